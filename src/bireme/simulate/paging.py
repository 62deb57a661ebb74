"""How far ahead chunks are fetched, when ranks update, and where: what the simulated batch is fastest with.

If copies begin earlier, more of them run during work, but their slots cannot keep chunks on the device.
"""

from itertools import product

from bireme.schedule.budgets import Budgets, TierTooSmallError
from bireme.schedule.paging import page
from bireme.schedule.program import Program
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["solve_paging"]

TRIED = (0, 1, 4)
"""Instructions ahead."""


def solve_paging(
    program: Program,
    costs: Costs,
    budgets: Budgets,
    links: TierLinks,
    network: Network | None = None,
    *,
    may_be_apart: bool = False,
    chunk_bytes: int | None = None,
    overlap: bool = True,
    overlap_reduce: bool = True,
    agree: bool = False,
) -> Program:
    """The program within the budgets, with the copies that cost least time; itself where everything fits.

    Updates are made on the host too where the costs say how long that takes, and apart where they may be.
    """
    best, best_s = program, float("inf")
    refused: TierTooSmallError | None = None
    is_summed = any(costs.reduce_s) or any(costs.reduce_bytes)
    places = (False, True) if costs.host_update_s else (False,)
    orders = ((False, False), (True, False), (False, True))[: 3 if may_be_apart else 2]
    for host_updates, ahead, (together, apart) in product(places, TRIED, orders):
        try:
            paged = page(
                program,
                costs.sizes(),
                budgets,
                ahead=ahead,
                chunk_bytes=chunk_bytes,
                is_summed=is_summed,
                updates_together=together,
                updates_apart=apart,
                host_updates=host_updates,
            )
        except TierTooSmallError as error:
            refused = refused or error
            continue
        if paged is program:
            return program
        timeline = simulate(
            paged,
            costs,
            network,
            overlap=overlap,
            overlap_reduce=overlap_reduce,
            agree=agree,
            tier_links=links,
        )
        if timeline.steady_batch_s < best_s * (1 - 1e-9):
            best, best_s = paged, timeline.steady_batch_s
    if best is program and refused is not None:
        raise refused
    return best
