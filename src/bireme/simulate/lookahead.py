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
    best_s = min(batch_s(lookahead) for lookahead in (*range(0, most + 1, step), most))
    near = min(k for k in (*range(0, most + 1, step), most) if batch_s(k) <= best_s * AS_GOOD)
    around = range(max(near - step + 1, 0), min(near + step, most + 1))
    best_s = min(best_s, *(batch_s(lookahead) for lookahead in around))
    found = min(k for k in (*around, most) if batch_s(k) <= best_s * AS_GOOD)
    if batch_s(0) <= best_s * AS_GOOD:
        found = 0
    return Lookahead(found, batch_s(found), batch_s(0))
