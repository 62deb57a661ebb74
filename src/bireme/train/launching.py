"""Starting the processes of a run on this machine, or joining those that torchrun has started.

A signal to the process that people started is passed on to its ranks, which agree on where to stop; the
processes are ended the hard way only if somebody asks a second time.
"""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from bireme.bounds import bytes_text
from bireme.devices import num_accelerators
from bireme.errors import BiremeError, SampleError
from bireme.files import free_bytes
from bireme.report.units import counted
from bireme.runtime.failures import RankFailed, RunFailed
from bireme.runtime.launch import launch, signal_ranks
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good
from bireme.train.chosen_batch import chooses_batch, with_batch_of
from bireme.train.export import NewestWeights, export_checkpoint
from bireme.train.folder import RunFolder
from bireme.train.initial_weights import remove_initial
from bireme.train.machines import visible_gpus
from bireme.train.outcome import REPLAN, Outcome, first_of
from bireme.train.predicted import write_predicted
from bireme.train.prepare import PreparedRun, write_prepared
from bireme.train.rank_part import RunStart
from bireme.train.recorded_batches import RECORDED
from bireme.train.replan import replanned
from bireme.train.replicas import run_replicas
from bireme.train.restart_limit import count_start
from bireme.train.run_data import learns
from bireme.train.run_file import RunFile
from bireme.train.summary import RunSummary, summary_of
from bireme.train.text_sample import written
from bireme.train.worker import train_rank

__all__ = ["DONE", "VISIBLE", "FinishedRun", "finish", "first_words", "signals_passed_on", "start"]

VISIBLE = "CUDA_VISIBLE_DEVICES"

USUAL_RESTARTS = 3

DONE = ("finished", "time limit")
"""The reasons to stop that leave a trained model."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of a run that was started here, and how it ended."""

    summary: RunSummary
    reason: str
    lost: str = ""
    """Why the result that was asked for is not on the disk, and what to do; empty if it is."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to stop before it had done all steps, or all that its time allowed."""
        return self.reason not in DONE


def start(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    *,
    is_shown: bool,
    restarts: int | None = None,
) -> FinishedRun:
    """Run the processes of a prepared run to their end, then write what came of it.

    One that ends because a stage has become slow goes on with a new plan, once. One that fails goes on from
    its newest checkpoint, unless so many `restarts` in a row have reached no new one: then the failure is
    raised. By default there are `USUAL_RESTARTS` if replicas may die, and none otherwise.
    """
    if restarts is None:
        restarts = USUAL_RESTARTS if prepared.run.sync.is_coordinated else 0
    outcomes = _run_through(prepared, folder, checkpoint, is_shown=is_shown, restarts=restarts)
    if first_of(outcomes).reason == REPLAN:
        if chooses_batch(prepared.run):  # its ranks have, and the folder remembers
            prepared = replace(prepared, run=with_batch_of(prepared.run, folder.load_run()))
        prepared = replace(replanned(prepared, first_of(outcomes)), initial=None)
        newest = newest_good(folder.checkpoints(prepared.run))
        write_prepared(prepared, folder, newest)
        outcomes = _run(prepared, folder, newest, is_shown=is_shown, may_replan=False)
    return finish(prepared, folder, outcomes)


def _run_through(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None, *, is_shown: bool, restarts: int
) -> list[Outcome]:
    """What the ranks of a run come to, after as many restarts as it takes and may take."""
    num_in_vain = 0
    while True:
        step, num_ledger_bytes = _step_of(checkpoint), _size_of(folder.ledger)
        try:
            return _run(prepared, folder, checkpoint, is_shown=is_shown, may_replan=True)
        except (BiremeError, RunFailed) as failure:
            # A user's mistake shows before anything is trained, and would only show again; so would a sample.
            is_mistake = isinstance(failure, BiremeError) and _size_of(folder.ledger) == num_ledger_bytes
            if is_mistake or isinstance(failure, SampleError):
                raise
            with suppress(BiremeError):  # if all checkpoints are damaged, the failure says more
                checkpoint = newest_good(folder.checkpoints(prepared.run))
            num_in_vain = 0 if _step_of(checkpoint) > step else num_in_vain
            if num_in_vain >= restarts:
                raise
            num_in_vain += 1
            count_start(folder, _step_of(checkpoint))
            why = failure.line if isinstance(failure, RankFailed) else str(failure)
            at = f"after step {_step_of(checkpoint)}" if checkpoint else "from its beginning"
            count = f"restart {num_in_vain} of at most {restarts} in a row without a new checkpoint"
            print(f"bireme: {why} The run continues {at} ({count}).", file=sys.stderr, flush=True)  # noqa: T201 (for people)


