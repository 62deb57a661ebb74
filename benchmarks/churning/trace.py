"""A trace of machines that come and go: its file, what follows from it, and a generator.

    time_s,machine,event
    0,a,arrives
    0,b,arrives
    41.5,b,lost
    60,b,arrives
    90,a,leaves
    120,,end

A machine that is `lost` ends without a word, one that `leaves` has had notice. The last line is optional:
without it the trace ends with its last event. A machine whose first event is its departure was there from
the start.

`read_trace` also takes traces of others: without a header, with the columns in another order, with other
words for the events, in milliseconds, or with a count of machines for each time (`time_ms,count`). It takes
JSON too: counts at equal intervals, and a list of machines for each time:

    {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}
    [480000, "remove", {"nodes": ["node-31", "node-10"]}]
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from math import inf, isfinite
from pathlib import Path
from random import Random

from bireme.errors import BiremeError
from bireme.files import write_text_atomically


class Kind(StrEnum):
    """What happens to a machine."""

    ARRIVES = "arrives"
    LOST = "lost"
    LEAVES = "leaves"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A machine arrives, is lost, or leaves."""

    time_s: float
    machine: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in the order of time, from 0 to `end_s`. In turns each machine arrives and departs."""

    events: tuple[TraceEvent, ...]
    end_s: float

    @property
    def machines(self) -> tuple[str, ...]:
        """All machines, those that arrive first being the first."""
        return tuple(dict.fromkeys(one.machine for one in self.events))

    def count(self, *kinds: Kind) -> int:
        """How many events are of these kinds."""
        return sum(one.kind in kinds for one in self.events)

    @property
    def arrivals_after_start(self) -> int:
        """How many machines arrive after the start, again or for the first time."""
        return sum(one.kind is Kind.ARRIVES and one.time_s > 0 for one in self.events)

    def from_all_there(self) -> list[TraceEvent]:
        """The events of a run that all machines begin: one that is not there at the start leaves then."""
        there = next((there for *_, there in self.steps()), frozenset[str]())
        absent = [TraceEvent(0.0, one, Kind.LEAVES) for one in self.machines if one not in there]
        return [*absent, *(one for one in self.events if one.time_s > 0)]

    def steps(self) -> Iterator[tuple[float, float, frozenset[str]]]:
        """Begin and end of each time in which the same machines are there, and these machines."""
        there, since_s = set[str](), 0.0
        for one in self.events:
            if one.time_s > since_s:
                yield since_s, one.time_s, frozenset(there)
                since_s = one.time_s
            (there.add if one.kind is Kind.ARRIVES else there.discard)(one.machine)
        if self.end_s > since_s:
            yield since_s, self.end_s, frozenset(there)

    @property
    def machine_s(self) -> float:
        """Seconds that machines are there, summed over the machines."""
        return sum((end_s - begin_s) * len(there) for begin_s, end_s, there in self.steps())

    @property
    def fewest(self) -> int:
        """The least number of machines that are there at a time."""
        return min((len(there) for *_, there in self.steps()), default=0)

    def in_places(self) -> "Trace":
        """The same with as few machines as are there at a time: a machine takes its own place again, or that
        of a machine that has gone. In traces of clouds each machine that arrives has a new name.
        """
        places, free, events = dict[str, str](), list[str](), list[TraceEvent]()
        for one in self.events:
            if one.kind is Kind.ARRIVES:
                last = places.get(one.machine, one.machine)
                place = last if last in free or not free else free[0]
                if place in free:
                    free.remove(place)
                places[one.machine] = place
            else:
                free.append(places[one.machine])
            events.append(replace(one, machine=places[one.machine]))
        return Trace(tuple(events), self.end_s)

    def scaled(self, factor: float) -> "Trace":
        """The same with all times multiplied."""
        events = tuple(replace(one, time_s=one.time_s * factor) for one in self.events)
        return Trace(events, self.end_s * factor)


def write_trace(trace: Trace, path: Path) -> None:
    """Write the file."""
    lines = [f"{one.time_s!r},{one.machine},{one.kind}" for one in trace.events]
    write_text_atomically(path, "\n".join(["time_s,machine,event", *lines, f"{trace.end_s!r},,end", ""]))


# Reading, also what others have written.

_TIMES = {
    "time_s": 1.0,
    "time": 1.0,
    "timestamp": 1.0,
    "seconds": 1.0,
    "t": 1.0,
    "time_ms": 1e-3,
    "ms": 1e-3,
    "milliseconds": 1e-3,
}
"""Names of the column of times, and the seconds of its unit."""
_MACHINES = frozenset({"machine", "node", "host", "instance", "name", "id", "ip"})
_EVENTS = frozenset({"event", "operation", "type", "kind", "action", "state"})
_COUNTS = frozenset({"count", "machines", "nodes", "instances", "size", "capacity"})
_END = frozenset({"end", "ends"})
_WORDS: Mapping[str, Kind] = {
    word: kind
    for kind, words in {
        Kind.ARRIVES: "arrives arrive arrival arrived add added join joins start started launch up running",
        Kind.LOST: "lost loss lose kill killed preempt preempted preemption evict evicted fail failed failure"
        " crash terminated down remove removed interrupted",
        Kind.LEAVES: "leaves leave left depart departs departure drain stop stopped notice shutdown",
    }.items()
    for word in words.split()
}


@dataclass(frozen=True, slots=True)
class _Columns:
    """The places of the columns in a line. A line of counts has no machine and no event."""

    time: int
    machine: int = -1
    event: int = -1
    count: int = -1
    unit_s: float = 1.0

    @property
    def width(self) -> int:
        """How many fields a line has at least."""
        return max(self.time, self.machine, self.event, self.count) + 1


def read_trace(path: Path, *, unit_s: float | None = None) -> Trace:
    """The trace in a file. Times are in the unit that the header names, else in `unit_s` seconds (1)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = _lines_of_json(text) if text.startswith(("{", "[")) else csv.reader(text.splitlines())
        rows = [
            (number, [field.strip() for field in fields])
            for number, fields in enumerate(lines, start=1)
            if any(field.strip() for field in fields) and not fields[0].lstrip().startswith("#")
        ]
    except (OSError, csv.Error, ValueError, TypeError, KeyError, IndexError) as error:
        raise BiremeError(
            f"The trace {path} cannot be read: {error}. Name a CSV file, or one of the JSON files that "
            "benchmarks/churning/trace.py shows."
        ) from None
    if not rows:
        raise BiremeError(f"The trace {path} has no line. Write `time_s,machine,event`, one event a line.")

    def wrong(number: int, what: str) -> BiremeError:
        return BiremeError(f"Line {number} of {path} {what}")

    number, first = rows[0]
    if _is_number(first[0]):
        columns = _without_header(first, wrong, number)
    else:
        columns, rows = _of_header(first, wrong, number), rows[1:]
    columns = replace(columns, unit_s=columns.unit_s if unit_s is None else unit_s)
    found = (_of_counts if columns.count >= 0 else _of_events)(rows, columns, wrong)
    if not found.machine_s:
        raise BiremeError(f"In the trace {path} no machine is ever there. Add arrivals before its end.")
    return found


