"""`bireme init`: a run file to start from."""

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json, print_json
from bireme.errors import BiremeError


def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run file to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a run file for `bireme train`, with every key explained and commented out.

    [dim]bireme init run.toml[/dim]
    """
    if path.suffix != ".toml":
        raise BiremeError(f"A run file must end in .toml, and {path} does not. Name it {path.stem}.toml.")
    is_there = path.exists() or path.is_symlink()
    if is_there and not force:
        raise BiremeError(f"{path} already exists. Name another file, or overwrite it with --force.")
    from bireme.files import write_text_atomically
    from bireme.train.run_file import commented_toml

    write_text_atomically(path, commented_toml())
    command = f"bireme train {_quoted(path)}"
    if as_json:
        print_json({"path": str(path), "replaced": is_there, "next": command})
        return
    typer.echo(f"{path} has every key of a run, commented out, with its default.")
    typer.echo(f"Edit it, then run: {command}")
    typer.echo(f"Or set keys for a single run: {command} --set training.steps=1000")


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