def _step_of(checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.manifest.step


def _size_of(path: Path) -> int:
    """Of a file, in bytes; 0 if there is none. A ledger grows with every batch that counts."""
    return path.stat().st_size if path.is_file() else 0


def _run(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    *,
    is_shown: bool,
    may_replan: bool,
) -> list[Outcome]:
    """What the ranks of a run come to."""
    plan = prepared.plan.plan
    write_predicted(prepared, folder.predicted_timeline, num_batches=RECORDED)
    words = first_words(prepared)
    begin = RunStart(
        folder.path,
        None if checkpoint is None else checkpoint.folder,
        prepared.machines.threads,
        is_shown,
        words,
        () if checkpoint is None else checkpoint.passed_over,
        may_replan,
        prepared.census,
    )
    with signals_passed_on(), _gpus_as_planned(prepared):
        if prepared.run.sync.mode != "all":
            return run_replicas(prepared, folder, checkpoint, begin)
        return launch(
            train_rank,
            plan.num_ranks,
            begin,
            timeout_s=prepared.run.cluster.timeout_s,
            threads_per_process=prepared.machines.threads,
            backend="nccl" if prepared.machines.backend == "nccl" else "gloo",
            device=prepared.machines.device,
        )


def finish(prepared: PreparedRun, folder: RunFolder, outcomes: list[Outcome]) -> FinishedRun:
    """Export the model, let it write a sample, and write down what came of the run."""
    own, run = first_of(outcomes), prepared.run
    sample = lost = ""
    newest = newest_good(folder.checkpoints(run))
    if own.reason in DONE:
        lost = _without_checkpoint(run, folder, own.steps, newest)
    if own.reason in DONE and newest is not None and not lost:
        if run.export.at_end:
            lost = _exported(prepared, folder, newest)
        with NewestWeights(run, prepared.graph, newest) as weights:
            sample = written(run, weights, prepared.data)
    if not lost:
        remove_initial(folder.initial)
    summary = summary_of(prepared, folder, outcomes, sample)
    try:
        summary.write(folder.summary)
    except BiremeError as error:  # what it says is shown all the same
        summary = replace(summary, warnings=(*summary.warnings, str(error)))
    return FinishedRun(summary, own.reason, lost)


def _without_checkpoint(run: RunFile, folder: RunFolder, steps: int, newest: Checkpoint | None) -> str:
    """Why a run that has done its steps has no result, in sentences; empty if the checkpoint is there."""
    every = run.checkpoint.every_steps
    due = (
        steps if run.checkpoint.at_end else (steps - 1) // every * every if every and run.export.at_end else 0
    )
    found = 0 if newest is None else newest.manifest.step
    if found >= due:
        return ""
    free = free_bytes(folder.path)
    room = "" if free is None else f" {bytes_text(free)} is free there."
    kept = f"The newest checkpoint is that of step {found}" if found else "There is no checkpoint"
    again = f"repeats steps {found + 1} to {steps}"
    return (
        f"The run has done {counted(steps, 'step')}, but the checkpoint of step {due} could not be written "
        f"to {folder.checkpoints(run)}, so there is no trained model.{room} {kept}. Free space; then "
        f"`bireme resume {shlex.quote(str(folder.path))}` {again}."
    )


def _exported(prepared: PreparedRun, folder: RunFolder, newest: Checkpoint) -> str:
    """Export the model; what went wrong, in sentences, empty if nothing did."""
    try:
        export_checkpoint(prepared.run, prepared.graph, newest, folder.model)
    except BiremeError as error:
        own, free = shlex.quote(str(folder.path)), free_bytes(folder.path)
        room = "" if free is None else f" {bytes_text(free)} is free there."
        return (
            f"The model could not be exported: {error}{room} The checkpoint of step {newest.manifest.step} "
            f"is whole: `bireme export {own} --to FOLDER` writes the model to any disk; or free space, and "
            f"`bireme resume {own}`."
        )
    return ""


def first_words(prepared: PreparedRun) -> dict[str, Any]:
    """What the log of a run begins with."""
    import torch

    from bireme import __version__

    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    return {
        "version": __version__,
        "torch": torch.__version__,
        "schedule": plan.schedule,
        "num_stages": plan.num_stages,
        "width": plan.width,
        "devices": [name for row in plan.devices for name in row],
        "predicted_batch_s": None if forecast is None else forecast.batch_s,
        "learns": learns(prepared.run, prepared.data, prepared.graph).document(),
    }


@contextmanager
def _gpus_as_planned(prepared: PreparedRun) -> Iterator[None]:
    """Let the processes that are started inside count the GPUs in the order in which the plan names them."""
    before = os.environ.get(VISIBLE)
    wanted = visible_gpus(prepared.plan.plan, prepared.machines, before, num_cuda=num_accelerators())
    if wanted is not None:
        os.environ[VISIBLE] = wanted
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        else:
            os.environ.pop(VISIBLE, None)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Pass signals to the ranks as a request to stop. The second interrupt ends everything.

    Processes that are started inside hold such requests back until they can take them, for this thread holds
    them back and they inherit that; another one is there to take them here.
    """
    interrupts = 0
    over = threading.Event()
    taker = threading.Thread(target=over.wait, name="bireme signals", daemon=True)
    taker.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt
        if not signal_ranks(signal.SIGUSR1):  # there is nothing to save yet, or any more
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        print("bireme: stopping after this step and saving …", file=sys.stderr, flush=True)  # noqa: T201 (for people)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
