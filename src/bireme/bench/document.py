"""What measurements promise: figures with their limits, whether these are kept, and how they are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.bench.spread import Spread

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Bound",
    "Verdict",
    "at_least",
    "at_most",
    "exactly",
    "print_verdicts",
    "resident_bytes",
    "shown",
    "verdict_documents",
]


class Bound(StrEnum):
    """How a value must lie to its limit."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EXACTLY = "exactly"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure that was promised: its limit, what was found, and whether that is enough."""

    name: str
    value: float
    bound: Bound
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the promise is kept; a value that is no number keeps none."""
        if self.bound is Bound.AT_MOST:
            return self.value <= self.limit
        return self.value >= self.limit if self.bound is Bound.AT_LEAST else self.value == self.limit


def at_most(name: str, value: float, limit: float) -> Verdict:
    """A value that must not be above its limit."""
    return Verdict(name, value, Bound.AT_MOST, limit)


def at_least(name: str, value: float, limit: float) -> Verdict:
    """A value that must not be below its limit."""
    return Verdict(name, value, Bound.AT_LEAST, limit)


def exactly(name: str, value: float, limit: float) -> Verdict:
    """A value that must be what was said."""
    return Verdict(name, value, Bound.EXACTLY, limit)


def resident_bytes(field: str) -> int:
    """Of this process, as Linux tells it: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def verdict_documents(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as plain data."""
    return [{"name": one.name, "limit": one.limit, "value": one.value, "ok": one.ok} for one in verdicts]


def print_verdicts(verdicts: Sequence[Verdict], console: "Console") -> None:
    """One line each."""
    from rich.markup import escape

    for one in verdicts:
        sign = "[green]✓[/green]" if one.ok else "[red]✗[/red]"
        text = f"{one.name}: {shown(one.value)} ({one.bound} {shown(one.limit)})"
        console.print(f"{sign} {escape(text)}", highlight=False)


def shown(value: object) -> str:
    """A figure in few letters."""
    if isinstance(value, Spread):
        return f"{shown(value.median)} ({shown(value.least)} to {shown(value.greatest)})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)
