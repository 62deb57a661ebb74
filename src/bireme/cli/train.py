"""`bireme train` and `bireme resume`: train a model over the available devices, or continue a run."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import begin, is_one_of_many, print_json, settings_of
from bireme.cli.supervised import report_folder, supervised
from bireme.errors import BiremeError, tell

if TYPE_CHECKING:
    from bireme.train.checkpoint.checkpoint import Checkpoint
    from bireme.train.finishing import FinishedRun
    from bireme.train.folder import RunFolder
    from bireme.train.prepare import PreparedRun
    from bireme.train.run_file import RunFile


INTERRUPTED_STATUS = 130
"""Exit status that shells use for a command ended by Ctrl-C."""

NO_PROGRESS_STATUS = 3
"""Differs from the status of wrong input, for scripts that restart runs."""


def train(
    run_file: Path | None = None,
    name: str | None = None,
    steps: int | None = None,
    set_: list[str] | None = None,
    source: Path | None = None,
    dry_run: bool = False,
    restarts: Annotated[int | None, {"min": 0}] = None,
    anyway: bool = False,
    as_json: bool = False,
) -> None:
    """Train a model over a pipeline. Without a run file: a small language model on Python's sources.

    [dim]bireme train run.toml --name first-run --steps 500[/dim]

    Options:
        name (NAME): Name of the run's folder, in runs/ unless set.
        steps: Steps to train, whatever the run file says.
        source (--from FILE.yml): Train by a configuration of axolotl or LLaMA-Factory instead of a run file.
        dry_run: Show the plan, its time and memory, and what would be written; write nothing.
        anyway: Train although the disk has no room for what the run saves.
    """
    sets = [] if source is None else _translated(run_file, source)
    sets += [*(set_ or ()), *settings_of(("--name", "log.name", name), ("--steps", "training.steps", steps))]
    if is_one_of_many():
        if dry_run:
            raise BiremeError("--dry-run plans in one process: call it without torchrun.")
        if restarts is not None:
            raise BiremeError(
                "--restarts is for processes that bireme starts. A launcher restarts its own: leave out "
                "--restarts, and set torchrun's --max-restarts."
            )
        _train_with_others(run_file, sets, anyway=anyway, as_json=as_json)
        return
    if not dry_run:
        supervised(partial(resumed, restarts=restarts, anyway=anyway, as_json=as_json))
    from bireme.train.folder import RunFolder, load_asked, tell_defaults

    run = load_asked(run_file, sets)
    tell_defaults(run, run_file)
    if not dry_run:
        RunFolder.check_new(run)  # now too, for what comes next may take long
    begin()
    from bireme.report.terminal import progress_bar
    from bireme.train.finishing import check_room
    from bireme.train.prepare import prepare, write_prepared

    with progress_bar("preparing") as progress:
        prepared = prepare(run, progress)
    if dry_run:
        _show_dry(prepared, RunFolder.named(run, datetime.now()), as_json=as_json)
        return
    if not anyway:
        check_room(prepared, RunFolder.named(run, datetime.now()))
    folder = RunFolder.new(run, datetime.now())
    write_prepared(prepared, folder)
    run_to_end(prepared, folder, None, restarts=restarts, as_json=as_json)


def _translated(run_file: Path | None, source: Path) -> list[str]:
    """The settings of another program's configuration; what became of its keys is shown."""
    from bireme.train.run_file.foreign import translated

    if run_file is not None:
        raise BiremeError(f"{run_file} and --from {source} both say what to train. Leave out one of the two.")
    found = translated(source)
    if os.environ.get("RANK", "0") == "0":
        for line in found.lines(str(source)):
            typer.echo(line, err=True)
    return found.settings


