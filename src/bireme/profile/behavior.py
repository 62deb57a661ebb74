"""The noun of memory behavior: what the blocks of one training iteration do from birth to death.

It is data and imports no torch. Seconds count from the beginning of the iteration, and events are numbered in
it. A block that was there before is born at second 0 and by no operator; one that stays has no death.

A trace makes an iteration slower; its seconds are shrunk evenly to what one takes that is not traced.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise

# What happens to tensor storages: born, read, written, dead, one event after the other.
#
# It is data and imports no torch. A block is one storage from its allocation to its release; it has a number
# of its own, for addresses are used again. Seconds are of the clock of the trace that recorded the events.


class Owner(StrEnum):
    """What a block is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    """Saved by a forward for its backward."""
    INPUT = "input"
    WORKSPACE = "workspace"
    """Everything else: results on their way to the next operator."""


class Phase(StrEnum):
    """The parts of a training iteration."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class EventKind(StrEnum):
    """What can happen to a block."""

    BIRTH = "birth"
    READ = "read"
    WRITE = "write"
    DEATH = "death"


@dataclass(frozen=True, slots=True)
class Storage:
    """A block as the trace knows it.

    `name` is that of the parameter, buffer or input it holds or belongs to, `module` the one whose code made
    it; both are empty where unknown. `address` is None where the storage has no memory.
    """

    id: int
    num_bytes: int
    owner: Owner
    name: str = ""
    module: str = ""
    address: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a block.

    `operator` is what did it, empty where no operator did. It ran from `start_s` to `end_s`.
    """

    kind: EventKind
    block: int
    num_bytes: int
    operator: str
    phase: Phase | None
    start_s: float
    end_s: float


# How training iterations repeat: whether they are the same events, and after how many the events come again.
#
# Two events are the same if they are of one kind, by one operator, in one phase, and on blocks of one size
# and owner that were born at the same place of the same, the previous, … iteration.


@dataclass(frozen=True, slots=True)
class _Repetition:
    """What several iterations in a row have in common.

    `is_stable` is set if all are the same; `period_events` is the least number of events after which they
    repeat, None where they do not.
    """

    num_iterations: int
    is_stable: bool
    period_events: int | None


def repetition_of(iterations: Sequence[Sequence[Event]], storages: Mapping[int, Storage]) -> _Repetition:
    """Compare the events of iterations that follow each other."""
    words = [list(iteration) for iteration in _words(iterations, storages)]
    return _Repetition(
        num_iterations=len(words),
        is_stable=len(words) > 1 and all(word == words[0] for word in words),
        period_events=period([event for word in words for event in word]),
    )


def period(sequence: Sequence[Hashable]) -> int | None:
    """The least distance at which a sequence equals itself, if it fits into it at least twice."""
    # The longest proper border of each prefix, as Knuth, Morris and Pratt find it; the rest is the period.
    borders = [0] * len(sequence)
    for end in range(1, len(sequence)):
        border = borders[end - 1]
        while border and sequence[border] != sequence[end]:
            border = borders[border - 1]
        borders[end] = border + 1 if sequence[border] == sequence[end] else 0
    shortest = len(sequence) - borders[-1] if sequence else 0
    return shortest if 0 < 2 * shortest <= len(sequence) else None


def _words(
    iterations: Sequence[Sequence[Event]], storages: Mapping[int, Storage]
) -> Iterator[Iterator[Hashable]]:
    """The events of each iteration without what differs between iterations: moments and numbers of blocks."""
    born: dict[int, tuple[int, int]] = {}
    """Of each block the iteration and the place among its births."""
    for index, iteration in enumerate(iterations):
        births = (event.block for event in iteration if event.kind is EventKind.BIRTH)
        born |= {block: (index, place) for place, block in enumerate(births)}
        yield (_word(event, index, born, storages) for event in iteration)


def _word(
    event: Event, iteration: int, born: Mapping[int, tuple[int, int]], storages: Mapping[int, Storage]
) -> Hashable:
    birth = born.get(event.block)
    block = ("before", event.block) if birth is None else (str(iteration - birth[0]), birth[1])
    owner = storages[event.block].owner
    return event.kind, event.operator, event.phase, event.num_bytes, owner, block


