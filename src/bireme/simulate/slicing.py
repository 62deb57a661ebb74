"""How many micro-batches to slice: the smallest number at which the simulated batch is fastest."""

from collections.abc import Callable

from bireme.schedule.catalogue import generate
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["solve_slices"]

PATIENCE = 3
"""Stop after so many numbers in a row that are no better: more slices only add work from there on."""


def solve_slices(
    costs: Costs, num_microbatches: int, network: Callable[[Program], Network] | None = None
) -> int:
    """The k of `1f1b-sliced` for these stage times; `network` joins a program's ranks."""
    num_stages = costs.num_stages
    best_s, best, worse = float("inf"), 0, 0
    for k in range(min(num_stages, num_microbatches) + 1):
        program = generate(
            "1f1b-sliced", num_stages=num_stages, num_microbatches=num_microbatches, num_sliced=k
        )
        taken_s = simulate(program, costs, network(program) if network else None).makespan_s
        if taken_s < best_s * (1 - 1e-9):
            best_s, best, worse = taken_s, k, 0
        else:
            worse += 1
        if worse == PATIENCE:
            break
    return best
