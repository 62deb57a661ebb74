"""A bound on the value of every placement, contiguous or not, by counting work alone.

It looks at times only: communication and memory can make no placement better. So it costs next to nothing
and holds for every objective but latency.
"""

import numpy as np

from bireme.placement.items import Floats, Items
from bireme.placement.workload import Objective

__all__ = ["ROUNDING", "each_maximum", "runs_on_accelerator", "simple_bound"]

ROUNDING = 1e-12
"""Relative room for sums that were added up in another order."""


def simple_bound(items: Items, objective: Objective) -> float:
    """A value that no placement is below: work shared out evenly, or more heavy items than devices.

    Every item must have a device that can take it.
    """
    bound = 0.0
    for on_accelerator, on_cpu in zip(
        each_maximum(items.accelerator_time, objective), each_maximum(items.cpu_time, objective), strict=True
    ):
        least = np.where(runs_on_accelerator(items), on_accelerator, on_cpu)
        if items.num_cpus:
            least = np.minimum(least, on_cpu)
        bound += max(_crowded(least, items.num_devices), _shared_out(items, on_accelerator, on_cpu))
    return bound * (1 - ROUNDING)


def each_maximum(numbers: Floats, objective: Objective) -> Floats:
    """The forward and backward column as what counts: a row for each maximum that the objective adds up."""
    if objective is Objective.FLUSH:
        return numbers.T
    summed: Floats = numbers.sum(axis=1)[np.newaxis, :]
    return summed


def runs_on_accelerator(items: Items) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which items an accelerator can run and hold, alone."""
    fitting = items.supported & (items.size <= items.room)
    return fitting & (items.num_accelerators > 0)


def _crowded(least: Floats, num_devices: int) -> float:
    """Of the `j * m + 1` heaviest items one of `m` devices has `j + 1`: at least the lightest of them."""
    heaviest_first = np.sort(least)[::-1]
    return max(
        float(heaviest_first[others * (num_devices - 1) : others * num_devices + 1].sum())
        for others in range((len(least) - 1) // num_devices + 1)
    )


def _shared_out(items: Items, on_accelerator: Floats, on_cpu: Floats) -> float:
    """The load of all devices if items could be cut, and what gains least by an accelerator is on CPUs."""
    forced = ~runs_on_accelerator(items)
    if not items.num_cpus:
        return float(on_accelerator.sum()) / items.num_accelerators
    if not items.num_accelerators:
        return float(on_cpu.sum()) / items.num_cpus
    movable = (~forced & (on_accelerator > 0)).nonzero()[0]
    movable = movable[np.argsort(on_cpu[movable] / on_accelerator[movable], kind="stable")]
    gone = np.concatenate([[0.0], np.cumsum(on_accelerator[movable])])
    come = np.concatenate([[0.0], np.cumsum(on_cpu[movable])])
    accelerators = (gone[-1] - gone) / items.num_accelerators
    cpus = (on_cpu[forced].sum() + come) / items.num_cpus
    crossing = int((cpus >= accelerators).argmax())
    if not crossing:
        return float(cpus[0])
    ahead = accelerators[crossing - 1] - cpus[crossing - 1]
    share = ahead / (ahead + cpus[crossing] - accelerators[crossing])
    return float(accelerators[crossing - 1] + share * (accelerators[crossing] - accelerators[crossing - 1]))
