"""The dynamic program over ideals: the best contiguous split, exactly.

An ideal is what the first devices of the line have together; the next device takes the difference to a larger
one. So the best split of an ideal over so many devices follows from those of all ideals inside it. Only
splits below a limit are looked for, that of the best split known before, and where none is found that one
was the best.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from bireme.cluster.machine import num_cores
from bireme.compiled import compiled
from bireme.placement.contiguous.ideals import Lattice, Narrow, SplitLimits, flush_by_limits
from bireme.placement.contraction import (
    SLACK,
    Floats,
    FoundPlacement,
    Integers,
    Items,
    loads_of,
    simple_bound,
    value_of,
)
from bireme.placement.workload import Objective

# The loop of the dynamic program over ideals, in a form that compiles.
#
# For an ideal `J` every smaller ideal is visited once, by taking items out in falling order of their numbers:
# since a number is greater than all that must be before it, the greatest of what is taken out can always go
# first, and each set has one such order. The load of what is taken out grows item by item. What it computes
# and its size only grow, so where that alone is too much on every kind of device, the way ends.


@compiled
def sweep(
    uppers: NDArray[np.int64],
    starts: NDArray[np.int64],
    taken: Narrow,
    below: Narrow,
    accelerator_time: Floats,
    cpu_time: Floats,
    size: Floats,
    supported: NDArray[np.bool_],
    net_starts: Integers,
    nets: Integers,
    net_size: Integers,
    net_cost: Floats,
    memory: float,
    forward_limit: float,
    value_limit: float,
    best: Floats,
    came_from: Narrow,
    came_by_cpu: NDArray[np.bool_],
    fewest: Narrow,
    most: Narrow,
) -> int:
    """Fill `best[J, cpus, accelerators]` for the ideals `uppers`, from those of all smaller ideals.

    Each cell is the smallest value with exactly so many devices, infinite where it would not be below
    `value_limit`; `came_from` and `came_by_cpu` say which ideal the last device began at and of which kind it
    is. Column 0 of times and costs must stay below `forward_limit` on each device, column 1 is the value.
    `most[J, cpus]` accelerators are the most from which the rest can still be done; `fewest[J, cpus]` becomes
    the fewest with which `J` can. The number of pairs of ideals is returned.
    """
    num_cpus, num_accelerators = best.shape[1] - 1, best.shape[2] - 1
    num_items = len(size)
    inside = np.zeros(len(net_size), np.int32)
    ideal = np.zeros(num_items + 1, np.int64)
    way = np.zeros(num_items + 1, np.int64)
    item_of = np.zeros(num_items + 1, np.int64)
    computed = np.zeros((num_items + 1, 4))
    moved = np.zeros((num_items + 1, 2))
    bytes_of = np.zeros(num_items + 1)
    runs = np.ones(num_items + 1, np.bool_)
    num_pairs = 0
    for upper in uppers:
        num_useful = 0
        for cpus in range(num_cpus + 1):
            fewest[upper, cpus] = num_accelerators + 1
            if most[upper, cpus] >= 0:
                num_useful = max(num_useful, cpus + most[upper, cpus])
        if not num_useful:
            continue
        # Where only one device may come before the rest, the empty ideal is all there is to reach.
        is_straight = num_useful == 1
        depth = 0
        ideal[0], item_of[0] = upper, num_items
        way[0] = starts[upper + 1] - 1 if is_straight else starts[upper]
        while depth >= 0:
            step = way[depth]
            if step == starts[ideal[depth] + 1] or taken[step] >= item_of[depth]:
                if depth:
                    item = item_of[depth]
                    for place in range(net_starts[item], net_starts[item + 1]):
                        inside[nets[place]] -= 1
                depth -= 1
                continue
            way[depth] += 1
            item, lower = taken[step], below[step]
            above, depth = depth, depth + 1
            for column in range(2):
                computed[depth, column] = computed[above, column] + accelerator_time[item, column]
                computed[depth, 2 + column] = computed[above, 2 + column] + cpu_time[item, column]
                moved[depth, column] = moved[above, column]
            bytes_of[depth] = bytes_of[above] + size[item]
            runs[depth] = runs[above] and supported[item]
            on_accelerator = (
                num_accelerators > 0
                and runs[depth]
                and bytes_of[depth] <= memory
                and computed[depth, 0] < forward_limit
                and computed[depth, 1] < value_limit
            )
            on_cpu = num_cpus > 0 and computed[depth, 2] < forward_limit and computed[depth, 3] < value_limit
            if not on_accelerator and not on_cpu:
                depth = above
                continue
            num_pairs += 1
            for place in range(net_starts[item], net_starts[item + 1]):
                net = nets[place]
                inside[net] += 1
                if inside[net] == 1:
                    moved[depth, 0] += net_cost[net, 0]
                    moved[depth, 1] += net_cost[net, 1]
                elif inside[net] == net_size[net]:
                    moved[depth, 0] -= net_cost[net, 0]
                    moved[depth, 1] -= net_cost[net, 1]
            ideal[depth], item_of[depth] = lower, item
            way[depth] = max(starts[lower], starts[lower + 1] - 1) if is_straight else starts[lower]
            cost = computed[depth, 1] + moved[depth, 1]
            on_accelerator &= computed[depth, 0] + moved[depth, 0] < forward_limit and cost < value_limit
            for cpus in range(num_cpus + 1):
                first = fewest[lower, cpus]
                if on_accelerator:
                    for accelerators in range(first, min(num_accelerators, most[upper, cpus])):
                        value = max(best[lower, cpus, accelerators], cost)
                        if value < best[upper, cpus, accelerators + 1]:
                            best[upper, cpus, accelerators + 1] = value
                            came_from[upper, cpus, accelerators + 1] = lower
                            came_by_cpu[upper, cpus, accelerators + 1] = False
                if on_cpu and cpus < num_cpus:
                    for accelerators in range(first, min(num_accelerators, most[upper, cpus + 1]) + 1):
                        value = max(best[lower, cpus, accelerators], computed[depth, 3])
                        if value < best[upper, cpus + 1, accelerators]:
                            best[upper, cpus + 1, accelerators] = value
                            came_from[upper, cpus + 1, accelerators] = lower
                            came_by_cpu[upper, cpus + 1, accelerators] = True
        for cpus in range(num_cpus + 1):
            for accelerators in range(num_accelerators + 1):
                if best[upper, cpus, accelerators] < value_limit:
                    fewest[upper, cpus] = accelerators
                    break
    return num_pairs


_AT_ONCE = 64
"""Ideals that a thread takes at a time."""

_MOST_THREADS = 8


class DynamicProgram:
    """The dynamic program over the ideals of some items, until a moment of the monotonic clock.

    `num_pairs` counts the pairs of ideals that were looked at.
    """

    def __init__(self, items: Items, lattice: Lattice, stop_at: float = math.inf) -> None:
        self.items = items
        self.lattice = lattice
        self.stop_at = stop_at
        self.num_pairs = 0
        self.num_accelerators = min(items.num_accelerators, len(items))
        self.num_cpus = min(items.num_cpus, len(items))

    def is_over(self) -> bool:
        """Whether the time is."""
        return monotonic() > self.stop_at

    def best(self, objective: Objective, start: tuple[int, ...] | None = None) -> FoundPlacement | None:
        """The best split; None where none fits. `start` is a split of the same items that is known.

        Where the time limit strikes it is the best so far, and its lower bound tells what is proven.
        """
        if objective is Objective.FLUSH:
            return self._flush(start)
        known = math.inf if start is None else value_of(loads_of(self.items, start), objective)
        bound = simple_bound(self.items, objective)
        if known <= bound * (1 + SLACK):
            return FoundPlacement(start, known, known) if start is not None else None
        where = self._split(SplitLimits(value=known * (1 - SLACK)), by_sum=True)
        if where is None and start is None:
            return None
        if where is None:
            assert start is not None
            where = start
        value = value_of(loads_of(self.items, where), objective)
        return FoundPlacement(where, value, min(value, bound) if self.is_over() else value)

    def _flush(self, start: tuple[int, ...] | None) -> FoundPlacement | None:
        steps = flush_by_limits(
            self.items,
            lambda limits: self._split(limits, by_sum=False),
            forward_bound=self._forward_bound(),
            start=start,
            is_over=self.is_over,
        )
        if steps.where is None:
            return None
        value = value_of(loads_of(self.items, steps.where), Objective.FLUSH)
        bound = max(steps.lower_bound, simple_bound(self.items, Objective.FLUSH))
        return FoundPlacement(steps.where, value, min(value, bound))

    def _forward_bound(self) -> float:
        """A forward load that some device has in every split."""
        forward = np.array([1.0, 0.0])
        alone = replace(
            self.items,
            accelerator_time=self.items.accelerator_time * forward,
            cpu_time=self.items.cpu_time * forward,
        )
        return simple_bound(alone, Objective.THROUGHPUT)

    def _split(self, limits: SplitLimits, *, by_sum: bool) -> tuple[int, ...] | None:
        """The best split within the limits, by the sum of forward and backward or by backward alone."""
        table = _Table(self, limits, by_sum=by_sum)
        for _ in table.fill():
            if self.is_over():
                return None
        return table.trace()


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Times and costs as the sweep wants them: what is limited, and what is made small."""

    accelerator_time: Floats
    cpu_time: Floats
    net_cost: Floats

    @classmethod
    def of(cls, items: Items, *, by_sum: bool) -> "_Columns":
        tables = items.accelerator_time, items.cpu_time, items.net_cost
        if not by_sum:
            return cls(*tables)
        return cls(*(np.column_stack((np.zeros(len(t)), t.sum(axis=1))) for t in tables))


