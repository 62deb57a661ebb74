"""Which chunks leave a tier and when they come back, so that it never holds more than it can.

Between two accesses of a chunk is a *gap*. In a gap the chunk is held, or it is evicted and, if its content
is read at the end, fetched again. Every copy between tiers costs the same: a gap costs a copy out where no
valid copy is below, and a copy in where it is read. What is chosen are the gaps to evict: as cheap as
possible, with no moment over capacity.

Time is swept once. At a moment with too many chunks, gaps under way are evicted in the order of a rule:
Belady's (the one that ends last), the cheapest first, the cheapest for its length, and the least recently
used as a yardstick. Gaps for which there is room after all are held again. The plan with the fewest copies
wins.

In a program that is a loop, all repetitions of a gap are one *group* and share its fate, so that the plan
repeats itself too.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from bireme.schedule.accesses import Access
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["Choice", "Gap", "OverfullError", "decide", "gaps_of", "num_copies", "settle"]

HELD_LAST = 1 << 60
"""The end of a gap whose content nobody reads again."""


class OverfullError(Exception):
    """A moment needs more chunks than fit."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(slots=True)
class Gap:
    """The time of a chunk between two accesses: from the begin of the window where `before` is None, and to
    its end where `after` is None.
    """

    chunk: Chunk
    before: Access | None
    after: Access | None
    previous: "Gap | None"
    """The gap before it, if nothing was written between them."""
    is_evicted: bool = False
    is_copied: bool = False
    """Whether a valid copy must be made below when it is evicted."""
    lead: int = 0
    """How many steps before its end the chunk is to have a slot again."""

    @property
    def start(self) -> int:
        """The step of the access before."""
        return -1 if self.before is None else self.before.at

    @property
    def is_read(self) -> bool:
        """Whether its content is read at its end, or outlives the window."""
        return self.after is None or self.after.reads

    @property
    def is_fetched(self) -> bool:
        """Whether an eviction costs a copy back."""
        return self.after is not None and self.after.reads

    @property
    def group(self) -> Hashable:
        """What it has in common with its repetitions in other batches."""
        item, stage, _, chunk = self.chunk
        before = None if self.before is None else self.before.label
        after = None if self.after is None else self.after.label
        late = None
        if self.before is not None and self.after is not None:
            late = self.after.batch - self.before.batch
        return item, stage, chunk, before, after, late

    def end(self, num_steps: int) -> int:
        """The step of the access after."""
        return num_steps if self.after is None else self.after.at

    def is_dirty(self) -> bool:
        """Whether the tier has the only valid copy, after what is decided about the gaps before."""
        if self.chunk.item is Item.FROZEN:
            return False  # `settle` lets what is ever evicted begin below
        # What begins the window in the tier has no copy below; what begins it below has.
        gap = self
        while gap.previous is not None:
            gap = gap.previous
            if gap.is_evicted:
                return False
        return self.before is not None or not self.is_evicted

    def copies(self) -> int:
        """How many copies its eviction costs."""
        return int(self.is_fetched) + int(self.before is not None and self.is_read and self.is_dirty())


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a group that is evicted: `lead` as in its gaps."""

    lead: int


def gaps_of(accesses: Iterable[Access]) -> list[Gap]:
    """All gaps in the order of their ends, from accesses in the order of time."""
    gaps: list[Gap] = []
    last: dict[Chunk, Access] = {}
    latest: dict[Chunk, Gap] = {}
    seen: set[Chunk] = set()
    for access in accesses:
        chunk = access.chunk
        before = last.get(chunk)
        if before is not None or (access.reads and chunk not in seen):
            previous = None if before is None or before.writes else latest.get(chunk)
            gap = latest[chunk] = Gap(chunk, before, access, previous)
            gaps.append(gap)
        seen.add(chunk)
        last.pop(chunk, None)
        if access.ends:
            latest.pop(chunk, None)
        else:
            # At the end, so that what is left is in the order of time.
            last[chunk] = access
    for chunk, before in last.items():
        gaps.append(Gap(chunk, before, None, None if before.writes else latest.get(chunk)))
    return gaps


def num_copies(gaps: Iterable[Gap]) -> int:
    """The copies, in both directions, of a plan that is settled."""
    return sum(gap.is_fetched + gap.is_copied for gap in gaps if gap.is_evicted)


def settle(gaps: Sequence[Gap], choices: Mapping[Hashable, Choice], num_steps: int) -> None:
    """Write down in each gap what becomes of it.

    Frozen weights that are ever evicted begin below: there is a valid copy from then on.
    """
    below = {gap.chunk for gap in gaps if gap.chunk.item is Item.FROZEN and gap.group in choices}
    for gap in gaps:
        choice = choices.get(gap.group)
        away = gap.end(num_steps) - gap.start - 1
        gap.lead = choice.lead if choice is not None and gap.is_fetched else 0
        gap.is_evicted = choice is not None and away > gap.lead
        if gap.before is None and gap.chunk in below and not gap.is_evicted:
            gap.is_evicted, gap.lead = True, gap.end(num_steps)
    for gap in gaps:
        gap.is_copied = gap.is_evicted and gap.before is not None and gap.is_read and gap.is_dirty()


def decide(
    accesses: Sequence[Access], gaps: Sequence[Gap], num_steps: int, capacity: int, ahead: int
) -> dict[Hashable, Choice]:
    """The groups to evict and how far ahead to fetch them again.

    A chunk that comes back has its slot `ahead` steps before it is used, and one that must be copied out
    keeps it so long, so that both can happen beside work. Raises `OverfullError` where that cannot be.
    """

    def plan(rule: Rule) -> _Plan:
        made = _Plan(accesses, gaps, num_steps, capacity, ahead)
        made.sweep(rule)
        made.give_back()
        return made

    copies = {rule: plan(rule).num_copies() for rule in RULES}
    # Plans write into the gaps, so the best is made once more.
    return plan(min(RULES, key=copies.__getitem__)).choices()


Rule = Callable[[Gap, int], float]
"""What is evicted first: the gap of the least value; `end` is its end."""


def _furthest(gap: Gap, end: int) -> float:
    return -float(end if gap.is_read else HELD_LAST)


def _cheapest(gap: Gap, end: int) -> float:
    return gap.copies() - end / HELD_LAST


def _cheapest_for_its_length(gap: Gap, end: int) -> float:
    return gap.copies() / max(end - gap.start, 1)


def _least_recent(gap: Gap, _end: int) -> float:
    return float(gap.start)


RULES: tuple[Rule, ...] = (_furthest, _cheapest, _cheapest_for_its_length, _least_recent)


@dataclass(slots=True)
class _Plan:
    """A plan under way: how many chunks there are at each step, and which groups are evicted."""

    accesses: Sequence[Access]
    gaps: Sequence[Gap]
    num_steps: int
    capacity: int
    ahead: int
    held: "NDArray[np.int64]" = field(init=False)
    groups: dict[Hashable, list[Gap]] = field(init=False)
    freed: dict[Hashable, list[tuple[int, int]]] = field(default_factory=dict)
    """The evicted groups, each with the steps during which its gaps have no slot."""

    def __post_init__(self) -> None:
        change = np.zeros(self.num_steps + 1, dtype=np.int64)
        for access in {
            (access.at, access.chunk): access for access in self.accesses if access.takes
        }.values():
            change[access.at] += 1
            change[access.at + 1] -= 1
        self.groups = defaultdict(list)
        for gap in self.gaps:
            gap.is_evicted = False
            self.groups[gap.group].append(gap)
            if gap.end(self.num_steps) > gap.start + 1:
                change[gap.start + 1] += 1
                change[gap.end(self.num_steps)] -= 1
        self.held = np.cumsum(change[:-1])

    def sweep(self, rule: Rule) -> None:
        """Evict until no moment is over capacity."""
        opening: defaultdict[int, list[int]] = defaultdict(list)
        for number, gap in enumerate(self.gaps):
            opening[gap.start + 1].append(number)
        candidates: list[tuple[float, int, int]] = []
        for now in range(self.num_steps):
            for number in opening.pop(now, ()):
                gap = self.gaps[number]
                first, last = self._absence(gap)
                if first > now:
                    opening[first].append(number)
                elif last > now and not gap.is_evicted:
                    heappush(candidates, (rule(gap, gap.end(self.num_steps)), number, last))
            while self.held[now] > self.capacity:
                if not candidates:
                    raise OverfullError(int(self.held[now]))
                _, number, last = heappop(candidates)
                if last > now and not self.gaps[number].is_evicted:
                    self._evict(self.gaps[number].group)

    def give_back(self) -> None:
        """Hold what there is room for after all, what saves the most first."""
        order = sorted(
            self.freed, key=lambda group: -sum(gap.copies() for gap in self.groups[group] if gap.is_evicted)
        )
        for group in order:
            spans = self.freed[group]
            self._add(spans, 1)
            if self._fits(spans):
                del self.freed[group]
                for gap in self.groups[group]:
                    gap.is_evicted = False
            else:
                self._add(spans, -1)

    def num_copies(self) -> int:
        """The copies that the plan costs."""
        return sum(gap.copies() for gap in self.gaps if gap.is_evicted)

    def choices(self) -> dict[Hashable, Choice]:
        """What becomes of every evicted group, with fetches as early as there is room for them.

        A chunk that is needed later is not fetched before one that is needed sooner, which would have to wait
        for it.
        """
        found: dict[Hashable, Choice] = {}
        posted = np.full(self.num_steps + 1, -1, dtype=np.int64)
        order = sorted(self.freed, key=lambda group: self.groups[group][0].end(self.num_steps))
        for group in order:
            gaps = [gap for gap in self.groups[group] if gap.is_evicted]
            lead = self.ahead
            if gaps[0].is_fetched:
                ends = [gap.end(self.num_steps) for gap in gaps]
                most = min(
                    end - max(self._absence(gap)[0], int(posted[:end].max(initial=-1)))
                    for gap, end in zip(gaps, ends, strict=True)
                )
                while lead < most and all(self.held[end - lead - 1] < self.capacity for end in ends):
                    lead += 1
                    self._add([(end - lead, end - lead + 1) for end in ends], 1)
                for end in ends:
                    posted[end] = max(posted[end], end - lead)
            found[group] = Choice(lead)
        return found

    def _absence(self, gap: Gap) -> tuple[int, int]:
        """The steps during which an evicted gap has no slot."""
        end = gap.end(self.num_steps)
        is_copied = gap.before is not None and gap.is_read and gap.is_dirty()
        first = gap.start + 1 + (self.ahead if is_copied else 0)
        return first, end - (self.ahead if gap.is_fetched else 0)

    def _evict(self, group: Hashable) -> None:
        spans = []
        for gap in self.groups[group]:
            first, last = self._absence(gap)
            if last > first:
                gap.is_evicted = True
                spans.append((first, last))
        self.freed[group] = spans
        self._add(spans, -1)

    def _add(self, spans: Iterable[tuple[int, int]], number: int) -> None:
        for first, last in spans:
            self.held[first:last] += number

    def _fits(self, spans: Iterable[tuple[int, int]]) -> bool:
        return all(self.held[first:last].max(initial=0) <= self.capacity for first, last in spans)
