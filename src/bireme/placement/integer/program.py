"""A thin layer over the HiGHS solver: an integer program built in blocks of columns and rows, and solved.

It knows nothing of placements. It needs `highspy`, which is an extra; without it a sentence says so. The
solver runs on one thread with a fixed seed, says nothing, and stops at Ctrl-C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bireme.errors import BiremeError
from bireme.placement.items import Floats

if TYPE_CHECKING:
    import highspy

__all__ = ["Columns", "IntegerProgram", "Solved", "SolverOutcome"]

Columns = NDArray[np.int32]

POLL_S = 0.1
"""How long Ctrl-C waits to be seen."""


class SolverOutcome(Enum):
    """How a search ended: with a proof, without one for its time or target, or with no solution to find."""

    OPTIMAL = "optimal"
    STOPPED = "stopped"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Solved:
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
        self._num_columns = 0
        self._num_rows = 0
        self._column_parts: list[_ColumnPart] = []
        self._row_parts: list[_RowPart] = []

    @property
    def num_columns(self) -> int:
        """How many columns it has by now."""
        return self._num_columns

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
        numbers = np.arange(self._num_columns, self._num_columns + count, dtype=np.int32)
        self._column_parts.append(
            _ColumnPart(
                _spread(lower, extent).ravel(),
                _spread(upper, extent).ravel(),
                _spread(cost, extent).ravel(),
                np.full(count, is_integer),
            )
        )
        self._num_columns += count
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
        count = len(numbers)
        kept = values != 0.0
        self._row_parts.append(
            _RowPart(
                kept.sum(axis=1, dtype=np.int32),
                numbers[kept],
                values[kept],
                _spread(lower, (count,)),
                _spread(upper, (count,)),
            )
        )
        self._num_rows += count

    def solve(
        self,
        *,
        time_limit_s: float,
        start: ArrayLike | None = None,
        gap: float = 0.0,
        seed: int = 0,
        target: float = -np.inf,
    ) -> Solved:
        """Search until the gap between solution and bound is at most `gap`, relative, or time is over.

        A solution that costs less than `target` ends the search too, and proves nothing.
        `start` has a value for every column; where it is feasible, what comes back is not worse. Ctrl-C
        stops the search and is raised again.
        """
        solver = self._solver()
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("random_seed", seed)
        solver.setOptionValue("objective_target", target)
        if start is not None:
            numbers = np.arange(self._num_columns, dtype=np.int32)
            solver.setSolution(self._num_columns, numbers, np.asarray(start, np.float64))
        _run(solver)
        has_integers = any(part.is_integer.any() for part in self._column_parts)
        return _solved(solver, has_integers=has_integers)

    def relaxed_bound(self, *, time_limit_s: float) -> float:
        """A bound that no solution is below, by the program without integrality; minus infinity for none.

        It is added up here from the prices the solver puts on rows, which prove it whatever its tolerances
        are. Where every column has finite bounds there is one as soon as there are prices.
        """
        solver = self._solver()
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.setOptionValue("solve_relaxation", True)
        # Prices need no corner of the polyhedron, and the way to one takes longer than all the rest.
        solver.setOptionValue("solver", "ipm")
        solver.setOptionValue("run_crossover", "off")
        _run(solver)
        prices = np.array(solver.getSolution().row_dual)
        return self._proven_by(prices) if len(prices) == self._num_rows else -np.inf

    def _proven_by(self, prices: Floats) -> float:
        """What the columns cost at least when rows are paid for at these prices."""
        columns, rows = self._column_parts, self._row_parts
        lower, upper = _joined([part.lower for part in rows]), _joined([part.upper for part in rows])
        prices = np.clip(
            prices, np.where(np.isinf(upper), 0.0, -np.inf), np.where(np.isinf(lower), 0.0, np.inf)
        )
        spent = np.repeat(prices, np.concatenate([part.lengths for part in rows]))
        spent *= _joined([part.coefficients for part in rows])
        numbers = np.concatenate([part.columns for part in rows])
        rest = _joined([part.cost for part in columns]) - np.bincount(numbers, spent, self._num_columns)
        return _least(prices, lower, upper) + _least(
            rest, _joined([part.lower for part in columns]), _joined([part.upper for part in columns])
        )

    def _solver(self) -> "highspy.Highs":
        package = _highspy()
        solver: highspy.Highs = package.Highs()
        solver.silent()
        solver.setOptionValue("threads", 1)
        model = package.HighsLp()
        model.num_col_, model.num_row_ = self._num_columns, self._num_rows
        columns, rows = self._column_parts, self._row_parts
        model.col_lower_ = _joined([part.lower for part in columns])
        model.col_upper_ = _joined([part.upper for part in columns])
        model.col_cost_ = _joined([part.cost for part in columns])
        kinds = (package.HighsVarType.kContinuous, package.HighsVarType.kInteger)
        model.integrality_ = [kinds[flag] for part in columns for flag in part.is_integer.tolist()]
        model.row_lower_ = _joined([part.lower for part in rows])
        model.row_upper_ = _joined([part.upper for part in rows])
        lengths = np.concatenate([[0], *(part.lengths for part in rows)])
        model.a_matrix_.format_ = package.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum(lengths, dtype=np.int32)
        model.a_matrix_.index_ = np.concatenate([np.zeros(0, np.int32), *(part.columns for part in rows)])
        model.a_matrix_.value_ = _joined([part.coefficients for part in rows])
        if solver.passModel(model) == package.HighsStatus.kError:
            raise BiremeError("HiGHS does not take the integer program: a number in it is not finite.")
        return solver


@dataclass(frozen=True, slots=True)
class _ColumnPart:
    lower: Floats
    upper: Floats
    cost: Floats
    is_integer: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _RowPart:
    lengths: Columns
    columns: Columns
    coefficients: Floats
    lower: Floats
    upper: Floats


def _highspy() -> ModuleType:
    try:
        import highspy
    except ImportError:
        raise BiremeError(
            'The integer programs need the HiGHS solver: install it with pip install "bireme[solver]".'
        ) from None
    return highspy


def _spread(numbers: ArrayLike, shape: tuple[int, ...]) -> Floats:
    return np.broadcast_to(np.asarray(numbers, np.float64), shape)


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _least(prices: Floats, lower: Floats, upper: Floats) -> float:
    """The smallest sum of quantities between these bounds at these prices."""
    bounds = np.where(prices > 0, lower, upper)[prices != 0]
    return float(prices[prices != 0] @ bounds)


def _run(solver: "highspy.Highs") -> None:
    # The solver has a thread of its own: Python sees Ctrl-C only between two of its own steps.
    solver.HandleUserInterrupt = True
    solver.startSolve()
    try:
        while not solver.wait(POLL_S)[0]:
            pass
    except KeyboardInterrupt:
        solver.cancelSolve()  # type: ignore[no-untyped-call]  # has no annotations, as of highspy 1.15
        solver.wait()
        raise


def _solved(solver: "highspy.Highs", *, has_integers: bool) -> Solved:
    package = _highspy()
    status, info = solver.getModelStatus(), solver.getInfo()
    statuses = package.HighsModelStatus
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        return Solved(SolverOutcome.INFEASIBLE, None, np.inf)
    is_known = info.primal_solution_status == package.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if is_known else None
    if status == statuses.kOptimal:
        bound = info.mip_dual_bound if has_integers else info.objective_function_value
        return Solved(SolverOutcome.OPTIMAL, values, float(bound))
    # A search that fails on numbers has proven nothing, but a solution it had is one.
    is_proven = has_integers and status == statuses.kTimeLimit
    return Solved(SolverOutcome.STOPPED, values, float(info.mip_dual_bound) if is_proven else -np.inf)
