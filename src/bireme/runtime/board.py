"""The board: what the ranks of a run, and who started them, tell each other through a store.

Signs of life, one per rank, and the root cause, of which the first that is written stays. Every call may
block for as long as the store's server is stopped, so no thread that must go on may make one.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from bireme.errors import BiremeError, SampleError, first_line

if TYPE_CHECKING:
    from bireme.runtime.stores import Store


# What a rank's failure is: who, at what, why. The first one of a run is its root cause, and is told once.
#
# It travels between processes as text. That is why it holds a traceback and no exception.


class FailureKind(StrEnum):
    """Whose doing a failure is, which decides how it is told."""

    PROGRAM = "program"
    """An exception, a process that died or stopped."""
    USER = "user"
    """A `BiremeError`: its text says all, a traceback adds nothing."""
    RUN = "run"
    """A `RunFailed`: all replicas end, and its text says all."""
    INTERRUPT = "interrupt"
    """Somebody wanted the end."""


class RunFailed(Exception):  # noqa: N818 (it is an event: the error is in its text)
    """A run cannot go on, and that is no mistake of the user: the text says why."""


class WeightsLost(RunFailed):
    """No replica is left that has the weights."""


class RankFailed(RunFailed):
    """A rank of the run failed, and all others were ended because of it.

    `instruction` is what it was doing then, if that is known; `text` is the traceback of its error, or a
    sentence where there is none; `summary` the same in a line.
    """

    def __init__(self, rank: int, instruction: str | None, text: str, summary: str | None = None) -> None:
        super().__init__(rank, instruction, text, summary)
        self.rank = rank
        self.instruction = instruction
        self.text = text.rstrip()
        self.summary = summary or self.text.splitlines()[-1]

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self._opening}: {self.summary}"

    def __str__(self) -> str:
        separator = "\n" if "\n" in self.text else " "
        return f"{self._opening}:{separator}{self.text}"

    @property
    def _opening(self) -> str:
        at = "" if self.instruction is None else f" at {self.instruction}"
        return f"Rank {self.rank} failed{at}"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, as it is written where all ranks can read it. `samples` are those that a `SampleError`
    names.
    """

    rank: int
    instruction: str | None
    summary: str
    text: str
    blame: FailureKind = FailureKind.PROGRAM
    samples: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, rank: int, instruction: str | None) -> "Failure":
        """The failure that an exception is."""
        what = str(error)
        if isinstance(error, BiremeError):
            samples = error.samples if isinstance(error, SampleError) else ()
            return cls(rank, instruction, first_line(error), what, FailureKind.USER, samples)
        if isinstance(error, RunFailed):
            return cls(rank, instruction, first_line(error), what, FailureKind.RUN)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, instruction, "it was interrupted", "it was interrupted", FailureKind.INTERRUPT)
        name = type(error).__qualname__
        summary = f"{name}: {first_line(error)}" if what else name
        return cls(rank, instruction, summary, "".join(traceback.format_exception(error)))

    @classmethod
    def told(cls, sentence: str, rank: int, instruction: str | None) -> "Failure":
        """A failure that no exception tells of; the instruction is that of the last sign of life."""
        if instruction is not None:
            sentence += " (Its instruction is as of its last heartbeat.)"
        return cls(rank, instruction, sentence, sentence)

    def encode(self) -> str:
        """As text for `decode`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Failure":
        """What `encode` wrote."""
        fields = json.loads(text)
        fields["blame"], fields["samples"] = FailureKind(fields["blame"]), tuple(fields["samples"])
        return cls(**fields)

    def to_others(self) -> RankFailed:
        """The exception that the other ranks end with."""
        return RankFailed(self.rank, self.instruction, self.text, self.summary)

    def to_starter(self) -> BaseException:
        """The exception for who started the ranks: the user's mistake is one again, the run's own failure and
        an interrupt too.
        """
        if self.blame is FailureKind.USER:
            return BiremeError(self.text)
        if self.blame is FailureKind.RUN:
            return RunFailed(self.text)
        if self.blame is FailureKind.INTERRUPT:
            return KeyboardInterrupt()
        return self.to_others()


def grace_s(timeout_s: float) -> float:
    """How long a rank that has to end may take to end by itself."""
    return min(5.0, timeout_s / 4)


# What a rank is told when another one is gone. That is nobody's wrong input, so it is no `BiremeError`.


class PeerLost(Exception):  # noqa: N818 (it is an event, which others act on)
    """The connection to a rank broke: its process has ended, or has given up itself.

    `rank` is its number in the world, `reason` what the transport said.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"Rank {self.rank} is gone: {self.reason}"


# The lifeline: a process that ends when its parent, or who asked for it, ends, whatever ended that.

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
"""Of Linux; Python's `fcntl` has no name for it."""
LOOK_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent, which had that number, is gone."""
    if sys.platform == "linux":
        # Says the kernel: when the *thread* ends that started this process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_look, args=(parent_pid,), name="bireme lifeline", daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(1)  # It ended before this was set.


def die_with_holder(lifeline: int) -> None:
    """From now on Linux kills this process when the other end of a pipe, of which this is the end to read,
    is closed: by its holder or by the holder's death. It does so too if this process is stopped, or stuck.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)  # It was closed before this was set.


def _look(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_S)
    os._exit(1)


_CAUSE = "board/cause"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's sign of life. Only that `count` grows means something: clocks of machines differ."""

    count: int
    finished: bool
    doing: str | None
    knows: bool = False
    """Whether the rank has learned of a root cause, and ends by it."""
    gone: bool = False
    """Whether the connection of the rank to the store is closed since then."""


class Board:
    """The board of `size` ranks, in the store of one run."""

    def __init__(self, store: "Store", size: int) -> None:
        self._store = store
        self._keys = [f"board/pulse/{rank}" for rank in range(size)]

    def beat(self, rank: int, pulse: Heartbeat) -> None:
        """Give a sign of life."""
        key, text = self._keys[rank], json.dumps(asdict(pulse))
        if (put := getattr(self._store, "set_while_here", None)) is not None:
            put(key, text, json.dumps(asdict(replace(pulse, gone=True))))
        else:
            self._store.set(key, text)

    def pulses(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """The last sign of life of these ranks; None of one that never gave any."""
        keys = [self._keys[rank] for rank in ranks]
        if self._store.check(keys):
            return [Heartbeat(**json.loads(text)) for text in self._store.multi_get(keys)]
        # Some are not there, and to get such a one is to wait for it.
        return [Heartbeat(**json.loads(self._store.get(k))) if self._store.check([k]) else None for k in keys]

    def record(self, failure: Failure) -> Failure:
        """Write down a root cause. What comes back is the one that counts: it may be another's."""
        return Failure.decode(self._store.compare_set(_CAUSE, "", failure.encode()))

    def cause(self) -> Failure | None:
        """The root cause, once there is one."""
        return Failure.decode(self._store.get(_CAUSE)) if self._store.check([_CAUSE]) else None
