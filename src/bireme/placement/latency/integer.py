"""The shortest latency, by an integer program: proven where time allows, with a bound where it does not.

It gives its answer back for nodes, with a value that was evaluated again. The program itself is in
`latency_program.py`.
"""

import math

from bireme.errors import BiremeError
from bireme.placement.integer.program import SolverOutcome
from bireme.placement.items import Floats
from bireme.placement.latency.latency import LatencyFound, latency_lower_bound, latency_of
from bireme.placement.latency.line import LinePlacement, line_of, solution_of, stand_in_line
from bireme.placement.latency.program import LatencyProgram, LatencyWindow
from bireme.placement.latency.steps import LatencySteps, steps_of
from bireme.placement.workload import Workload

__all__ = ["solve_latency"]

TOLERANCE = 1e-6
"""Relative: what the solver's numbers may be off by."""


def solve_latency(
    workload: Workload,
    *,
    num_pieces: int = 1,
    time_limit_s: float,
    start: LatencyFound | None = None,
    gap: float = 0.0,
) -> LatencyFound:
    """The placement with the shortest latency, up to `num_pieces` pieces on each accelerator.

    It is never worse than `start`, a placement that runs and fits. The search ends when the gap between
    value and bound is at most `gap`, relative, or when time is over.
    """
    if num_pieces < 1:
        raise BiremeError(f"An accelerator has {num_pieces} pieces in this program; it must be 1 or more.")
    steps = steps_of(workload)
    known = _checked(workload, num_pieces, start)
    least = latency_lower_bound(workload)
    if least == math.inf:
        raise _nothing_fits(workload, num_pieces)
    if known is not None and known.value - least <= gap * known.value:
        return LatencyFound(known.devices, known.pieces, known.value, min(least, known.value))
    window = LatencyWindow(least, _longest(steps) if known is None else known.value)
    program = LatencyProgram(steps, num_pieces, window)
    solution = None if known is None else _solution(workload, program, known)
    solved = program.program.solve(time_limit_s=time_limit_s, start=solution, gap=gap)
    better = None if solved.values is None else _found(workload, steps, line_of(program, solved.values))
    if known is None and better is None:
        if solved.outcome is SolverOutcome.INFEASIBLE:
            raise _nothing_fits(workload, num_pieces)
        raise BiremeError(
            f"No placement was found within {time_limit_s:g} s. Raise the time limit, or begin with what a "
            "search has found."
        )
    best = min((found for found in (known, better) if found is not None), key=lambda found: found.value)
    bound = best.value if solved.outcome is SolverOutcome.INFEASIBLE else solved.bound / program.unit
    bound = max(least, bound * (1 - TOLERANCE))
    return LatencyFound(best.devices, best.pieces, best.value, min(bound, best.value))


def _checked(workload: Workload, num_pieces: int, start: LatencyFound | None) -> LatencyFound | None:
    """The start, with the value that it really has."""
    if start is None:
        return None
    report = latency_of(workload, start.devices, start.pieces)
    reason = report.reason
    if reason is None and max(start.pieces) >= num_pieces:
        reason = f"It has {max(start.pieces) + 1} pieces on an accelerator, and {num_pieces} are allowed."
    if reason is not None:
        raise BiremeError(f"The placement to begin with cannot run. {reason}")
    return LatencyFound(start.devices, start.pieces, report.latency, start.lower_bound)


def _nothing_fits(workload: Workload, num_pieces: int) -> BiremeError:
    return BiremeError(
        f"No placement fits: {workload.num_accelerators} accelerators of {workload.accelerator_bytes:g} "
        f"bytes with {num_pieces} pieces each cannot run all nodes, and there is no CPU. Allow more "
        "accelerators, more memory, or more pieces."
    )


def _longest(steps: LatencySteps) -> float:
    """What no placement takes longer than: one thing after the other, each output moved for each user."""
    times = steps.cpu_time.clip(min=steps.accelerator_time).sum()
    num_moves = steps.net_users.starts[1:] - steps.net_users.starts[:-1] + 1
    return float(times + (steps.net_cost * num_moves).sum())


def _solution(workload: Workload, program: LatencyProgram, known: LatencyFound) -> Floats:
    """What is known, as a solution. Nodes that joined another one are moved to it, which costs nothing."""
    steps = program.steps
    devices = [known.devices[places[0]] for places in steps.members]
    pieces = [known.pieces[places[0]] for places in steps.members]
    line = stand_in_line(steps, program.num_pieces, devices, pieces)
    finish = latency_of(workload, steps.spread(devices), steps.spread(pieces)).finish
    return solution_of(program, line, [finish[places[0]] for places in steps.members])


def _found(workload: Workload, steps: LatencySteps, line: LinePlacement) -> LatencyFound | None:
    """The placement for nodes; none where the solver's rounding was too coarse for it to run."""
    devices, pieces = steps.spread(line.devices(steps)), steps.spread(line.pieces())
    report = latency_of(workload, devices, pieces)
    return LatencyFound(devices, pieces, report.latency, 0.0) if report.reason is None else None
