"""A thin layer over the HiGHS solver: an integer program built in blocks of columns and rows, and solved.

It knows nothing of placements. It needs `highspy`, which is an extra; without it a sentence says so. The
solver runs on one thread with a fixed seed, says nothing, and stops at Ctrl-C.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bireme.errors import BiremeError
from bireme.placement.contiguous import cut_chain, no_split_fits
from bireme.placement.contraction import (
    Floats,
    FoundPlacement,
    Integers,
    Items,
    each_maximum,
    fits,
    placed,
    runs_on_accelerator,
    simple_bound,
)
from bireme.placement.workload import Objective
from bireme.user_code import optional_package

if TYPE_CHECKING:
    import highspy


Columns = NDArray[np.int32]

_POLL_S = 0.1
"""How long Ctrl-C waits to be seen."""


class SolverOutcome(Enum):
    """How a search ended: with a proof, without one for its time or target, or with no solution to find."""

    OPTIMAL = "optimal"
    STOPPED = "stopped"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class _Solved:
    """The best solution known when the search ended, if any, and a bound no solution is below.

    Integer columns may be off by the solver's tolerance of 1e-6; so may `bound`, which is minus infinity
    where nothing is proven.
    """

    outcome: SolverOutcome
    values: Floats | None
    bound: float


class IntegerProgram:
    """An integer program, to be made as small as it can be. What it costs must be bounded below.

    >>> program = Program()
    >>> chosen = program.add_columns(3, upper=1, is_integer=True, cost=[3, 1, 2])
    >>> program.add_rows(chosen[np.newaxis, :], [1, 1, 1], lower=2)
    >>> program.solve(time_limit_s=10).bound
    3.0
    """

    def __init__(self) -> None:
        self._package = _highspy()
        self._solver: highspy.Highs = self._package.Highs()
        self._solver.silent()
        self._solver.setOptionValue("threads", 1)
        self._has_integers = False

    @property
    def num_columns(self) -> int:
        """How many columns it has by now."""
        return int(self._solver.getNumCol())

    def add_columns(
        self,
        shape: int | Sequence[int],
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        is_integer: bool = False,
        cost: ArrayLike = 0.0,
    ) -> Columns:
        """A block of columns; their numbers in an array of this shape. Bounds and costs broadcast to it."""
        extent = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(extent))
        numbers = np.arange(self.num_columns, self.num_columns + count, dtype=np.int32)
        costs, least, most = (_spread(one, extent).ravel() for one in (cost, lower, upper))
        nothing = np.zeros(0, np.int32)
        self._check(self._solver.addCols(count, costs, least, most, 0, nothing, nothing, np.zeros(0)))
        if is_integer:
            kinds = np.full(count, self._package.HighsVarType.kInteger)
            self._check(self._solver.changeColsIntegrality(count, numbers, kinds))
            self._has_integers = True
        return numbers.reshape(extent)

    def add_rows(
        self,
        columns: ArrayLike,
        coefficients: ArrayLike,
        *,
        lower: ArrayLike = -np.inf,
        upper: ArrayLike = np.inf,
    ) -> None:
        """Row `i` holds the sum of `coefficients[i, j] * columns[i, j]` between its bounds.

        Coefficients and bounds broadcast; a row may name a column once, and zeros are left out.
        """
        numbers = np.asarray(columns, np.int32)
        values = _spread(coefficients, numbers.shape)
        count, kept = len(numbers), values != 0.0
        ends = np.cumsum(kept.sum(axis=1), dtype=np.int32)
        least, most = _spread(lower, (count,)), _spread(upper, (count,))
        starts = np.append(0, ends[:-1]).astype(np.int32)[:count]
        self._check(
            self._solver.addRows(count, least, most, int(kept.sum()), starts, numbers[kept], values[kept])
        )

    def _check(self, status: "highspy.HighsStatus") -> None:
        if status == self._package.HighsStatus.kError:
            raise BiremeError("HiGHS does not take the integer program: a number in it is not finite.")

    def less(self, small: Columns, large: Columns) -> None:
        """No entry of the first is above its counterpart in the second."""
        self.add_rows(beside(large, small), [1.0, -1.0], lower=0.0)

    def solve(self, *, time_limit_s: float, target: float = -np.inf) -> _Solved:
        """Search until solution and bound meet, or time is over.

        A solution that costs less than `target` ends the search too, and proves nothing. Ctrl-C stops the
        search and is raised again.
        """
        solver = self._solver
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("objective_target", target)
        _run(solver)
        return _solved(solver, has_integers=self._has_integers)

    def relaxed_bound(self, *, time_limit_s: float) -> float:
        """A bound that no solution is below, by the program without integrality; minus infinity for none.

        It is added up here from the prices the solver puts on rows, which prove it whatever its tolerances
        are. Where every column has finite bounds there is one as soon as there are prices.
        """
        solver = self._solver
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.setOptionValue("solve_relaxation", True)
        # Prices need no corner of the polyhedron, and the way to one takes longer than all the rest.
        solver.setOptionValue("solver", "ipm")
        solver.setOptionValue("run_crossover", "off")
        _run(solver)
        prices = np.array(solver.getSolution().row_dual)
        return self._proven_by(prices) if len(prices) == solver.getNumRow() else -np.inf

    def _proven_by(self, prices: Floats) -> float:
        """What the columns cost at least when rows are paid for at these prices."""
        self._solver.ensureRowwise()  # type: ignore[attr-defined]  # not among its types, as of highspy 1.15
        model = self._solver.getLp()
        lower, upper = np.array(model.row_lower_, np.float64), np.array(model.row_upper_, np.float64)
        prices = np.clip(
            prices, np.where(np.isinf(upper), 0.0, -np.inf), np.where(np.isinf(lower), 0.0, np.inf)
        )
        rows, costs = model.a_matrix_, np.array(model.col_cost_, np.float64)
        spent = np.repeat(prices, np.diff(rows.start_)) * np.array(rows.value_)
        rest = costs - np.bincount(np.array(rows.index_, np.int64), spent, self.num_columns)
        return _least(prices, lower, upper) + _least(
            rest, np.array(model.col_lower_, np.float64), np.array(model.col_upper_, np.float64)
        )


def beside(*columns: ArrayLike) -> NDArray[Any]:
    """Rows with one entry of each of these tables, which have one shape or are spread to it."""
    return np.stack(np.broadcast_arrays(*columns), axis=-1).reshape(-1, len(columns))


def _highspy() -> ModuleType:
    solver: ModuleType = optional_package("highspy", "solver", "The HiGHS solver")
    return solver


def _spread(numbers: ArrayLike, shape: tuple[int, ...]) -> Floats:
    return np.broadcast_to(np.asarray(numbers, np.float64), shape)


def _least(prices: Floats, lower: Floats, upper: Floats) -> float:
    """The smallest sum of quantities between these bounds at these prices."""
    bounds = np.where(prices > 0, lower, upper)[prices != 0]
    return float(prices[prices != 0] @ bounds)


def _run(solver: "highspy.Highs") -> None:
    # The solver has a thread of its own: Python sees Ctrl-C only between two of its own steps.
    solver.HandleUserInterrupt = True
    solver.startSolve()
    try:
        while not solver.wait(_POLL_S)[0]:
            pass
    except KeyboardInterrupt:
        solver.cancelSolve()  # type: ignore[no-untyped-call]  # has no annotations, as of highspy 1.15
        solver.wait()
        raise


def _solved(solver: "highspy.Highs", *, has_integers: bool) -> _Solved:
    package = _highspy()
    status, info = solver.getModelStatus(), solver.getInfo()
    statuses = package.HighsModelStatus
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        return _Solved(SolverOutcome.INFEASIBLE, None, np.inf)
    is_known = info.primal_solution_status == package.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if is_known else None
    if status == statuses.kOptimal:
        bound = info.mip_dual_bound if has_integers else info.objective_function_value
        return _Solved(SolverOutcome.OPTIMAL, values, float(bound))
    # A search that fails on numbers has proven nothing, but a solution it had is one.
    is_proven = has_integers and status == statuses.kTimeLimit
    return _Solved(SolverOutcome.STOPPED, values, float(info.mip_dual_bound) if is_proven else -np.inf)


# What the integer programs about loads share: numbers in the solver's scale, who may go where, the answer.
#
# The solver's tolerances are absolute. So times are scaled until the value to beat is a thousand, and the
# tolerance a billionth of it.

FULL_SCALE = 1000.0
"""What a known value, and the memory of an accelerator, are in the solver's numbers."""

