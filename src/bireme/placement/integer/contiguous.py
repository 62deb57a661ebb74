"""The best contiguous placement as an integer program on HiGHS.

The devices are in a line of slots, and no edge of the order leads back in it:

    slot       0        1        2        3
            [ a b ]  [ c e ]  [ d ]    [ f ]        an accelerator or a CPU in each
    by[e]      0        1        1                  whether e is in this slot or one before it

So the columns `by` rise along the line and fall along the edges, and an item is in the slot where its own
rise. The program has the same optimum as the dynamic program over ideals, and needs no list of ideals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.placement.contraction import Floats, FoundPlacement, Integers, Items
from bireme.placement.integer.anywhere import PlacementModel, best_of
from bireme.placement.integer.program import (
    FULL_SCALE,
    Columns,
    Frame,
    IntegerProgram,
    cut_nets,
    frame_of,
    memory_rows,
    sizes_in_scale,
)
from bireme.placement.workload import Objective

# The order of items for an integer program: its edges without those that follow from others, and how early
# and how late in a line of devices an item can be, by the work and the bytes that must be before and after
# it.

_TOLERANCE = 1e-6
"""The share of a device that work may be over before it is counted as needing another one."""


@dataclass(frozen=True, slots=True, eq=False)
class _ItemOrder:
    """The edges that are needed, from `leaders[e]` to `followers[e]`; and `upto[i, j]`: is `j` before `i`.

    An item counts as being before itself.
    """

    leaders: Integers
    followers: Integers
    upto: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The first and the last slot that each item can be in."""

    earliest: Integers
    latest: Integers


def _order_of(items: Items) -> _ItemOrder:
    """The order, closed and reduced."""
    upto = np.eye(len(items), dtype=np.bool_)
    leaders, followers = [], []
    for item in range(len(items)):
        before = np.array(items.before.row(item), np.int64)
        if before.size:
            upto[item] |= upto[before].any(axis=0)
            # A predecessor is before itself; whoever is before a second one too is implied by that one.
            needed = before[upto[np.ix_(before, before)].sum(axis=0) == 1]
            leaders += needed.tolist()
            followers += [item] * len(needed)
    return _ItemOrder(np.array(leaders, np.int64), np.array(followers, np.int64), upto)


def _windows_of(frame: Frame, order: _ItemOrder, num_slots: int) -> Windows:
    """The slots that each item can be in where no device has more than the frame's ceiling."""
    needs = _devices_needed(frame, order.upto)
    needs_after = _devices_needed(frame, order.upto.T)
    earliest = np.minimum(needs - 1, num_slots - 1)
    latest = np.maximum(num_slots - needs_after, 0)
    return Windows(earliest.astype(np.int64), latest.astype(np.int64))


def _devices_needed(frame: Frame, sets: NDArray[np.bool_]) -> Integers:
    """How many devices the items of each row take at least."""
    least: Floats = np.where(frame.on_accelerator, frame.accelerator_time.sum(axis=0), np.inf)
    least = np.minimum(least, np.where(frame.on_cpu, frame.cpu_time.sum(axis=0), np.inf))
    shares = [sets @ least / frame.ceiling]
    if not frame.items.num_cpus:
        shares.append(sets @ sizes_in_scale(frame.items) / FULL_SCALE)
    needed: Integers = np.maximum(1, np.ceil(np.max(shares, axis=0) - _TOLERANCE)).astype(np.int64)
    return needed


def solve_contiguous(
    items: Items,
    objective: Objective,
    *,
    time_limit_s: float,
    start: Sequence[int] | None = None,
) -> FoundPlacement:
    """The best contiguous placement; `start` must be contiguous. See `best_of`."""
    frame = frame_of(items, objective, start)
    if frame.start is not None:
        _line_of(items, frame.start.where)  # refuses a start that is not contiguous
    return best_of(frame, _ContiguousModel, time_limit_s=time_limit_s)


