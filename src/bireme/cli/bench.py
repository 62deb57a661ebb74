"""`bireme bench`: measure Bireme on this machine and compare it with its limits and peers."""

from typing import Annotated

import typer

from bireme.cli.options import Json, print_json

app = typer.Typer(
    add_completion=False,
    help="Measure Bireme on this machine and compare it with its limits and peers.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Typer needs this for a subcommand as long as there is only one."""


@app.command()
def engine(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure one shape and the overhead, in less than a minute.")
    ] = False,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Also measure two replicas over 100 Mbit/s between network namespaces; needs root.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the engine on emulated devices and a small GPT, and compare it with torch's runtime.

    [dim]bireme bench engine --quick[/dim]
    """
    from dataclasses import replace

    from bireme.bench.effort import FULL, QUICK
    from bireme.bench.engine import bench_engine

    report = bench_engine(replace(QUICK if quick else FULL, hosts=hosts))
    if as_json:
        from bireme.bench.table import engine_document

        print_json(engine_document(report))
        return
    from rich.console import Console

    from bireme.bench.table import print_engine_report

    print_engine_report(report, Console())
