"""The search: the fastest plan that fits, and the best of every kind.

Shapes are gone through by what they promise, each with mappings onto devices and cuts for them, and the
simulator judges what is left. Where there are few plans in all, all are gone through: those that are left out
could not be better, by bounds that hold (see docs/search.md). Else shapes, mappings and cuts are the likely
ones, and a walk from neighbor to neighbor follows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from bireme.bounds import EQUAL
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Forecast, NoRoomError, NothingFits, Origin
from bireme.plan.plan import Plan
from bireme.plan.plan_file import profile_hash
from bireme.plan.plan_request import AUTO, Goal, PlanRequest
from bireme.plan.search.draft import Draft, draft_of
from bireme.plan.search.evaluated import EvaluatedDrafts, with_best_shard, with_gathering
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.explorers import ExhaustiveExplorer, HeuristicExplorer, InPartsExplorer, few_enough
from bireme.plan.search.mapping import why_homeless
from bireme.plan.search.nothing_fits import Remedies, asked_of, nearest_misfit
from bireme.plan.search.paged_walk import with_paging, with_room
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outlines
from bireme.plan.search.unequal_widths import UnequalExplorer
from bireme.plan.search.ways import with_best_way
from bireme.profile.profile import Profile
from bireme.schedule.budgets import TierTooSmallError
from bireme.timeline.timeline import Timeline

Progress = Callable[[float], None]
"""Told now and then which share of the work is done."""


def find_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    *,
    progress: Progress | None = None,
    is_brief: bool = False,
    advises: bool = True,
    compares: bool = True,
) -> Answer | NothingFits:
    """The best plans for a model of that profile on that cluster, or why there is none.

    With `is_brief`, for a run that is over soon, the search stops early where it would go through all plans.
    Without `advises` the changes that would make a plan fit are not looked for. Without `compares` nothing is
    said of the other ways to live with the memory.
    """
    tell = progress or (lambda _share: None)
    if request.equal_widths_because:
        request = replace(request, stage_widths=EQUAL)  # also where a part of the search asks for less

    def again(asked: PlanRequest, place: int, count: int) -> Answer | NothingFits:
        return find_plan(
            profile,
            cluster,
            asked,
            progress=lambda done: tell((place + done) / count),
            is_brief=is_brief,
            advises=advises and chooses_way and not place,
            compares=compares,
        )

    chooses_way = bool(request.sync_choices) or request.codec == AUTO
    if chooses_way:
        problem = PlanningProblem(profile, cluster, request)
        return with_best_way(profile, cluster, request, again, least_cost(problem, problem.devices))
    walked: set[Draft] = set()

    def on_devices(asked: PlanRequest, most_cost: float) -> Answer | NothingFits:
        is_subset = asked.devices != request.devices
        share = (lambda _share: None) if is_subset else tell  # the first search takes longest
        on = partial(_found, profile, progress=share, is_brief=is_brief)
        walks_briefly = is_brief or is_subset
        if asked.shares_weights:
            return with_gathering(profile, cluster, asked, on, is_brief=walks_briefly)
        if asked.memory is None:
            return on(cluster, asked)
        return with_paging(
            profile, cluster, asked, on, most_cost, walked, is_brief=walks_briefly, compares=compares
        )

    try:
        if request.shard == AUTO:
            asked, request = request, request.sharing(request.shards[0])  # whose refusal has the advice
            found = with_best_shard(asked, len(asked.devices) or cluster.num_devices, again)
        else:
            problem = PlanningProblem(profile, cluster, request)
            found = _with_subsets(problem, on_devices, is_brief=is_brief)
    except (NoRoomError, TierTooSmallError) as error:
        nearest = find_resident(profile, cluster, request) if advises else None
        if not isinstance(nearest, NothingFits):
            raise
        advice = Remedies(PlanningProblem(profile, cluster, request), nearest).advice()
        raise NoRoomError(f"{error}{advice}") from error
    if advises and isinstance(found, NothingFits):
        advice = Remedies(PlanningProblem(profile, cluster, request), found).advice()
        return replace(found, advice=advice)
    return found


def find_resident(profile: Profile, cluster: Cluster, request: PlanRequest) -> Answer | NothingFits:
    """The best plans within the budgets that page nothing, or why there is none."""
    return _found(profile, cluster, request, progress=lambda _share: None, is_brief=False, is_tight=True)


def _found(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    *,
    progress: Progress,
    is_brief: bool,
    is_tight: bool = False,
    is_rough: bool = False,
) -> Answer | NothingFits:
    """The best plans with the codec that is wished for. If memory is tight, not all plans are gone through:
    hardly any fits, and so hardly any would be ruled out. If the search is rough, it is brief, and a
    heuristic one does not walk on from the plans it finds.
    """
    is_brief = is_brief or is_rough
    problem = PlanningProblem(profile, cluster, request)
    outlines = Outlines(problem)
    shapes = [] if isinstance(request.stage_widths, tuple) else list(outlines)
    if not shapes and request.equal_widths_because:
        raise BiremeError(_no_shape(problem, outlines.refusal))
    if homeless := why_homeless(problem, shapes):
        raise BiremeError(homeless)
    ledger = EvaluatedDrafts(problem, PlanEvaluator(problem), progress)
    explorer: ExhaustiveExplorer | HeuristicExplorer
    # The partition names what is missing, but knows no plans of several stages on a rank.
    is_overfull = problem.is_overfull and any(shape.stages_per_rank == 1 for shape in shapes)
    is_exhaustive, how = is_overfull, []
    if shapes and not is_overfull:
        is_exhaustive = not is_tight and few_enough(problem)
        if is_exhaustive:
            explorer = ExhaustiveExplorer(problem, outlines, ledger, is_brief=is_brief)
        else:
            explorer = HeuristicExplorer(problem, outlines, ledger, walks=not is_rough)
        explorer.explore(shapes)
        how.append(explorer.how)
    if request.in_parts and request.memory is None and not request.shares_weights:
        in_parts = InPartsExplorer(problem, outlines, ledger)
        in_parts.explore(shapes)
        how.append(in_parts.how)
    if not request.equal_widths_because and not is_overfull:
        unequal = UnequalExplorer(problem, outlines, ledger, is_brief=is_brief)
        unequal.explore()
        how += [unequal.how] if unequal.how else []
        is_exhaustive = is_exhaustive if shapes else unequal.is_exhaustive
    candidates = ledger.candidates()
    asked = [] if candidates else list(asked_of(problem, shapes))
    if asked:
        next((one for one in asked if isinstance(one, Draft) and ledger.evaluated(one).fits), None)
        candidates = ledger.candidates()
    if not candidates and not shapes and not ledger.misfits():
        roomy = with_room(cluster)
        if roomy == cluster:
            raise BiremeError(_no_shape(problem, outlines.refusal))
        found = _found(profile, roomy, request, progress=progress, is_brief=True, is_tight=is_tight)
        if isinstance(found, Answer):
            ledger.evaluated(draft_of(found.best.plan, cluster))
    if not candidates:
        nearest = nearest_misfit(problem, asked, ledger.misfits())
        return replace(nearest, is_exhaustive=is_exhaustive)
    origin = Origin(
        graph=profile.graph,
        profile=profile_hash(profile),
        cluster=cluster_hash(cluster),
        batch_size=request.batch_size,
        how="; ".join(how),
    )
    is_exhaustive = is_exhaustive and not is_brief
    return Answer(candidates, origin, ledger.num_evaluated, is_exhaustive=is_exhaustive)


def forecast_of(plan: Plan, profile: Profile, cluster: Cluster, request: PlanRequest) -> Forecast:
    """What any plan promises that names its devices and the samples of its micro-batches.

    Of the request the part of the memory and the penalties count.
    """
    draft = draft_of(plan, cluster)
    return PlanEvaluator(PlanningProblem(profile, cluster, request)).forecast(draft)


def timeline_of(
    plan: Plan, profile: Profile, cluster: Cluster, request: PlanRequest, *, num_batches: int
) -> Timeline:
    """The first batches under such a plan, by the simulator: of the slowest replica."""
    evaluator = PlanEvaluator(PlanningProblem(profile, cluster, request))
    return evaluator.timeline(draft_of(plan, cluster), plan.program(num_batches))


def _no_shape(problem: PlanningProblem, refusal: str) -> str:
    request = problem.request
    sizes = ", ".join(map(str, problem.sizes))
    batch = f"{request.batch_size}"
    if request.largest_batch:
        batch += f" to {request.largest_batch}"
    if refusal:
        return f"No plan{request.shape_words} makes batches of {batch} samples. {refusal}"
    rules = (
        "a batch is width times micro-batches times their samples, and a pipeline of two weight versions "
        "needs as many micro-batches as stages"
    )
    if isinstance(request.stage_widths, tuple):
        rules = (
            "a batch is micro-batches times their samples, and needs a micro-batch for each replica of a "
            "stage, or of all stages with two weight versions"
        )
    return (
        f"No plan{request.shape_words} makes batches of {batch} samples out of whole micro-batches of "
        f"{sizes}: {rules}. Use another batch size, or profile smaller micro-batches."
    )


# Plans that leave devices out: a search on all devices, then on subsets that may cost less or fit.
#
# A plan for some of the devices is a plan for all of them, so more devices make no plan infeasible, and none
# slower. An exhaustive search considers every subset by itself; a heuristic search and the walk of plans that
# page begin with the fastest devices, and may miss a plan for a few devices with more memory. Subsets whose
# work alone costs more than the best plan so far are not searched. Walks on subsets are brief.

_MOST_DEVICES = 8
"""If there are more, subsets are searched only if nothing fits."""

_MOST_SUBSETS = 24
"""Subsets to search; if there are more, those without the slowest, or without the smallest, devices."""

_LimitedSearch = Callable[[PlanRequest, float], Answer | NothingFits]
"""Searches for a request; a plan that costs more than the second argument may be left out."""


def _with_subsets(
    problem: PlanningProblem, search: _LimitedSearch, *, is_brief: bool
) -> Answer | NothingFits:
    """The best answer for all devices or a subset; raises what the search for all raises if nothing fits.

    With `is_brief` subsets are searched only if nothing fits.
    """
    request, goal = problem.request, problem.request.goal
    first: Answer | NothingFits | BiremeError
    try:
        first = search(request, math.inf)
    except BiremeError as error:
        first = error
    if not isinstance(first, BiremeError) and first.is_exhaustive:
        return first
    best = first if isinstance(first, Answer) else None
    num_searched = 0
    for devices in _subsets(problem, best, is_brief=is_brief):
        least = math.inf if best is None else best.best.forecast.cost(goal)
        if least_cost(problem, devices) >= least:
            continue
        num_searched += 1
        try:
            found = search(replace(request, devices=tuple(problem.names[one] for one in devices)), least)
        except BiremeError:
            continue
        if isinstance(found, Answer):
            best = found if best is None else _merged(best, found, goal)
    if best is not None:
        if not num_searched:
            return best
        how = f"{best.origin.how}; {num_searched:,} subsets of the devices searched"
        return replace(best, origin=replace(best.origin, how=how))
    if isinstance(first, BiremeError):
        raise first
    assert isinstance(first, NothingFits)
    return first


def _subsets(problem: PlanningProblem, best: Answer | None, *, is_brief: bool) -> Iterator[tuple[int, ...]]:
    """The subsets of the devices that are worth a search, the largest first."""
    if best is not None and (is_brief or len(problem.devices) > _MOST_DEVICES):
        return
    pages = problem.request.memory is not None or problem.request.shares_weights
    found = None if best is not None and not pages else _all_subsets(problem)
    if found is None:
        found = _without_the_worst(problem)
    least, fixed = problem.request.least_devices, set(problem.pins.values())
    for devices in sorted(found, key=len, reverse=True):
        servers = {problem.servers[device] for device in devices}
        if least <= len(devices) and fixed <= set(devices) and problem.owners <= servers:
            yield devices


def _all_subsets(problem: PlanningProblem) -> set[tuple[int, ...]] | None:
    """All subsets, one of those that are equal; None if there are too many."""
    devices = problem.devices
    if len(devices) > _MOST_DEVICES:
        return None
    found = set[tuple[int, ...]]()
    for count in range(1, len(devices)):
        for some in combinations(sorted(devices), count):
            found.add(tuple(sorted(problem.symmetry.canonical(some))) if problem.is_symmetric else some)
    return found if len(found) <= _MOST_SUBSETS else None


def _without_the_worst(problem: PlanningProblem) -> set[tuple[int, ...]]:
    """The devices without the slowest kinds, and without those of least memory."""
    found = set[tuple[int, ...]]()
    for figures in (problem.usual_speeds, problem.limits):
        kinds = sorted({figures[device] for device in problem.devices}, reverse=True)
        for worst in kinds[: _MOST_SUBSETS // 2]:
            found.add(tuple(device for device in problem.devices if figures[device] >= worst))
    found.discard(tuple(problem.devices))
    return found


def least_cost(problem: PlanningProblem, devices: Sequence[int]) -> float:
    """What a sample costs at the least on these devices: its work, divided as if there were no units."""
    work_s = min(
        float((chain.forward_s + chain.backward_s).sum()) / size
        for size in problem.sizes
        for chain in (problem.whole(size),)
    )
    if problem.request.goal is Goal.ENERGY:
        return work_s * min(problem.watts[device] / problem.most_speeds[device] for device in devices)
    return work_s / sum(problem.most_speeds[device] for device in devices)


def _merged(one: Answer, other: Answer, goal: Goal) -> Answer:
    """The better answer with the candidates of both, those of the same kind too."""
    better = min(one, other, key=lambda answer: answer.best.forecast.cost(goal))
    candidates = sorted((*one.candidates, *other.candidates), key=lambda found: found.forecast.cost(goal))
    return replace(better, candidates=tuple(candidates), num_tried=one.num_tried + other.num_tried)
