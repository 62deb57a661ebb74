"""The best placement as an integer program on HiGHS: of any kind first, then of the contiguous ones.

A column for each item and each device says whether the one is on the other; accelerators pay for the nets
they cut. Only nets are looked at, no graph. Equal devices are ordered by the heaviest item they have, so
that of all placements that differ in the numbers of devices alone the search sees few.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bireme.placement.contraction import ROUNDING, Floats, FoundPlacement, Integers, Items, essential_edges
from bireme.placement.program import (
    FULL_SCALE,
    SOLVER_ROUNDING,
    Columns,
    CutNets,
    Frame,
    IntegerProgram,
    beside,
    cut_nets,
    frame_of,
    memory_rows,
    sizes_in_scale,
)
from bireme.placement.workload import Objective

# A bound on the value of every placement that knows of communication, by one linear program without devices.
#
# Spread evenly over all devices, fractions of items cut no net, so the first bound of a program with a column
# for each item and device is work alone. Here `apart[v]` says, for an item that is the *root*, whether item
# `v` is on another device; where the root is on a CPU all are apart, itself too. What is not apart is on the
# root's accelerator, which must not be loaded above the maximum; so most items must be apart. And two pins of
# a net can differ in that only as far as the net is paid for: once by the root's accelerator, and once more
# by the other pin's, if that is one. What all pay together is shared out evenly. These are the spreading
# metrics of Even, Naor, Rao and Schieber ("Divide-and-conquer approximation algorithms via spreading
# metrics", 2000), with a few roots for all items.

_NUM_ROOTS = (4, 12)
"""The bound hardly rises with more roots. A few are tried first, to learn how long it takes."""

_TIMES_LONGER = 5.0
"""How much longer all devices take than the few."""


def spreading_bound(frame: Frame, *, time_limit_s: float) -> float:
    """A value that no placement better than the frame's start is below, contiguous or not.

    In the scale of the frame and never below its `floor`, which it is where the time does not suffice.
    """
    # With the start itself in it, the linear program has a solution.
    frame = replace(frame, ceiling=frame.ceiling * (1 + 2 * SOLVER_ROUNDING))
    bound, left_s = frame.floor, time_limit_s
    for num_roots in _NUM_ROOTS:
        began = time.monotonic()
        roots = _roots(frame, num_roots)
        if roots:
            program = _Spreading(frame, roots).program
            bound = max(bound, program.relaxed_bound(time_limit_s=left_s) * (1 - ROUNDING))
        took_s = time.monotonic() - began
        left_s -= took_s
        if _TIMES_LONGER * took_s > left_s:
            break
    return bound


class _Spreading:
    """The linear program for a frame and some roots."""

    def __init__(self, frame: Frame, roots: list[int]) -> None:
        self.frame, self.items, self.num_roots = frame, frame.items, len(roots)
        self.program = IntegerProgram()
        self.maxima = frame.add_maxima(self.program)
        self.paid = self.program.add_columns(len(self.items.net_cost), upper=self.items.num_accelerators)
        self.on_cpu = self.program.add_columns(
            len(self.items), lower=~frame.on_accelerator, upper=frame.on_cpu
        )
        self.apart = self.program.add_columns((len(self.items), len(roots)), upper=1.0)
        own = self.apart[roots, np.arange(len(roots))]
        self.program.less(own, self.on_cpu[roots])
        self._share_out()
        self._cut(self.on_cpu[:, np.newaxis])
        self._load_roots(self._cut(self.apart))
        self.program.less(self.on_cpu[:, np.newaxis], self.apart)

    def _share_out(self) -> None:
        """All devices of a kind together have no more than the maximum times their number."""
        frame, num_cpus = self.frame, self.items.num_cpus
        for maximum, on_accelerator, on_cpu, cost in zip(
            self.maxima, frame.accelerator_time, frame.cpu_time, frame.net_cost, strict=True
        ):
            columns = np.concatenate([[maximum], self.on_cpu, self.paid])
            factors = np.concatenate([[-self.items.num_accelerators], -on_accelerator, cost])
            self.program.add_rows(columns[np.newaxis, :], factors, upper=-on_accelerator.sum())
            columns = np.concatenate([[maximum], self.on_cpu])
            self.program.add_rows(columns[np.newaxis, :], np.append([-num_cpus], on_cpu), upper=0.0)

    def _cut(self, columns: Columns) -> list[CutNets]:
        """Pins of a net differ by no more than what is paid for it."""
        groups = cut_nets(self.program, self.items, columns)
        for group in groups:
            parts = [
                group.high,
                self.paid[group.numbers, np.newaxis],
                *([group.low] if len(group.low) else []),
            ]
            self.program.add_rows(beside(*parts), [1.0, -1.0, -1.0][: len(parts)], upper=0.0)
        return groups

    def _load_roots(self, groups: list[CutNets]) -> None:
        """What is not apart from a root is on its accelerator, with the nets that cuts."""
        frame = self.frame
        for group in groups:
            self._pay_twice(group)
        for maximum, work, cost in zip(self.maxima, frame.accelerator_time, frame.net_cost, strict=True):
            largest = np.full((self.num_roots, 1), maximum)
            columns = np.hstack([largest, self.apart.T, *(group.payers() for group in groups)])
            factors = np.concatenate([[-1.0], -work, *(group.prices(cost) for group in groups)])
            self.program.add_rows(columns, factors, upper=-work.sum())
        sizes = sizes_in_scale(self.items)
        self.program.add_rows(self.apart.T, -sizes, upper=FULL_SCALE - sizes.sum())

    def _pay_twice(self, group: CutNets) -> None:
        """A pin that is apart while another is not makes its own device pay too, unless that is a CPU."""
        paid = self.paid[group.numbers, np.newaxis]
        starts = self.items.pins.starts[group.numbers]
        for pin in range(group.pins.shape[1]):
            on_cpu = self.on_cpu[self.items.pins.values[starts + pin], np.newaxis]
            least = group.low if len(group.low) else group.pins[:, 1 - pin]
            self.program.add_rows(
                beside(group.pins[:, pin], least, on_cpu, paid), [2.0, -2.0, -1.0, -1.0], upper=0.0
            )


def _roots(frame: Frame, num_roots: int) -> list[int]:
    """The heaviest item of each stretch of equal work, of those that can be on an accelerator."""
    work = frame.accelerator_time.sum(axis=0)
    middle = np.cumsum(work) - work / 2
    stretch = np.minimum(middle / max(work.sum(), 1e-300) * num_roots, num_roots - 1).astype(np.int64)
    here = (np.flatnonzero(frame.on_accelerator & (stretch == number)) for number in range(num_roots))
    return [int(items[work[items].argmax()]) for items in here if items.size]


_ORDERED_ITEMS_PER_DEVICE = 4
"""Equal devices are ordered by this number of their heaviest items; rows for light items do not pay."""


_BOUND_SHARE = 0.2
"""The most of a program's time that goes into a bound beforehand, which large ones never rise to."""


