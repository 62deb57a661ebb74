"""When a run is to stop or to save: signals to any rank and the clock of rank 0, agreed on by all ranks.

A signal only sets a flag here. With every batch each rank says what it wants; the sum comes back with the
batch's result, the same on all ranks, so that all stop after the same batch.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from time import monotonic
from types import FrameType

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.train.folder import RunFolder

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
