"""The dynamic program over all ideals of an order: sets that hold, with an item, all that is before it.

Ideals are numbered by their size, the empty one first and the whole one last, and joined into a lattice: from
each ideal a way leads down for every item that can be taken out of it. The ways of an ideal are in the order
of their items.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.cluster.machine import num_cores
from bireme.compiled import compiled
from bireme.placement.contraction import (
    SLACK,
    Floats,
    FoundPlacement,
    Integers,
    Items,
    loads_of,
    placed,
    simple_bound,
)
from bireme.placement.workload import Objective

# The sum of two maxima, by one maximum under a limit on the other.
#
# Of all splits whose largest forward load is below a limit, the one with the smallest largest backward load
# is taken; then the limit goes down to its own forward load, and so on. Every best pair is met on the way,
# and the way ends as soon as no pair that is left can have a smaller sum.


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """What a split must stay below: every device's forward load, and the value that is made small."""

    forward: float = math.inf
    value: float = math.inf


@dataclass(frozen=True, slots=True)
class _SplitSteps:
    """Where the way ended: the best split, None where there is none, and a bound that no split is below."""

    where: tuple[int, ...] | None
    lower_bound: float


def flush_by_limits(
    items: Items,
    smallest_backward: Callable[[SplitLimits], tuple[int, ...] | None],
    *,
    forward_bound: float = 0.0,
    start: tuple[int, ...] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> _SplitSteps:
    """The split with the smallest sum of the two maxima.

    `smallest_backward` finds the split of the smallest largest backward load within limits, and None where
    there is none; `forward_bound` is a forward load that some device has in every split. `start` is a split
    to be better than. Once `is_over` says so the way ends early; an answer of `smallest_backward` that came
    in after that is not used, as it may have been cut short.
    """
    best, best_sum = start, math.inf if start is None else sum(_maxima(items, start))
    limit, backward_bound = math.inf, 0.0
    while forward_bound < limit and forward_bound + backward_bound < best_sum:
        found = smallest_backward(SplitLimits(limit, best_sum - forward_bound))
        if is_over():
            return _SplitSteps(best, min(best_sum, forward_bound + backward_bound))
        if found is None:
            break
        forward, backward_bound = _maxima(items, found)
        if forward + backward_bound < best_sum:
            best, best_sum = found, forward + backward_bound
        # The next one is really below this one, whatever the last digit of a sum in another order is.
        limit = min(forward, limit) * (1 - 1e-12)
    return _SplitSteps(best, best_sum)


def _maxima(items: Items, where: tuple[int, ...]) -> tuple[float, float]:
    forward, backward = loads_of(items, where).max(axis=0).tolist()
    return forward, backward


Bits = NDArray[np.uint64]

Narrow = NDArray[np.int32]
"""Whole numbers in tables of millions of them."""

_MOST_AT_ONCE = 4096
"""Ideals that grow between two looks at the clock."""


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """The ideals as rows of bits. The ways down of ideal `i` are `starts[i]` to `starts[i + 1]`: the items
    that can be taken out, and the ideals that are left. `levels[n]` is the first ideal of `n` items."""

    bits: Bits
    starts: NDArray[np.int64]
    taken: Narrow
    below: Narrow
    levels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bits)

    def sums(self, weight: Floats) -> Floats:
        """What the items of each ideal weigh together."""
        sums = np.zeros(len(self))
        for begin, end in zip(self.levels[1:-1], self.levels[2:], strict=True):
            way = self.starts[begin:end]
            sums[begin:end] = sums[self.below[way]] + weight[self.taken[way]]
        return sums

    def between(self, upper: int, lower: int) -> list[int]:
        """The items of one ideal that are not in the other."""
        rest = (self.bits[upper] & ~self.bits[lower]).view(np.uint8)
        places: list[int] = np.unpackbits(rest, bitorder="little").nonzero()[0].tolist()
        return places


def lattice_of(items: Items, most: int, is_over: Callable[[], bool] = lambda: False) -> Lattice | None:
    """The lattice of the items' ideals, or None where there are more than `most` or `is_over` says so."""
    if 2.0 ** min(_widest(items), 1000) > most:
        return None
    count = len(items)
    # Each item's share of a set's hash; fixed, so that a run can be repeated.
    shares = np.random.default_rng(0x2B3A).integers(1, 2**63 - 1, count, dtype=np.int64)
    growth = _first_ideal(items, most)
    before, after = items.before, items.after
    num_done, num_ideals, num_ways = 0, 1, 0
    while num_done < num_ideals:
        _grow(growth, before.starts, before.values, after.starts, after.values, shares, most)
        is_full = num_done == growth.counts[0]
        num_done, num_ideals, num_ways = growth.counts.tolist()
        if num_ideals > most or is_full or is_over():
            return None
    children, taken = growth.children[:num_ways], growth.taken[:num_ways]
    order = np.lexsort((taken, children))
    starts = np.searchsorted(children[order], np.arange(num_ideals + 1))
    levels = np.searchsorted(growth.sizes[:num_ideals], np.arange(count + 2))
    return Lattice(
        growth.bits[:num_ideals],
        starts.astype(np.int64),
        taken[order],
        growth.parents[:num_ways][order],
        levels.astype(np.int64),
    )


def _widest(items: Items) -> int:
    """How many items have the same depth: none of them is before another, so each set of them is an ideal."""
    depths = np.zeros(len(items), np.int64)
    for item in range(len(items)):
        depths[item] = max((depths[other] + 1 for other in items.before.row(item)), default=0)
    return int(np.bincount(depths).max())


