"""The best placement of any kind, contiguous or not, as an integer program on HiGHS.

A column for each item and each device says whether the one is on the other; accelerators pay for the nets
they cut. Only nets are looked at, no graph. Equal devices are told apart by the heaviest item they have, so
that of all placements that differ in the numbers of devices alone the search sees few.
"""

import time
from collections.abc import Sequence

import numpy as np

from bireme.placement.found import FoundPlacement
from bireme.placement.integer.loads import Frame, frame_of, memory_rows
from bireme.placement.integer.nets import cut_nets
from bireme.placement.integer.program import Columns, IntegerProgram
from bireme.placement.integer.spreading import bounded
from bireme.placement.items import Floats, Integers, Items
from bireme.placement.workload import Objective

__all__ = ["solve_any"]

ORDERED_ITEMS_PER_DEVICE = 4
"""Equal devices are told apart by so many of the heaviest items; rows for the light ones do not pay."""


def solve_any(
    items: Items,
    objective: Objective,
    *,
    time_limit_s: float,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
) -> FoundPlacement:
    """The best placement, or the best one known when the time is over; never worse than `start`.

    The search also ends when value and bound are no more than `gap` apart, relative. The placement need not
    be contiguous. Raises `BiremeError` where no placement fits, or none was found in time.
    """
    began = time.monotonic()
    frame = frame_of(items, objective, start)
    frame = bounded(frame, time_limit_s=time_limit_s)
    if frame.is_settled(gap):
        return frame.found()
    model = _Model(frame)
    solved = model.program.solve(
        time_limit_s=time_limit_s - (time.monotonic() - began),
        start=None if frame.start is None else model.values_of(frame.start.where),
        gap=gap,
        target=frame.target(gap),
    )
    return frame.found(solved, None if solved.values is None else model.where_of(solved.values))


class _Model:
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
        """The placement that a solution stands for."""
        devices: list[int] = values[self.on].argmax(axis=1).tolist()
        return devices

    def values_of(self, where: Sequence[int]) -> Floats:
        """The columns for a placement, after equal devices are renumbered into the program's order."""
        renamed = self._in_order(where)
        values = np.zeros(self.program.num_columns)
        values[self.maxima] = self.frame.maxima_of(where)
        values[self.on[np.arange(len(self.items)), renamed]] = 1.0
        for group in self.nets:
            group.complete(values)
        return values

    def _in_order(self, where: Sequence[int]) -> Integers:
        """Devices of a kind renumbered by their first item, in the order of `rank`."""
        accelerators = self.items.num_accelerators
        new: dict[int, int] = {}
        free = [iter(range(accelerators)), iter(range(accelerators, self.items.num_devices))]
        for item in self.rank.tolist():
            if where[item] not in new:
                new[where[item]] = next(free[where[item] >= accelerators])
        return np.array([new[device] for device in where], np.int64)

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
        for place, item in enumerate(ranked[: ORDERED_ITEMS_PER_DEVICE * num_alike]):
            for device in range(1, num_alike):
                earlier = on[ranked[:place], device - 1]
                columns = np.concatenate([on[item, device:], earlier])
                signs = np.repeat([1.0, -1.0], [num_alike - device, place])
                self.program.add_rows(columns[np.newaxis, :], signs, upper=0.0)
