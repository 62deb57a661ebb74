"""The dynamic program over ideals: the best contiguous split, exactly.

An ideal is what the first devices of the line have together; the next device takes the difference to a larger
one. So the best split of an ideal over so many devices follows from those of all ideals inside it. Only
splits below a limit are looked for, that of the best split known before, and where none is found that one
was the best.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from bireme.cluster.machine import num_cores
from bireme.placement.bounds import simple_bound
from bireme.placement.contiguous.ideals import Lattice, Narrow
from bireme.placement.contiguous.limits import SplitLimits, flush_by_limits
from bireme.placement.contiguous.sweep import sweep
from bireme.placement.found import SLACK, FoundPlacement, loads_of, value_of
from bireme.placement.items import Floats, Items
from bireme.placement.workload import Objective

__all__ = ["DynamicProgram"]

AT_ONCE = 64
"""Ideals that a thread takes at a time."""

MOST_THREADS = 8


class DynamicProgram:
    """The dynamic program over the ideals of some items, until a moment of the monotonic clock.

    `num_pairs` counts the pairs of ideals that were looked at.
    """

    def __init__(self, items: Items, lattice: Lattice, stop_at: float = math.inf) -> None:
        self.items = items
        self.lattice = lattice
        self.stop_at = stop_at
        self.num_pairs = 0
        self.num_accelerators = min(items.num_accelerators, len(items))
        self.num_cpus = min(items.num_cpus, len(items))

    def is_over(self) -> bool:
        """Whether the time is."""
        return monotonic() > self.stop_at

    def best(self, objective: Objective, start: tuple[int, ...] | None = None) -> FoundPlacement | None:
        """The best split; None where none fits. `start` is a split of the same items that is known.

        Where the time limit strikes it is the best so far, and its lower bound tells what is proven.
        """
        if objective is Objective.FLUSH:
            return self._flush(start)
        known = math.inf if start is None else value_of(loads_of(self.items, start), objective)
        bound = simple_bound(self.items, objective)
        if known <= bound * (1 + SLACK):
            return FoundPlacement(start, known, known) if start is not None else None
        where = self._split(SplitLimits(value=known * (1 - SLACK)), by_sum=True)
        if where is None and start is None:
            return None
        if where is None:
            assert start is not None
            where = start
        value = value_of(loads_of(self.items, where), objective)
        return FoundPlacement(where, value, min(value, bound) if self.is_over() else value)

    def _flush(self, start: tuple[int, ...] | None) -> FoundPlacement | None:
        steps = flush_by_limits(
            self.items,
            lambda limits: self._split(limits, by_sum=False),
            forward_bound=self._forward_bound(),
            start=start,
            is_over=self.is_over,
        )
        if steps.where is None:
            return None
        value = value_of(loads_of(self.items, steps.where), Objective.FLUSH)
        bound = max(steps.lower_bound, simple_bound(self.items, Objective.FLUSH))
        return FoundPlacement(steps.where, value, min(value, bound))

    def _forward_bound(self) -> float:
        """A forward load that some device has in every split."""
        forward = np.array([1.0, 0.0])
        alone = replace(
            self.items,
            accelerator_time=self.items.accelerator_time * forward,
            cpu_time=self.items.cpu_time * forward,
        )
        return simple_bound(alone, Objective.THROUGHPUT)

    def _split(self, limits: SplitLimits, *, by_sum: bool) -> tuple[int, ...] | None:
        """The best split within the limits, by the sum of forward and backward or by backward alone."""
        table = _Table(self, limits, by_sum=by_sum)
        for _ in table.fill():
            if self.is_over():
                return None
        return table.trace()


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Times and costs as the sweep wants them: what is limited, and what is made small."""

    accelerator_time: Floats
    cpu_time: Floats
    net_cost: Floats

    @classmethod
    def of(cls, items: Items, *, by_sum: bool) -> "_Columns":
        tables = items.accelerator_time, items.cpu_time, items.net_cost
        if not by_sum:
            return cls(*tables)
        return cls(*(np.column_stack((np.zeros(len(t)), t.sum(axis=1))) for t in tables))


