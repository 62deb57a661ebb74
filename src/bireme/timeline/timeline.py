"""The noun of this room: a `Timeline`, when each instruction of a program started and ended.

The simulator predicts one and the engine measures one; reports set them side by side. Times are seconds
from the begin of the window. They are kept in arrays, one entry per instruction of the rank's track, so a
timeline of millions of instructions stays small.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from operator import sub

from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.residency import Residency

__all__ = [
    "AVERAGE_SYNC",
    "BUSY",
    "GRADIENT_SYNC",
    "Copies",
    "Interval",
    "RankCopies",
    "RankTimeline",
    "Timeline",
    "Transfers",
    "sync_name",
]

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
    start_s: "array[float]"
    end_s: "array[float]"
    num_bytes: "array[float]"
    posted_by: "array[int]"


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
        the window without its last batch; of a window of one batch it is the makespan.
        """
        ends = self.batch_end_s()
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
        """For each batch of the window the end of its last backward on any rank."""
        first = self.program.first_batch
        ends = [0.0] * self.program.num_batches
        for rank in self.ranks:
            index = 0
            for block in rank.track.blocks():
                for place, instruction in enumerate(block.instructions):
                    if instruction.kind is Kind.REDUCE:
                        batch = instruction.batch + block.batches - first
                        ends[batch] = max(ends[batch], rank.start_s[index + place])
                index += len(block.instructions)
        return ends


def sync_name(timeline: Timeline, transfers: Transfers) -> str:
    """Which sync with replicas these transfers are."""
    track = timeline.ranks[transfers.source].track
    is_average = any(track[index].kind is Kind.AVERAGE_START for index in transfers.sent_by[:1])
    return AVERAGE_SYNC if is_average else GRADIENT_SYNC