class _Table:
    """The cells of the dynamic program: for each ideal, by how many devices of each kind it has."""

    def __init__(self, program: DynamicProgram, limits: SplitLimits, *, by_sum: bool) -> None:
        self.program, self.items, self.lattice = program, program.items, program.lattice
        self.limits = limits
        self.columns = _Columns.of(self.items, by_sum=by_sum)
        shape = len(self.lattice), program.num_cpus + 1, program.num_accelerators + 1
        self.best = np.full(shape, np.inf)
        self.best[0, 0, 0] = 0.0
        self.came_from = np.zeros(shape, np.int32)
        self.came_by_cpu = np.zeros(shape, np.bool_)
        self.fewest = np.full(shape[:2], shape[2], np.int32)
        self.fewest[0, 0] = 0
        self.most = self._most()

    def _most(self) -> Narrow:
        """For each ideal and number of CPUs the most accelerators from which the rest can still be done."""
        program, items = self.program, self.items
        weight = np.where(items.supported, self.columns.accelerator_time[:, 1], 0.0)
        on_cpu = self.columns.cpu_time[:, 1]
        ratio = np.divide(weight, on_cpu, out=np.full_like(weight, np.inf), where=on_cpu > 0)
        # A CPU is worth so many accelerators at best.
        worth = ratio[weight > 0].max(initial=0.0)
        done = self.lattice.sums(weight)
        needed = (done[-1] - done) / self.limits.value
        left = np.arange(program.num_cpus, -1, -1, dtype=np.float64)
        spare = np.multiply(left, worth, out=np.zeros(len(left)), where=left > 0)
        most = program.num_accelerators + spare[None, :] - needed[:, None]
        most = np.floor(np.minimum(most + 1e-6, program.num_accelerators))
        # Something is left of all but the whole, so a device must be, too.
        most[:-1, -1] = np.minimum(most[:-1, -1], program.num_accelerators - 1)
        most[-1] = program.num_accelerators
        rounded: Narrow = np.maximum(most, -1).astype(np.int32)
        return rounded

    def fill(self) -> Iterator[None]:
        """Go through the ideals by size; yields now and then."""
        num_threads = min(_MOST_THREADS, num_cores())
        self._sweep(np.zeros(0, np.int64))  # compiled before threads want it
        with ThreadPoolExecutor(num_threads) as threads:
            for begin, end in zip(self.lattice.levels[1:-1], self.lattice.levels[2:], strict=True):
                chunks = [np.arange(at, min(at + _AT_ONCE, end)) for at in range(begin, end, _AT_ONCE)]
                for first in range(0, len(chunks), 4 * num_threads):
                    some = chunks[first : first + 4 * num_threads]
                    work = threads.map(self._sweep, some) if len(some) > 1 else map(self._sweep, some)
                    self.program.num_pairs += sum(work)
                    yield

    def _sweep(self, uppers: NDArray[np.int64]) -> int:
        items, lattice, columns = self.items, self.lattice, self.columns
        return sweep(
            uppers,
            lattice.starts,
            lattice.taken,
            lattice.below,
            columns.accelerator_time,
            columns.cpu_time,
            items.size,
            items.supported,
            items.nets.starts,
            items.nets.values,
            np.diff(items.pins.starts),
            columns.net_cost,
            items.room,
            self.limits.forward,
            self.limits.value,
            self.best,
            self.came_from,
            self.came_by_cpu,
            self.fewest,
            self.most,
        )

    def trace(self) -> tuple[int, ...] | None:
        """From the best cell of the whole set down to the empty one."""
        whole = len(self.lattice) - 1
        best = self.best[whole]
        if not best.min() < self.limits.value:
            return None
        cpus, accelerators = divmod(int(best.argmin()), best.shape[1])
        where = [0] * len(self.items)
        ideal = whole
        while ideal:
            lower = int(self.came_from[ideal, cpus, accelerators])
            if self.came_by_cpu[ideal, cpus, accelerators]:
                cpus -= 1
                device = self.items.num_accelerators + cpus
            else:
                accelerators -= 1
                device = accelerators
            for item in self.lattice.between(ideal, lower):
                where[item] = device
            ideal = lower
        return tuple(where)
