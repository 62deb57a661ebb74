"""Which codecs the borders of a plan get, where the planner may choose: those with the least time to loss.

A search is made without codecs and one with each that is worth trying, on all borders between ranks. The best
plan of all is then gone through border by border: a fast link needs none. Within one server nothing is tried.
"""

from collections.abc import Callable
from dataclasses import replace

from bireme.cluster.cluster import Cluster
from bireme.codec.border import AS_IT_IS, BorderCodecs
from bireme.plan.codec_penalties import WORDS_TO_TRY
from bireme.plan.forecast import Answer, Candidate, NothingFits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile

__all__ = ["with_best_codecs"]

CodecSearch = Callable[[PlanRequest, int, int], Answer | NothingFits]
"""Searches for a request; told that it is the one of that number, of so many."""


def with_best_codecs(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: CodecSearch
) -> Answer | NothingFits:
    """The best answer over all codecs, the best plan without any among its candidates."""
    bare = replace(request, codec="none")
    words = WORDS_TO_TRY if _has_far_devices(cluster, request) else ()
    plain = search(bare, 0, 1 + len(words))
    found = [
        search(replace(request, codec=word), place, 1 + len(words)) for place, word in enumerate(words, 1)
    ]
    answers = [one for one in (plain, *found) if isinstance(one, Answer)]
    if not answers:
        return plain
    best = min(answers, key=_cost_s)
    if best is plain:
        return plain
    refined = _refined(best.best, PlanningProblem(profile, cluster, bare))
    without = plain.candidates[:1] if isinstance(plain, Answer) else ()
    candidates = (refined, *best.candidates[1:], *without)
    ordered = tuple(sorted(candidates, key=lambda one: one.forecast.cost_s_per_sample))
    return replace(best, candidates=ordered, num_tried=sum(one.num_tried for one in answers))


def _cost_s(answer: Answer) -> float:
    return answer.best.forecast.cost_s_per_sample


def _has_far_devices(cluster: Cluster, request: PlanRequest) -> bool:
    """Whether the devices that may be used lie on several servers."""
    placed = cluster.devices()
    usable = [cluster.number_of(name) for name in request.devices] or range(len(placed))
    return len({placed[device].server for device in usable}) > 1


def _refined(best: Candidate, problem: PlanningProblem) -> Candidate:
    """The plan with the best codec of each border, given those of the others."""
    evaluator = PlanEvaluator(problem)
    draft, forecast = draft_of(best.plan, problem.cluster), best.forecast
    tried = (AS_IT_IS, *(BorderCodecs(word, word) for word in WORDS_TO_TRY))
    for border in range(len(draft.codecs)):
        for one in tried:
            own = (*draft.codecs[:border], one, *draft.codecs[border + 1 :])
            other = replace(draft, codecs=own)
            promised = evaluator.forecast(other)
            candidate = Candidate(best.plan, promised)
            if candidate.fits and promised.cost_s_per_sample < forecast.cost_s_per_sample:
                draft, forecast = other, promised
    codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
    return Candidate(draft.plan(problem.names, codecs), forecast)