_BEFORE = -1
"""The event at which blocks are born that were there already."""


@dataclass(frozen=True, slots=True)
class _BlockAccess:
    """A block is read or written by an operator that runs from `start_s` to `end_s`."""

    event: int
    kind: EventKind
    operator: str
    phase: Phase | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBlock(Storage):
    """One allocation. Being made by an operator counts as its first access."""

    birth_event: int
    birth_s: float
    birth_operator: str
    birth_phase: Phase | None
    death_event: int | None
    death_s: float | None
    accesses: tuple[_BlockAccess, ...]

    def title(self, longest: int | None = None) -> str:
        """Its name, else where it was made and by what; what is too long for people loses its middle."""
        operator = self.birth_operator.removeprefix("aten.")
        made = f"{self.module} {operator}" if self.module else operator
        name = self.name or made or "there before"
        if longest is not None and len(name) > longest:
            head = longest // 3
            return f"{name[:head]}…{name[head + 1 - longest :]}"
        return name

    @property
    def is_persistent(self) -> bool:
        """Whether it is there before the iteration and after it."""
        return self.birth_event == _BEFORE and self.death_event is None

    def lives_after(self, event: int) -> bool:
        """Whether it is there between an event and the next."""
        return self.birth_event <= event and (self.death_event is None or event < self.death_event)


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most bytes live: after `event`, which is the work of `operator`."""

    num_bytes: int
    event: int
    at_s: float
    phase: Phase | None
    operator: str


@dataclass(frozen=True, slots=True)
class Span:
    """When a phase of the iteration runs."""

    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Allocator:
    """What the device's own allocator says of the iterations: it rounds sizes up, and sees everything."""

    peak_bytes: int
    reserved_bytes: int
    num_allocations: int


@dataclass(frozen=True, slots=True)
class Behavior:
    """One training iteration, which took `traced_s` before its seconds were shrunk.

    `event_s` says when each event happens, and never goes back.
    """

    device: str
    duration_s: float
    traced_s: float
    spans: tuple[Span, ...]
    blocks: tuple[MemoryBlock, ...]
    event_s: tuple[float, ...]
    peak: Peak
    repetition: _Repetition
    allocator: Allocator | None = None

    @property
    def num_events(self) -> int:
        """Births, reads, writes and deaths."""
        return len(self.event_s)

    def live_bytes(self) -> list[int]:
        """How much lives before the first event, and after each."""
        return live_bytes(self.blocks, self.num_events)

    def at_peak(self) -> tuple[MemoryBlock, ...]:
        """The blocks that live at the peak, the largest first."""
        alive = [block for block in self.blocks if block.lives_after(self.peak.event)]
        return tuple(sorted(alive, key=lambda block: (-block.num_bytes, block.id)))

    def by_owner(self) -> dict[Owner, int]:
        """The bytes at the peak; together they are the peak's."""
        found = dict.fromkeys(Owner, 0)
        for block in self.at_peak():
            found[block.owner] += block.num_bytes
        return found