SOLVER_ROUNDING = 1e-8
"""The share of a bound that the solver's tolerances may have added to it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A problem in the solver's scale. Rows of the times and costs are the maxima that the objective adds up.

    `ceiling` is a hair below the value of `start`, infinite where none is known: in a better placement no
    device has more than that in all, and `on_accelerator` and `on_cpu` tell which items can be where. `floor`
    is a proven bound, and no load is above `most`.
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

    def above(self, floor: float) -> "Frame":
        """The same with a higher floor, in its scale."""
        return replace(self, floor=max(floor, self.floor))

    def is_settled(self) -> bool:
        """Whether the start is known to be the best placement: by the floor, or because a better one has no
        device for some item.
        """
        is_proven = self.start is not None and self.start.value * self.scale <= self.target
        return is_proven or (self.start is not None and not (self.on_accelerator | self.on_cpu).all())

    @property
    def target(self) -> float:
        """A value, in its scale, that the floor shows to be the best."""
        return self.floor / (1 - SOLVER_ROUNDING)

    def found(self, solved: _Solved | None = None, where: Sequence[int] | None = None) -> FoundPlacement:
        """The better one of the start and what the solver found, with a bound that holds for all."""
        best, floor = self.start, self.floor
        if where is not None and fits(self.items, where):
            found = placed(self.items, self.objective, where)
            if best is None or found.value < best.value:
                best = found
        if best is None and solved is not None and solved.outcome is SolverOutcome.INFEASIBLE:
            raise no_split_fits(self.items)
        if best is None:
            raise BiremeError(
                "The integer program found no placement within its time limit. Give it more time, or a "
                "placement to start from."
            )
        if solved is None or solved.outcome is SolverOutcome.INFEASIBLE:
            floor = max(floor, self.ceiling)  # none is better than the start
        elif math.isfinite(solved.bound):
            floor = max(floor, solved.bound * (1 - SOLVER_ROUNDING))
        return FoundPlacement(best.where, best.value, min(floor / self.scale, best.value))


def frame_of(items: Items, objective: Objective, start: Sequence[int] | None) -> Frame:
    """The problem, with a placement that fits to be better than: by default a cut of the items' line."""
    able = runs_on_accelerator(items)
    if not items.num_cpus and not able.all():
        raise no_split_fits(items)
    known = _by_order(items, objective) if start is None else placed(items, objective, start)
    on_accelerator = items.accelerator_time.sum(axis=1)
    on_cpu = items.cpu_time.sum(axis=1)
    most = float(np.maximum(on_accelerator, on_cpu).sum() + items.net_cost.sum())
    reference = most if known is None else known.value
    scale = FULL_SCALE / reference if reference > 0 else 1.0
    ceiling = math.inf if known is None else known.value * scale * (1 - SOLVER_ROUNDING)
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
    with suppress(BiremeError):
        return placed(items, objective, cut_chain(items, Objective.THROUGHPUT).where)
    return None


