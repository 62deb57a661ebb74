"""Plans whose replicas share weights, which are gathered where they are used, and so cost time.

Ordinary searches say what is good if replicas share the optimizer only: within the memory there is, and as if
there were room for everything. What they find is made to gather its weights, by the walk of plans that page:
it varies into how many parts the stage of a rank is cut (few of them are whole at a time), how long sweeps
are, which ranks recompute, and how large micro-batches are. Plans of one replica share nothing and stay what
they are.
"""

from collections.abc import Iterable
from dataclasses import replace

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate, Forecast, NothingFits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import Draft, draft_of
from bireme.plan.search.paged import BRIEF_SEEDS, MOST_SEEDS, Search, with_room
from bireme.plan.search.paged_walk import AS_GOOD, PagedWalk, has_room
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile

__all__ = ["with_gathering"]

USUAL = 2
"""Stages of a rank, or versions of one, whose weights are whole at a time: those of the pass that runs, and
those of the next one, which are on their way."""

TRIED = (1, 3, 4)
"""The others that are tried for the best."""


def with_gathering(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: Search, *, is_brief: bool
) -> Answer | NothingFits:
    """The best plan that fits, and shares weights where it has replicas."""
    most = BRIEF_SEEDS if is_brief else MOST_SEEDS
    walk = _GatheredWalk(PlanningProblem(profile, cluster, request), is_brief=is_brief)
    answers = (
        search(with_room(cluster), replace(request, memory_fraction=1.0)),
        search(cluster, request, is_tight=True),
    )
    found: dict[Draft, Candidate] = {}
    for answer in answers:
        for seed in _seeds(answer.candidates, most) if isinstance(answer, Answer) else ():
            best = walk.best_from(draft_of(seed.plan, cluster), 0.0)
            if best is not None:
                found.setdefault(draft_of(best.plan, cluster), best)
    bases = [answer for answer in answers if isinstance(answer, Answer)]
    if not bases:
        return answers[-1]
    if not found:
        raise BiremeError(
            "No plan fits whose replicas share weights: gathered weights and whole gradients of one stage "
            "need room in addition to the parts. Share the optimizer only, use smaller micro-batches, or use "
            "more devices."
        )
    how = f"{bases[-1].origin.how}; {walk.num_tried:,} plans that share weights simulated"
    return Answer(
        tuple(sorted(found.values(), key=lambda one: one.forecast.cost(request.goal))),
        replace(bases[-1].origin, how=how, cluster=cluster_hash(cluster)),
        sum(base.num_tried for base in bases) + walk.num_tried,
    )


def _seeds(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """So many of the best plans, among them one of several replicas if there is any."""
    known = list(candidates)
    several = [one for one in known if one.plan.width > 1]
    return list(dict.fromkeys([*known[: most - 1], *several[:1], *known[most - 1 :]]))[:most]


class _GatheredWalk(PagedWalk):
    """Evaluates drafts that share weights."""

    def _fitting_at(self, draft: Draft, *, host_updates: bool) -> tuple[Forecast, Draft] | None:
        del host_updates  # nothing pages
        for most in (USUAL, 1) if draft.outline.width > 1 else (0,):
            shared = replace(draft, whole_weights=most)
            try:
                found = self._evaluator.forecast(shared)
            except BiremeError:
                return None
            if has_room(found):
                return found, shared
        return None

    def _is_hopeless(self, draft: Draft, least: float) -> bool:
        """Nothing is: sums that are made stage by stage may take less time than those of whole gradients."""
        return False

    def _settled(self, draft: Draft) -> Candidate:
        """The plan of a draft, with so much whole at a time as is fastest."""
        forecast = self._forecast(draft)
        assert forecast is not None, "it fits"
        best = self._fitting[draft]
        for most in TRIED if best.whole_weights else ():
            other = replace(best, whole_weights=most)
            promised = self._evaluator.forecast(other)
            if has_room(promised) and promised.batch_s * AS_GOOD < forecast.batch_s:
                best, forecast = other, promised
        return self._candidate(best)
