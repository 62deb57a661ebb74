"""What a search has evaluated: the best of every kind and shape, and how many plans."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate, Forecast, MemoryWay, NothingFits, PlanKind
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import Draft, draft_of
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.paged_walk import AS_GOOD, BRIEF_SEEDS, MOST_SEEDS, PagedWalk, Search, with_room
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline
from bireme.profile.profile import Profile

NumberedSearch = Callable[[PlanRequest, int, int], Answer | NothingFits]
"""Searches for a request, given its number and the number of all requests."""


# What replicas share, if the planner may choose: the choice that is predicted to take the least time.
#
# A search is made for each choice, within the budgets and with offloading if that is allowed. A choice that
# excludes something else that was asked for is passed over.


def with_best_shard(request: PlanRequest, num_devices: int, search: NumberedSearch) -> Answer | NothingFits:
    """The best answer over all that replicas may share, if there are devices for two replicas; the first of
    equally good answers. If nothing fits, the refusal of the first search.
    """
    shards = request.shards if num_devices >= 2 * (request.depth or 1) else ("none",)
    answers, ways = list[Answer](), list[MemoryWay]()
    refusal: NothingFits | BiremeError | None = None
    for place, shard in enumerate(shards):
        found: Answer | NothingFits | BiremeError
        try:
            found = search(request.sharing(shard), place, len(shards))
        except BiremeError as error:
            found = error
        if not isinstance(found, Answer):
            refusal = refusal or found
            ways.append(MemoryWay(shard, None, str(found)))
            continue
        named = tuple(
            replace(one, plan=replace(one.plan, shard=shard if one.plan.width > 1 else "none"))
            for one in found.candidates
        )
        answers.append(replace(found, candidates=named))
        ways.append(MemoryWay(shard, named[0]))
    if isinstance(refusal, BiremeError) and not answers:
        raise refusal
    if isinstance(refusal, NothingFits) and not answers:
        return refusal
    best = min(answers, key=lambda one: one.best.forecast.cost(request.goal))
    return replace(
        best,
        num_tried=sum(one.num_tried for one in answers),
        shard_ways=tuple(ways) if len(shards) > 1 else (),
    )


# Plans whose replicas share weights, which are gathered where they are used, and so cost time.
#
# Ordinary searches say what is good if replicas share the optimizer only: within the memory there is, and as
# if there were room for everything. What they find is made to gather its weights, by the walk of plans that
# page: it varies into how many parts the stage of a rank is cut (few of them are whole at a time), how long
# sweeps are, which ranks recompute, and how large micro-batches are. Plans of one replica share nothing and
# stay what they are.

_USUAL = 2
"""Stages of a rank, or versions of one, whose weights are whole at a time: those of the pass that runs, and
those of the next one, which are on their way."""

_TRIED = (1, 3, 4)
"""The others that are tried for the best."""


def with_gathering(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: Search, *, is_brief: bool
) -> Answer | NothingFits:
    """The best plan that fits, and shares weights where it has replicas; within these limits they may be
    offloaded.
    """
    most = BRIEF_SEEDS if is_brief else MOST_SEEDS
    walk = _GatheredWalk(PlanningProblem(profile, cluster, request), is_brief=is_brief)
    answers = (
        search(with_room(cluster), replace(request, memory=None, memory_fraction=1.0)),
        search(cluster, request, is_tight=True),
    )
    found: dict[Draft, Candidate] = {}
    for answer in answers:
        for seed in _seeds(answer.candidates, most) if isinstance(answer, Answer) else ():
            draft = draft_of(seed.plan, cluster)
            least = min((one.forecast.cost(request.goal) for one in found.values()), default=math.inf)
            if request.memory is not None and found and walk.cost_with_room(draft) * AS_GOOD >= least:
                continue  # offloading only adds time
            best = walk.best_from(draft, 0.0)
            if best is not None:
                found.setdefault(draft_of(best.plan, cluster), best)
    bases = [answer for answer in answers if isinstance(answer, Answer)]
    if not bases:
        return answers[-1]
    if not found and request.memory is not None:
        raise walk.refusal()
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
        for most in (_USUAL, 1) if draft.outline.width > 1 else (0,):
            found = super()._fitting_at(replace(draft, whole_weights=most), host_updates=host_updates)
            if found is not None:
                return found
        return None

    def _is_hopeless(self, draft: Draft, least: float) -> bool:
        """If nothing is offloaded, a draft takes no longer to simulate than this would."""
        return self._problem.request.memory is not None and super()._is_hopeless(draft, least)

    def _roomy(self, draft: Draft) -> Draft:
        return replace(draft, whole_weights=_USUAL) if draft.outline.width > 1 else draft

    def _settled(self, draft: Draft) -> Candidate:
        """The plan of a draft, with so much whole at a time as is fastest."""
        forecast = self._forecast(draft)
        assert forecast is not None, "it fits"
        best = self._fitting[draft]
        for most in _TRIED if best.whole_weights else ():
            on_host = best.paging is not None and best.paging.host_updates
            other = super()._fitting_at(replace(draft, whole_weights=most), host_updates=on_host)
            if other is not None and other[0].batch_s * AS_GOOD < forecast.batch_s:
                forecast, best = other
        self._seen[draft], self._fitting[draft] = forecast, best
        return super()._settled(draft)


_MOST_SHOWN, _MOST_WIDTHS = 16, 6
"""Largest number of candidates in an answer, including the best of every kind; widths that have one each."""

_SLACK = 1e-9
"""Relative: so much better is rounding."""

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class EvaluatedDraft:
    """A draft plan, its forecast, and the cost of a sample: seconds, or joules if energy is the goal."""

    draft: Draft
    forecast: Forecast
    cost: float

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return self.forecast.fits


class EvaluatedDrafts:
    """Evaluates drafts and remembers the best."""

    def __init__(
        self, problem: PlanningProblem, evaluator: PlanEvaluator, progress: Callable[[float], None]
    ) -> None:
        self._problem = problem
        self.evaluator = evaluator
        self.progress = progress
        self._of_kind: dict[PlanKind, EvaluatedDraft] = {}
        self._of_shape: dict[tuple[str, tuple[int, ...], int], EvaluatedDraft] = {}
        self._seen: dict[Draft, EvaluatedDraft] = {}

    @property
    def num_evaluated(self) -> int:
        """How many drafts were simulated."""
        return len(self._seen)

    def misfits(self) -> list[EvaluatedDraft]:
        """What was simulated and does not fit."""
        return [one for one in self._seen.values() if not one.fits]

    def all_best(self) -> list[EvaluatedDraft]:
        """The best of every kind, the best of all first."""
        return sorted(self._of_kind.values(), key=lambda one: one.cost)

    def could_win(self, outline: Outline, least_batch_s: float) -> bool:
        """Whether a plan whose batch takes that at the least could be the best of its kind."""
        best = self._of_kind.get(outline.kind)
        return best is None or self.least_cost(outline, least_batch_s) < best.cost * (1 - _SLACK)

    def could_be_best(self, outline: Outline, least_batch_s: float) -> bool:
        """Whether it could be the best of all."""
        least = min((one.cost for one in self._of_kind.values()), default=math.inf)
        return self.least_cost(outline, least_batch_s) < least * (1 - _SLACK)

    def least_cost(self, outline: Outline, least_batch_s: float) -> float:
        """The cost at the least of a plan whose batch takes that at the least."""
        least_s = outline.penalty(self._problem) * least_batch_s / outline.batch_size
        return least_s * self._problem.least_power(outline.num_devices)

    def evaluated(self, draft: Draft) -> EvaluatedDraft:
        """What the plan evaluator says; the best are remembered."""
        known = self._seen.get(draft)
        if known is not None:
            return known
        forecast = self.evaluator.forecast(draft)
        found = EvaluatedDraft(draft, forecast, forecast.cost(self._problem.request.goal))
        self._seen[draft] = found
        if found.fits:
            outline = draft.outline
            widths = outline.stage_widths or (outline.width,)
            _keep(self._of_kind, outline.kind, found)
            _keep(self._of_shape, (outline.schedule, widths, outline.num_ranks), found)
        return found

    def candidates(self) -> tuple[Candidate, ...]:
        """The best, those of every kind and of several widths among them, by what they cost."""
        shown = {one.draft: one for one in self._of_kind.values()}
        of_shapes = sorted(self._of_shape.values(), key=lambda one: one.cost)
        of_widths: dict[int, EvaluatedDraft] = {}
        for one in of_shapes:
            of_widths.setdefault(one.draft.outline.most_replicas, one)
        for one in (*[*of_widths.values()][:_MOST_WIDTHS], *of_shapes):
            if len(shown) < _MOST_SHOWN:
                shown.setdefault(one.draft, one)
        ordered = sorted(shown.values(), key=lambda one: (one.cost, one.draft.outline.num_devices))
        return tuple(self._candidate(one) for one in ordered)

    def _candidate(self, found: EvaluatedDraft) -> Candidate:
        draft, problem = found.draft, self._problem
        codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
        return Candidate(draft.plan(problem.names, codecs), found.forecast)


def _keep(book: dict[_Key, EvaluatedDraft], key: _Key, found: EvaluatedDraft) -> None:
    best = book.get(key)
    if best is None or found.cost < best.cost * (1 - _SLACK):
        book[key] = found
