"""`bireme resume`: go on with a run as if it had never stopped."""

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json
from bireme.errors import BiremeError

__all__ = ["resume"]

NO_PROGRESS_STATUS = 3
"""Another one than that of a wrong input, for who restarts runs by itself."""


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
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Try once more, though the last starts came to no new checkpoint."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest good checkpoint.

    The exit status is 3 where three starts in a row came to no new one: trying again is of no use then.

    [dim]bireme resume runs/20260101-120000-gpt-layers-4[/dim]
    """
    from bireme.cli.train import begin, run_to_end
    from bireme.train.folder import RunFolder
    from bireme.train.run_file import load_run_file

    folder = RunFolder.of(run_dir)
    run = load_run_file(folder.run_file, set_ or ())
    begin()
    from bireme.report.progress import progress_bar
    from bireme.train.brake import NoProgressError, check_progress, note_start
    from bireme.train.checkpoint.checkpoint import newest_good
    from bireme.train.export import exported_step
    from bireme.train.going_on import check_finds_checkpoints
    from bireme.train.prepare import prepared_again

    check_finds_checkpoints(run, folder)
    checkpoint = newest_good(
        folder.checkpoints(run), on_bad=lambda text: typer.echo(f"bireme: {text}", err=True)
    )
    at = 0 if checkpoint is None else checkpoint.manifest.step
    # One that was killed amid its very end has still to export its model.
    if at >= run.training.steps and exported_step(folder.model) == at:
        raise BiremeError(
            f"{run_dir} has done its {at} steps. To train on, ask for more: --set training.steps={2 * at}."
        )
    try:
        if not anyway:
            check_progress(folder, at)
    except NoProgressError as error:
        typer.echo(f"bireme: {error}", err=True)
        raise typer.Exit(NO_PROGRESS_STATUS) from None
    with progress_bar("preparing") as progress:
        prepared = prepared_again(run, folder, progress, checkpoint)
    note_start(folder, at)
    begins = "" if checkpoint else ", as there is no checkpoint to go on from"
    typer.echo(f"bireme: going on behind step {at} of {run.training.steps}{begins}.", err=True)
    run_to_end(prepared, folder, checkpoint, as_json=as_json)
