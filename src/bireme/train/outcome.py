"""When a run stops, and its results as plain data: those of each rank, and the whole."""

import gc
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch

from bireme.balance import SlowStage
from bireme.devices import allocated_bytes, is_accelerator, peak_bytes, reset_peak
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.memory.system_memory import give_back_heap
from bireme.runtime.paging.rank_paging import TierMoves
from bireme.runtime.stores import Store
from bireme.train.folder import RunFolder

# How much memory a process has had at most: all of it on a CPU, that of tensors on an accelerator.
#
# On a CPU it is the most that was resident at a time, as the operating system counts it: the interpreter and
# its libraries, tensors, and what the C library keeps of memory that was given back. Looking costs nothing,
# so no thread has to.

_STATUS = Path("/proc/self/status")


class MemoryUsed:
    """Of an accelerator it counts what is in use beyond what was in use when it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if is_accelerator(device):
            reset_peak(device)
            self._before = allocated_bytes(device)

    def peak_bytes(self) -> int:
        """The most there has been so far."""
        if is_accelerator(self._device):
            return peak_bytes(self._device) - self._before
        return _bytes("VmHWM")


class LoadsOfRanks:
    """The most memory that each rank has used and the bytes that it has sent, which rank 0 logs. A thread
    brings them over the run's store, because on late links training would wait for each of its answers. So
    rank 0 has those of other ranks a little later, and at first its own alone.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._known: list[tuple[int, int] | None] = [None] * (0 if rank else size)
        self._thread = threading.Thread()

    def latest(self, peak_bytes: int, sent_bytes: int) -> list[tuple[int, int] | None]:
        """Those of all ranks on rank 0, None where they are not known; begins to bring new ones."""
        if not self._rank:
            self._known[0] = peak_bytes, sent_bytes
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._bring, args=(peak_bytes, sent_bytes), daemon=True)
            self._thread.start()
        return [*self._known]

    def _bring(self, peak_bytes: int, sent_bytes: int) -> None:
        with suppress(RuntimeError):  # without the store the run itself fails, and gives the reason
            if self._rank:
                self._store.set(f"load/{self._rank}", f"{peak_bytes} {sent_bytes}")
            for rank in range(1, len(self._known)):
                if self._store.check([f"load/{rank}"]):
                    peak, sent = self._store.get(f"load/{rank}").split()
                    self._known[rank] = int(peak), int(sent)


def settled_bytes() -> int:
    """What of this process is resident now, without memory that was given back and that the C library keeps;
    where that is unknown, the most there was.
    """
    gc.collect()
    give_back_heap()
    return _bytes("VmRSS")


def _bytes(what: str) -> int:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))
    except (OSError, StopIteration):  # not Linux; what it says in bytes others say in kilobytes
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


REPLAN = "new plan"
"""The reason of a run that has ended so that a new plan takes over."""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What a rank has sent over a boundary in one direction: without a codec, and with it."""

    boundary: int
    forward: bool
    raw_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank measured. `busy_share` is None where no batches were recorded; `control_s` is what the
    control took with its waits, None where it never ran. `raw_sum_bytes` is what the sums of its gradients
    would have sent without a codec, `sent_sum_bytes` what they did send; of both, `gathered_bytes` are
    weights for replicas that share them. `num_batches` are those that this process has trained. `tiers` are
    there if the rank pages. `kept_bytes` is the most that it held at a time for replicas that were late, away
    or coming back: sums of batches, and snapshots.
    """

    rank: int
    peak_bytes: int | None
    busy_share: float | None
    control_s: float | None = None
    links: tuple[LinkBytes, ...] = ()
    raw_sum_bytes: int = 0
    sent_sum_bytes: int = 0
    tiers: tuple[TierMoves, ...] = ()
    gathered_bytes: int = 0
    num_batches: int = 0
    kept_bytes: int = 0
    copied_bytes: int = 0
    """Sent to other hosts for second copies of the rank's state."""


