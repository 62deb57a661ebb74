"""Costs of stages of unequal width: seconds of devices and lanes, and the simulation of all ranks.

Such a plan is one pipeline. Its ranks are the replicas of all stages, so nothing has to stand for replicas
that are not simulated: each message goes from the rank that has a micro-batch to the one that takes it on,
and each stage sums its gradients over its own replicas.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

from bireme.plan.search.contention import HopBytes, processors_of, rings_s
from bireme.plan.search.draft import Draft
from bireme.plan.search.draft_paging import Tied, tied_rings
from bireme.plan.search.problem import PlanningProblem
from bireme.schedule.program import Program
from bireme.schedule.routes import microbatch_owner
from bireme.simulate.costs import Costs
from bireme.simulate.links import cluster_network
from bireme.simulate.simulator import Until, simulate
from bireme.timeline.timeline import Timeline


@lru_cache(maxsize=1024)
def _pairs(here: tuple[int, ...], there: tuple[int, ...]) -> tuple[tuple[tuple[int, int], int], ...]:
    """Between which replicas of two stages with these shares how many micro-batches of a batch go."""
    times = gcd(*here, *there)  # owners repeat themselves
    owners = (microbatch_owner([one // times for one in share]) for share in (here, there))
    return tuple((ends, times * count) for ends, count in sorted(Counter(zip(*owners, strict=True)).items()))


def flows(draft: Draft, costs: Costs) -> Iterator[tuple[int, int, float, int]]:
    """The bytes of messages from one device to another, and the number of such messages in a batch."""
    for boundary, (here, there) in enumerate(pairwise(range(draft.outline.num_stages))):
        for (one, other), count in _pairs(draft.shares[here], draft.shares[there]):
            ends = draft.grid[here][one], draft.grid[there][other]
            yield (*ends, costs.forward_bytes[boundary], count)
            yield (*ends[::-1], costs.backward_bytes[boundary], count)


def hop_bytes(problem: PlanningProblem, draft: Draft, costs: Costs) -> list[float]:
    """The bytes that a ring moves over each of its hops in a batch, per stage."""
    sums, stages = problem.request.sums_within, draft.stages(len(problem.profile.units))
    return [
        sums.hop_bytes(one, slice(*units), width)
        for one, units, width in zip(costs.gradient_bytes, stages, draft.outline.stage_widths, strict=True)
    ]


def rings(draft: Draft, of_stages: list[float]) -> list[HopBytes]:
    """The rings of all stages that have replicas."""
    return [HopBytes(row, one) for row, one in zip(draft.grid, of_stages, strict=True) if len(row) > 1]


def least_path_s(problem: PlanningProblem, draft: Draft, costs: Costs) -> float:
    """The least seconds of a batch that drains: a replica begins when all stages before it have run a
    forward, on the fastest of their replicas. When it is done, they have a backward left to run, and its
    stage a sum.
    """
    forward_s = backward_s = least_s = 0.0
    sums = hop_bytes(problem, draft, costs)
    for stage, (row, share) in enumerate(zip(draft.grid, draft.shares, strict=True)):
        speeds = [problem.usual_speeds[device] for device in row]
        again_s = costs.recompute_s[stage] if stage in draft.recompute else 0.0
        each_s = costs.forward_s[stage] + costs.backward_s[stage] + again_s
        every_s = max(count / speed for count, speed in zip(share, speeds, strict=True)) * each_s
        sum_s = rings_s(problem, [HopBytes(row, sums[stage])]) if len(row) > 1 else 0.0
        least_s = max(least_s, forward_s + every_s + max(backward_s, sum_s))
        forward_s += costs.forward_s[stage] / max(speeds)
        backward_s += costs.backward_s[stage] / max(speeds)
    return least_s


def simulated(
    problem: PlanningProblem,
    draft: Draft,
    program: Program,
    costs: Costs,
    tied: list[Tied],
    until: Until | None = None,
) -> Timeline:
    """The timeline of all ranks of a draft in the window of a program, `until` the clock stops."""
    devices = [seat.device for seat in draft.seats()]
    reduced, sync_s = hop_bytes(problem, draft, costs), [0.0] * draft.outline.num_stages
    for one in tied_rings(problem, draft, tied):
        for stage in one.stages:
            sync_s[stage] += one.ring.seconds
            own = problem.request.sums_within.hop_share(len(draft.grid[stage])) * one.ring.num_bytes
            reduced[stage] = max(reduced[stage] - own, 0.0)
    network = cluster_network(
        problem.cluster,
        program,
        devices,
        replicas={seat.rank: draft.grid[seat.stage] for seat in draft.seats()},
        most_overlap=problem.most_overlap(draft.outline.schedule),
    )
    return simulate(
        program,
        replace(
            costs,
            reduce_s=tuple(sync_s),
            reduce_bytes=tuple(reduced),
            rank_speed=tuple(problem.usual_speeds[device] for device in devices),
            update_speed=tuple(problem.usual_resource_speeds[device].memory for device in devices),
            host_speed=tuple(problem.usual_resource_speeds[device].host for device in devices),
            engine=problem.engine,
        ),
        network,
        agree=True,
        processors=processors_of(problem, [(device,) for device in devices], 0),
        until=until,
    )
