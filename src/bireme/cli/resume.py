"""`bireme resume`: go on with a run as if it had never stopped."""

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json
from bireme.errors import BiremeError

__all__ = ["resume"]


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Change the run from here on, such as its steps or its plan; repeat it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest good checkpoint.

    [dim]bireme resume runs/20260101-120000-gpt-layers-4[/dim]
    """
    from bireme.cli.train import show_finished, show_prepared
    from bireme.report.progress import progress_bar
    from bireme.train.checkpoint.checkpoint import newest_good
    from bireme.train.folder import RunFolder
    from bireme.train.launching import start
    from bireme.train.prepare import prepared_again
    from bireme.train.run_file import load_run_file

    folder = RunFolder.of(run_dir)
    run = load_run_file(folder.run_file, set_ or ())
    checkpoint = newest_good(
        folder.checkpoints(run), on_bad=lambda text: typer.echo(f"bireme: {text}", err=True)
    )
    if checkpoint is not None and checkpoint.manifest.step >= run.training.steps:
        raise BiremeError(
            f"{run_dir} has done its {run.training.steps} steps. To train on, ask for more: --set "
            f"training.steps={2 * run.training.steps}."
        )
    with progress_bar("preparing") as progress:
        prepared = prepared_again(run, folder, progress)
    at = 0 if checkpoint is None else checkpoint.manifest.step
    typer.echo(f"bireme: going on behind step {at} of {run.training.steps}.", err=True)
    show_prepared(prepared, folder, as_json=as_json)
    show_finished(start(prepared, folder, checkpoint, is_shown=True), as_json=as_json)
