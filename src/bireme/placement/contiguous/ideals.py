"""All ideals of the order of some items: the sets that hold, with an item, everything that is before it.

They are numbered by their size, the empty one first and the whole one last, and joined into a lattice: from
each ideal a way leads down for every item that can be taken out of it. The ways of an ideal are in the order
of their items.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contraction import Floats, Integers, Items, loads_of

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
    growth = _first_ideal(items)
    while growth.num_done < growth.num_ideals:
        begin, growth = growth.num_done, _with_room(growth, count)
        _grow(
            growth,
            items.before.starts,
            items.before.values,
            items.after.starts,
            items.after.values,
            shares,
            most,
        )
        if growth.num_ideals > most or is_over():
            return None
        waiting = growth.ready[growth.num_done - begin : growth.num_ideals - begin]
        growth = growth._replace(ready=waiting)
    children, taken = growth.children[: growth.num_ways], growth.taken[: growth.num_ways]
    order = np.lexsort((taken, children))
    starts = np.searchsorted(children[order], np.arange(growth.num_ideals + 1))
    levels = np.searchsorted(growth.sizes[: growth.num_ideals], np.arange(count + 2))
    return Lattice(
        growth.bits[: growth.num_ideals],
        starts.astype(np.int64),
        taken[order],
        growth.parents[: growth.num_ways][order],
        levels.astype(np.int64),
    )


def _widest(items: Items) -> int:
    """How many items have the same depth: none of them is before another, so each set of them is an ideal."""
    depths = np.zeros(len(items), np.int64)
    for item in range(len(items)):
        depths[item] = max((depths[other] + 1 for other in items.before.row(item)), default=0)
    return int(np.bincount(depths).max())


class _Growth(NamedTuple):
    """The ideals so far, and the ways from `parents` to `children`; rows past the numbers are room to grow.

    The ideals below `num_done` have grown. `ready` are, for those from there on, the items that can come
    next. `slots` is a table of the ideals by their `hashes`. The three numbers are in `counts`.
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

    @property
    def num_done(self) -> int:
        return int(self.counts[0])

    @property
    def num_ideals(self) -> int:
        return int(self.counts[1])

    @property
    def num_ways(self) -> int:
        return int(self.counts[2])


def _first_ideal(items: Items) -> _Growth:
    """The empty one."""
    num_words = (len(items) + 63) // 64
    slots = np.full(4096, -1, np.int32)
    slots[0] = 0
    ready = np.zeros((1, num_words), np.uint64)
    for item in np.flatnonzero(np.diff(items.before.starts) == 0):
        ready[0, item >> 6] |= np.uint64(1 << (int(item) & 63))
    return _Growth(
        bits=np.zeros((1024, num_words), np.uint64),
        ready=ready,
        hashes=np.zeros(1024, np.int64),
        sizes=np.zeros(1024, np.int32),
        slots=slots,
        children=np.empty(4096, np.int32),
        taken=np.empty(4096, np.int32),
        parents=np.empty(4096, np.int32),
        counts=np.array([0, 1, 0], np.int64),
    )


def _with_room(growth: _Growth, num_items: int) -> _Growth:
    """With room for more ideals, and at least for one to grow by all items."""
    num_ideals, num_ways = growth.num_ideals + num_items, growth.num_ways + num_items
    slots = growth.slots
    if 3 * num_ideals > len(slots):
        slots = np.full(1 << (4 * num_ideals).bit_length(), -1, np.int32)
        _fill(slots, growth.hashes, growth.num_ideals)
    waiting = len(growth.ready)
    ready = np.zeros((2 * waiting + _MOST_AT_ONCE + num_items, growth.ready.shape[1]), np.uint64)
    ready[:waiting] = growth.ready
    return _Growth(
        _longer(growth.bits, num_ideals),
        ready,
        _longer(growth.hashes, num_ideals),
        _longer(growth.sizes, num_ideals),
        slots,
        _longer(growth.children, num_ways),
        _longer(growth.taken, num_ways),
        _longer(growth.parents, num_ways),
        growth.counts,
    )


def _longer(table: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """A table with at least so many rows, and often twice as many as it has."""
    if len(table) >= num_rows:
        return table
    more = np.zeros((max(num_rows - len(table), len(table)), *table.shape[1:]), table.dtype)
    return np.concatenate((table, more))


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
    begin, num_ideals, num_ways = growth.counts[0], growth.counts[1], growth.counts[2]
    num_items, num_words = len(shares), bits.shape[1]
    room = min(len(bits), begin + len(ready), len(slots) // 3) - num_items
    room_for_ways = len(children) - num_items
    ideal, end = begin, begin + _MOST_AT_ONCE
    while ideal < min(end, num_ideals) and num_ideals <= min(most, room) and num_ways <= room_for_ways:
        for word in range(num_words):
            candidates = ready[ideal - begin, word]
            for bit in range(64 if candidates else 0):
                if not candidates >> np.uint64(bit) & one:
                    continue
                item = 64 * word + bit
                grown = bits[ideal, word] | (one << np.uint64(item & 63))
                key = hashes[ideal] ^ shares[item]
                slot = key & (len(slots) - 1)
                child = slots[slot]
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
                    child = slots[slot]
                if child < 0:
                    child = num_ideals
                    num_ideals += 1
                    for other_word in range(num_words):
                        bits[child, other_word] = bits[ideal, other_word]
                        ready[child - begin, other_word] = ready[ideal - begin, other_word]
                    bits[child, word] = grown
                    hashes[child] = key
                    sizes[child] = sizes[ideal] + 1
                    ready[child - begin, word] ^= one << np.uint64(item & 63)
                    for place in range(after_starts[item], after_starts[item + 1]):
                        follower = after[place]
                        is_next = True
                        for other_place in range(before_starts[follower], before_starts[follower + 1]):
                            other = before[other_place]
                            if not bits[child, other >> 6] >> np.uint64(other & 63) & one:
                                is_next = False
                                break
                        if is_next:
                            ready[child - begin, follower >> 6] |= one << np.uint64(follower & 63)
                    slots[slot] = child
                children[num_ways] = child
                taken[num_ways] = item
                parents[num_ways] = ideal
                num_ways += 1
        ideal += 1
    growth.counts[0], growth.counts[1], growth.counts[2] = ideal, num_ideals, num_ways


@compiled
def _fill(slots: Narrow, hashes: NDArray[np.int64], num_ideals: int) -> None:
    """Write the ideals into an empty table, by hash."""
    for ideal in range(num_ideals):
        slot = hashes[ideal] & (len(slots) - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = ideal
