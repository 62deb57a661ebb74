"""Why a plan is what it is: what would help, found by planning again with one thing changed at a time."""

from collections.abc import Callable
from dataclasses import dataclass

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.plan_request import PlanRequest
from bireme.plan.what_if import WhatIf, changes
from bireme.profile.profile import Profile

__all__ = ["Help", "explain"]

ExplainingSearch = Callable[[Profile, Cluster, PlanRequest], object]
"""`find_plan`: an `Answer`, or something else where nothing fits."""

Tell = Callable[[float, str], None]
"""Which part is done, and what comes next."""


@dataclass(frozen=True, slots=True)
class Help:
    """The best plan if something were otherwise. `gain` says how many times as much is trained in the same
    time; 1 is no help."""

    words: str
    candidate: Candidate
    gain: float


def explain(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    answer: Answer,
    search: ExplainingSearch,
    *,
    tell: Tell = lambda *_: None,
) -> tuple[Help, ...]:
    """What each change would bring, the best first; what then fits nowhere or cannot be is left out."""
    found = []
    all_changes = list(changes(cluster, request))
    for place, change in enumerate(all_changes):
        tell(place / len(all_changes), f"planning with {change.words}")
        other = _planned(search, profile, change)
        if other is not None:
            best = other.best
            goal = request.goal
            gain = answer.best.forecast.cost(goal) / best.forecast.cost(goal)
            found.append(Help(change.words, best, gain))
    tell(1.0, "done")
    return tuple(sorted(found, key=lambda one: -one.gain))


def _planned(search: ExplainingSearch, profile: Profile, change: WhatIf) -> Answer | None:
    try:
        found = search(profile, change.cluster, change.request)
    except BiremeError:
        return None
    return found if isinstance(found, Answer) else None
