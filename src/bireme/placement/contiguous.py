"""The best contiguous split of a workload, and how much of that is proven.

The dynamic program runs on items into which operators without time are merged. Where these have a size and
memory is short, a second run that forgets the size proves that nothing was lost by it; where it proves too
little, a third one leaves them alone, if the ideals are not too many then.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import IS_COMPILED
from bireme.errors import BiremeError
from bireme.placement.contraction import (
    SLACK,
    Floats,
    FoundPlacement,
    Integers,
    Items,
    Weightless,
    in_order,
    items_of,
    placed,
    simple_bound,
)
from bireme.placement.ideals import DynamicProgram, Lattice, SplitLimits, flush_by_limits, lattice_of
from bireme.placement.workload import Objective, Workload

# Contiguous splits of graphs with too many ideals: the best cut of a line of all items, for many lines.
#
# Every topological order makes the graph a line, which `cut_chain` cuts in the best way. A walk in depth is a
# good order, because neighbors in it feed each other. From the best order so far others are drawn that
# differ from it by chance, and a better cut is kept; so the answer never gets worse and the same seed gives
# the same.

_MOST_LINES = 240
"""Lines that are cut, where they are short."""

_WORK = 5e7
"""Stretches times cells of all lines together: what bounds their number where they are long."""

_AT_LEAST = 6


def cut_lines(
    items: Items,
    objective: Objective,
    *,
    seed: int = 0,
    most_lines: int = _MOST_LINES,
    is_over: Callable[[], bool] = lambda: False,
) -> FoundPlacement:
    """The best cut of all lines tried; raises `NoSplitFoundError` where none fits.

    Whatever `is_over` says, one line is cut, and more as long as none fits that was not drawn by chance.
    """
    random = Random(seed)
    cells = (items.num_accelerators + 1) * (items.num_cpus + 1)
    num_lines = min(most_lines, max(_AT_LEAST, int(_WORK / (len(items) ** 2 * cells))))
    best: FoundPlacement | None = None
    best_order: list[int] = []
    seen: set[tuple[int, ...]] = set()
    fixed = _fixed_orders(items)
    for number in range(num_lines):
        given = next(fixed, None)
        if given is None and best is None and is_over():
            break
        order = given or _near(items, best_order, random)
        if tuple(order) in seen:
            continue
        seen.add(tuple(order))
        with suppress(NoSplitFoundError):  # this line has no cut that fits; another may
            found = cut_chain(items, objective, order, (lambda: False) if best is None else is_over)
            if best is None or found.value < best.value:
                best, best_order = found, order
        best_order = best_order or order
        if (best is not None and is_over()) or (number and _is_line(items)):
            break
    if best is None:
        raise no_split_found(items, "in the orders tried")
    return best


def _is_line(items: Items) -> bool:
    """Whether there is one topological order only."""
    return all(place in items.after.row(place - 1) for place in range(1, len(items)))


def _fixed_orders(items: Items) -> Iterator[list[int]]:
    """Walks in depth and in breadth, from the front and from the back, and one that fills the memory."""
    count = len(items)
    yield list(range(count))
    if items.size.sum() > items.accelerator_bytes:
        yield _filling(items)
    yield _sorted(items, lambda item, depth: (-depth, -item))
    yield _sorted(items, lambda item, depth: (depth, item))
    tails = [0.0] * count
    times = items.accelerator_time.sum(axis=1)
    for item in reversed(range(count)):
        tails[item] = times[item] + max((tails[other] for other in items.after.row(item)), default=0.0)
    yield _sorted(items, lambda item, depth: (-tails[item], item))


def _sorted(items: Items, key: Callable[[int, int], Any]) -> list[int]:
    """The topological order of items by a key."""
    return in_order({item: items.after.row(item) for item in range(len(items))}, key)


def _filling(items: Items) -> list[int]:
    """The topological order that takes, of what can come next, the largest that still fits."""
    waiting = [len(items.before.row(item)) for item in range(len(items))]
    size: list[float] = items.size.tolist()
    ready = sorted((size[item], item) for item, count in enumerate(waiting) if not count)
    order: list[int] = []
    left = items.room
    while ready:
        place = bisect_right(ready, (left, len(items)))
        if not place:
            place, left = len(ready), items.room
        taken, item = ready.pop(place - 1)
        left -= taken
        order.append(item)
        for other in items.after.row(item):
            waiting[other] -= 1
            if not waiting[other]:
                insort(ready, (size[other], other))
    return order


def _near(items: Items, order: list[int], random: Random) -> list[int]:
    """An order like another: every item is drawn forward or back by chance, some by much."""
    place_of = {item: place for place, item in enumerate(order)}
    reach = len(order) * random.choice((0.02, 0.05, 0.1, 0.3, 1.0))
    share = random.choice((0.05, 0.2, 1.0))
    drawn = {
        item: place + (random.uniform(-reach, reach) if random.random() < share else 0.0)
        for item, place in place_of.items()
    }
    return _sorted(items, lambda item, _: drawn[item])


MOST_IDEALS = 1_000_000 if IS_COMPILED else 5_000
"""How many ideals the dynamic program goes through at most."""

_MOST_CELLS = 60_000_000
"""Ideals times cells of each, which bounds the memory."""

_MOST_BYTES = 500_000_000
"""Of the sets that the ideals are, which does so where items are many."""


@dataclass(frozen=True, slots=True)
class ContiguousSplit:
    """A contiguous split: of which items, and among how many ideals where they were counted."""

    items: Items
    found: FoundPlacement
    num_ideals: int | None = None


@dataclass(frozen=True, slots=True)
class Contiguous:
    """The search for a contiguous split of a workload, until a moment of the monotonic clock.

    `say` is told what is going on, for people.
    """

    workload: Workload
    objective: Objective
    seed: int = 0
    stop_at: float = math.inf
    most_ideals: int = MOST_IDEALS
    say: Callable[[str], None] = lambda _: None

    @property
    def most_ideals_here(self) -> int:
        """How many ideals `best` goes through at most, by time and memory."""
        return self._most_ideals_of(self._items(Weightless.JOIN))

    def best_of_lines(self) -> ContiguousSplit:
        """The best cut of some lines, with the bound from counting work.

        Raises `NoSplitFoundError` where no cut fits.
        """
        bare, items = self._items(Weightless.VANISH), self._items(Weightless.JOIN)
        try:
            found = self._cut_lines(items)
        except BiremeError:
            items = self._items(Weightless.STAY)
            found = self._cut_lines(items)
        return ContiguousSplit(
            items, replace(found, lower_bound=min(simple_bound(bare, self.objective), found.value))
        )

    def best(self) -> ContiguousSplit | None:
        """The best split of all, proven where the time suffices; None where the ideals are too many,
        or take too long to list.

        Raises where no split fits, and `NoSplitFoundError` where the time was too short to find any.
        """
        items, bare = self._items(Weightless.JOIN), self._items(Weightless.VANISH)
        lattice = self._lattice(items)
        if lattice is None:
            return None
        self.say(f"{len(lattice):,} ideals of {len(items)} items")
        found = self._search(items, lattice)
        is_light = np.array_equal(bare.size, items.size)
        if is_light and found is None:
            raise self._none_of(items)
        if is_light and found is not None:
            return ContiguousSplit(items, found, len(lattice))
        relaxed = self._search(bare, lattice, known=found)
        if relaxed is None:
            raise self._none_of(bare)
        if found is not None and relaxed.lower_bound >= found.value * (1 - SLACK):
            return ContiguousSplit(items, replace(found, lower_bound=found.value), len(lattice))
        return self._best_apart(
            ContiguousSplit(items, found, len(lattice)) if found else None, relaxed.lower_bound
        )

    def _best_apart(self, joined: ContiguousSplit | None, lower_bound: float) -> ContiguousSplit | None:
        """The best split where what takes no time may be apart from its neighbor, if there is time."""
        items = self._items(Weightless.STAY)
        lattice = None if self._is_over() else self._lattice(items)
        if lattice is not None:
            self.say(f"memory is short: {len(lattice):,} ideals with weights on their own")
            known = None if joined is None else carried_over(joined, items, self.objective)
            found = self._search(items, lattice, known=known)
            if found is not None:
                return ContiguousSplit(
                    items, replace(found, lower_bound=max(found.lower_bound, lower_bound)), len(lattice)
                )
            raise self._none_of(items)
        if joined is None and self._is_over():
            raise no_split_found(items, "in the time")
        if joined is None:
            return None  # lines may still have a cut
        return replace(joined, found=replace(joined.found, lower_bound=lower_bound))

    def _most_ideals_of(self, items: Items) -> int:
        cells = (min(items.num_accelerators, len(items)) + 1) * (min(items.num_cpus, len(items)) + 1)
        row_bytes = 8 * ((len(items) + 63) // 64)
        return min(self.most_ideals, _MOST_CELLS // cells, _MOST_BYTES // row_bytes)

    def _none_of(self, items: Items) -> BiremeError:
        """Why there is no split: nothing is proven once the time is over."""
        return no_split_found(items, "in the time") if self._is_over() else no_split_fits(items)

    def _is_over(self) -> bool:
        return monotonic() > self.stop_at

    def _items(self, weightless: Weightless) -> Items:
        return items_of(self.workload, contiguous=True, weightless=weightless)

    def _lattice(self, items: Items) -> Lattice | None:
        # Going through the ideals takes far longer than listing them: half the time must do for that.
        began = monotonic()
        stop_at = began + (self.stop_at - began) / 2
        return lattice_of(items, self._most_ideals_of(items), lambda: monotonic() > stop_at)

    def _search(
        self, items: Items, lattice: Lattice, *, known: FoundPlacement | None = None
    ) -> FoundPlacement | None:
        """The dynamic program, from the best split that is known."""
        if known is None:
            with suppress(BiremeError):
                known = self._cut_lines(items)
        program = DynamicProgram(items, lattice, self.stop_at)
        return program.best(self.objective, None if known is None else known.where)

    def _cut_lines(self, items: Items) -> FoundPlacement:
        return cut_lines(items, self.objective, seed=self.seed, is_over=self._is_over)


def carried_over(split: ContiguousSplit, items: Items, objective: Objective) -> FoundPlacement:
    """The same split, of finer items."""
    device_of = {
        place: device
        for members, device in zip(split.items.members, split.found.where, strict=True)
        for place in members
    }
    where = [device_of[members[0]] for members in items.members]
    return replace(placed(items, objective, where), lower_bound=split.found.lower_bound)


# The best cut of a line of items among the devices: exact for the line, in the square of its length.
#
# For items in a given order, a device takes a stretch `[begin, end)`. Row by row over `end`, the loads of all
# stretches that end there are kept up to date at once: item `end - 1` joins every stretch that begins at or
# before it, and each of its nets becomes cut, or whole, for a range of beginnings that the places of the
# net's other pins tell. So a row costs the nets of one item and a few operations on arrays.

_ROWS_AT_ONCE = 256
"""Between two looks at the clock."""


class NoSplitFoundError(BiremeError):
    """No split that fits was found, which does not prove that there is none."""


def cut_chain(
    items: Items,
    objective: Objective,
    order: Sequence[int] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> FoundPlacement:
    """The best split of the items, in an order that is topological, into one stretch for each device.

    Its lower bound is 0: another order may be better. Raises `NoSplitFoundError` where no cut of this order
    fits, or none was found before `is_over` said so.
    """
    line = _Line(items, range(len(items)) if order is None else order, is_over)
    if objective is Objective.FLUSH:
        where = flush_by_limits(items, lambda limits: line.split(limits, by_sum=False), is_over=is_over).where
        return _found(items, objective, where)
    # Under a limit only short stretches count, so a limit that proves too low costs little.
    most = items.accelerator_time.sum() + items.cpu_time.sum() + items.net_cost.sum()
    below = 1.3 * simple_bound(items, objective)
    while 0 < below < most and not is_over():
        where = line.split(SplitLimits(value=below), by_sum=True)
        if where is not None:
            return _found(items, objective, where)
        below *= 1.6
    return _found(items, objective, line.split(SplitLimits(), by_sum=True))


def _found(items: Items, objective: Objective, where: tuple[int, ...] | None) -> FoundPlacement:
    if where is None:
        raise no_split_found(items, "in the order tried")
    return placed(items, objective, where)


def no_split_fits(items: Items) -> BiremeError:
    """The sentence for people whose workload no split fits, where that is proven."""
    return BiremeError(f"No placement fits: {_needs(items)} Give more of them, or more memory.")


def no_split_found(items: Items, among: str) -> NoSplitFoundError:
    """The sentence where none was found, but there may be one."""
    return NoSplitFoundError(
        f"No split that fits was found {among}, and there may be one: {_needs(items)} Try --method milp, "
        "--any, a longer --time-limit, or give more memory."
    )


def _needs(items: Items) -> str:
    return (
        f"the operators take {items.size.sum():.12g} bytes in {len(items)} pieces that cannot be parted; "
        f"there are {items.num_accelerators} accelerators of {items.accelerator_bytes:.12g} bytes and "
        f"{items.num_cpus} CPUs."
    )


class _Line:
    """Items in an order, and what does not depend on any limit."""

    def __init__(self, items: Items, order: Sequence[int], is_over: Callable[[], bool]) -> None:
        self.items, self.is_over = items, is_over
        self.order = np.fromiter(order, np.int64, len(items))
        self.size = _sums(items.size[self.order])
        self.room = items.room
        self.num_unsupported = _sums(~items.supported[self.order])
        self.joins = self._joins()
        self.num_accelerators = min(items.num_accelerators, len(items))
        self.num_cpus = min(items.num_cpus, len(items))

    def _joins(self) -> list[list[tuple[int, int, int]]]:
        """For the item at each place its nets: (net, the pin before it, the first pin if it is the last)."""
        place_of = np.empty(len(self.order), np.int64)
        place_of[self.order] = np.arange(len(self.order))
        joins: list[list[tuple[int, int, int]]] = [[] for _ in self.order]
        for net in range(len(self.items.pins)):
            places = sorted(place_of[self.items.pins.row(net)].tolist())
            for number, place in enumerate(places):
                previous = places[number - 1] if number else -1
                joins[place].append((net, previous, places[0] if place == places[-1] else -1))
        return joins

    def split(self, limits: SplitLimits, *, by_sum: bool) -> tuple[int, ...] | None:
        """The devices of the best split within the limits, or None where there is none, or the time is over.

        Best is the smallest maximum of forward and backward together where `by_sum` is set, else of backward
        alone.
        """
        count = len(self.order)
        shape = self.num_cpus + 1, self.num_accelerators + 1, count + 1
        best = np.full(shape, np.inf)  # best[cpus, accelerators, end]: with exactly so many devices
        best[0, 0, 0] = 0.0
        begins = np.zeros(shape, np.int64)
        on_cpu = np.zeros(shape, np.bool_)
        on_accelerator, on_host = np.zeros((2, count)), np.zeros((2, count))
        first = self._first_begins(limits, by_sum=by_sum)
        for end in range(1, count + 1):
            if end % _ROWS_AT_ONCE == 0 and self.is_over():
                return None
            begin = first[end]
            self._join(end - 1, begin, on_accelerator, on_host)
            cost = _cost(on_accelerator[:, begin:end], limits, by_sum=by_sum)
            cost[self.size[end] - self.size[begin:end] > self.room] = np.inf
            cost[self.num_unsupported[end] > self.num_unsupported[begin:end]] = np.inf
            if self.num_accelerators:
                ways = np.maximum(best[:, :-1, begin:end], cost)
                begins[:, 1:, end] = begin + ways.argmin(axis=2)
                best[:, 1:, end] = ways.min(axis=2)
            if self.num_cpus:
                cost = _cost(on_host[:, begin:end], limits, by_sum=by_sum)
                ways = np.maximum(best[:-1, :, begin:end], cost)
                is_better = ways.min(axis=2) < best[1:, :, end]
                on_cpu[1:, :, end] = is_better
                begins[1:, :, end] = np.where(is_better, begin + ways.argmin(axis=2), begins[1:, :, end])
                best[1:, :, end] = np.minimum(ways.min(axis=2), best[1:, :, end])
        if not best[:, :, count].min() < limits.value:
            return None
        return self._trace(best[:, :, count], begins, on_cpu)

    def _first_begins(self, limits: SplitLimits, *, by_sum: bool) -> list[int]:
        """For every end the first beginning of a stretch that some device computes within the limit."""
        columns = slice(0, 2) if by_sum else slice(1, 2)
        firsts = []
        for times, is_there in (
            (self.items.accelerator_time, self.num_accelerators),
            (self.items.cpu_time, self.num_cpus),
        ):
            if is_there:
                work = _sums(times[self.order, columns].sum(axis=1))
                firsts.append(np.searchsorted(work, work - limits.value * (1 + SLACK)))
        begins: list[int] = np.minimum(np.minimum.reduce(firsts), np.arange(len(self.order) + 1) - 1).tolist()
        return begins

    def _join(self, place: int, begin: int, on_accelerator: Floats, on_host: Floats) -> None:
        """Let the item at a place join all stretches that begin at or before it, from `begin` on."""
        item = self.order[place]
        on_accelerator[:, begin : place + 1] += self.items.accelerator_time[item][:, None]
        on_host[:, begin : place + 1] += self.items.cpu_time[item][:, None]
        for net, previous, first in self.joins[place]:
            cost = self.items.net_cost[net][:, None]
            on_accelerator[:, max(begin, previous + 1) : place + 1] += cost
            if first >= begin:
                on_accelerator[:, begin : first + 1] -= cost

    def _trace(self, best: Floats, begins: Integers, on_cpu: NDArray[np.bool_]) -> tuple[int, ...]:
        """From the best cell of the whole line back to its beginning."""
        cpus, accelerators = divmod(int(best.argmin()), best.shape[1])
        where = np.empty(len(self.order), np.int64)
        end = len(self.order)
        while end:
            begin = begins[cpus, accelerators, end]
            if on_cpu[cpus, accelerators, end]:
                cpus -= 1
                where[self.order[begin:end]] = self.items.num_accelerators + cpus
            else:
                accelerators -= 1
                where[self.order[begin:end]] = accelerators
            end = begin
        return tuple(where.tolist())


def _sums(values: Floats | NDArray[np.bool_]) -> Floats:
    """What comes before each place, and in all."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _cost(loads: Floats, limits: SplitLimits, *, by_sum: bool) -> Floats:
    """What each stretch counts for; infinite past the limit on forward loads."""
    cost: Floats = loads.sum(axis=0) if by_sum else np.where(loads[0] < limits.forward, loads[1], np.inf)
    return cost