def _lines_of_json(text: str) -> Iterator[list[str]]:
    """The fields of the lines that such a trace would have as CSV."""
    if text.startswith("{"):
        found = json.loads(text)
        gap_s = float(found["metadata"]["gap_seconds"])
        yield ["time_s", "count"]
        yield from ([repr(number * gap_s), str(count)] for number, count in enumerate(found["data"]))
        return
    yield ["time_ms", "event", "machine"]
    for line in text.splitlines():
        time_ms, event, rest = json.loads(line)
        yield from ([str(time_ms), event, machine] for machine in rest["nodes"])


_Wrong = Callable[[int, str], BiremeError]
_Rows = Sequence[tuple[int, list[str]]]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _of_header(names: Sequence[str], wrong: _Wrong, number: int) -> _Columns:
    lower = [name.lower() for name in names]

    def place(known: Iterable[str]) -> int:
        return next((at for at, name in enumerate(lower) if name in known), -1)

    time, machine, event, count = (place(one) for one in (_TIMES, _MACHINES, _EVENTS, _COUNTS))
    if time >= 0 and machine >= 0 and event >= 0:
        return _Columns(time, machine, event, unit_s=_TIMES[lower[time]])
    if time >= 0 and count >= 0:
        return _Columns(time, count=count, unit_s=_TIMES[lower[time]])
    raise wrong(number, f"names the columns {', '.join(names)}. Name them time_s, machine, event.")


def _without_header(fields: Sequence[str], wrong: _Wrong, number: int) -> _Columns:
    """Of a first line that begins with a time: the event is the field that has the word of one."""
    if len(fields) == 2 and _is_number(fields[1]):
        return _Columns(0, count=1)
    events = [at for at, field in enumerate(fields[1:3], start=1) if field.lower() in {*_WORDS, *_END}]
    if len(fields) < 3 or not events:
        raise wrong(
            number, f"is `{','.join(fields)}`. Write `time_s,machine,event` with one of {', '.join(Kind)}."
        )
    return _Columns(0, 3 - events[-1], events[-1])


def _time_s(row: Sequence[str], columns: _Columns, before_s: float, wrong: _Wrong, number: int) -> float:
    if len(row) < columns.width:
        raise wrong(number, f"has {len(row)} fields instead of {columns.width}: `{','.join(row)}`.")
    text = row[columns.time]
    time_s = float(text) * columns.unit_s if _is_number(text) else inf
    if not isfinite(time_s) or time_s < 0:
        raise wrong(number, f"has the time `{text}`. Write seconds from the start of the trace, from 0 on.")
    if time_s < before_s:
        raise wrong(
            number, f"has the time {text}, which is before the line above it. Sort the lines by time."
        )
    return time_s