def _show_dry(prepared: "PreparedRun", folder: "RunFolder", *, as_json: bool) -> None:
    """What the run would do and leave."""
    from bireme.train.data.viewing import data_notes
    from bireme.train.finishing import disk_room
    from bireme.train.prepare import prepared_document, written_paths
    from bireme.train.run_data import learns

    paths = [str(path) for path in written_paths(prepared, folder)]
    room, taken = disk_room(prepared, folder), folder.taken(prepared.run)
    notes = data_notes(prepared.data)
    if as_json:
        found = prepared_document(prepared)
        more = {
            "notes": [*found["notes"], *notes],
            "learns": learns(prepared.run, prepared.data, prepared.graph),
            "writes": paths,
            "disk": None if room is None else room.document(),
            "taken": taken or None,
        }
        print_json(found | more)
        return
    show_prepared(prepared, folder, as_json=False)
    for note in notes:
        typer.echo(note)
    typer.echo("Nothing was written. The run would write:")
    for path in paths:
        typer.echo(f"  {path}")
    if room is not None:
        short = ": too little, so that the run would be refused" if room.is_short else ""
        typer.echo(f"On the disk, {room.sentence}{short}.")
    if taken:
        typer.echo(f"The run itself would be refused: {taken}")


def resumed(
    run_dir: Path, sets: Sequence[str] | None = None, *, restarts: int | None, anyway: bool, as_json: bool
) -> None:
    """Continue a run to its end in this process. What was set before holds for the rest of the run."""
    from bireme.train.folder import RunFolder

    RunFolder(run_dir).restore(tell)
    folder = RunFolder.of(run_dir)
    run = folder.load_run(sets or ())
    begin()
    from bireme.report.terminal import progress_bar
    from bireme.train.checkpoint.checkpoint import newest_good, step_after
    from bireme.train.export import has_ended
    from bireme.train.finishing import check_room
    from bireme.train.outcome import RestartLimitError, check_restart_limit, count_start
    from bireme.train.prepare import prepared_again
    from bireme.train.resume_checks import check_finds_checkpoints, check_rate

    check_finds_checkpoints(run, folder)
    checkpoint = newest_good(folder.checkpoints(run), on_bad=tell)
    at = step_after(checkpoint)
    # A run that was killed at its very end must still export its model.
    if has_ended(run, folder, at):
        raise BiremeError(
            f"{run_dir} has finished its {at} steps. To train further: --set training.steps={2 * at}"
            f"{_rate_of(run, at)}."
        )
    check_rate(run, folder, at, tell)
    try:
        if not anyway:
            check_restart_limit(folder, at)
    except RestartLimitError as error:
        tell(f"{error}")
        raise typer.Exit(NO_PROGRESS_STATUS) from None
    with progress_bar("preparing") as progress:
        prepared = prepared_again(run, folder, progress, checkpoint, tell)
    if not anyway:
        check_room(prepared, folder, at)
    count_start(folder, at)
    begins = "" if checkpoint else ", because there is no checkpoint yet"
    tell(f"resuming after step {at} of {run.training.steps}{begins}.")
    run_to_end(prepared, folder, checkpoint, restarts=restarts, as_json=as_json)


def _rate_of(run: "RunFile", steps: int) -> str:
    """What to say of the learning rate as well, where it has come to its end."""
    if run.training.schedule == "constant" or run.training.schedule_steps is not None:
        return ""
    return (
        f" --set training.schedule_steps={steps}, which keeps the last learning rate; with --set "
        "training.after_schedule=restart as well it warms up and falls once more"
    )


def run_to_end(
    prepared: "PreparedRun",
    folder: "RunFolder",
    checkpoint: "Checkpoint | None",
    *,
    restarts: int | None = None,
    as_json: bool,
) -> None:
    """Show the plan, run it, and show the results."""
    from bireme.report.live_view import live_view
    from bireme.runtime.board import RunFailed
    from bireme.train.launching import start

    show_prepared(prepared, folder, as_json=as_json)
    report_folder(folder.path.resolve())
    try:
        with live_view():
            finished = start(prepared, folder, checkpoint, is_shown=True, restarts=restarts)
    except KeyboardInterrupt:
        tell(f"interrupted before a new checkpoint. {_how_to_resume(folder.path)}")
        raise typer.Exit(INTERRUPTED_STATUS) from None
    except RunFailed as error:
        tell(f"{error}\n{_how_to_resume(folder.path)}")
        raise typer.Exit(1) from None
    show_finished(finished, as_json=as_json)
    if finished.lost:
        raise typer.Exit(1)


