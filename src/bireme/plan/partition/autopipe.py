"""AutoPipe's partitioner: start from the least pace, then move work away from the critical path.

A batch that drains takes more than its pace: in the best partition, loads are not equal but fall after the
master stage, so that the last micro-batch comes back without waiting. The search is that of the authors'
released planner. Ours are: any number of micro-batches, devices of unequal speed, memory limits and links
(through the tables it starts from), no stage is ever empty, and a last walk from neighbour to neighbour.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from bireme.plan.partition.chain import Seconds
from bireme.plan.partition.exact import LeastMax, least_max, least_sum
from bireme.plan.partition.loads import Loads
from bireme.plan.partition.partition import Partition, assess
from bireme.plan.partition.recurrence import iterate
from bireme.plan.partition.times import ChainTimes

__all__ = ["Cuts", "FoundPartition", "autopipe"]

Cuts = tuple[int, ...]

MOST_WORK = 80_000
"""Stages times micro-batches times partitions that the search goes on from. With few it ends by itself."""

SLOWER = (1.0, 1.2, 2.0)
"""How much slower a partition may be for the sake of a shorter way through."""

MOST_STEPS = 8
"""Of the walk at the end."""

MOST_NEIGHBOURS = 64
"""About so many are gone through at each of them."""

MOST_AT_ONCE = 2_000
"""So few partitions are all gone through, which takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class FoundPartition:
    """The best partition found, and what its batch takes; `start` is the one with the least pace."""

    partition: Partition
    batch_s: float
    start: Partition
    start_batch_s: float
    num_tried: int


