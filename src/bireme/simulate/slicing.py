"""How many micro-batches to slice: the smallest number at which the simulated batch is fastest."""

from collections.abc import Callable

from bireme.schedule.catalogue import generate
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["solve_slices"]


def solve_slices(
    costs: Costs,
    num_microbatches: int,
    network: Callable[[Program], Network] | None = None,
    *,
    recompute: bool = False,
    overlap: bool = True,
) -> int:
    """The k of `1f1b-sliced` for these stage times; `network` joins a program's ranks."""
    num_stages = costs.num_stages

    def taken_s(k: int) -> float:
        program = generate(
            "1f1b-sliced",
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_sliced=k,
            recompute=range(num_stages) if recompute else (),
        )
        links = None if network is None else network(program)
        return simulate(program, costs, links, overlap=overlap).makespan_s

    all_s = [taken_s(k) for k in range(min(num_stages, num_microbatches) + 1)]
    return next(k for k, one_s in enumerate(all_s) if one_s <= min(all_s) * (1 + 1e-9))