class PlacementModel(ABC):
    """An integer program for the placements that are better than a frame's start."""

    program: IntegerProgram

    @abstractmethod
    def where_of(self, values: Floats) -> list[int] | None:
        """The placement that a solution stands for; None where rounding has spoilt it."""


def best_of(
    frame: Frame, model_of: Callable[[Frame], PlacementModel], *, time_limit_s: float
) -> FoundPlacement:
    """The best placement of a model, or the best one known when the time is over.

    It is never worse than the frame's start. Raises `BiremeError` where no placement fits, or none was found
    in time.
    """
    began = time.monotonic()
    if not frame.is_settled():
        frame = frame.above(spreading_bound(frame, time_limit_s=_BOUND_SHARE * time_limit_s))
    if frame.is_settled():
        return frame.found()
    model = model_of(frame)
    solved = model.program.solve(time_limit_s=time_limit_s - (time.monotonic() - began), target=frame.target)
    return frame.found(solved, None if solved.values is None else model.where_of(solved.values))


def solve_any(
    items: Items, objective: Objective, *, time_limit_s: float, start: Sequence[int] | None = None
) -> FoundPlacement:
    """The best placement, which need not be contiguous; see `best_of`."""
    return best_of(frame_of(items, objective, start), _AnyModel, time_limit_s=time_limit_s)


