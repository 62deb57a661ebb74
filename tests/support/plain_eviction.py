"""The choice of what to evict as its rules say it, step by step: what the planner's own must equal.

It walks every chain of gaps anew, makes the best plan twice, and fetches one step earlier at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.eviction import HELD_LAST, Gap, OverfullError

__all__ = ["plain_decide"]

Rule = Callable[["PlainPlan", Gap], float]


def plain_decide(
    accesses: Sequence[ChunkAccess], gaps: Sequence[Gap], num_steps: int, capacity: int, ahead: int
) -> dict[Hashable, int]:
    """What `decide` gives."""
    while True:
        try:
            copies = [
                PlainPlan(accesses, gaps, num_steps, capacity, ahead, rule).num_copies() for rule in RULES
            ]
        except OverfullError:
            if not ahead:
                raise
            ahead //= 2
            continue
        best = RULES[copies.index(min(copies))]
        return PlainPlan(accesses, gaps, num_steps, capacity, ahead, best).choices()


class PlainPlan:
    """A plan by one rule."""

    def __init__(
        self,
        accesses: Sequence[ChunkAccess],
        gaps: Sequence[Gap],
        num_steps: int,
        capacity: int,
        ahead: int,
        rule: Rule,
    ) -> None:
        self.gaps, self.num_steps, self.capacity, self.ahead = gaps, num_steps, capacity, ahead
        self.places = {id(gap): place for place, gap in enumerate(gaps)}
        self.held = np.zeros(num_steps, dtype=np.int64)
        for at, _ in {(access.at, access.chunk) for access in accesses if access.takes}:
            self.held[at] += 1
        self.groups: dict[Hashable, list[Gap]] = defaultdict(list)
        for gap in gaps:
            gap.is_evicted = False
            self.groups[gap.group].append(gap)
            self.held[gap.start + 1 : max(gap.end(num_steps), gap.start + 1)] += 1
        self.freed: dict[Hashable, list[tuple[int, int]]] = {}
        self.sweep(rule)
        self.give_back()

    def is_copied(self, gap: Gap) -> bool:
        """Whether no gap of the chain before this one has left a copy below."""
        before = self.gaps[: self.places[id(gap)]]
        is_clean = any(one.is_evicted for one in before if one.chain == gap.chain)
        return gap.may_be_copied and not is_clean

    def copies(self, gap: Gap) -> int:
        """How many copies the eviction of a gap costs."""
        return gap.is_fetched + self.is_copied(gap)

    def num_copies(self) -> int:
        """How many copies the plan costs."""
        return sum(self.copies(gap) for gap in self.gaps if gap.is_evicted)

    def sweep(self, rule: Rule) -> None:
        """Evict until no moment is over capacity."""
        opening: dict[int, list[int]] = defaultdict(list)
        for number, gap in enumerate(self.gaps):
            opening[gap.start + 1].append(number)
        candidates: list[tuple[float, int, int]] = []
        for now in range(self.num_steps):
            for number in opening.pop(now, ()):
                gap = self.gaps[number]
                first, last = self.absence(gap)
                if first > now:
                    opening[first].append(number)
                elif last > now and not gap.is_evicted:
                    heappush(candidates, (rule(self, gap), number, last))
            while self.held[now] > self.capacity:
                if not candidates:
                    raise OverfullError(int(self.held[now]))
                _, number, last = heappop(candidates)
                if last > now and not self.gaps[number].is_evicted:
                    self.evict(self.gaps[number].group)

    def give_back(self) -> None:
        """Hold what there is room for after all."""
        saved = {
            group: sum(self.copies(gap) for gap in self.groups[group] if gap.is_evicted)
            for group in self.freed
        }
        for group in sorted(self.freed, key=lambda group: -saved[group]):
            spans = self.freed[group]
            self.add(spans, 1)
            if all(self.held[first:last].max(initial=0) <= self.capacity for first, last in spans):
                del self.freed[group]
                for gap in self.groups[group]:
                    gap.is_evicted = False
            else:
                self.add(spans, -1)

    def choices(self) -> dict[Hashable, int]:
        """What becomes of every evicted group."""
        found: dict[Hashable, int] = {}
        posted = np.full(self.num_steps + 1, -1, dtype=np.int64)
        for group in sorted(self.freed, key=lambda group: self.groups[group][0].end(self.num_steps)):
            gaps, lead = [gap for gap in self.groups[group] if gap.is_evicted], self.ahead
            if gaps[0].is_fetched:
                ends = [gap.end(self.num_steps) for gap in gaps]
                most = min(
                    end - max(self.absence(gap)[0], int(posted[:end].max(initial=-1)))
                    for gap, end in zip(gaps, ends, strict=True)
                )
                while lead < most and all(self.held[end - lead - 1] < self.capacity for end in ends):
                    lead += 1
                    self.add([(end - lead, end - lead + 1) for end in ends], 1)
                for end in ends:
                    posted[end] = max(posted[end], end - lead)
            found[group] = lead
        return found

    def absence(self, gap: Gap) -> tuple[int, int]:
        """The steps during which an evicted gap has no slot."""
        first = gap.start + 1 + (self.ahead if self.is_copied(gap) else 0)
        return first, gap.end(self.num_steps) - (self.ahead if gap.is_fetched else 0)

    def evict(self, group: Hashable) -> None:
        """Evict all gaps of a group that are long enough."""
        spans = self.freed.setdefault(group, [])
        for gap in self.groups[group]:
            first, last = self.absence(gap)
            if last > first and not gap.is_evicted:
                gap.is_evicted = True
                spans.append((first, last))
                self.add([(first, last)], -1)

    def add(self, spans: Iterable[tuple[int, int]], number: int) -> None:
        """So many chunks more during these steps."""
        for first, last in spans:
            self.held[first:last] += number


def _furthest(plan: PlainPlan, gap: Gap) -> float:
    return -float(gap.end(plan.num_steps) if gap.is_read else HELD_LAST)


def _cheapest(plan: PlainPlan, gap: Gap) -> float:
    return plan.copies(gap) - gap.end(plan.num_steps) / HELD_LAST


def _cheapest_for_its_length(plan: PlainPlan, gap: Gap) -> float:
    return plan.copies(gap) / max(gap.end(plan.num_steps) - gap.start, 1)


def _least_recent(_plan: PlainPlan, gap: Gap) -> float:
    return float(gap.start)


RULES: tuple[Rule, ...] = (_furthest, _cheapest, _cheapest_for_its_length, _least_recent)