def _train_with_others(run_file: Path | None, sets: Sequence[str], *, anyway: bool, as_json: bool) -> None:
    """Join the run as one of torchrun's processes."""
    from bireme.runtime.processes import has_server
    from bireme.train.folder import load_asked

    with suppress(BiremeError):  # rank 0 says what is wrong
        if load_asked(run_file, sets).sync.mode != "allreduce" and not has_server():
            begin()  # this process starts the ranks of its host
    from bireme.train.launched_process import join

    finished = join(run_file, sets, partial(show_prepared, as_json=as_json), anyway=anyway)
    if finished is not None:
        show_finished(finished, as_json=as_json)
    if finished is not None and finished.lost:
        raise typer.Exit(1)


def show_prepared(prepared: "PreparedRun", folder: "RunFolder", *, as_json: bool) -> None:
    """Show devices and plan before the first step."""
    from rich.console import Console

    from bireme.report.plan_document import apart_note
    from bireme.report.train_table import print_prepared
    from bireme.train.choices import idle_codec, idle_keys
    from bireme.train.plan_search import first_delayed_step, is_short
    from bireme.train.run_data import learns

    console = Console(stderr=as_json, highlight=False)
    print_prepared(
        prepared.run.model.source,
        prepared.machines.cluster,
        prepared.plan,
        prepared.profile,
        folder.path,
        console,
        answer=prepared.answer,
        first_delayed_step=first_delayed_step(prepared.run, prepared.plan),
        learns=learns(prepared.run, prepared.data, prepared.graph),
        is_brief=is_short(prepared.run, prepared.graph),
    )
    run, plan = prepared.run, prepared.plan.plan
    clipped = apart_note(plan, run.training.clip_norm)
    for sentence in (*idle_keys(run, plan), *idle_codec(run, plan), *clipped):
        console.print(sentence, style="yellow", markup=False)


def show_finished(finished: "FinishedRun", *, as_json: bool) -> None:
    """Show the results."""
    resume = _how_to_resume(Path(finished.summary["run_dir"])) if finished.is_stopped else ""
    if as_json:
        print_json(finished.summary)
        if resume:
            tell(f"stopped ({finished.reason}). {resume}")
    else:
        from rich.console import Console

        from bireme.report.train_table import print_summary

        print_summary(finished.summary, Console(highlight=False), resume=resume, is_lost=bool(finished.lost))
    if finished.lost:
        tell(finished.lost)


def _how_to_resume(folder: Path) -> str:
    import shlex

    from bireme.machines.orders import phase_of

    if phase_of(os.environ):
        name = shlex.quote(folder.name)
        return (
            f"To resume: type the same bireme coordinate with --set log.name={name}, and bireme join again."
        )
    return f"To resume: bireme resume {shlex.quote(str(folder))}"


# `bireme resume`: continue a run as if it had never stopped.


def resume(
    run_dir: Path,
    set_: list[str] | None = None,
    restarts: Annotated[int | None, {"min": 0}] = None,
    anyway: bool = False,
    as_json: bool = False,
) -> None:
    """Resume a run from its most recent intact checkpoint.

    The exit status is 3 if three starts in a row reached no new checkpoint: another start would not help.

    [dim]bireme resume runs/20260101-120000-gpt-layers-4[/dim]

    Arguments:
        run_dir (RUN): Folder of the run.

    Options:
        set_ (--set TABLE.KEY=VALUE): Set a key for the rest of the run, such as its steps or its plan.
            Repeatable.
        anyway: Resume although the last starts reached no new checkpoint, or the disk has no room
            for what the run saves.
    """
    supervised(partial(resumed, sets=set_, restarts=restarts, anyway=anyway, as_json=as_json))
    resumed(run_dir, set_, restarts=restarts, anyway=anyway, as_json=as_json)
