"""Contiguous splits of graphs with too many ideals: the best cut of a line of all items, for many lines.

Every topological order makes the graph a line, which `chain.py` cuts in the best way. A walk in depth is a
good order, because neighbours in it feed each other. From the best order so far others are drawn that differ
from it by chance, and a better cut is kept; so the answer never gets worse and the same seed gives the same.
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from random import Random

from bireme.placement.contiguous.chain import NoSplitFoundError, cut_chain, no_split_found
from bireme.placement.found import FoundPlacement
from bireme.placement.items import Items
from bireme.placement.workload import Objective

__all__ = ["cut_lines"]

MOST_LINES = 240
"""Lines that are cut, where they are short."""

WORK = 5e7
"""Stretches times cells of all lines together: what bounds their number where they are long."""

AT_LEAST = 6


def cut_lines(
    items: Items,
    objective: Objective,
    *,
    seed: int = 0,
    most_lines: int = MOST_LINES,
    is_over: Callable[[], bool] = lambda: False,
) -> FoundPlacement:
    """The best cut of all lines tried; raises `NoSplitFoundError` where none fits.

    Whatever `is_over` says, one line is cut, and more as long as none fits that was not drawn by chance.
    """
    random = Random(seed)
    cells = (items.num_accelerators + 1) * (items.num_cpus + 1)
    num_lines = min(most_lines, max(AT_LEAST, int(WORK / (len(items) ** 2 * cells))))
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
