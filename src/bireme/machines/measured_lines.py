"""What the lines between the machines of a run carry, and which of them is to be measured next.

The coordinator names one line after the other to the machines, each of which is in one measurement at a time.
After each of the next arrivals a line is measured again, three times in all, and the best counts: a machine
that was busy when it joined does not decide the plan.
"""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Annotated

from annotated_types import Ge, Gt
from pydantic import TypeAdapter

from bireme.machines.findings import Finding

LINES_VARIABLE = "BIREME_LINES"
"""Names the variable with the lines between the machines of a phase."""
_NUM_KEPT = 3
_MOST_WHOLE, _NUM_NEAR = 8, 3
"""With more machines, only the lines of the first one are measured, and of each to those that came next."""
_BUSY_S = 30.0
"""A measurement that is not reported for so long has failed."""
_Rate = Annotated[float, Gt(0)]


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """A line as one of its ends sees it: bytes per second away from here and towards here, and seconds there
    and back.
    """

    out_bytes_per_s: _Rate
    in_bytes_per_s: _Rate
    round_s: Annotated[float, Ge(0)]

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> "MeasuredLine | None":
        """The line that was checked, if its speed was measured."""
        found = {one.check: one.measured for one in findings}
        if not found.get("bandwidth") or not found.get("latency"):
            return None
        return cls(*found["bandwidth"], *found["latency"])

    @property
    def turned(self) -> "MeasuredLine":
        """The line as its other end sees it."""
        return MeasuredLine(self.in_bytes_per_s, self.out_bytes_per_s, self.round_s)


@dataclass(frozen=True, slots=True)
class LineBetween:
    """The line between two machines of a phase, by their numbers, as the first of them sees it."""

    first: int
    second: int
    line: MeasuredLine

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of both."""
        return self.first, self.second


_LINES = TypeAdapter(tuple[LineBetween, ...])


def lines_in_variable(variables: Mapping[str, str] = os.environ) -> tuple[LineBetween, ...]:
    """The lines that the environment has for the processes of a phase."""
    return _LINES.validate_json(variables.get(LINES_VARIABLE) or "[]")


def variable_of(lines: Sequence[LineBetween]) -> dict[str, str]:
    """The variable that `lines_in_variable` reads."""
    return {LINES_VARIABLE: json.dumps([asdict(one) for one in lines])}


_Pair = tuple[str, str]


class LineTable:
    """The lines between the machines of a run, which are named by their keys."""

    def __init__(self) -> None:
        self._found: dict[_Pair, deque[MeasuredLine]] = {}
        """By two machines, the smaller key first, which sees the line so."""
        self._tried: dict[_Pair, int] = {}
        """The arrival after which a line was last measured, or could not be."""
        self._arrival = 0
        self._busy: dict[str, float] = {}
        """Until when a machine measures."""

    def note_arrival(self) -> None:
        """Have lines measured again that were not measured often enough."""
        self._arrival += 1

    def note(self, one: str, other: str, line: MeasuredLine | None) -> None:
        """A machine has measured its line to another one; None if it could not."""
        pair = _pair(one, other)
        self._tried[pair] = self._arrival
        self._busy.pop(one, None)
        self._busy.pop(other, None)
        if line is not None:
            kept = self._found.setdefault(pair, deque(maxlen=_NUM_KEPT))
            kept.append(line if pair[0] == one else line.turned)

    def is_new(self, there: Sequence[str]) -> bool:
        """Whether a line between these machines was never tried."""
        return any(pair not in self._tried for pair in _wanted(there))

    def next_of(self, key: str, there: Sequence[str], now_s: float) -> str | None:
        """The machine whose line to this one is to be measured now, if any; both are busy from now on."""
        busy = {one for one, until_s in self._busy.items() if now_s < until_s}
        due = [
            pair
            for pair in _wanted(there)
            if key in pair
            and not busy & {*pair}
            and self._tried.get(pair, 0) < self._arrival
            and len(self._found.get(pair, ())) < _NUM_KEPT
        ]
        if not due:
            return None
        pair = min(due, key=lambda one: self._tried.get(one, 0))
        self._busy |= dict.fromkeys(pair, now_s + _BUSY_S)
        return pair[pair[0] == key]

    def among(self, machines: Sequence[str]) -> tuple[LineBetween, ...]:
        """The known lines between the machines of a phase, whose numbers are their places."""
        found = []
        for (first, one), (second, other) in combinations(enumerate(machines), 2):
            if (pair := _pair(one, other)) in self._found:
                line = _best(self._found[pair])
                found.append(LineBetween(first, second, line if pair[0] == one else line.turned))
        return tuple(found)


def _best(lines: Sequence[MeasuredLine]) -> MeasuredLine:
    """The best of several measurements. Three digits are enough, and keep plans comparable."""
    values = (
        max(one.out_bytes_per_s for one in lines),
        max(one.in_bytes_per_s for one in lines),
        min(one.round_s for one in lines),
    )
    return MeasuredLine(*(float(f"{value:.3g}") for value in values))


def _pair(one: str, other: str) -> _Pair:
    return (one, other) if one < other else (other, one)


def _wanted(there: Sequence[str]) -> Iterator[_Pair]:
    """The lines to measure between machines, in the order in which these came."""
    for (place, one), (later, other) in combinations(enumerate(there), 2):
        if len(there) <= _MOST_WHOLE or not place or later - place <= _NUM_NEAR:
            yield _pair(one, other)
