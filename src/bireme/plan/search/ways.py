"""The ways to send less over links, where the planner may choose: codecs of boundaries, codecs of sums over
replicas, and how replicas agree.

A way is a point on these three axes. The usual way is searched first, and the plans that it finds are
evaluated in every other way. The ways that look best are then searched too, and their plans evaluated in the
others. So another way never makes the choice slower. Steps are those of the study (`plan/penalties.py`), and
multiply. Averages through codecs, or beside codecs of boundaries, were not studied and are not proposed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations

from bireme.cluster.cluster import Cluster
from bireme.codec.description import AS_IT_IS, BoundaryCodecs
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate, ConsideredWay, NothingFits
from bireme.plan.penalties import STUDIED_CELLS, STUDIED_SUMS, WORDS_TO_TRY, agreement_steps, sum_steps
from bireme.plan.plan_request import AUTO, Goal, PlanRequest, SyncChoice
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluated import NumberedSearch
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule

_MOST_SEARCHED, _FAR = 2, 1.1
"""Ways that are searched beside the usual one, and how many times as much as the best plan known plans may
cost in them. The way of the best plan is searched in any case.
"""
_MOST_SPREAD = 4
"""Plans of a way that are evaluated in the others."""


def with_best_way(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: NumberedSearch, least: float
) -> Answer | NothingFits:
    """The best answer over all ways, the usual way first among equals, with the plans of all ways among its
    candidates; the refusal of the usual way if no plan fits with it. Without its steps for one, any plan
    costs `least` for a sample at the least.
    """
    usual, *others = _ways(profile, cluster, request)
    plain = search(usual.asked, 0, 1 + _MOST_SEARCHED if others else 1)
    if not isinstance(plain, Answer):
        return plain
    answers, refused = {usual: usual.named(plain)}, list[ConsideredWay]()
    plans = {usual: [*answers[usual].candidates]}

    def cost(way: "_Way") -> float:
        return min(one.forecast.cost(request.goal) for one in plans[way])

    for way in others:
        refusal = way.refusal
        if not refusal and least * way.least_steps >= cost(usual):
            refusal = "Its steps alone cost more than the best plan."
        known = [] if refusal else way.evaluated(plain.candidates)
        if known:
            plans[way] = known
        else:
            refused.append(way.refused(refusal or _NONE_KNOWN))
    while True:
        best = min(plans, key=cost)
        way = min((one for one in plans if one not in answers), key=cost, default=best)
        is_enough = len(answers) > _MOST_SEARCHED or cost(way) > _FAR * cost(best)
        if way in answers or (best in answers and is_enough):
            break
        place = min(len(answers), _MOST_SEARCHED)
        answers[way] = way.found(partial(search, way.asked, place, 1 + _MOST_SEARCHED), plain)
        found = answers[way].candidates
        plans[way] += found
        for other in plans.keys() - answers.keys():
            plans[other] += other.evaluated(found[:_MOST_SPREAD])
    first = min(plans[best], key=lambda one: one.forecast.cost(request.goal))
    if first.plan.codecs and request.codec == AUTO:
        plans[best].insert(0, best.refined(first))
    candidates = [one for own in plans.values() for one in own]
    candidates.sort(key=lambda one: one.forecast.cost(request.goal))
    considered = [way.considered(plans[way]) for way in sorted(plans, key=cost)]
    return replace(
        answers[best],
        candidates=(*candidates,),
        num_tried=sum(one.num_tried for one in answers.values()),
        ways=(*considered, *refused) if others else (),
    )


def _ways(profile: Profile, cluster: Cluster, request: PlanRequest) -> Iterator["_Way"]:
    """All ways that the request leaves open, the usual one first. Within one server no codec of boundaries is
    tried.
    """
    choices: Sequence[SyncChoice | None] = request.sync_choices or (None,)
    words: Sequence[str] = (request.codec,)
    if request.codec == AUTO:
        words = ("none", *(WORDS_TO_TRY if _has_far_devices(cluster, request) else ()))
    for choice in choices:
        for word in words:
            if choice is None or word == words[0] or not choice.averages:
                yield _Way(profile, cluster, request, word, choice)


def _has_far_devices(cluster: Cluster, request: PlanRequest) -> bool:
    """Whether the devices that may be used lie on several servers."""
    placed = cluster.devices()
    usable = [cluster.number_of(name) for name in request.devices] or range(len(placed))
    return len({placed[device].server for device in usable}) > 1


_NONE_KNOWN = "No plan of several replicas whose steps the study knows is among the best."


class _Way:
    """A codec of all boundaries and a choice of how replicas agree; no choice if the request names it."""

    def __init__(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, word: str, choice: SyncChoice | None
    ) -> None:
        self._profile, self._cluster, self._choice = profile, cluster, choice
        self._is_usual = choice is None or choice is request.sync_choices[0]
        self._has_codec = word not in (request.codec, "none")
        asked = replace(request if choice is None else request.agreeing(choice), codec=word)
        if self._averages and request.delay_warmup_share == 0 and request.schedule == AUTO:
            asked = replace(asked, synchronous=True)
        self.asked = asked
        self._evaluators: dict[str, tuple[PlanEvaluator, PlanningProblem]] = {}

    @property
    def _averages(self) -> bool:
        return self._choice is not None and self._choice.averages

    @property
    def refusal(self) -> str:
        """Why it is not proposed; empty if it is."""
        asked, choice, optimizer = self.asked, self._choice, self._profile.optimizer
        if choice is None or self._is_usual:
            return ""
        what = choice.mode if choice.averages else "codecs of sums"
        rule = Rule.SYNCHRONOUS if asked.schedule == AUTO else SCHEDULES[asked.schedule].rule
        knows_rule = rule is Rule.SYNCHRONOUS or (rule is Rule.FRESH and asked.delay_warmup_share > 0)
        unknown = {
            f"with {optimizer}": optimizer not in STUDIED_SUMS,
            f"under {asked.schedule}": choice.averages and not knows_rule,
            "beside codecs of boundaries": choice.averages and (asked.codec != "none" or asked.boundaries),
            "with codecs": choice.averages and not choice.sums.is_dense,
            "with principal components": asked.whole_backwards,
            choice.unstudied: choice.unstudied,
        }
        for words, is_unknown in unknown.items():
            if is_unknown:
                return f"The study has no figure of {what} {words}."
        if asked.width == 1:
            return "One replica has no other to agree with."
        if choice.averages and asked.shard not in ("none", AUTO):
            return "Replicas that share state sum gradients in every batch."
        return ""

    @property
    def least_steps(self) -> float:
        """The steps for one that it takes at the least."""
        asked, optimizer = self.asked, self._profile.optimizer
        if asked.goal is Goal.THROUGHPUT:
            return 1.0
        agreed = min(
            asked.agreement_penalty(replicas, optimizer, rule)
            for _, replicas in STUDIED_CELLS
            for rule in (Rule.SYNCHRONOUS, Rule.FRESH)
        )
        coded = asked.codec_penalty((BoundaryCodecs(asked.codec, asked.codec),), optimizer)
        return agreed * coded * sum_steps(asked.sums.codec, optimizer).steps

    def is_known(self, candidate: Candidate) -> bool:
        """Whether a plan is one of this way, and not of the usual one, and the study knows its steps."""
        plan, asked = candidate.plan, self.asked
        if (self._has_codec and not plan.codecs) or (plan.width == 1 and not self._is_usual):
            return False
        if self._is_usual or asked.rounds is None or not asked.rounds.averages:
            return True
        words = self._profile.optimizer, asked.num_sites(plan.width), plan.source.rule
        has_warmup = asked.delay_warmup_share > 0
        return agreement_steps(*asked.rounds.agreement, *words, has_warmup=has_warmup).is_studied

    def named(self, answer: Answer) -> Answer:
        """With plans that have the choice in them."""
        return replace(answer, candidates=(*self._named(answer.candidates),))

    def found(self, search: Callable[[], Answer | NothingFits], plain: Answer) -> Answer:
        """What a search finds of plans whose steps the study knows; otherwise `plain` without plans."""
        answer: Answer | NothingFits | None = None
        with suppress(BiremeError):
            answer = search()
        if not isinstance(answer, Answer):
            return replace(plain, candidates=(), num_tried=0)
        return replace(answer, candidates=(*filter(self.is_known, self.named(answer).candidates),))

    def evaluated(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """What plans of another way come to in this one, as far as they fit."""
        found = []
        for one in candidates:
            draft = replace(draft_of(one.plan, self._cluster), codecs=())
            is_late = self.asked.synchronous and draft.rule is not Rule.SYNCHRONOUS
            if is_late or (one.plan.stage_widths and self.asked.equal_widths_because):
                continue
            evaluator, problem = self._evaluator(one.plan.known_shard)
            coded = draft.plan(problem.names, problem.codecs(draft.outline.rank_of_stage)).codecs
            plan = replace(one.plan, codecs=coded)
            if self.is_known(replace(one, plan=plan)):
                candidate = Candidate(plan, evaluator.forecast(draft))
                found += [candidate] if candidate.forecast.fits else []
        return [*self._named(found)]

    def refined(self, best: Candidate) -> Candidate:
        """The plan with the best codec of each boundary, given those of the others: fast links need none."""
        evaluator, problem = self._evaluator(best.plan.known_shard)
        draft, forecast, goal = draft_of(best.plan, self._cluster), best.forecast, self.asked.goal
        tried = (AS_IT_IS, *(BoundaryCodecs(word, word) for word in WORDS_TO_TRY))
        for boundary in range(len(draft.codecs)):
            for one in tried:
                other = replace(draft, codecs=(*draft.codecs[:boundary], one, *draft.codecs[boundary + 1 :]))
                promised = evaluator.forecast(other)
                if promised.fits and promised.cost(goal) < forecast.cost(goal):
                    draft, forecast = other, promised
        codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
        return Candidate(replace(best.plan, codecs=draft.plan(problem.names, codecs).codecs), forecast)

    def considered(self, plans: Iterable[Candidate]) -> ConsideredWay:
        """The way with the best of its plans, and what that sends over the link that needs longest."""
        best = min(plans, key=lambda one: one.forecast.cost(self.asked.goal))
        evaluator, problem = self._evaluator(best.plan.known_shard)
        draft = draft_of(best.plan, self._cluster)
        link, seconds = evaluator.busiest_lane(draft)
        pairs = permutations({device for row in draft.grid for device in row}, 2)
        lanes = (lane for pair in pairs for lane in problem.path(*pair) if lane.name == link)
        rate = next((lane.bytes_per_s for lane in lanes), 0.0)
        words = dict.fromkeys(word for one in best.plan.codecs for word in (one.forward, one.backward))
        found = replace(self.refused(""), codecs=", ".join(words) or "none")
        return replace(found, candidate=best, link=link, link_bytes=seconds * rate)

    def refused(self, why: str) -> ConsideredWay:
        """The way without a plan."""
        choice = SyncChoice(self.asked.sums, self.asked.rounds)
        return ConsideredWay(self.asked.codec, str(self.asked.sums.codec), choice.mode, refusal=why)

    def _named(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        choice = self._choice
        mode, codec = ("", "") if choice is None else (choice.mode, str(choice.sums.codec))
        for one in candidates:
            yield replace(one, plan=replace(one.plan, sync_mode=mode, sum_codec=codec))

    def _evaluator(self, shard: str) -> tuple[PlanEvaluator, PlanningProblem]:
        """Of plans whose replicas share this."""
        if shard not in self._evaluators:
            asked = self.asked.sharing(shard) if self.asked.shard == AUTO else self.asked
            problem = PlanningProblem(self._profile, self._cluster, asked)
            self._evaluators[shard] = PlanEvaluator(problem), problem
        return self._evaluators[shard]
