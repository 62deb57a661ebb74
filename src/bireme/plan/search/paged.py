"""Plans that page, weighed against plans that fit without: recomputation, more stages, smaller micro-batches.

If memory limits, ordinary searches are made: one within the budgets, which knows all that helps but paging,
one as if there were room for everything, and one as if devices had the memory of all their tiers. What the
last two find is then made to fit by paging, by a walk: parts of a rank that follow each other, sweeps,
recomputation of all stages, of none or of those of a rank, and smaller micro-batches, each as long as the
predicted time falls. Paging only adds time, so plans that are slower with room for everything than a plan
that is known to fit are left alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate, MemoryWay, NothingFits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.paged_walk import AS_GOOD, PagedWalk
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.tied_gradients import TiedGradients
from bireme.plan.search.tier_budgets import budgets_of
from bireme.profile.profile import Profile

__all__ = ["BRIEF_SEEDS", "MOST_SEEDS", "Search", "with_paging", "with_room"]


class Search(Protocol):
    """An ordinary search on a cluster; `is_tight` where hardly any plan fits."""

    def __call__(
        self, machines: Cluster, request: PlanRequest, /, *, is_tight: bool = False
    ) -> Answer | NothingFits:
        """What it finds."""


MOST_SEEDS, BRIEF_SEEDS = 4, 2
"""Plans that would be best with room for everything, which are made to fit; fewer for a run that is short."""

TIERS_FILLED = 0.9
"""What stages take of all tiers: chunks leave a part of each empty."""

ROOM_BYTES = 2**60
"""What a device has that has room for everything."""


def with_paging(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    search: Search,
    most_cost: float,
    *,
    is_brief: bool,
) -> Answer | NothingFits:
    """The best plan that fits, whether it pages or not, and what the other ways would take.

    Plans that cost more than `most_cost` with room for everything are not made to page.
    """

    def cost(candidate: Candidate) -> float:
        return candidate.forecast.cost(request.goal)

    _check_updates(profile, request)
    roomy = search(with_room(cluster), replace(request, memory=None, memory_fraction=1.0))
    problem = PlanningProblem(profile, cluster, request)
    walk = PagedWalk(problem, is_brief=is_brief)
    if isinstance(roomy, NothingFits) or walk.fits(draft_of(roomy.best.plan, cluster)):
        return search(cluster, request)
    plain = search(cluster, request, is_tight=True)
    fits = plain if isinstance(plain, Answer) else None
    least = most_cost if fits is None else min(most_cost, cost(fits.best))
    paged: list[Candidate] = []
    most_seeds = BRIEF_SEEDS if is_brief else MOST_SEEDS
    seeds = list(roomy.candidates[:most_seeds])
    if (limited := _with_tiers(problem)) is not None:
        within = search(limited, replace(request, memory=None, memory_fraction=1.0))
        seeds += within.candidates[:most_seeds] if isinstance(within, Answer) else ()
    for seed in sorted(dict.fromkeys(seeds), key=cost):
        if cost(seed) * AS_GOOD < least:
            best = walk.best_from(draft_of(seed.plan, cluster), cost(seed), least)
            if best is not None:
                paged.append(best)
                least = min(least, cost(best))
    if fits is None and not paged:
        raise walk.refusal()
    candidates = sorted([*paged, *(() if fits is None else fits.candidates)], key=cost)
    basis = fits or roomy
    how = f"{basis.origin.how}; {walk.num_tried:,} plans that page simulated"
    return Answer(
        tuple(candidates),
        replace(basis.origin, how=how, cluster=cluster_hash(cluster)),
        basis.num_tried + walk.num_tried,
        tuple(_ways(plain, roomy, walk)),
    )


def _check_updates(profile: Profile, request: PlanRequest) -> None:
    """Refuse updates apart where units share weights: their gradients are summed before anyone steps."""
    each = [(place, place + 1) for place in range(len(profile.units))]
    tied = TiedGradients(profile).between(each)
    if tied and request.memory is not None and request.memory.updates_apart:
        raise BiremeError(
            f"Stages are to step apart, but several units use {tied[0].name}, whose gradients are summed "
            'before any stage steps. Leave updates "agreed", or use a model that ties no weights.'
        )


def with_room(cluster: Cluster) -> Cluster:
    """The cluster with room for everything."""
    servers = (
        replace(server, devices=tuple(replace(device, memory_bytes=ROOM_BYTES) for device in server.devices))
        for server in cluster.servers
    )
    return Cluster(tuple(servers), cluster.switch)


def _with_tiers(problem: PlanningProblem) -> Cluster | None:
    """The cluster whose devices have the memory of all their tiers; None if that is unlimited everywhere.

    Stages that fit there are cut for hosts of unlike memory.
    """
    numbers = range(len(problem.names))
    budgets = budgets_of(problem, tuple((one,) for one in numbers))
    if all(one.host_bytes is None for one in budgets):
        return None
    room = [
        ROOM_BYTES
        if own.host_bytes is None
        else int(TIERS_FILLED * (own.device_bytes + own.host_bytes + own.disk_bytes)) + process_bytes
        for own, process_bytes in zip(budgets, problem.process_bytes, strict=True)
    ]
    left = iter(room)
    servers = tuple(
        replace(server, devices=tuple(replace(device, memory_bytes=next(left)) for device in server.devices))
        for server in problem.cluster.servers
    )
    return Cluster(servers, problem.cluster.switch)


def _ways(plain: Answer | NothingFits, roomy: Answer, walk: PagedWalk) -> Iterator[MemoryWay]:
    """What each way to live with the memory would take, and what it would be with room for everything."""
    if isinstance(plain, NothingFits):
        yield MemoryWay("without paging", None, str(plain))
    else:
        yield MemoryWay("without paging", plain.best)
    for words, again in (("paging", False), ("paging and recomputation", True)):
        yield MemoryWay(words, walk.best_seen(again=again), "Nothing that was tried fits.")
    yield MemoryWay("room for everything", roomy.best)