def autopipe(loads: Loads, *, most_at_once: int = MOST_AT_ONCE) -> FoundPartition | None:
    """Search from the partition with the least pace; None where no partition fits, and `exact` says why.

    The seconds are those of the recurrence, which is 1F1B's. If there are at most `most_at_once` partitions,
    it goes through them all.
    """
    costs = [loads.cost_s(stage) for stage in range(loads.num_stages)]
    table = least_max(costs, loads.link_s)
    if table.value == np.inf:
        return None
    search = _Search(loads, table)
    starts = [table.cuts()]
    if _has_short_ways(loads):
        starts += _short_ways(costs, loads.link_s, table.value)
    search.run(starts)
    num_units, num_cuts = loads.chain.num_units, loads.num_stages - 1
    if comb(num_units - 1, num_cuts) <= most_at_once:
        search.all_seconds(_fitting(loads, combinations(range(1, num_units), num_cuts)))
    fastest = min(search.tried.values(), key=lambda trial: trial.batch_s)
    best = _walk(fastest.cuts, search.all_seconds, loads)
    start_s, best_s = search.all_seconds([search.start.cuts, best])
    return FoundPartition(
        assess(loads, best), best_s, assess(loads, search.start.cuts), start_s, len(search.tried)
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A partition that was gone through; `busy_s` is forward, backward and messages of each stage."""

    cuts: Cuts
    batch_s: float
    master: int
    busy_s: list[float]
    backward_s: list[float]


class _Search:
    """The published search: what was tried, and what is to be tried next."""

    def __init__(self, loads: Loads, table: LeastMax) -> None:
        self._loads = loads
        self._table = table
        self._stopwatch = ChainTimes(loads)
        self._num_stages = loads.num_stages
        self.tried: dict[Cuts, _Trial] = {}
        self.start = self._try(table.cuts())

    def run(self, starts: Iterable[Cuts]) -> None:
        """Go on from some partitions and every one found until there is none left."""
        queue = deque(dict.fromkeys(starts))
        seen = set(queue)
        for _ in range(max(4, MOST_WORK // (self._num_stages * self._loads.setting.num_microbatches))):
            if not queue:
                return
            trial = self._try(queue.popleft())
            self._lighten_the_tail(trial)
            for cuts in self._with_a_smaller_master(trial):
                if cuts not in seen:
                    seen.add(cuts)
                    queue.append(cuts)

    def all_seconds(self, all_cuts: Sequence[Cuts]) -> list[float]:
        """What batches take, those not tried yet in one go."""
        new = [cuts for cuts in dict.fromkeys(all_cuts) if cuts not in self.tried]
        if new:
            loads = self._loads
            times = self._stopwatch.times(new)
            gone = iterate(
                times.forward_s,
                times.backward_s,
                loads.setting.num_microbatches,
                hop_s=times.hop_s,
                overlap=loads.line.overlap,
            )
            rows = zip(
                new,
                gone.seconds,
                gone.master,
                times.busy_s(overlap=loads.line.overlap),
                times.backward_s,
                strict=True,
            )
            for cuts, seconds, master, busy_s, backward_s in rows:
                trial = _Trial(cuts, float(seconds), int(master), busy_s.tolist(), backward_s.tolist())
                self.tried[cuts] = trial
        return [self.tried[cuts].batch_s for cuts in all_cuts]

    def _try(self, cuts: Cuts) -> _Trial:
        self.all_seconds([cuts])
        return self.tried[cuts]

    def _lighten_the_tail(self, trial: _Trial) -> None:
        """Move units to later stages after the master until the last micro-batch comes back without a bubble.

        The last micro-batch goes to stage `behind` and back while the master runs its last backwards;
        `gap_s` is what it may be late because of what was moved.
        """
        master, behind, gap_s = trial.master, trial.master + 1, 0.0
        while behind < self._num_stages:
            busy_s, backward_s = trial.busy_s, trial.backward_s
            if sum(busy_s[master + 1 : behind + 1]) <= (behind - master) * backward_s[master] + gap_s:
                behind += 1
                continue
            mover = self._first_that_can_take(trial, behind)
            if mover is None:
                return
            around_s = sum(busy_s[master + 1 : mover + 1])
            gap_s += max(0.0, around_s - ((mover - master) * backward_s[master] + gap_s))
            behind = mover + 1
            cuts = list(trial.cuts)
            cuts[mover] += 1
            trial = self._try(tuple(cuts))
            if trial.master != master:
                return

    def _first_that_can_take(self, trial: _Trial, behind: int) -> int | None:
        """The first stage after the master that stays below it with the next stage's first unit."""
        bounds = self._loads.chain.bounds(trial.cuts)
        master_s = self._loads.busy_of(trial.master, bounds[trial.master], bounds[trial.master + 1])
        for stage in range(trial.master + 1, min(behind, self._num_stages - 1)):
            begin, end, after = bounds[stage : stage + 3]
            if after - end < 2 or not self._loads.fits(stage, begin, end + 1):
                continue
            if not self._loads.fits(stage + 1, end + 1, after):
                continue
            if self._loads.busy_of(stage, begin, end + 1) < master_s:
                return stage
        return None

    def _with_a_smaller_master(self, trial: _Trial) -> Iterable[Cuts]:
        """Give the master's first unit to the stages before it, or its last to the next stage.

        The stages before are cut again as the table says. If the critical path would move later, nothing
        is won.
        """
        bounds, master = self._loads.chain.bounds(trial.cuts), trial.master
        if bounds[master + 1] - bounds[master] < 2 or master == 0:
            return
        begin, end = bounds[master] + 1, bounds[master + 1]
        if self._table.value_before(master, begin) < np.inf and self._loads.fits(master, begin, end):
            yield (*self._table.cuts_before(master, begin), begin, *bounds[master + 1 : -1])
        if master < self._num_stages - 1:
            after = bounds[master + 2]
            fits = self._loads.fits(master + 1, end - 1, after)
            if fits and self._table.value_before(master + 1, end - 1) < np.inf:
                before = self._table.cuts_before(master + 1, end - 1)
                cuts = (*before, end - 1, *bounds[master + 2 : -1])
                if self._try(cuts).master <= master:
                    yield cuts


def _has_short_ways(loads: Loads) -> bool:
    """Whether the time a micro-batch takes to go through depends on the cuts."""
    line = loads.line
    if len({seat.speed for seat in line.seats}) > 1 or any(again.any() for again in loads.recomputed):
        return True
    return not line.overlap and any(link.bytes_per_s < np.inf for link in line.links)


def _short_ways(costs: Sequence[Seconds], borders: Sequence[Seconds], pace_s: float) -> Iterable[Cuts]:
    """Of partitions that are a little slower than could be those that a micro-batch is soonest through."""
    for factor in SLOWER:
        cuts = least_sum(costs, borders, factor * pace_s)
        if cuts is not None:
            yield cuts


def _walk(cuts: Cuts, all_seconds: Callable[[Sequence[Cuts]], list[float]], loads: Loads) -> Cuts:
    """From neighbour to neighbour as long as that is better."""
    best_s = all_seconds([cuts])[0]
    for _ in range(MOST_STEPS):
        near = _fitting(loads, _neighbours(cuts))
        found = all_seconds(near)
        least_s = min(found, default=np.inf)
        if not least_s < best_s:
            break
        cuts, best_s = near[found.index(least_s)], least_s
    return cuts


def _neighbours(cuts: Cuts) -> Iterable[Cuts]:
    """A few cuts in a row moved by one: a unit goes from one stage to another, those between pass one on."""
    most = max(1, MOST_NEIGHBOURS // (2 * max(len(cuts), 1)))
    for first in range(len(cuts)):
        for end in range(first + 1, min(first + most, len(cuts)) + 1):
            for step in (-1, 1):
                yield (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])


def _fitting(loads: Loads, all_cuts: Iterable[Cuts]) -> list[Cuts]:
    """Those that leave no stage empty and fit every device."""
    given = list(all_cuts)
    inner = np.array(given, np.intp).reshape(len(given), loads.num_stages - 1)
    ends = np.pad(inner, ((0, 0), (0, 1)), constant_values=loads.chain.num_units)
    begins = np.pad(inner, ((0, 0), (1, 0)))
    fine = np.asarray((begins < ends).all(axis=1), np.bool_)
    for stage, seat in enumerate(loads.line.seats):
        if seat.memory_bytes < np.inf:
            places = np.flatnonzero(fine)
            held = loads.peak_bytes[stage][begins[places, stage] - stage, ends[places, stage] - 1 - stage]
            fine[places] = held <= seat.memory_bytes
    return [cuts for cuts, is_fine in zip(given, fine.tolist(), strict=True) if is_fine]
