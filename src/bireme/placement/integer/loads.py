"""What the integer programs about loads share: numbers in the solver's scale, who may go where, the answer.

The solver's tolerances are absolute. So times are scaled until the value to beat is a thousand, and the
tolerance a billionth of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.placement.bounds import each_maximum, runs_on_accelerator, simple_bound
from bireme.placement.contiguous.chain import cut_chain, no_split_fits
from bireme.placement.found import FoundPlacement, fits, loads_of, value_of
from bireme.placement.integer.program import Columns, IntegerProgram, Solved, SolverOutcome
from bireme.placement.items import Floats, Items
from bireme.placement.workload import Objective

__all__ = ["FULL_SCALE", "Frame", "frame_of", "memory_rows", "sizes_in_scale"]

FULL_SCALE = 1000.0
"""What a known value, and the memory of an accelerator, are in the solver's numbers."""

ROUNDING = 1e-8
"""The share of a bound that the solver's tolerances may have added to it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A problem in the solver's scale. Rows of the times and costs are the maxima that the objective adds up.

    `ceiling` is the value of `start`, infinite where none is known: no device has more than that in all, so
    `on_accelerator` and `on_cpu` tell which items can be where in a placement that is as good. `floor` is a
    proven bound, and no load is above `most`.
    """

    items: Items
    objective: Objective
    start: FoundPlacement | None
    scale: float
    most: float
    ceiling: float
    floor: float
    accelerator_time: Floats
    cpu_time: Floats
    net_cost: Floats
    on_accelerator: NDArray[np.bool_]
    on_cpu: NDArray[np.bool_]

    def add_maxima(self, program: IntegerProgram) -> Columns:
        """A column for each maximum; their sum is what the program makes small."""
        maxima = program.add_columns(len(self.net_cost), upper=min(self.ceiling, self.most), cost=1.0)
        # The floor makes no row: where it is above what a node's own program proves, all branches look alike.
        if len(maxima) > 1:
            program.add_rows(maxima[np.newaxis, :], 1.0, upper=self.ceiling)
        return maxima

    def maxima_of(self, where: Sequence[int]) -> Floats:
        """What those columns are for a placement."""
        largest: Floats = each_maximum(loads_of(self.items, where), self.objective).max(axis=1)
        return largest * self.scale

    def above(self, floor: float) -> "Frame":
        """The same with a higher floor, in its scale."""
        return replace(self, floor=max(floor, self.floor))

    def proven(self, bound: float) -> float:
        """What holds for sure of a bound of the solver's, in its scale."""
        return bound * (1 - ROUNDING) if math.isfinite(bound) else 0.0

    def is_settled(self, gap: float) -> bool:
        """Whether the start is as good as asked for, by the floor alone."""
        return self.start is not None and self.start.value * self.scale <= self.target(gap)

    def target(self, gap: float) -> float:
        """A value, in its scale, that the floor shows to be as good as asked for."""
        return self.floor / (1 - max(gap, ROUNDING)) if gap < 1 else math.inf

    def found(self, solved: Solved | None = None, where: Sequence[int] | None = None) -> FoundPlacement:
        """The better one of the start and what the solver found, with a bound that holds for all."""
        best, floor = self.start, self.floor
        if where is not None and fits(self.items, where):
            value = value_of(loads_of(self.items, where), self.objective)
            if best is None or value < best.value:
                best = FoundPlacement(tuple(where), value, 0.0)
        if best is None and solved is not None and solved.outcome is SolverOutcome.INFEASIBLE:
            raise no_split_fits(self.items)
        if best is None:
            raise BiremeError(
                "The integer program found no placement within its time limit. Give it more time, or a "
                "placement to start from."
            )
        if solved is not None:
            floor = max(floor, self.proven(solved.bound))
        return FoundPlacement(best.where, best.value, min(floor / self.scale, best.value))


def frame_of(items: Items, objective: Objective, start: Sequence[int] | None) -> Frame:
    """The problem, with a placement to be better than: where none is given, a cut of the items' line."""
    able = runs_on_accelerator(items)
    if not items.num_cpus and not able.all():
        raise no_split_fits(items)
    known = _by_order(items, objective) if start is None else _checked(items, objective, start)
    on_accelerator = items.accelerator_time.sum(axis=1)
    on_cpu = items.cpu_time.sum(axis=1)
    most = float(np.maximum(on_accelerator, on_cpu).sum() + items.net_cost.sum())
    reference = most if known is None else known.value
    scale = FULL_SCALE / reference if reference > 0 else 1.0
    ceiling = math.inf if known is None else known.value * scale * (1 + ROUNDING / 10)
    return Frame(
        items=items,
        objective=objective,
        start=known,
        scale=scale,
        most=most * scale,
        ceiling=ceiling,
        floor=simple_bound(items, objective) * scale,
        accelerator_time=each_maximum(items.accelerator_time, objective) * scale,
        cpu_time=each_maximum(items.cpu_time, objective) * scale,
        net_cost=each_maximum(items.net_cost, objective) * scale,
        on_accelerator=able & (on_accelerator * scale <= ceiling),
        on_cpu=(on_cpu * scale <= ceiling) & (items.num_cpus > 0),
    )


def sizes_in_scale(items: Items) -> Floats:
    """What items take of an accelerator's memory, where that is `FULL_SCALE`."""
    if not items.accelerator_bytes or math.isinf(items.accelerator_bytes):
        return np.zeros(len(items))
    return items.size * (FULL_SCALE / items.accelerator_bytes)


def memory_rows(program: IntegerProgram, items: Items, on_device: Columns) -> None:
    """Rows for the accelerators' memory; `on_device[d, i]` is the column for item `i` on one of them."""
    sizes = sizes_in_scale(items)
    if sizes.sum() > FULL_SCALE:
        program.add_rows(on_device, sizes, upper=FULL_SCALE)


def _by_order(items: Items, objective: Objective) -> FoundPlacement | None:
    try:
        where = cut_chain(items, Objective.THROUGHPUT).where
    except BiremeError:
        return None
    return FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)


def _checked(items: Items, objective: Objective, start: Sequence[int]) -> FoundPlacement:
    if len(start) != len(items) or not fits(items, start):
        raise BiremeError(
            "The placement to start from does not fit these items: an accelerator cannot run or hold what it "
            "is given, or the number of items differs. Start from another one, or from none."
        )
    return FoundPlacement(tuple(start), value_of(loads_of(items, start), objective), 0.0)