def _of_events(rows: _Rows, columns: _Columns, wrong: _Wrong) -> Trace:
    events, there, end_s = list[TraceEvent](), dict[str, bool](), 0.0
    early = list[str]()
    for number, row in rows:
        end_s = _time_s(row, columns, end_s, wrong, number)
        word, machine = row[columns.event].lower(), row[columns.machine]
        if word in _END:
            if number != rows[-1][0]:
                raise wrong(number, "ends the trace, and is not its last line.")
            break
        kind = _WORDS.get(word)
        if kind is None:
            raise wrong(number, f"has the event `{row[columns.event]}`. Write one of {', '.join(Kind)}.")
        if not machine:
            raise wrong(number, "names no machine.")
        if there.get(machine) is (kind is Kind.ARRIVES):
            what = "arrives, and is there already" if kind is Kind.ARRIVES else f"{kind}, and is not there"
            raise wrong(number, f"is wrong: the machine {machine} {what}.")
        if machine not in there and kind is not Kind.ARRIVES:
            early.append(machine)
        there[machine] = kind is Kind.ARRIVES
        events.append(TraceEvent(end_s, machine, kind))
    begun = [TraceEvent(0.0, machine, Kind.ARRIVES) for machine in early]
    return Trace((*begun, *events), end_s)


def _of_counts(rows: _Rows, columns: _Columns, wrong: _Wrong) -> Trace:
    """Of the number of machines at each time. The machine that has been there longest is lost first."""
    events, there, end_s, names = list[TraceEvent](), list[str](), 0.0, 0
    for number, row in rows:
        end_s = _time_s(row, columns, end_s, wrong, number)
        text = row[columns.count]
        if not text.isdecimal():
            raise wrong(number, f"has `{text}` machines. Write a whole number from 0 on.")
        while len(there) < int(text):
            there.append(f"machine-{names}")
            names += 1
            events.append(TraceEvent(end_s, there[-1], Kind.ARRIVES))
        while len(there) > int(text):
            events.append(TraceEvent(end_s, there.pop(0), Kind.LOST))
    return Trace(tuple(events), end_s)


# The generator.


@dataclass(frozen=True, slots=True)
class Market:
    """Where spot machines are rented: `machines` at most, all there at the start, for `end_s`.

    A machine lives for `lifetime_s` in the mean, and its place is empty for `away_s` in the mean; both times
    are exponential. So arrivals and departures of many machines are Poisson's. The share `notice` of the
    departures is announced. Machines lie in `zones`: every `burst_every_s` in the mean (0: never) one zone
    loses each of its machines with the probability `burst_share`. No departure leaves fewer than `least`
    machines.
    """

    machines: int
    end_s: float
    lifetime_s: float
    away_s: float
    notice: float = 0.0
    zones: int = 1
    burst_every_s: float = 0.0
    burst_share: float = 0.5
    least: int = 1


def generated(market: Market, seed: int = 0) -> Trace:
    """A trace of such machines, always the same of a seed."""
    random = Random(f"trace {seed}")
    names = [f"m{number:0{len(str(market.machines - 1))}}" for number in range(market.machines)]
    there, events = set(range(market.machines)), [TraceEvent(0.0, name, Kind.ARRIVES) for name in names]
    agenda: list[tuple[float, int]] = []
    for number in range(market.machines):
        heappush(agenda, (random.expovariate(1 / market.lifetime_s), number))
    burst = market.machines
    """Stands for a burst in the agenda."""
    if market.burst_every_s:
        heappush(agenda, (random.expovariate(1 / market.burst_every_s), burst))

    def depart(number: int, kind: Kind, now_s: float) -> None:
        there.discard(number)
        events.append(TraceEvent(now_s, names[number], kind))

    while agenda and agenda[0][0] < market.end_s:
        now_s, number = heappop(agenda)
        if number == burst:
            zone = random.randrange(market.zones)
            hit = [one for one in sorted(there) if one % market.zones == zone]
            for one in hit:
                if random.random() < market.burst_share and len(there) > market.least:
                    depart(one, Kind.LOST, now_s)
            lost = {one for one in hit if one not in there}
            agenda = sorted(entry for entry in agenda if entry[1] not in lost)
            for one in sorted(lost):
                heappush(agenda, (now_s + random.expovariate(1 / market.away_s), one))
            heappush(agenda, (now_s + random.expovariate(1 / market.burst_every_s), burst))
        elif number in there:
            is_told = random.random() < market.notice
            if len(there) > market.least:
                depart(number, Kind.LEAVES if is_told else Kind.LOST, now_s)
            mean_s = market.lifetime_s if number in there else market.away_s
            heappush(agenda, (now_s + random.expovariate(1 / mean_s), number))
        else:
            there.add(number)
            events.append(TraceEvent(now_s, names[number], Kind.ARRIVES))
            heappush(agenda, (now_s + random.expovariate(1 / market.lifetime_s), number))
    return Trace(tuple(events), market.end_s)
