"""What a rank's failure is: who, at what, why. The first one of a run is its root cause, and is told once.

It travels between processes as text. That is why it holds a traceback and no exception.
"""

import json
import traceback
from dataclasses import asdict, dataclass
from enum import StrEnum

from bireme.errors import BiremeError, SampleError

__all__ = ["Failure", "FailureKind", "RankFailed", "RunFailed", "grace_s"]


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
            return cls(rank, instruction, _first_line(what), what, FailureKind.USER, samples)
        if isinstance(error, RunFailed):
            return cls(rank, instruction, _first_line(what), what, FailureKind.RUN)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, instruction, "it was interrupted", "it was interrupted", FailureKind.INTERRUPT)
        name = type(error).__qualname__
        summary = f"{name}: {_first_line(what)}" if what else name
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


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