class _Growth(NamedTuple):
    """The ideals so far, and the ways from `parents` to `children`, in tables with room for all of them.

    `counts` has the numbers of ideals that have grown, of all ideals, and of ways. `ready` are the items that
    can come next. `slots` has the ideals by their `hashes`, each as its number plus 1. Unused rows of a table
    take no memory.
    """

    bits: Bits
    ready: Bits
    hashes: NDArray[np.int64]
    sizes: Narrow
    slots: Narrow
    children: Narrow
    taken: Narrow
    parents: Narrow
    counts: Integers


def _first_ideal(items: Items, most: int) -> _Growth:
    """The empty one. If there are no more than `most` ideals, each grows by one of log₂(`most`) at most."""
    num_ideals, num_words = most + len(items) + 1, (len(items) + 63) // 64
    num_ways = num_ideals * most.bit_length() + len(items)
    growth = _Growth(
        bits=np.zeros((num_ideals, num_words), np.uint64),
        ready=np.zeros((num_ideals, num_words), np.uint64),
        hashes=np.zeros(num_ideals, np.int64),
        sizes=np.zeros(num_ideals, np.int32),
        slots=np.zeros(1 << (4 * num_ideals).bit_length(), np.int32),
        children=np.empty(num_ways, np.int32),
        taken=np.empty(num_ways, np.int32),
        parents=np.empty(num_ways, np.int32),
        counts=np.array([0, 1, 0], np.int64),
    )
    growth.slots[0] = 1
    for item in np.flatnonzero(np.diff(items.before.starts) == 0).tolist():
        growth.ready[0, item >> 6] |= np.uint64(1 << (item & 63))
    return growth


@compiled
def _grow(
    growth: _Growth,
    before_starts: Integers,
    before: Integers,
    after_starts: Integers,
    after: Integers,
    shares: NDArray[np.int64],
    most: int,
) -> None:
    """Some ideals grow by every item that can come next, while there is room and are no more than `most`."""
    one = np.uint64(1)
    bits, ready, hashes, sizes, slots = growth.bits, growth.ready, growth.hashes, growth.sizes, growth.slots
    children, taken, parents = growth.children, growth.taken, growth.parents
    ideal, num_ideals, num_ways = growth.counts[0], growth.counts[1], growth.counts[2]
    num_items, num_words = len(shares), bits.shape[1]
    end = ideal + _MOST_AT_ONCE
    while ideal < min(end, num_ideals) and num_ideals <= most and num_ways + num_items <= len(children):
        for word in range(num_words):
            candidates = ready[ideal, word]
            for bit in range(64 if candidates else 0):
                if not candidates >> np.uint64(bit) & one:
                    continue
                item = 64 * word + bit
                grown = bits[ideal, word] | (one << np.uint64(item & 63))
                key = hashes[ideal] ^ shares[item]
                slot = key & (len(slots) - 1)
                child = slots[slot] - 1
                while child >= 0:
                    if hashes[child] == key and bits[child, word] == grown:
                        is_same = True
                        for other_word in range(num_words):
                            if other_word != word and bits[child, other_word] != bits[ideal, other_word]:
                                is_same = False
                                break
                        if is_same:
                            break
                    slot = (slot + 1) & (len(slots) - 1)
                    child = slots[slot] - 1
                if child < 0:
                    child = num_ideals
                    num_ideals += 1
                    # Word by word: to assign a row, numba compiles the sentence of an error too.
                    for other_word in range(num_words):
                        bits[child, other_word] = bits[ideal, other_word]
                        ready[child, other_word] = ready[ideal, other_word]
                    bits[child, word] = grown
                    hashes[child] = key
                    sizes[child] = sizes[ideal] + 1
                    ready[child, word] ^= one << np.uint64(item & 63)
                    for place in range(after_starts[item], after_starts[item + 1]):
                        follower = after[place]
                        is_next = True
                        for other_place in range(before_starts[follower], before_starts[follower + 1]):
                            other = before[other_place]
                            if not bits[child, other >> 6] >> np.uint64(other & 63) & one:
                                is_next = False
                                break
                        if is_next:
                            ready[child, follower >> 6] |= one << np.uint64(follower & 63)
                    slots[slot] = child + 1
                children[num_ways] = child
                taken[num_ways] = item
                parents[num_ways] = ideal
                num_ways += 1
        ideal += 1
    growth.counts[0], growth.counts[1], growth.counts[2] = ideal, num_ideals, num_ways


# The dynamic program over ideals: the best contiguous split, exactly.
#
# An ideal is what the first devices of the line have together; the next device takes the difference to a
# larger one. So the best split of an ideal over so many devices follows from those of all ideals inside it.
# Only splits below a limit are looked for, that of the best split known before, and where none is found that
# one was the best.

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
        known = None if start is None else placed(self.items, objective, start)
        bound = simple_bound(self.items, objective)
        if known is not None and known.value <= bound * (1 + SLACK):
            return replace(known, lower_bound=known.value)
        below = math.inf if known is None else known.value * (1 - SLACK)
        where = self._split(SplitLimits(value=below), by_sum=True)
        found = known if where is None else placed(self.items, objective, where)
        if found is None:
            return None
        return replace(found, lower_bound=min(found.value, bound) if self.is_over() else found.value)

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
        found = placed(self.items, Objective.FLUSH, steps.where)
        bound = max(steps.lower_bound, simple_bound(self.items, Objective.FLUSH))
        return replace(found, lower_bound=min(found.value, bound))

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
