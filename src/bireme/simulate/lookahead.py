"""How far ahead to run where links are slow: the least lookahead at which a steady batch is fastest."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.generators.shape import Shape
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["Lookahead", "solve_lookahead"]

WINDOW = 6
"""Batches to simulate: enough for a steady state."""

MOST_TRIED = 24
"""From twice as many on, not all are tried."""

AS_GOOD = 1.001
"""A thousandth of a batch is not worth another stashed micro-batch."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The least lookahead that is as good as any, and what it makes of a steady batch without any."""

    lookahead: int
    steady_batch_s: float
    without_s: float


def solve_lookahead(
    name: str,
    costs: Costs,
    num_microbatches: int,
    network: Callable[[Program], Network],
    *,
    recompute: bool = False,
    overlap_reduce: bool = True,
) -> Lookahead:
    """The lookahead of `1f1b`, `2bw` or `2bw-fresh` for these times and links; `network` joins the ranks.

    Running further ahead helps as a rule but not always, so all are tried; where they are many, some all
    along and then the neighbours of the best.
    """
    num_stages = costs.num_stages

    @cache
    def batch_s(lookahead: int) -> float:
        program = generate(
            name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_batches=WINDOW,
            lookahead=lookahead,
            recompute=range(num_stages) if recompute else (),
        )
        timeline = simulate(program, costs, network(program), overlap_reduce=overlap_reduce)
        return timeline.steady_batch_s

    find_most = schedule_named(name).most_lookahead
    most = find_most(Shape(num_stages, num_microbatches, WINDOW)) if find_most else 0
    step = max(1, most // MOST_TRIED)
    coarse = sorted({*range(0, most + 1, step), most})
    near = min(coarse, key=batch_s)
    tried = sorted({*coarse, *range(max(near - step + 1, 0), min(near + step, most + 1))})
    good_enough_s = min(map(batch_s, tried)) * AS_GOOD
    found = next(lookahead for lookahead in tried if batch_s(lookahead) <= good_enough_s)
    return Lookahead(found, batch_s(found), batch_s(0))
