"""`bireme bench`: measure Bireme on this machine and compare it with its limits and peers.

What it runs is in `benchmarks/`, which comes with the source and not with an installation.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from bireme.cli.described import described
from bireme.errors import BiremeError

app = typer.Typer(
    add_completion=False,
    help="Measure Bireme on this machine and compare it with its limits and peers.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Typer needs this for a subcommand as long as there is only one."""


@app.command()
@described
def engine(quick: bool = False, hosts: bool = False, as_json: bool = False) -> None:
    """Measure the engine on emulated devices and a small GPT, and compare it with torch's runtime.

    [dim]bireme bench engine --quick[/dim]

    Options:
        quick: Measure one shape and the overhead, in less than a minute.
        hosts: Also measure two replicas over 100 Mbit/s between network namespaces; needs root.
    """
    words = [*["--quick"] * quick, *["--hosts"] * hosts, *["--json"] * as_json]
    raise typer.Exit(run_program("engine", words))


def run_program(name: str, words: Sequence[str]) -> int:
    """Run a program of `benchmarks/` with this Bireme; return its exit status."""
    source = Path(__file__).resolve().parents[2]
    program = source.parent / "benchmarks" / f"{name}.py"
    if not program.is_file():
        raise BiremeError(
            "The benchmarks are in Bireme's source, which this installation does not have: get the source, "
            f"run `pip install -e .` in its folder, then `bireme bench {name}` again."
        )
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, program, *words], env=environment, check=False).returncode