# What it costs to cut nets, as columns and rows of an integer program.
#
# For a place, an accelerator or a slot of a line, item `i` is there if its column is 1. A net is cut there if
# the largest column of its pins differs from the smallest. So one column is held above all pins and one below
# them, and the difference is paid: the tightest linear form, with two rows for a pin. For nets of two pins a
# single column above both differences is the same.


@dataclass(frozen=True, slots=True)
class CutNets:
    """Nets of equally many pins: their numbers, the columns of their pins, and what a cut of them is.

    `pins` is `[net, pin, place]`, `high` and `low` are `[net, place]`, and a cut is their difference. With
    two pins `high` alone is the cut, and `low` has no rows.
    """

    numbers: Integers
    pins: Columns
    high: Columns
    low: Columns

    def payers(self) -> Columns:
        """The columns that a place pays for, `[place, column]`."""
        return np.hstack([self.high.T, self.low.T])

    def prices(self, net_cost: Floats) -> Floats:
        """What it pays for each of them."""
        return np.concatenate([net_cost[self.numbers], -net_cost[self.numbers[: len(self.low)]]])


def cut_nets(program: IntegerProgram, items: Items, on: Columns) -> list[CutNets]:
    """Columns and rows for all nets; `on[i, place]` is the column that says that item `i` is there."""
    sizes = np.diff(items.pins.starts)
    groups = []
    for size in np.unique(sizes):
        numbers = (sizes == size).nonzero()[0].astype(np.int64)
        places = items.pins.starts[numbers][:, np.newaxis] + np.arange(size, dtype=np.int64)
        pins = on[items.pins.values[places]]
        groups.append(_cut_pairs(program, numbers, pins) if size == 2 else _cut(program, numbers, pins))
    return groups


def _cut_pairs(program: IntegerProgram, numbers: Integers, pins: Columns) -> CutNets:
    cut = program.add_columns((len(pins), pins.shape[2]), upper=1.0)
    for one, other in ((0, 1), (1, 0)):
        program.add_rows(beside(cut, pins[:, one], pins[:, other]), [1, -1, 1], lower=0.0)
    return CutNets(numbers, pins, cut, cut[:0])


def _cut(program: IntegerProgram, numbers: Integers, pins: Columns) -> CutNets:
    high, low = (program.add_columns((len(pins), pins.shape[2]), upper=1.0) for _ in range(2))
    for pin in range(pins.shape[1]):
        program.less(pins[:, pin], high)
        program.less(low, pins[:, pin])
    return CutNets(numbers, pins, high, low)
