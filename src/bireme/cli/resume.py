"""`bireme resume`: continue a run as if it had never stopped."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, Restarts, begin
from bireme.cli.supervised import supervised
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.train.run_file import RunFile


NO_PROGRESS_STATUS = 3
"""Differs from the status of wrong input, for scripts that restart runs."""


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Set a key for the rest of the run, such as its steps or its plan. Repeatable.",
        ),
    ] = None,
    restarts: Restarts = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Resume although the last starts reached no new checkpoint, or the disk has no room for "
            "what the run saves.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its most recent intact checkpoint.

    The exit status is 3 if three starts in a row reached no new checkpoint: another start would not help.

    [dim]bireme resume runs/20260101-120000-gpt-layers-4[/dim]
    """
    supervised(partial(resumed, sets=set_, restarts=restarts, anyway=anyway, as_json=as_json))
    resumed(run_dir, set_, restarts=restarts, anyway=anyway, as_json=as_json)


def resumed(
    run_dir: Path,
    sets: Sequence[str] | None = None,
    *,
    restarts: int | None,
    anyway: bool,
    as_json: bool,
) -> None:
    """Continue a run to its end in this process. What was set before holds for the rest of the run."""
    from bireme.cli.train import run_to_end
    from bireme.train.folder import RunFolder

    RunFolder(run_dir).restore(_tell)
    folder = RunFolder.of(run_dir)
    run = folder.load_run(sets or ())
    begin()
    from bireme.report.terminal import progress_bar
    from bireme.train.checkpoint.checkpoint import newest_good
    from bireme.train.disk_room import check_room
    from bireme.train.export import has_ended
    from bireme.train.prepare import prepared_again
    from bireme.train.resume_checks import check_finds_checkpoints, check_rate
    from bireme.train.stops import RestartLimitError, check_restart_limit, count_start

    check_finds_checkpoints(run, folder)
    checkpoint = newest_good(folder.checkpoints(run), on_bad=_tell)
    at = 0 if checkpoint is None else checkpoint.manifest.step
    # A run that was killed at its very end must still export its model.
    if has_ended(run, folder, at):
        raise BiremeError(
            f"{run_dir} has finished its {at} steps. To train further: --set training.steps={2 * at}"
            f"{_rate_of(run, at)}."
        )
    check_rate(run, folder, at, _tell)
    try:
        if not anyway:
            check_restart_limit(folder, at)
    except RestartLimitError as error:
        typer.echo(f"bireme: {error}", err=True)
        raise typer.Exit(NO_PROGRESS_STATUS) from None
    with progress_bar("preparing") as progress:
        prepared = prepared_again(run, folder, progress, checkpoint, _tell)
    if not anyway:
        check_room(prepared, folder, at)
    count_start(folder, at)
    begins = "" if checkpoint else ", because there is no checkpoint yet"
    typer.echo(f"bireme: resuming after step {at} of {run.training.steps}{begins}.", err=True)
    run_to_end(prepared, folder, checkpoint, restarts=restarts, as_json=as_json)


def _rate_of(run: "RunFile", steps: int) -> str:
    """What to say of the learning rate as well, where it has come to its end."""
    if run.training.schedule == "constant" or run.training.schedule_steps is not None:
        return ""
    return (
        f" --set training.schedule_steps={steps}, which keeps the last learning rate; with --set "
        "training.after_schedule=restart as well it warms up and falls once more"
    )


def _tell(sentence: str) -> None:
    typer.echo(f"bireme: {sentence}", err=True)