def behavior_of(
    events: Sequence[Event],
    earlier: Sequence[Event],
    storages: Mapping[int, Storage],
    spans: Sequence[Span],
    *,
    device: str,
    untraced_s: float,
    repetition: _Repetition,
    allocator: Allocator | None = None,
) -> Behavior:
    """The behavior in an iteration's `events`, when `earlier` ones had happened before.

    The spans of its phases, by the clock of the events, say when it begins and ends. `untraced_s` is what an
    iteration takes without the trace.
    """
    begin_s, end_s = spans[0].start_s, spans[-1].end_s
    pace = min(untraced_s / (end_s - begin_s), 1.0)

    def at(traced_s: float) -> float:
        # What another thread notices after the end happened at the end.
        return (min(traced_s, end_s) - begin_s) * pace

    lives: dict[int, list[tuple[int, Event]]] = {}
    for event in earlier:
        if event.kind is EventKind.BIRTH:
            lives[event.block] = []
        elif event.kind is EventKind.DEATH:
            del lives[event.block]
    timed = [replace(event, start_s=at(event.start_s), end_s=at(event.end_s)) for event in events]
    for index, event in enumerate(timed):
        lives.setdefault(event.block, []).append((index, event))
    blocks = tuple(_block(storages[number], life) for number, life in lives.items())
    return Behavior(
        device=device,
        duration_s=at(end_s),
        traced_s=end_s - begin_s,
        spans=tuple(Span(span.phase, at(span.start_s), at(span.end_s)) for span in spans),
        blocks=blocks,
        # Two threads of a device may notice deaths a little late, and their times are in no order then.
        event_s=tuple(accumulate((max(event.start_s, 0.0) for event in timed), max)),
        peak=_peak(blocks, timed),
        repetition=repetition,
        allocator=allocator,
    )


def _block(storage: Storage, life: Sequence[tuple[int, Event]]) -> MemoryBlock:
    """The block of a storage, from its events and their numbers; without a birth it was there before."""
    events = {event.kind: (index, event) for index, event in life}
    birth_event, birth = events.get(EventKind.BIRTH, (_BEFORE, None))
    death_event, death = events.get(EventKind.DEATH, (None, None))
    return MemoryBlock(
        **asdict(storage),
        birth_event=birth_event,
        birth_s=0.0 if birth is None else birth.start_s,
        birth_operator="" if birth is None else birth.operator,
        birth_phase=None if birth is None else birth.phase,
        death_event=death_event,
        death_s=None if death is None else death.start_s,
        accesses=tuple(
            _BlockAccess(index, one.kind, one.operator, one.phase, one.start_s, one.end_s)
            for index, one in life
            if one.kind in (EventKind.READ, EventKind.WRITE)
        ),
    )


def _peak(blocks: Sequence[MemoryBlock], events: Sequence[Event]) -> Peak:
    live = live_bytes(blocks, len(events))
    most = max(live)
    event = live.index(most) - 1
    if event == _BEFORE:
        return Peak(most, event, 0.0, None, "")
    cause = events[event]
    return Peak(most, event, cause.start_s, cause.phase, cause.operator)


def live_bytes(blocks: Sequence[MemoryBlock], num_events: int) -> list[int]:
    """The bytes of blocks that live before the first event, and after each."""
    changes = [0] * (num_events + 1)
    for block in blocks:
        changes[block.birth_event + 1] += block.num_bytes
        if block.death_event is not None:
            changes[block.death_event + 1] -= block.num_bytes
    return list(accumulate(changes))


# How long blocks lie idle between their accesses, in seconds and in events.
#
# The paper calls it the access time interval (ATI): from the end of one access of a living block to the start
# of its next. Iterations repeat, so the last access of a block that stays is followed by its first in the
# next.


@dataclass(frozen=True, slots=True)
class Idle:
    """A block is not touched between two accesses; one in the next iteration is later than this one's end."""

    block: MemoryBlock
    start_s: float
    end_s: float
    num_events: int

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


def idle_intervals(behavior: Behavior) -> list[Idle]:
    """All between two accesses; across the end of the iteration where iterations are known to repeat."""
    found: list[Idle] = []
    for block in behavior.blocks:
        found += (_between(block, one, other) for one, other in pairwise(block.accesses))
        if block.is_persistent and block.accesses and behavior.repetition.is_stable:
            last, first = block.accesses[-1], block.accesses[0]
            num_events = behavior.num_events - last.event + first.event
            end_s = max(behavior.duration_s + first.start_s, last.end_s)
            found.append(Idle(block, last.end_s, end_s, num_events))
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of some values that so many per cent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def _between(block: MemoryBlock, one: _BlockAccess, other: _BlockAccess) -> Idle:
    # One operator's accesses of a block are one, so that `other` is a later operator.
    return Idle(block, one.end_s, max(other.start_s, one.end_s), other.event - one.event)
