"""Figures that benchmarks measure several times, and verdicts: figures with the limits that they promise.

A shared machine breaks promises too. A broken promise is the machine's if the best round keeps it, or if
other programs had more than 5 % of the cores meanwhile; else it is Bireme's. A count is Bireme's in any case.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(figures: Iterable[float]) -> "Spread":
        """Of at least one figure."""
        found = list(figures)
        return Spread(statistics.median(found), min(found), max(found))

    def show(self, form: str) -> str:
        """Such as `1.97 (1.91 to 2.02)`."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Theirs over ours, round by round: more than one says that ours took less."""
    return Spread.of(their / our for our, their in zip(ours, theirs, strict=True))


class _Bound(StrEnum):
    """How a value must lie to its limit."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EXACTLY = "exactly"


class Cause(StrEnum):
    """Why a value misses its limit."""

    MACHINE = "machine"
    BIREME = "bireme"


_MOST_OTHERS = 0.05
"""Share of the cores that other programs may have while something is timed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure that was promised: its limit, what was found, and whether that is enough.

    `best` is the figure of the best round; `others_share` the share of the cores that other programs had
    while it was measured. Both are None if they are not known.
    """

    name: str
    value: float
    bound: _Bound
    limit: float
    best: float | None = None
    others_share: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the promise is kept; a value that is no number keeps none."""
        return self._is_kept_by(self.value)

    @property
    def cause(self) -> Cause | None:
        """Why the promise is broken; None if it is kept, or if nothing is known of the machine."""
        is_count = self.bound is _Bound.EXACTLY
        if self.ok or (self.best is None and self.others_share is None and not is_count):
            return None
        is_machine = self._is_kept_by_best or self._is_busy
        return Cause.MACHINE if is_machine and not is_count else Cause.BIREME

    @property
    def reason(self) -> str:
        """The cause in words, with the figures that it follows from."""
        best = None if self.best is None else f"the best round has {shown(self.best)}"
        others = None
        if self.others_share is not None:
            others = f"other programs had {self.others_share:.0%} of the cores"
        if self.cause is Cause.MACHINE:
            return f"The machine: {best if self._is_kept_by_best else others}."
        figures = ", ".join(filter(None, (best, others)))
        return f"Bireme: {figures}." if figures else "Bireme: a count does not depend on the machine."

    @property
    def _is_kept_by_best(self) -> bool:
        return self.best is not None and self._is_kept_by(self.best)

    @property
    def _is_busy(self) -> bool:
        return self.others_share is not None and self.others_share > _MOST_OTHERS

    def _is_kept_by(self, value: float) -> bool:
        if self.bound is _Bound.AT_MOST:
            return value <= self.limit
        return value >= self.limit if self.bound is _Bound.AT_LEAST else value == self.limit


def at_most(
    name: str, value: float, limit: float, best: float | None = None, others_share: float | None = None
) -> Verdict:
    """A value that must not be above its limit."""
    return Verdict(name, value, _Bound.AT_MOST, limit, best, others_share)


def at_least(
    name: str, value: float, limit: float, best: float | None = None, others_share: float | None = None
) -> Verdict:
    """A value that must not be below its limit."""
    return Verdict(name, value, _Bound.AT_LEAST, limit, best, others_share)


def exactly(name: str, value: float, limit: float) -> Verdict:
    """A value that must be what was said."""
    return Verdict(name, value, _Bound.EXACTLY, limit)


def resident_bytes(field: str) -> int:
    """Of this process, as Linux tells it: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def verdict_documents(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as plain data; broken ones have a `cause` if it is known."""
    return [
        {"name": one.name, "limit": one.limit, "value": one.value, "ok": one.ok}
        | ({} if one.cause is None else {"cause": one.cause})
        for one in verdicts
    ]


def print_verdicts(verdicts: Sequence[Verdict], console: "Console") -> None:
    """Each with the cause if it is broken, and how many the machine broke."""
    from rich.markup import escape

    for one in verdicts:
        sign = "[green]✓[/green]" if one.ok else "[red]✗[/red]"
        text = f"{one.name}: {shown(one.value)} ({one.bound} {shown(one.limit)})"
        console.print(f"{sign} {escape(text)}", highlight=False)
        if one.cause is not None:
            console.print(f"  {one.reason}", highlight=False)
    num_broken = sum(not one.ok for one in verdicts)
    if num_machine := sum(one.cause is Cause.MACHINE for one in verdicts):
        console.print(
            f"{num_machine} of {num_broken} ✗ are the machine's: repeat them when no other program runs.",
            highlight=False,
        )


def shown(value: object) -> str:
    """A figure in few letters."""
    if isinstance(value, Spread):
        return f"{shown(value.median)} ({shown(value.least)} to {shown(value.greatest)})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)
