"""The noun of this room: a `Timeline`, when each instruction of a program started and ended.

The simulator predicts one and the engine measures one; reports set them side by side. Times are seconds
from the begin of the window. They are kept in arrays, one entry per instruction of the rank's track, so a
timeline of millions of instructions stays small.
"""

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from operator import sub

from bireme.grouping import grouped
from bireme.schedule.instruction import COMPUTE, RECEIVES, Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.residency import Residency

BUSY = COMPUTE | {Kind.UPDATE, Kind.TRIAL}
"""The kinds that use the device."""

GRADIENT_SYNC, AVERAGE_SYNC = "gradient sync", "weight average"
"""What a rank does with its replicas in parallel to its track."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One instruction with its time."""

    instruction: Instruction
    index: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """When each instruction of one rank started and ended."""

    rank: int
    track: Track
    start_s: "array[float]"
    end_s: "array[float]"

    @property
    def busy_s(self) -> float:
        """Seconds in which the device was used."""
        return float(sum(compress(map(sub, self.end_s, self.start_s), self.mask(BUSY))))

    def mask(self, kinds: frozenset[Kind]) -> bytes:
        """For each instruction 1 if it is of one of the kinds, else 0."""
        track = self.track

        def of(instructions: tuple[Instruction, ...]) -> bytes:
            return bytes(instruction.kind in kinds for instruction in instructions)

        return of(track.head) + of(track.body) * track.repeats + of(track.tail)

    def intervals(self) -> Iterator[Interval]:
        """Every instruction with its time."""
        for index, instruction in enumerate(self.track):
            yield Interval(instruction, index, self.start_s[index], self.end_s[index])