class _Table:
    """The cells of the dynamic program: for each ideal, by how many devices of each kind it has."""

    def __init__(self, program: DynamicProgram, limits: SplitLimits, *, by_sum: bool) -> None:
        self.program, self.items, self.lattice = program, program.items, program.lattice
        self.limits = limits
        self.columns = _Columns.of(self.items, by_sum=by_sum)
        shape = len(self.lattice), program.num_cpus + 1, program.num_accelerators + 1
        self.best = np.full(shape, np.inf)
        self.best[0, 0, 0] = 0.0
        self.came_from = np.zeros(shape, np.int32)
        self.came_by_cpu = np.zeros(shape, np.bool_)
        self.fewest = np.full(shape[:2], shape[2], np.int32)
        self.fewest[0, 0] = 0
        self.most = self._most()

    def _most(self) -> Narrow:
        """For each ideal and number of CPUs the most accelerators from which the rest can still be done."""
        program, items = self.program, self.items
        weight = np.where(items.supported, self.columns.accelerator_time[:, 1], 0.0)
        on_cpu = self.columns.cpu_time[:, 1]
        ratio = np.divide(weight, on_cpu, out=np.full_like(weight, np.inf), where=on_cpu > 0)
        # A CPU is worth so many accelerators at best.
        worth = ratio[weight > 0].max(initial=0.0)
        done = self.lattice.sums(weight)
        needed = (done[-1] - done) / self.limits.value
        left = np.arange(program.num_cpus, -1, -1, dtype=np.float64)
        spare = np.multiply(left, worth, out=np.zeros(len(left)), where=left > 0)
        most = program.num_accelerators + spare[None, :] - needed[:, None]
        most = np.floor(np.minimum(most + 1e-6, program.num_accelerators))
        # Something is left of all but the whole, so a device must be, too.
        most[:-1, -1] = np.minimum(most[:-1, -1], program.num_accelerators - 1)
        most[-1] = program.num_accelerators
        rounded: Narrow = np.maximum(most, -1).astype(np.int32)
        return rounded

    def fill(self) -> Iterator[None]:
        """Go through the ideals by size; yields now and then."""
        num_threads = min(MOST_THREADS, num_cores())
        self._sweep(np.zeros(0, np.int64))  # compiled before threads want it
        with ThreadPoolExecutor(num_threads) as threads:
            for begin, end in zip(self.lattice.levels[1:-1], self.lattice.levels[2:], strict=True):
                chunks = [np.arange(at, min(at + AT_ONCE, end)) for at in range(begin, end, AT_ONCE)]
                for first in range(0, len(chunks), 4 * num_threads):
                    some = chunks[first : first + 4 * num_threads]
                    work = threads.map(self._sweep, some) if len(some) > 1 else map(self._sweep, some)
                    self.program.num_pairs += sum(work)
                    yield

    def _sweep(self, uppers: NDArray[np.int64]) -> int:
        items, lattice, columns = self.items, self.lattice, self.columns
        return sweep(
            uppers,
            lattice.starts,
            lattice.taken,
            lattice.below,
            columns.accelerator_time,
            columns.cpu_time,
            items.size,
            items.supported,
            items.nets.starts,
            items.nets.values,
            np.diff(items.pins.starts),
            columns.net_cost,
            items.room,
            self.limits.forward,
            self.limits.value,
            self.best,
            self.came_from,
            self.came_by_cpu,
            self.fewest,
            self.most,
        )

    def trace(self) -> tuple[int, ...] | None:
        """From the best cell of the whole set down to the empty one."""
        whole = len(self.lattice) - 1
        best = self.best[whole]
        if not best.min() < self.limits.value:
            return None
        cpus, accelerators = divmod(int(best.argmin()), best.shape[1])
        where = [0] * len(self.items)
        ideal = whole
        while ideal:
            lower = int(self.came_from[ideal, cpus, accelerators])
            if self.came_by_cpu[ideal, cpus, accelerators]:
                cpus -= 1
                device = self.items.num_accelerators + cpus
            else:
                accelerators -= 1
                device = accelerators
            for item in self.lattice.between(ideal, lower):
                where[item] = device
            ideal = lower
        return tuple(where)