class _AnyModel(PlacementModel):
    """The program for a frame."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.items = frame.items
        self.program = IntegerProgram()
        self.rank = np.argsort(-frame.accelerator_time.sum(axis=0), kind="stable")
        accelerators, cpus = self.items.num_accelerators, self.items.num_cpus
        self.maxima = frame.add_maxima(self.program)
        self.on = self.program.add_columns(
            (len(self.items), accelerators + cpus), upper=self._may_be_on(), is_integer=True
        )
        self.program.add_rows(self.on, 1.0, lower=1.0, upper=1.0)
        self.nets = cut_nets(self.program, self.items, self.on[:, :accelerators]) if accelerators else []
        self._add_loads()
        memory_rows(self.program, self.items, self.on.T[:accelerators])
        self._order_alike(self.on[:, :accelerators], frame.on_accelerator)
        self._order_alike(self.on[:, accelerators:], frame.on_cpu)

    def where_of(self, values: Floats) -> list[int]:
        devices: list[int] = values[self.on].argmax(axis=1).tolist()
        return devices

    def _may_be_on(self) -> Floats:
        kinds = (
            np.tile(self.frame.on_accelerator[:, np.newaxis], self.items.num_accelerators),
            np.tile(self.frame.on_cpu[:, np.newaxis], self.items.num_cpus),
        )
        return np.hstack(kinds).astype(np.float64)

    def _add_loads(self) -> None:
        """No device has more than the maximum, forward and backward together or each with its own."""
        frame, accelerators = self.frame, self.items.num_accelerators
        for maximum, compute, on_cpu, cost in zip(
            self.maxima, frame.accelerator_time, frame.cpu_time, frame.net_cost, strict=True
        ):
            largest = np.full((self.items.num_devices, 1), maximum)
            columns, factors = [largest[:accelerators], self.on.T[:accelerators]], [[-1.0], compute]
            columns += [group.payers() for group in self.nets]
            factors += [group.prices(cost) for group in self.nets]
            self.program.add_rows(np.hstack(columns), np.concatenate(factors), upper=0.0)
            columns, factors = [largest[accelerators:], self.on.T[accelerators:]], [[-1.0], on_cpu]
            self.program.add_rows(np.hstack(columns), np.concatenate(factors), upper=0.0)

    def _order_alike(self, on: Columns, able: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Equal devices in the order of their first items: an item opens a device if all before it are open.

        Of the renumberings of a placement one is left. An item may be on device `d` or a later one only if
        an item of an earlier rank is on device `d - 1`.
        """
        num_alike = on.shape[1]
        ranked = [item for item in self.rank.tolist() if able[item]]
        for place, item in enumerate(ranked[: _ORDERED_ITEMS_PER_DEVICE * num_alike]):
            for device in range(1, num_alike):
                earlier = on[ranked[:place], device - 1]
                columns = np.concatenate([on[item, device:], earlier])
                signs = np.repeat([1.0, -1.0], [num_alike - device, place])
                self.program.add_rows(columns[np.newaxis, :], signs, upper=0.0)


# The best contiguous placement as an integer program on HiGHS.
#
# The devices are in a line of slots, and no edge of the order leads back in it:
#
#     slot       0        1        2        3
#             [ a b ]  [ c e ]  [ d ]    [ f ]        an accelerator or a CPU in each
#     by[e]      0        1        1                  whether e is in this slot or one before it
#
# So the columns `by` rise along the line and fall along the edges, and an item is in the slot where its own
# rise. The program has the same optimum as the dynamic program over ideals, and needs no list of ideals.

# How early and how late in a line of devices an item can be, by the work and the bytes that must be before
# and after it.

_TOLERANCE = 1e-6
"""The share of a device that work may be over before it is counted as needing another one."""


def _windows_of(frame: Frame, num_slots: int) -> tuple[Integers, Integers]:
    """The first and the last slot that each item can be in if no device has more than the frame's ceiling."""
    upto = np.eye(len(frame.items), dtype=np.bool_)  # upto[i, j]: is item j before i, or i itself
    for item in range(len(frame.items)):
        upto[item] |= upto[frame.items.before.row(item)].any(axis=0)
    needs, needs_after = _devices_needed(frame, upto), _devices_needed(frame, upto.T)
    earliest = np.minimum(needs - 1, num_slots - 1)
    latest = np.maximum(num_slots - needs_after, 0)
    return earliest.astype(np.int64), latest.astype(np.int64)


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
    items: Items, objective: Objective, *, time_limit_s: float, start: Sequence[int] | None = None
) -> FoundPlacement:
    """The best contiguous placement; `start` must be contiguous. See `best_of`."""
    return best_of(frame_of(items, objective, start), _ContiguousModel, time_limit_s=time_limit_s)


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

    def _add_order(self) -> Columns:
        """Columns that rise along the line and fall along the edges, in the windows the work leaves."""
        earliest, latest = _windows_of(self.frame, self.num_slots)
        slots = np.arange(self.num_slots - 1)
        by = self.program.add_columns(
            (len(self.items), self.num_slots - 1),
            lower=slots >= latest[:, np.newaxis],
            upper=slots >= earliest[:, np.newaxis],
            is_integer=True,
        )
        self.program.less(by[:, :-1], by[:, 1:])
        leaders, followers = essential_edges(self.items.after).T
        self.program.less(by[followers], by[leaders])
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
            is_last = slot == self.num_slots - 1
            now, before = self.by[:, slot : slot + 1].T, self.by[:, slot - 1 : slot].T if slot else ()
            signs = np.repeat([1.0, -1.0, 1.0], [len(here), len(now), len(before)])
            self.program.add_rows(beside(*here, *now, *before), signs, lower=is_last, upper=is_last)
            if len(here) == 2:
                kind = self.is_cpu[slot]
                self.program.add_rows(beside(here[0], kind), 1.0, upper=1.0)
                self.program.less(here[1], kind)

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
