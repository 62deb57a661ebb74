"""Which chunks leave a tier and when they come back, so that it never holds more than it can.

Between two accesses of a chunk is a *gap*. What is chosen are the gaps to evict: with as few copies as
possible, and no moment over capacity.

Time is swept once. At a moment with too many chunks, gaps under way are evicted in the order of a rule:
Belady's (the one that ends last), the cheapest first, the cheapest for its length, and the least recently
used as a yardstick. Gaps for which there is room after all are held again. The plan with the fewest copies
wins.

Around what happens in the tier below there is no choice: the chunk is evicted before, and fetched after.

In a program that is a loop, all repetitions of a gap are one *group* and share its fate, so that the plan
repeats itself too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, pairwise

import numpy as np

from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.tiers import Chunk

# Gaps: the times between two accesses of a chunk, in which it is held or evicted.
#
# Every copy between tiers costs the same: an evicted gap costs a copy out where no valid copy is below, and a
# copy in where its content is read at its end.


@dataclass(slots=True)
class Gap:
    """The time of a chunk between two accesses: from the begin of the window where `before` is None, and to
    its end where `after` is None.
    """

    chunk: Chunk
    before: ChunkAccess | None
    after: ChunkAccess | None
    chain: int
    """The same for gaps of a chunk between which nothing was written: a copy below stays valid."""
    start: int
    """The step of the access before."""
    is_read: bool
    """Whether its content is read at its end, or outlives the window."""
    group: Hashable
    """What it has in common with its repetitions in other batches."""
    is_evicted: bool = False
    is_copied: bool = False
    """Whether a valid copy must be made below when it is evicted."""
    lead: int = 0
    """How many steps before its end the chunk is to have a slot again."""

    @property
    def must_be_below(self) -> bool:
        """Whether the chunk is evicted in any case: what is before or after the gap happens in the tier
        below, or there is always a copy there, with which the window begins.
        """
        if self.before is None:
            return self.after is not None and self.after.is_kept_below
        return self.before.is_below or (self.after is not None and self.after.is_below)

    @property
    def is_fetched(self) -> bool:
        """Whether an eviction costs a copy back."""
        return self.is_read and self.after is not None and not self.after.is_below

    @property
    def may_be_copied(self) -> bool:
        """Whether its eviction costs a copy out, unless a valid copy is below.

        What begins the window in the tier below has one there, so has what is written there, and frozen
        weights that are ever evicted do: `settle` lets them. Of the weights before a trial step the pass that
        read them last may be followed by a checkpoint, from which it would run again.
        """
        if self.before is None or self.before.is_kept_below:
            return False
        is_kept = self.is_read or (self.after is not None and self.after.step.kind is Kind.TRIAL)
        return is_kept and self.chunk.item is not Item.FROZEN

    def end(self, num_steps: int) -> int:
        """The step of the access after."""
        return num_steps if self.after is None else self.after.at


Leads = Mapping[Hashable, int]
"""The groups of gaps that are evicted, each with its lead as in `Gap`."""


def gaps_of(accesses: Iterable[ChunkAccess]) -> list[Gap]:
    """All gaps in the order of their ends, from accesses in the order of time."""
    gaps: list[Gap] = []
    last: dict[Chunk, ChunkAccess] = {}
    chains: dict[Chunk, int] = {}
    seen: set[Chunk] = set()
    for access in accesses:
        chunk = access.chunk
        before = last.pop(chunk, None)
        if before is not None or (access.reads and chunk not in seen):
            # A chain has the number of its first gap.
            chain = None if before is None or before.writes else chains.get(chunk)
            chain = chains[chunk] = len(gaps) if chain is None else chain
            gaps.append(_gap(chunk, before, access, chain))
        seen.add(chunk)
        if access.ends:
            chains.pop(chunk, None)
        else:
            # At the end, so that what is left is in the order of time.
            last[chunk] = access
    for chunk, before in last.items():
        chain = None if before.writes else chains.get(chunk)
        gaps.append(_gap(chunk, before, None, len(gaps) if chain is None else chain))
    return gaps


def _gap(chunk: Chunk, before: ChunkAccess | None, after: ChunkAccess | None, chain: int) -> Gap:
    item, stage, _, number = chunk
    num_batches = None if before is None or after is None else after.step.batch - before.step.batch
    labels = before and before.label, after and after.label, num_batches
    start, is_read = -1 if before is None else before.at, after is None or after.reads
    return Gap(chunk, before, after, chain, start, is_read, (item, stage, number, *labels))


def num_copies(gaps: Iterable[Gap]) -> int:
    """The copies, in both directions, of a plan that is settled."""
    return sum(gap.is_fetched + gap.is_copied for gap in gaps if gap.is_evicted)


def settle(gaps: Sequence[Gap], leads: Leads, num_steps: int) -> None:
    """Write down in each gap what becomes of it.

    Frozen weights that are ever evicted begin below: there is a valid copy from then on.
    """
    below = {gap.chunk for gap in gaps if gap.chunk.item is Item.FROZEN and gap.group in leads}
    clean: set[int] = set()
    for gap in gaps:
        lead = leads.get(gap.group)
        gap.lead = lead if lead is not None and gap.is_fetched else 0
        is_away = gap.end(num_steps) - gap.start - 1 > gap.lead
        gap.is_evicted = lead is not None and (is_away or gap.must_be_below)
        if gap.before is None and gap.chunk in below and not gap.is_evicted:
            gap.is_evicted, gap.lead = True, gap.end(num_steps)
        gap.is_copied = gap.is_evicted and gap.may_be_copied and gap.chain not in clean
        if gap.is_evicted:
            clean.add(gap.chain)


HELD_LAST = 1 << 60
"""The end of a gap whose content nobody reads again."""

_Spans = list[tuple[int, int]]
"""Steps, each from one up to another."""


def most_at_a_step(accesses: Iterable[ChunkAccess]) -> int:
    """The most chunks that a step of a tier needs there."""
    needed = Counter(at for at, _ in {(one.at, one.chunk) for one in accesses if one.takes})
    return max(needed.values(), default=0)


class OverfullError(Exception):
    """A moment needs more chunks than fit."""


class Evictions:
    """What to evict from a tier so that it never holds more than `capacity` chunks. Plans are kept: they
    differ by the lead of the copies alone, and one lead is often tried again.
    """

    def __init__(
        self, accesses: Sequence[ChunkAccess], gaps: Sequence[Gap], num_steps: int, capacity: int
    ) -> None:
        self._table = _Table(accesses, gaps, num_steps)
        self._capacity = capacity
        self._leads: dict[int, Leads | None] = {}

    def leads(self, ahead: int) -> Leads:
        """The groups to evict and how far ahead to fetch them; the same object for plans that are alike.

        A chunk that comes back has its slot `ahead` steps before it is used, or half as far ahead where that
        cannot be, and so on; one that must be copied out keeps it so long, so that both can happen during
        work. Raises `OverfullError` where there is no room even with 0.
        """
        while (found := self._leads.get(ahead)) is None:
            if ahead not in self._leads:
                plans = (_Plan(self._table, rule, self._capacity, ahead) for rule in RULES)
                try:
                    self._leads[ahead] = min(plans, key=_Plan.num_copies).leads()
                except OverfullError:
                    if not ahead:
                        raise
                    self._leads[ahead] = None
            else:
                ahead //= 2
        return found


class _Table:
    """What all plans for the same gaps share: gaps and groups by number, and what is held with all gaps."""

    def __init__(self, accesses: Sequence[ChunkAccess], gaps: Sequence[Gap], num_steps: int) -> None:
        self.num_steps = num_steps
        self.starts = [gap.start for gap in gaps]
        self.ends = [gap.end(num_steps) for gap in gaps]
        self.is_read = [gap.is_read for gap in gaps]
        self.is_fetched = [gap.is_fetched for gap in gaps]
        self.may_be_copied = [gap.may_be_copied for gap in gaps]
        self.must_be_below = [number for number, gap in enumerate(gaps) if gap.must_be_below]
        self.chains = [gap.chain for gap in gaps]
        self.of_chain: list[list[int]] = [[] for _ in gaps]
        for number, chain in enumerate(self.chains):
            self.of_chain[chain].append(number)
        numbers: dict[Hashable, int] = {}
        self.groups = [numbers.setdefault(gap.group, len(numbers)) for gap in gaps]
        self.names = list(numbers)
        self.members: list[list[int]] = [[] for _ in numbers]
        self.opening: list[list[range]] = [[] for _ in range(num_steps + 1)]
        """By step the gaps that open there, those together that are alike: of the chunks of an item."""
        change = np.zeros(num_steps + 2, dtype=np.int64)
        for at, count in Counter(access.at for access in accesses if access.takes).items():
            change[at] += count
            change[at + 1] -= count
        for number, group in enumerate(self.groups):
            self.members[group].append(number)
        figures = self.starts, self.ends, self.is_read, self.is_fetched, self.may_be_copied
        first = 0
        for (start, *_), alike in groupby(zip(*figures, strict=True)):
            count = len(list(alike))
            self.opening[start + 1].append(range(first, first + count))
            first += count
        begins = np.array(self.starts, np.int64) + 1
        np.add.at(change, begins, 1)  # a gap of no length ends where it begins
        np.add.at(change, np.maximum(np.array(self.ends, np.int64), begins), -1)
        self.held = np.cumsum(change[:num_steps])


class _Plan:
    """The plan of a rule: how many chunks there are at each step, and which groups are evicted."""

    def __init__(self, table: _Table, rule: "Rule", capacity: int, ahead: int) -> None:
        self.table = table
        self.capacity = capacity
        self.ahead = ahead
        self.held = table.held.copy()
        self.is_evicted = [False] * len(table.starts)
        self.first_evicted = [len(table.starts)] * len(table.starts)
        """Of each chain, the first gap that is evicted: those after it find a valid copy below."""
        self.freed: dict[int, _Spans] = {}
        """The groups that were chosen, each with the steps during which its gaps have no slot."""
        for gap in table.must_be_below:
            self._add([self._absence(gap)], -1)
            self._take_away(gap)
        self._sweep(rule)
        self._give_back()

    def is_copied(self, gap: int) -> bool:
        """Whether the eviction of a gap costs a copy out."""
        table = self.table
        return table.may_be_copied[gap] and self.first_evicted[table.chains[gap]] >= gap

    def copies(self, gap: int) -> int:
        """How many copies the eviction of a gap costs."""
        return self.table.is_fetched[gap] + self.is_copied(gap)

    def num_copies(self) -> int:
        return sum(self.copies(gap) for gap, is_evicted in enumerate(self.is_evicted) if is_evicted)

    def _sweep(self, rule: "Rule") -> None:
        """Evict until no moment is over capacity."""
        table, held, is_evicted, ahead = self.table, self.held, self.is_evicted, self.ahead
        chains, evicted = table.chains, self.first_evicted
        later: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        due: list[Sequence[int]]
        candidates: list[tuple[float, int, int, Sequence[int]]] = []
        for now, opening in enumerate(table.opening[: table.num_steps]):
            due = [*opening, *later.pop(now, ())]
            for gaps in due:
                gap = gaps[0]
                is_fetched, is_copied = table.is_fetched[gap], self.is_copied(gap)
                is_alike = len(gaps) == 1 or not table.may_be_copied[gap]
                if not is_alike and any((evicted[chains[one]] >= one) != is_copied for one in gaps):
                    due += [[other] for other in gaps]
                    continue
                first = table.starts[gap] + 1 + (ahead if is_copied else 0)
                last = table.ends[gap] - (ahead if is_fetched else 0)
                if first > now:
                    later[first].append(gaps)
                elif last > now:
                    heappush(candidates, (rule(table, gap, is_fetched + is_copied), gap, last, gaps))
            while held[now] > self.capacity:
                if not candidates:
                    raise OverfullError(f"{held[now]} chunks")
                value, _, last, gaps = heappop(candidates)
                num_evicted = 0
                while last > now and num_evicted < len(gaps) and held[now] > self.capacity:
                    if not is_evicted[gaps[num_evicted]]:
                        self._evict(table.groups[gaps[num_evicted]])
                    num_evicted += 1
                if last > now and num_evicted < len(gaps):
                    heappush(candidates, (value, gaps[num_evicted], last, gaps[num_evicted:]))

    def _give_back(self) -> None:
        """Hold what there is room for after all, what saves the most first."""
        saved = {group: sum(map(self.copies, self._evicted(group))) for group in self.freed}
        for group in sorted(self.freed, key=lambda group: -saved[group]):
            spans = self.freed[group]
            if not self._fits(spans, self.capacity - 1):
                continue
            self._add(spans, 1)
            are_apart = all(end <= begin for (_, end), (begin, _) in pairwise(spans))
            if are_apart or self._fits(spans, self.capacity):
                del self.freed[group]
                self._hold(group)
            else:
                self._add(spans, -1)

    def leads(self) -> Leads:
        """What becomes of every evicted group, with fetches as early as there is room for them.

        A chunk that is needed later is not fetched before one that is needed sooner, which would have to wait
        for it.
        """
        table, found = self.table, dict[Hashable, int]()
        posted = np.full(table.num_steps + 1, -1, dtype=np.int64)
        groups = dict.fromkeys([*self.freed, *(table.groups[gap] for gap in table.must_be_below)])
        for group in sorted(groups, key=lambda group: table.ends[table.members[group][0]]):
            gaps, lead = self._evicted(group), self.ahead
            if table.is_fetched[gaps[0]]:
                ends = [table.ends[gap] for gap in gaps]
                least = min(end - self._absence(gap)[1] for gap, end in zip(gaps, ends, strict=True))
                most = min(
                    end - max(self._absence(gap)[0], int(posted[:end].max(initial=-1)))
                    for gap, end in zip(gaps, ends, strict=True)
                )
                lead = self._lead(ends, least, most)
                for end in ends:
                    posted[end] = max(posted[end], end - lead)
            found[table.names[group]] = lead
        return found

    def _lead(self, ends: Sequence[int], least: int, most: int) -> int:
        """How far ahead of their ends chunks can have a slot at the most; they have it from then on."""
        if most <= least:
            return least
        if all(other - end >= most - least for end, other in pairwise(ends)):
            lead = least + min(self._room_before(end - least, most - least) for end in ends)
            self._add([(end - lead, end - least) for end in ends], 1)
            return lead
        lead = least
        while lead < most and all(self.held[end - lead - 1] < self.capacity for end in ends):
            lead += 1
            self._add([(end - lead, end - lead + 1) for end in ends], 1)
        return lead

    def _room_before(self, step: int, most: int) -> int:
        """For how many steps right before a step there is room for a chunk more."""
        full = np.flatnonzero(self.held[step - most : step] >= self.capacity)
        return most - 1 - int(full[-1]) if full.size else most

    def _absence(self, gap: int) -> tuple[int, int]:
        """The steps during which an evicted gap has no slot: none where it is too short to be away."""
        table, ahead = self.table, self.ahead
        first, last = table.starts[gap] + 1, table.ends[gap]
        if not ahead:
            return first, last
        first = min(first + (ahead if self.is_copied(gap) else 0), last)
        return first, max(first, last - (ahead if table.is_fetched[gap] else 0))

    def _evicted(self, group: int) -> list[int]:
        return [gap for gap in self.table.members[group] if self.is_evicted[gap]]

    def _evict(self, group: int) -> None:
        spans = []
        for gap in self.table.members[group]:
            if not self.is_evicted[gap]:
                span = self._absence(gap)
                if span[1] > span[0]:
                    spans.append(span)
                    self._take_away(gap)
        self.freed.setdefault(group, []).extend(spans)
        self._add(spans, -1)

    def _take_away(self, gap: int) -> None:
        chain = self.table.chains[gap]
        self.is_evicted[gap] = True
        self.first_evicted[chain] = min(self.first_evicted[chain], gap)

    def _hold(self, group: int) -> None:
        table = self.table
        for gap in table.members[group]:
            self.is_evicted[gap] = False
        for chain in {table.chains[gap] for gap in table.members[group]}:
            others = (gap for gap in table.of_chain[chain] if self.is_evicted[gap])
            self.first_evicted[chain] = next(others, len(self.is_evicted))

    def _add(self, spans: Iterable[tuple[int, int]], number: int) -> None:
        held = self.held
        for first, last in spans:
            held[first:last] += number

    def _fits(self, spans: Iterable[tuple[int, int]], capacity: int) -> bool:
        held, most = self.held, np.maximum.reduce
        return all(most(held[first:last], initial=0) <= capacity for first, last in spans)


Rule = Callable[[_Table, int, int], float]
"""What is evicted first: the gap of the least value, of those whose eviction costs so many copies."""


def _furthest(table: _Table, gap: int, _copies: int) -> float:
    return -float(table.ends[gap] if table.is_read[gap] else HELD_LAST)


def _cheapest(table: _Table, gap: int, copies: int) -> float:
    return copies - table.ends[gap] / HELD_LAST


def _cheapest_for_its_length(table: _Table, gap: int, copies: int) -> float:
    return copies / max(table.ends[gap] - table.starts[gap], 1)


def _least_recent(table: _Table, gap: int, _copies: int) -> float:
    return float(table.starts[gap])


RULES: tuple[Rule, ...] = (_furthest, _cheapest, _cheapest_for_its_length, _least_recent)
