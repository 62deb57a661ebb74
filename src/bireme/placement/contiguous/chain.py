"""The best cut of a line of items among the devices: exact for the line, in the square of its length.

For items in a given order, a device takes a stretch `[begin, end)`. Row by row over `end`, the loads of all
stretches that end there are kept up to date at once: item `end - 1` joins every stretch that begins at or
before it, and each of its nets becomes cut, or whole, for a range of beginnings that the places of the net's
other pins tell. So a row costs the nets of one item and a few operations on arrays.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.placement.contiguous.ideals import SplitLimits, flush_by_limits
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
    return FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)


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