class _ContiguousModel(PlacementModel):
    """The program for a frame. Columns are `[item, slot]`; there is none of a kind that has no device."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.items, self.program = frame, frame.items, IntegerProgram()
        self.num_accelerators = min(self.items.num_accelerators, len(self.items))
        self.num_cpus = min(self.items.num_cpus, len(self.items))
        self.num_slots = self.num_accelerators + self.num_cpus
        self.maxima = frame.add_maxima(self.program)
        self.by = self._add_order()
        self.is_cpu = self._add_kinds()
        self.on_accelerator = self._add_kind(self.num_accelerators, frame.on_accelerator)
        self.on_cpu = self._add_kind(self.num_cpus, frame.on_cpu)
        self._place_each()
        self.nets = cut_nets(self.program, self.items, self.on_accelerator) if self.num_accelerators else []
        self._add_loads()
        memory_rows(self.program, self.items, self.on_accelerator.T)

    def where_of(self, values: Floats) -> list[int] | None:
        slots = self.num_slots - 1 - np.rint(values[self.by]).astype(np.int64).sum(axis=1)
        is_cpu = values[self.is_cpu] > 0.5
        numbers = np.where(
            is_cpu, self.items.num_accelerators + np.cumsum(is_cpu) - 1, np.cumsum(~is_cpu) - 1
        )
        goes_back = any(
            slots[self.items.before.row(item)].max(initial=0) > slots[item] for item in range(len(slots))
        )
        return None if goes_back else numbers[slots].tolist()

    def values_of(self, where: Sequence[int]) -> Floats:
        line = _line_of(self.items, where)  # empty devices come after it
        slot_of = {device: slot for slot, device in enumerate(line)}
        slots = np.array([slot_of[device] for device in where])
        is_cpu = [device >= self.items.num_accelerators for device in line]
        free_cpus = self.num_cpus - sum(is_cpu)
        is_cpu += [True] * free_cpus + [False] * (self.num_slots - len(line) - free_cpus)
        values = np.zeros(self.program.num_columns)
        values[self.maxima] = self.frame.maxima_of(where)
        values[self.by] = slots[:, np.newaxis] <= np.arange(self.num_slots - 1)
        values[self.is_cpu] = is_cpu
        there = slots[:, np.newaxis] == np.arange(self.num_slots)
        values[self.on_accelerator] = (there & ~np.array(is_cpu))[:, : self.on_accelerator.shape[1]]
        values[self.on_cpu] = (there & np.array(is_cpu))[:, : self.on_cpu.shape[1]]
        for group in self.nets:
            group.complete(values)
        return values

    def _add_order(self) -> Columns:
        """Columns that rise along the line and fall along the edges, in the windows the work leaves."""
        order = _order_of(self.items)
        windows = _windows_of(self.frame, order, self.num_slots)
        slots = np.arange(self.num_slots - 1)
        by = self.program.add_columns(
            (len(self.items), self.num_slots - 1),
            lower=slots >= windows.latest[:, np.newaxis],
            upper=slots >= windows.earliest[:, np.newaxis],
            is_integer=True,
        )
        self._less(by[:, :-1], by[:, 1:])
        self._less(by[order.followers], by[order.leaders])
        return by

    def _add_kinds(self) -> Columns:
        """A column for each slot: whether a CPU is in it."""
        is_sure = not (self.num_cpus and self.num_accelerators)
        is_cpu = self.program.add_columns(
            self.num_slots, lower=is_sure and self.num_cpus > 0, upper=self.num_cpus > 0, is_integer=True
        )
        self.program.add_rows(is_cpu[np.newaxis, :], 1.0, lower=self.num_cpus, upper=self.num_cpus)
        return is_cpu

    def _add_kind(self, num_devices: int, able: NDArray[np.bool_]) -> Columns:
        """Columns for items on devices of a kind."""
        shape = (len(self.items), self.num_slots if num_devices else 0)
        return self.program.add_columns(shape, upper=able[:, np.newaxis])

    def _place_each(self) -> None:
        """An item is in the slot where its `by` rises, on a device of the kind that is there."""
        for slot in range(self.num_slots):
            here = [kind[:, slot] for kind in (self.on_accelerator, self.on_cpu) if kind.size]
            columns, signs, risen = here.copy(), [1.0] * len(here), 0.0
            if slot < self.num_slots - 1:
                columns.append(self.by[:, slot])
                signs.append(-1.0)
            else:
                risen = 1.0
            if slot:
                columns.append(self.by[:, slot - 1])
                signs.append(1.0)
            self.program.add_rows(np.column_stack(columns), signs, lower=risen, upper=risen)
            if len(here) == 2:
                kind = np.full(len(self.items), self.is_cpu[slot])
                self.program.add_rows(np.column_stack([here[0], kind]), 1.0, upper=1.0)
                self._less(here[1], kind)

    def _add_loads(self) -> None:
        """No slot has more than the maximum; what its kind of device does not do is 0."""
        frame = self.frame
        for maximum, on_accelerator, on_cpu, cost in zip(
            self.maxima, frame.accelerator_time, frame.cpu_time, frame.net_cost, strict=True
        ):
            columns = [np.full((self.num_slots, 1), maximum)]
            factors = [np.array([-1.0])]
            for kind, times in ((self.on_accelerator, on_accelerator), (self.on_cpu, on_cpu)):
                if kind.size:
                    columns.append(kind.T)
                    factors.append(times)
            columns += [group.payers() for group in self.nets]
            factors += [group.prices(cost) for group in self.nets]
            self.program.add_rows(np.hstack(columns), np.concatenate(factors), upper=0.0)

    def _less(self, smaller: Columns, larger: Columns) -> None:
        """Rows that hold each column of the one below its fellow of the other."""
        self.program.add_rows(np.column_stack([smaller.ravel(), larger.ravel()]), [1, -1], upper=0.0)


def _line_of(items: Items, where: Sequence[int]) -> list[int]:
    """The devices in use, in an order that no edge leads back in."""
    waits_for: dict[int, set[int]] = {device: set() for device in sorted(where)}
    for item, device in enumerate(where):
        waits_for[device].update(where[other] for other in items.before.row(item))
    line: list[int] = []
    while len(line) < len(waits_for):
        ready = (d for d in waits_for if d not in line and waits_for[d] <= {d, *line})
        following = next(ready, None)
        if following is None:
            raise BiremeError(
                "The placement to start from is not contiguous: some of its devices wait for each other in a "
                "circle. Start from another one, or from none."
            )
        line.append(following)
    return line
