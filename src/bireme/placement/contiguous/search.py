"""The best contiguous split of a workload, and how much of that is proven.

The dynamic program runs on items into which operators without time are merged. Where these have a size and
memory is short, a second run that forgets the size proves that nothing was lost by it; where it proves too
little, a third one leaves them alone, if the ideals are not too many then.
"""

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from time import monotonic

import numpy as np

from bireme.compiled import IS_COMPILED
from bireme.errors import BiremeError
from bireme.placement.contiguous.chain import NoSplitFoundError, cut_chain, no_split_fits, no_split_found
from bireme.placement.contiguous.dynamic import DynamicProgram
from bireme.placement.contiguous.ideals import Lattice, lattice_of
from bireme.placement.contraction import (
    SLACK,
    FoundPlacement,
    Items,
    Weightless,
    items_of,
    loads_of,
    simple_bound,
    value_of,
)
from bireme.placement.workload import Objective, Workload

# Contiguous splits of graphs with too many ideals: the best cut of a line of all items, for many lines.
#
# Every topological order makes the graph a line, which `chain.py` cuts in the best way. A walk in depth is a
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
        found = _cut(items, objective, order, _never if best is None else is_over)
        if found is not None and (best is None or found.value < best.value):
            best, best_order = found, order
        best_order = best_order or order
        if (best is not None and is_over()) or (number and _is_line(items)):
            break
    if best is None:
        raise no_split_found(items, "in the orders tried")
    return best


def _never() -> bool:
    return False


def _cut(
    items: Items, objective: Objective, order: list[int], is_over: Callable[[], bool]
) -> FoundPlacement | None:
    try:
        return cut_chain(items, objective, order, is_over)
    except NoSplitFoundError:  # this line has no cut that fits; another may
        return None


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


def _sorted(items: Items, key: Callable[[int, int], object]) -> list[int]:
    """The topological order that takes, of what can come next, what has the smallest key.

    The key is of the item and of how many came before it when it could come.
    """
    waiting = [len(items.before.row(item)) for item in range(len(items))]
    ready = [(key(item, 0), item) for item, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        item = heapq.heappop(ready)[1]
        order.append(item)
        for other in items.after.row(item):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key(other, len(order)), other))
    return order


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
    where = tuple(device_of[members[0]] for members in items.members)
    return FoundPlacement(where, value_of(loads_of(items, where), objective), split.found.lower_bound)
