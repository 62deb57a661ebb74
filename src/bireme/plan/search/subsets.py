"""Plans that leave devices out: a search on all devices, then on subsets that may cost less or fit.

A plan for some of the devices is a plan for all of them, so more devices make no plan infeasible, and none
slower. An exhaustive search considers every subset by itself; a heuristic search and the walk of plans that
page begin with the fastest devices, and may miss a plan for a few devices with more memory. Subsets whose
work alone costs more than the best plan so far are not searched. Walks on subsets are brief.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.problem import PlanningProblem

_MOST_DEVICES = 8
"""If there are more, subsets are searched only if nothing fits."""

_MOST_SUBSETS = 24
"""Subsets to search; if there are more, those without the slowest, or without the smallest, devices."""

Search = Callable[[PlanRequest, float], Answer | NothingFits]
"""Searches for a request; a plan that costs more than the second argument may be left out."""


def with_subsets(problem: PlanningProblem, search: Search, *, is_brief: bool) -> Answer | NothingFits:
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
        if _least_cost(problem, devices) >= least:
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


def _least_cost(problem: PlanningProblem, devices: Sequence[int]) -> float:
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
