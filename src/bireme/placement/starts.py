"""Placements that searches begin with: a random one, and one that fills device after device.

Neither proves a bound.
"""

from random import Random

import numpy as np
from numpy.typing import NDArray

from bireme.placement.contiguous.chain import no_split_found
from bireme.placement.contraction import Floats, FoundPlacement, Items, loads_of, value_of
from bireme.placement.workload import Objective

_Places = NDArray[np.int64]

_HALVINGS = 40
"""Of the range in which the lowest level is searched that `greedy` can fill devices up to."""


def random_start(items: Items, random: Random) -> tuple[int, ...]:
    """Each item on an accelerator drawn from those that have room for it, else on a CPU.

    Where there is neither, on the emptiest accelerator, so what comes of it may not fit. Large items draw
    first.
    """
    left = [items.room] * items.num_accelerators
    cpus = range(items.num_accelerators, items.num_devices)
    where = [0] * len(items)
    order = list(range(len(items)))
    random.shuffle(order)
    for item in sorted(order, key=lambda item: -items.size[item]):
        roomy = [device for device, room in enumerate(left) if items.size[item] <= room]
        if roomy and items.supported[item]:
            where[item] = random.choice(roomy)
        elif cpus:
            where[item] = random.choice(cpus)
        else:
            where[item] = left.index(max(left))
        if where[item] < len(left):
            left[where[item]] -= items.size[item]
    return tuple(where)


def greedy(items: Items, objective: Objective) -> FoundPlacement:
    """Fill one device after the other, in the order of the items, up to the lowest level that takes them all.

    The level counts times only: what moves between devices is paid but not looked at. Raises `BiremeError`
    where no cut of this order fits. The split is contiguous where the items are numbered topologically.
    """
    line = _Line(items)
    where = line.fill(np.inf)
    if where is None:
        raise no_split_found(items, "in the order tried")
    low, high = 0.0, 2 * float(items.accelerator_time.sum() + items.cpu_time.sum())
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        filled = line.fill(level)
        if filled is None:
            low = level
        else:
            where, high = filled, level
    return FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)


class _Line:
    """The items in their order, as sums over what comes before each place."""

    def __init__(self, items: Items) -> None:
        self.count = len(items)
        self.first_cpu = items.num_accelerators
        # More devices of a kind than items are of no use.
        self.num_accelerators = min(items.num_accelerators, self.count)
        self.num_cpus = min(items.num_cpus, self.count)
        self.on_accelerator = _sums(items.accelerator_time.sum(axis=1))
        self.on_cpu = _sums(items.cpu_time.sum(axis=1))
        size = _sums(items.size)
        holds = np.searchsorted(size, size + items.room, "right") - 1
        cpu_only = np.append(np.flatnonzero(~items.supported), self.count)
        self.runs_to: _Places = np.minimum(
            holds, cpu_only[np.searchsorted(cpu_only, np.arange(self.count + 1))]
        )

    def fill(self, level: float) -> tuple[int, ...] | None:
        """The device of each item when none is filled above the level; none where they do not all fit."""
        accelerator_ends = np.minimum(self.runs_to, _ends(self.on_accelerator, level))
        cpu_ends = _ends(self.on_cpu, level)
        # After so many devices of each kind, the furthest place reached: more of the line is never worse.
        furthest = np.zeros((self.num_accelerators + 1, self.num_cpus + 1), np.int64)
        for accelerators in range(self.num_accelerators + 1):
            for cpus in range(self.num_cpus + 1):
                if accelerators:
                    furthest[accelerators, cpus] = accelerator_ends[furthest[accelerators - 1, cpus]]
                if cpus:
                    by_cpu = cpu_ends[furthest[accelerators, cpus - 1]]
                    furthest[accelerators, cpus] = max(by_cpu, furthest[accelerators, cpus])
        if furthest[-1, -1] < self.count:
            return None
        return self._trace(furthest, accelerator_ends)

    def _trace(self, furthest: _Places, accelerator_ends: _Places) -> tuple[int, ...]:
        """The devices of a line that is filled, from its end back."""
        accelerators, cpus = self.num_accelerators, self.num_cpus
        where = np.empty(self.count, np.int64)
        while accelerators or cpus:
            end = furthest[accelerators, cpus]
            if accelerators and accelerator_ends[furthest[accelerators - 1, cpus]] == end:
                accelerators -= 1
                device = accelerators
            else:
                cpus -= 1
                device = self.first_cpu + cpus
            where[furthest[accelerators, cpus] : end] = device
        return tuple(where.tolist())


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _ends(sums: Floats, level: float) -> _Places:
    """For every place, how far a device that begins there gets before it is filled."""
    ends: _Places = np.searchsorted(sums, sums + level, "right") - 1
    return ends
