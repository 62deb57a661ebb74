"""`bireme train`: from a model and data to a trained model, over the devices at hand."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, print_json

if TYPE_CHECKING:
    from bireme.train.folder import RunFolder
    from bireme.train.launching import Finished
    from bireme.train.prepare import Prepared

__all__ = ["show_finished", "show_prepared", "train"]


def train(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="What to do; `bireme init` writes one. The demonstration if left out."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="TABLE.KEY=VALUE", help="In the place of what the file says; repeat it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model over a pipeline. Without a file, a small language model on Python's own sources.

    [dim]bireme train run.toml --set training.steps=500[/dim]
    """
    from bireme.train.run_file import load_run_file

    run = load_run_file(run_file, set_ or ())
    from bireme.report.progress import progress_bar
    from bireme.train.folder import RunFolder
    from bireme.train.launching import start
    from bireme.train.prepare import prepare, write_prepared

    with progress_bar("preparing") as progress:
        prepared = prepare(run, progress)
    folder = RunFolder.new(run, datetime.now())
    write_prepared(prepared, folder)
    show_prepared(prepared, folder, as_json=as_json)
    show_finished(start(prepared, folder, None, is_shown=True), as_json=as_json)


def show_prepared(prepared: "Prepared", folder: "RunFolder", *, as_json: bool) -> None:
    """What was found and what is planned, before the first step."""
    from rich.console import Console

    from bireme.report.train_table import print_prepared

    print_prepared(
        prepared.run.model.source,
        prepared.machines.cluster,
        prepared.plan,
        prepared.profile,
        folder.path,
        Console(stderr=as_json),
        answer=prepared.answer,
    )


def show_finished(finished: "Finished", *, as_json: bool) -> None:
    """What came of it."""
    if as_json:
        print_json(finished.summary.document())
        return
    from rich.console import Console

    from bireme.report.train_table import print_summary

    print_summary(finished.summary.document(), Console(), is_stopped=finished.is_stopped)
