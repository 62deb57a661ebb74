"""All schedules on the same devices, with the same work: which is fastest, and what does it keep?

Every device gets one stage's work. Schedules that want several stages on a device get each stage cut into
equal parts, so that the work of each device stays what it is while the messages multiply.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError
from bireme.schedule.budgets import Budgets, TierTooSmallError, cut_memory
from bireme.schedule.catalogue import SCHEDULES, generate, schedule_named
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program, Rule
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline

# How far ahead to run where links are slow: the least lookahead at which a steady batch is fastest.

WINDOW = 6
"""Batches to simulate: enough for a steady state."""

_MOST_TRIED = 24
"""From twice as many on, not all are tried."""

_AS_GOOD = 1.001
"""A thousandth of a batch is not worth another stashed micro-batch."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What schedules are compared on: the work of stages; `network` joins the ranks of a program."""

    costs: Costs
    num_microbatches: int
    network: Callable[[Program], Network]
    recompute: bool = False
    overlap_reduce: bool = True

    def program(self, name: str, num_batches: int, **more: int | None) -> Program:
        """The program of a schedule; `more` are arguments of `generate`."""
        num_stages = self.costs.num_stages
        shape: dict[str, Any] = {"num_stages": num_stages, "num_microbatches": self.num_microbatches, **more}
        recomputed = range(num_stages) if self.recompute else ()
        return generate(name, num_batches=num_batches, recompute=recomputed, **shape)

    def timeline(self, program: Program, *, agree: bool = False) -> Timeline:
        """What it takes."""
        network = self.network(program)
        return simulate(program, self.costs, network, overlap_reduce=self.overlap_reduce, agree=agree)


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The least lookahead that is as good as any, and what it makes of a steady batch without any."""

    lookahead: int
    steady_batch_s: float
    without_s: float


def solve_lookahead(name: str, contest: Contest) -> Lookahead:
    """The lookahead of `1f1b`, `2bw` or `2bw-fresh` for these times and links.

    Running further ahead helps as a rule but not always, so all are tried; where they are many, some all
    along and then the neighbors of the best.
    """

    @cache
    def batch_s(lookahead: int) -> float:
        return contest.timeline(contest.program(name, WINDOW, lookahead=lookahead)).steady_batch_s

    find_most = schedule_named(name).most_lookahead
    most = find_most(Shape(contest.costs.num_stages, contest.num_microbatches, WINDOW)) if find_most else 0
    step = max(1, most // _MOST_TRIED)
    coarse = sorted({*range(0, most + 1, step), most})
    near = min(coarse, key=batch_s)
    tried = sorted({*coarse, *range(max(near - step + 1, 0), min(near + step, most + 1))})
    good_enough_s = min(map(batch_s, tried)) * _AS_GOOD
    found = next(lookahead for lookahead in tried if batch_s(lookahead) <= good_enough_s)
    return Lookahead(found, batch_s(found), batch_s(0))


# How many micro-batches to slice: the smallest number at which the simulated batch is fastest.


def solve_slices(contest: Contest) -> int:
    """The k of `1f1b-sliced` for these stage times. Sums of gradients count as hidden."""
    most = min(contest.costs.num_stages, contest.num_microbatches)
    programs = (contest.program("1f1b-sliced", 1, num_sliced=k) for k in range(most + 1))
    all_s = [simulate(one, contest.costs, contest.network(one)).makespan_s for one in programs]
    return next(k for k, one_s in enumerate(all_s) if one_s <= min(all_s) * (1 + 1e-9))


# How far ahead chunks are fetched, when ranks update, and where: what the simulated batch is fastest with.
#
# If copies begin earlier, more of them run during work, but their slots cannot keep chunks on the device.

_TRIED = (0, 1, 4)
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

    @cache
    def paged_programs(host_updates: bool, together: bool, apart: bool) -> PagedPrograms:
        cut = cut_memory(
            program,
            costs.sizes(),
            (budgets,) * program.num_ranks,
            chunk_bytes=chunk_bytes,
            host_updates=host_updates and not is_summed,  # what is summed stays on the device
        )
        return PagedPrograms(
            program, cut, is_summed=is_summed, updates_together=together, updates_apart=apart
        )

    for host_updates, ahead, order in product(places, _TRIED, orders):
        try:
            paged = paged_programs(host_updates, *order).fetched(ahead)
        except TierTooSmallError as error:
            refused = refused or error
            continue
        if paged is program:
            return program
        timeline = simulate(
            paged,
            costs,
            network,
            overlap_reduce=overlap_reduce,
            agree=agree,
            tier_links=links,
        )
        if timeline.steady_batch_s < best_s * (1 - 1e-9):
            best, best_s = paged, timeline.steady_batch_s
    if best is program and refused is not None:
        raise refused
    return best


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """One schedule's outcome, or why it cannot run in this shape.

    `advice` says what a lookahead would bring, for schedules that have one.
    """

    schedule: Schedule
    timeline: Timeline | None = None
    refused: str | None = None
    advice: Lookahead | None = None


def compare(contest: Contest, num_batches: int, *, agree: bool = False) -> Iterator[ScheduleOutcome]:
    """Each schedule in turn, on as many devices as the costs have stages."""
    for schedule in SCHEDULES.values():
        num_stages = contest.costs.num_stages * schedule.stages_per_rank
        shape = Shape(num_stages, contest.num_microbatches, num_batches, schedule.stages_per_rank)
        own = replace(contest, costs=spread(contest.costs, schedule.routes(shape).rank_of_stage))
        slices = solve_slices(contest) if schedule.slices else None
        try:
            program = own.program(schedule.name, num_batches, num_sliced=slices)
        except BiremeError as error:
            yield ScheduleOutcome(schedule, refused=str(error))
            continue
        timeline = own.timeline(program, agree=agree and schedule.rule is not Rule.STASHED)
        is_overlapped = all(one.overlap is Overlap.FULL for one in own.network(program).paths.values())
        has_advice = schedule.most_lookahead is not None and is_overlapped
        yield ScheduleOutcome(
            schedule, timeline, advice=solve_lookahead(schedule.name, own) if has_advice else None
        )


def spread(costs: Costs, rank_of_stage: Sequence[int]) -> Costs:
    """The costs where each device keeps its work, cut into as many equal parts as it has stages.

    What a part sends is as large as what its device's whole stage sends, and on the last device as what
    that one gets.
    """
    parts = [rank_of_stage.count(rank) for rank in rank_of_stage]
    if set(parts) == {1}:
        return costs

    sent = (*costs.message_bytes[:-1], costs.input_bytes[-1])
    back = (*(costs.gradient_message_bytes or costs.message_bytes)[:-1], costs.input_bytes[-1])
    boundaries = tuple(sent[rank] for rank in rank_of_stage)
    shared: dict[str, Any] = {
        name: tuple(values[rank] / part for rank, part in zip(rank_of_stage, parts, strict=True))
        for name in _SHARED
        if (values := getattr(costs, name))
    }
    return replace(
        costs,
        message_bytes=boundaries,
        gradient_message_bytes=tuple(back[rank] for rank in rank_of_stage),
        input_bytes=(costs.input_bytes[0], *boundaries[:-1]),
        workspace_bytes=tuple(costs.workspace_bytes[rank] for rank in rank_of_stage),
        **shared,
    )


_SHARED = (
    *("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "half_forward_s", "recompute_s"),
    *("update_s", "trial_s", "reduce_s", "reduce_busy_s", "reduce_bytes"),
    *("weight_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "frozen_bytes", "stash_bytes"),
    *("waiting_bytes", "halves_bytes"),
)
"""What the parts of a stage have together."""
