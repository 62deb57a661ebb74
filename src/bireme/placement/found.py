"""What a solver found on `Items`, and what a placement of them comes to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bireme.placement.items import Floats, Items
from bireme.placement.workload import Objective

__all__ = ["FoundPlacement", "fits", "loads_of", "value_of"]

SLACK = 1e-9
"""Relative: values that differ by less are the same, added up in another order."""


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A placement: the device of each item, its value, and a value that no placement is below."""

    where: tuple[int, ...]
    value: float
    lower_bound: float


def loads_of(items: Items, where: Sequence[int]) -> Floats:
    """Forward and backward load of each device, in two columns; who computes on a CPU moves nothing."""
    loads = np.zeros((items.num_devices, 2))
    for item, device in enumerate(where):
        on_accelerator = device < items.num_accelerators
        loads[device] += (items.accelerator_time if on_accelerator else items.cpu_time)[item]
    for net, cost in enumerate(items.net_cost):
        devices = {where[pin] for pin in items.pins.row(net)}
        if len(devices) > 1:
            for device in devices:
                if device < items.num_accelerators:
                    loads[device] += cost
    return loads


def value_of(loads: Floats, objective: Objective) -> float:
    """What the loads of all devices come to."""
    if objective is Objective.FLUSH:
        return float(loads[:, 0].max() + loads[:, 1].max())
    return float(loads.sum(axis=1).max())


def fits(items: Items, where: Sequence[int]) -> bool:
    """Whether accelerators can run and hold what they are given."""
    sizes = np.zeros(items.num_devices)
    for item, device in enumerate(where):
        if device < items.num_accelerators:
            if not items.supported[item]:
                return False
            sizes[device] += items.size[item]
    return bool((sizes <= items.room).all())