@dataclass(frozen=True, slots=True)
class Transfers:
    """What went from one rank to another, in order; `rank` to itself stands for its sync with replicas.

    `sent_by` and `received_by` are indices into the two ranks' tracks: of the send and of the receive, or
    twice of the REDUCE or AVERAGE_START.
    """

    source: int
    destination: int
    start_s: "array[float]"
    end_s: "array[float]"
    num_bytes: "array[float]"
    sent_by: "array[int]"
    received_by: "array[int]"

    @property
    def is_sync(self) -> bool:
        """Whether this is the sync of a rank with its replicas."""
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class Copies:
    """The chunks of a rank that went from one tier to the next, in order.

    `posted_by` is the index of the FETCH or EVICT in the rank's track.
    """

    source: str
    destination: str
    start_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_bytes: "array[float]" = field(default_factory=lambda: array("d"))
    posted_by: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class RankCopies:
    """All copies of a rank that pages, and the seconds in which it waited for chunks or for their slots."""

    rank: int
    waited_s: float
    copies: tuple[Copies, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A program's window in time: what each rank did, what crossed the links, what was kept."""

    program: Program
    ranks: tuple[RankTimeline, ...]
    transfers: tuple[Transfers, ...]
    memory: tuple[Residency, ...]
    source: str = "predicted"
    paging: tuple[RankCopies, ...] = ()
    """Of the ranks that page."""
    others: tuple[tuple[RankTimeline, ...], ...] = ()
    """The ranks of the other replicas, on the same clock, if they were recorded; `ranks` are the first's."""

    @property
    def makespan_s(self) -> float:
        """From the begin of the window to the end of its last instruction."""
        return max((rank.end_s[-1] for rank in self.ranks if rank.end_s), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time, from begin to end of the window, in which nothing was computed."""
        whole = self.makespan_s * len(self.ranks)
        return 1.0 - sum(rank.busy_s for rank in self.ranks) / whole if whole else 0.0

    @property
    def steady_batch_s(self) -> float:
        """Seconds a batch takes once the window's start-up is over and before it drains.

        Measured from batch to batch, at the end of the last backward on any rank, over the second half of
        the window without its last batch; of a window of one batch it is the makespan. If the clock was
        stopped before the window's last batch, as `settled_batch_s` has it.
        """
        ends = self.batch_end_s()
        if len(ends) < self.program.num_batches:
            return settled_batch_s(ends, len(ends)) or self.makespan_s
        if len(ends) == 1:
            return self.makespan_s
        last = max(len(ends) - 2, 1)
        first = min((len(ends) - 1) // 2, last - 1)
        return (ends[last] - ends[first]) / (last - first)

    @property
    def steady_bubble_fraction(self) -> float:
        """The idle share of the ranks in the steady state: what a long run sees."""
        busy = sum(rank.busy_s for rank in self.ranks) / self.program.num_batches
        whole = self.steady_batch_s * len(self.ranks)
        return max(1.0 - busy / whole, 0.0) if whole else 0.0

    def batch_end_s(self) -> list[float]:
        """For each batch of the window the end of its last backward on any rank; only of the batches that
        have ended on all ranks if the clock was stopped.
        """
        first = self.program.first_batch
        ends = [0.0] * self.program.num_batches
        num_ended = len(ends)
        for rank in self.ranks:
            index, num_known = 0, len(rank.start_s)
            for block in rank.track.blocks():
                for place, instruction in enumerate(block.instructions):
                    if instruction.kind is not Kind.REDUCE:
                        continue
                    batch = instruction.batch + block.batches - first
                    if index + place < num_known:
                        ends[batch] = max(ends[batch], rank.start_s[index + place])
                    else:
                        num_ended = min(num_ended, batch)
                index += len(block.instructions)
                if index >= num_known and num_ended < len(ends):
                    break
        return ends[:num_ended]


_SETTLED = 1e-3
"""Relative: batches that differ by no more take equally long."""


def settled_batch_s(ends: Sequence[float], most: float = math.inf) -> float | None:
    """Seconds of a batch once batches take equally long, or two together as long as the two before, given
    when each has ended; None before. After `most` batches, the mean of the second half.
    """
    spans = [after - before for before, after in pairwise(ends)]
    if len(spans) > 1 and abs(spans[-1] - spans[-2]) <= _SETTLED * spans[-1]:
        return spans[-1]
    if len(spans) > 3:
        last, before = spans[-1] + spans[-2], spans[-3] + spans[-4]
        if abs(last - before) <= _SETTLED * last:
            return last / 2
    if len(ends) < most or not spans:
        return None
    half = spans[len(spans) // 2 :]
    return sum(half) / len(half)


def sync_name(timeline: Timeline, transfers: Transfers) -> str:
    """Which sync with replicas these transfers are."""
    track = timeline.ranks[transfers.source].track
    is_average = any(track[index].kind is Kind.AVERAGE_START for index in transfers.sent_by[:1])
    return AVERAGE_SYNC if is_average else GRADIENT_SYNC


# The critical path: the chain of instructions that set the pace of a window.
#
# Walk back from the instruction that ended last. What kept an instruction from starting earlier is whatever
# ended last before it: the instruction before it on its rank, or the message it waited for. What kept the
# message is the instruction that made it or, where its receive was posted only later, what the receiving rank
# did before that.


@dataclass(frozen=True, slots=True)
class _PathStep:
    """One step of the path: an instruction, and how long the path stood still before it."""

    rank: int
    interval: Interval
    waited_s: float


def critical_path(timeline: Timeline) -> Iterator[_PathStep]:
    """The steps that set the pace, last to first."""
    walk = _Walk(timeline)
    ends = [rank.end_s[-1] if rank.end_s else 0.0 for rank in timeline.ranks]
    place = walk.busy(ends.index(max(ends)), None) if ends else None
    while place is not None:
        before = walk.before(place)
        ended_s = 0.0 if before is None else timeline.ranks[before.rank].end_s[before.index]
        interval = walk.interval(place)
        yield _PathStep(place.rank, interval, max(interval.start_s - ended_s, 0.0))
        place = before


@dataclass(frozen=True, slots=True)
class _Place:
    """An instruction, by its rank and its index there."""

    rank: int
    index: int


class _Walk:
    """Looks back from an instruction, without a picture of the whole timeline: that may be millions long."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.channels = grouped((one.destination, one) for one in timeline.transfers if not one.is_sync)

    def interval(self, place: _Place) -> Interval:
        rank = self.timeline.ranks[place.rank]
        return Interval(
            rank.track[place.index], place.index, rank.start_s[place.index], rank.end_s[place.index]
        )

    def busy(self, rank: int, below: int | None) -> _Place | None:
        """The last instruction that uses the device below an index."""
        track = self.timeline.ranks[rank].track
        index = (len(track) if below is None else below) - 1
        while index >= 0 and track[index].kind not in BUSY:
            index -= 1
        return _Place(rank, index) if index >= 0 else None

    def before(self, place: _Place) -> _Place | None:
        """What this instruction had to wait for."""
        local = self.busy(place.rank, place.index)
        local_s = 0.0 if local is None else self.timeline.ranks[local.rank].end_s[local.index]
        found = self._message(place)
        if found is None:
            return local
        transfers, number = found
        if transfers.end_s[number] <= local_s:
            return local
        maker = self.busy(transfers.source, transfers.sent_by[number])
        posted_s = self.timeline.ranks[place.rank].start_s[transfers.received_by[number]]
        made_s = self.timeline.ranks[transfers.source].start_s[transfers.sent_by[number]]
        if posted_s == transfers.start_s[number] > made_s:
            return self.busy(place.rank, transfers.received_by[number])
        return maker

    def _message(self, place: _Place) -> tuple[Transfers, int] | None:
        """The transfer that brought what this instruction uses."""
        track = self.timeline.ranks[place.rank].track
        instruction = track[place.index]
        if instruction.kind not in COMPUTE:
            return None
        needed = instruction.needs(self.timeline.program.num_stages)
        if needed is None:
            return None
        index = place.index
        while index >= 0 and not (track[index].kind in RECEIVES and track[index].carries() == needed):
            index -= 1
        for received_by in (index, place.index):  # where communication blocks, the use is the receipt
            for transfers in self.channels.get(place.rank, ()):
                number = _position(transfers, received_by)
                if number is not None:
                    return transfers, number
        return None


def _position(transfers: Transfers, received_by: int) -> int | None:
    """Which transfer was received by that instruction; they are in order."""
    number = bisect_left(transfers.received_by, received_by)
    if number < len(transfers.received_by) and transfers.received_by[number] == received_by:
        return number
    return None


# Who sets the pace: the critical path added up by what it consists of.


@dataclass(frozen=True, slots=True)
class Pace:
    """The share of the window that the critical path spends in one kind of work of one stage.

    `kind` is None for time in which the stage waited for messages or a gradient sync.
    """

    stage: int
    kind: Kind | None
    seconds: float
    share: float


def pace(timeline: Timeline) -> list[Pace]:
    """What the critical path consists of, most first."""
    seconds: defaultdict[tuple[int, Kind | None], float] = defaultdict(float)
    for step in critical_path(timeline):
        instruction = step.interval.instruction
        seconds[instruction.stage, instruction.kind] += step.interval.end_s - step.interval.start_s
        if step.waited_s > 0:
            seconds[instruction.stage, None] += step.waited_s
    whole = timeline.makespan_s
    found = [Pace(stage, kind, spent, spent / whole) for (stage, kind), spent in seconds.items() if spent > 0]
    return sorted(found, key=lambda p: (-p.seconds, p.stage))