@dataclass(frozen=True, slots=True)
class SyncFigures:
    """What came of a run whose replicas may die: epochs of the membership, committed rounds and samples, and
    samples that had to be trained again.
    """

    mode: str
    epochs: int
    rounds: int
    samples_committed: int
    samples_redone: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank can tell at the end. What is not of the rank itself is the same on all.

    `batch_s` is the median of the seconds of a batch, those first in a window left out. `checkpoint` is the
    step of the newest one. The figures of the last evaluation are None where they mean nothing;
    `eval_loss_through_codecs` also where boundaries have no codecs. A run that ended to be planned again says
    which stage is slow. `placement` is what an epoch takes of private and public samples, None where all are
    public. `copied_step` is that of the newest second copy, None if there is none. `leads` says whether the
    rank's replica speaks for the run.
    """

    steps: int
    reason: str
    train_loss: float | None
    eval_loss: float | None
    batch_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    num_skipped: int
    checkpoint: int | None
    own: RankOutcome
    eval_perplexity: float | None = None
    eval_bits_per_byte: float | None = None
    eval_loss_through_codecs: float | None = None
    warnings: tuple[str, ...] = field(default=())
    slow: SlowStage | None = None
    placement: dict[str, Any] | None = None
    sync: SyncFigures | None = None
    copied_step: int | None = None
    leads: bool = True


def first_of(outcomes: Sequence[Outcome]) -> Outcome:
    """That of rank 0, which has what all share."""
    return next(outcome for outcome in outcomes if outcome.own.rank == 0)


# The restart limit: stops a script that restarts a run again and again without progress.
#
# A small file in the run's folder counts the starts from the same checkpoint.

_MOST_STARTS = 3


class RestartLimitError(BiremeError):
    """A run was started too often without reaching a new checkpoint."""


def check_restart_limit(folder: RunFolder, step: int) -> None:
    """Refuse another start from the checkpoint of `step`, 0 for none, if too many reached no newer one."""
    if _num_starts(folder, step) >= _MOST_STARTS:
        raise RestartLimitError(
            f"{folder.path} was started {_MOST_STARTS} times from step {step} and always ended before "
            f"a new checkpoint. Find out why (see the end of {folder.metrics.name}), or lower "
            "checkpoint.every_steps; then add --anyway."
        )


def count_start(folder: RunFolder, step: int) -> None:
    """Count a start from the checkpoint of `step`."""
    document = {"step": step, "starts": _num_starts(folder, step) + 1}
    write_text_atomically(folder.starts, json.dumps(document) + "\n")


def _num_starts(folder: RunFolder, step: int) -> int:
    """The number of starts since the most recent checkpoint; 0 if there is no count."""
    try:
        document = json.loads(folder.starts.read_text(encoding="utf-8"))
        return int(document["starts"]) if step <= int(document["step"]) else 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return 0


# When a run is to stop or to save: signals to any rank and the clock of rank 0, agreed on by all ranks.
#
# A signal only sets a flag here. With every batch each rank sends a vote; the sum comes back with the
# batch's result, the same on all ranks, so that all stop after the same batch.

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Reason(IntEnum):
    """What a rank wants, as a number to sum over ranks; the largest reason counts.

    Rank 0 alone asks for a checkpoint or says that the time is over.
    """

    NONE = 0
    SAVE = 1
    TIME = 2
    SIGNAL = 4
    INTERRUPT = 1 << 15

    @classmethod
    def of(cls, votes: float) -> "Reason":
        """The largest reason in the sum of all ranks' votes, for fewer than 8,192 ranks."""
        return next(one for one in reversed(cls) if votes >= one)

    def __str__(self) -> str:
        return {Reason.TIME: "time limit", Reason.SIGNAL: "signal", Reason.INTERRUPT: "interrupted"}.get(
            self, "finished"
        )


class Stops:
    """What this rank has to say. On other ranks than 0 there are no limits of time, which count from here."""

    def __init__(self, time_limit_s: float | None = None, save_every_s: float | None = None) -> None:
        self._ends_s = None if time_limit_s is None else monotonic() + time_limit_s
        self._save_every_s = save_every_s
        self._saved_s = monotonic()
        self._reason = Reason.NONE

    def saved(self) -> None:
        """A checkpoint was taken."""
        self._saved_s = monotonic()

    def vote(self) -> float:
        """This rank's number for the batch that ends."""
        if self._reason is not Reason.NONE:
            return float(self._reason)
        now = monotonic()
        if self._ends_s is not None and now > self._ends_s:
            return float(Reason.TIME)
        if self._save_every_s is not None and now > self._saved_s + self._save_every_s:
            return float(Reason.SAVE)
        return 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals for as long as this lasts, also those that were held back until now.

        A second interrupt is an ordinary one. A request to stop that comes after the end does no harm.
        """
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            yield
        finally:
            for number, handler in before.items():
                is_late = number == signal.SIGUSR1 and handler is signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if is_late else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._reason is Reason.INTERRUPT:
                raise KeyboardInterrupt
            self._reason = Reason.INTERRUPT
        elif self._reason is not Reason.INTERRUPT:
            self._reason = Reason.SIGNAL
