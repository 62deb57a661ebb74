"""Plans that this process has found before are not searched again: a question has one answer."""

from bireme.cluster.cluster import Cluster
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search import explorers, search
from bireme.profile.profile import Profile

__all__ = ["find_plan_once", "forget_plans"]

_found: dict[str, Answer | NothingFits] = {}
_find_plan = search.find_plan


def find_plan_once(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    *,
    progress: search.Progress | None = None,
    is_brief: bool = False,
    advises: bool = True,
    compares: bool = True,
) -> Answer | NothingFits:
    """`find_plan`, or what it found before."""
    question = repr((profile, cluster, request, is_brief, advises, compares, explorers.MOST_INSTRUCTIONS))
    if question not in _found:
        _found[question] = _find_plan(
            profile,
            cluster,
            request,
            progress=progress,
            is_brief=is_brief,
            advises=advises,
            compares=compares,
        )
    return _found[question]


def forget_plans() -> None:
    """Search again from here on."""
    _found.clear()
