"""How far ahead to run where links are slow: the least lookahead at which a steady batch is fastest."""

from collections.abc import Callable
from dataclasses import dataclass

from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.generators.shape import Shape
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["Lookahead", "solve_lookahead"]

WINDOW = 6
"""Batches to simulate: enough for a steady state."""

AS_GOOD = 1.001
"""A thousandth of a batch is not worth another stashed micro-batch."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The least lookahead that is as good as any, and what it makes of a steady batch without any."""

    lookahead: int
    steady_batch_s: float
    without_s: float


def solve_lookahead(
    name: str, costs: Costs, num_microbatches: int, network: Callable[[Program], Network]
) -> Lookahead:
    """The lookahead of `1f1b`, `2bw` or `2bw-fresh` for these times and links; `network` joins the ranks.

    Running further ahead never slows a stage down, so the least that is as good as the most is found by
    halving.
    """
    num_stages = costs.num_stages

    def batch_s(lookahead: int) -> float:
        program = generate(
            name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_batches=WINDOW,
            lookahead=lookahead,
        )
        return simulate(program, costs, network(program)).steady_batch_s

    without_s = batch_s(0)
    find_most = schedule_named(name).most_lookahead
    least, most = 0, find_most(Shape(num_stages, num_microbatches, WINDOW)) if find_most else 0
    best_s = batch_s(most)
    good_enough_s = best_s * AS_GOOD
    if without_s <= good_enough_s:
        return Lookahead(0, without_s, without_s)
    while least < most:
        middle = (least + most) // 2
        middle_s = batch_s(middle)
        if middle_s <= good_enough_s:
            most, best_s = middle, middle_s
        else:
            least = middle + 1
    return Lookahead(least, best_s, without_s)
