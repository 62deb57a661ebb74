"""The ways to send less over links, where the planner may choose: codecs of boundaries, codecs of sums over
replicas, and how replicas agree.

A way is a point on these three axes. Each is searched for by itself, as if the request had named it, and the
plan with the least time to the same loss is the best. So another way never makes the choice slower, and a
request that names the chosen way finds the same plan. Steps are those of the study (`plan/penalties.py`). The
study varies one axis at a time, so ways that differ from the usual one in two axes are not proposed.
"""

from collections.abc import Callable
from dataclasses import replace
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

# Codecs of boundaries. A search is made without codecs and one with each that is worth trying, on all
# boundaries between ranks. The best plan of all is then gone through boundary by boundary: a fast link needs
# none. Within one server nothing is tried.


def with_best_codecs(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: NumberedSearch
) -> Answer | NothingFits:
    """The best answer over all codecs, the best plan without any among its candidates."""
    bare = replace(request, codec="none")
    words = WORDS_TO_TRY if _has_far_devices(cluster, request) else ()
    asked = (bare, *(replace(request, codec=word) for word in words))
    found = [search(one, place, len(asked)) for place, one in enumerate(asked)]
    answers = [one for one in found if isinstance(one, Answer)]
    plain = found[0]
    if not answers or not words:
        return plain
    best = min(answers, key=lambda one: one.best.forecast.cost(request.goal))
    ways = [
        _way(one.codec, one, answer.best, profile, cluster)
        if isinstance(answer, Answer)
        else _refused(one.codec, one, str(answer))
        for one, answer in zip(asked, found, strict=True)
    ]
    if best is plain:
        return replace(best, ways=_ordered(ways, request.goal))
    refined = _refined(best.best, PlanningProblem(profile, cluster, bare))
    place = found.index(best)
    ways[place] = _way(_words(refined), asked[place], refined, profile, cluster)
    without = plain.candidates[:1] if isinstance(plain, Answer) else ()
    candidates = (refined, *best.candidates[1:], *without)
    ordered = tuple(sorted(candidates, key=lambda one: one.forecast.cost(request.goal)))
    num_tried = sum(one.num_tried for one in answers)
    return replace(best, candidates=ordered, num_tried=num_tried, ways=_ordered(ways, request.goal))


def _has_far_devices(cluster: Cluster, request: PlanRequest) -> bool:
    """Whether the devices that may be used lie on several servers."""
    placed = cluster.devices()
    usable = [cluster.number_of(name) for name in request.devices] or range(len(placed))
    return len({placed[device].server for device in usable}) > 1


def _refined(best: Candidate, problem: PlanningProblem) -> Candidate:
    """The plan with the best codec of each boundary, given those of the others."""
    evaluator = PlanEvaluator(problem)
    draft, forecast, goal = draft_of(best.plan, problem.cluster), best.forecast, problem.request.goal
    tried = (AS_IT_IS, *(BoundaryCodecs(word, word) for word in WORDS_TO_TRY))
    for boundary in range(len(draft.codecs)):
        for one in tried:
            own = (*draft.codecs[:boundary], one, *draft.codecs[boundary + 1 :])
            other = replace(draft, codecs=own)
            promised = evaluator.forecast(other)
            candidate = Candidate(best.plan, promised)
            if candidate.fits and promised.cost(goal) < forecast.cost(goal):
                draft, forecast = other, promised
    codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
    return Candidate(draft.plan(problem.names, codecs), forecast)


# Codecs of sums, and how replicas agree.

LeastCost = Callable[[PlanRequest], float]
"""What a sample costs at the least with any plan for a request, without its steps for one."""


def with_best_sync(
    profile: Profile, cluster: Cluster, request: PlanRequest, search: NumberedSearch, least: LeastCost
) -> Answer | NothingFits:
    """The best answer over all ways for the replicas to agree, the usual way first among equals; the refusal
    of the usual way if no plan fits with it.
    """
    usual, *others = request.sync_choices
    others.sort(key=_sent_share)
    bare = request.agreeing(usual)
    plain = search(bare, 0, len(request.sync_choices))
    if not isinstance(plain, Answer):
        return plain
    goal, named = request.goal, _named(plain, usual)
    num_tried = plain.num_tried
    best, ways = named, list(plain.ways) or [_way(request.codec, bare, named.best, profile, cluster)]
    for place, choice in enumerate(others, 1):
        asked = _asked(bare, choice)
        cost = best.best.forecast.cost(goal)
        refusal = _unstudied(bare, choice, profile.optimizer)
        if not refusal and least(asked) * _least_steps(asked, profile.optimizer) >= cost:
            refusal = "Its steps alone cost more than the best plan."
        if refusal:
            ways.append(_refused(asked.codec, asked, refusal))
            continue
        found = _found(search, asked, place, len(request.sync_choices), profile.optimizer)
        if not isinstance(found, Answer):
            ways.append(_refused(asked.codec, asked, found))
            continue
        found = _named(found, choice)
        ways.append(_way(asked.codec, asked, found.best, profile, cluster))
        num_tried += found.num_tried
        best = found if found.best.forecast.cost(goal) < cost else best
    return replace(best, num_tried=num_tried, ways=_ordered(ways, goal))


def _asked(request: PlanRequest, choice: SyncChoice) -> PlanRequest:
    """The request with a choice, limited to combinations that the study has: no codec on boundaries, and no
    delayed updates unless it has figures of both together.
    """
    asked = request.agreeing(choice)
    averages = choice.rounds is not None and choice.rounds.averages
    is_synchronous = not averages or request.delay_warmup_share == 0
    return replace(
        asked,
        codec="none" if asked.codec == AUTO else asked.codec,
        synchronous=asked.synchronous or (is_synchronous and asked.schedule == AUTO),
    )


def _found(
    search: NumberedSearch, asked: PlanRequest, place: int, count: int, optimizer: str
) -> Answer | str:
    """The plans of several replicas whose steps the study knows, or why there are none."""
    try:
        found = search(asked, place, count)
    except BiremeError as error:
        return str(error)
    if not isinstance(found, Answer):
        return str(found)
    known = tuple(one for one in found.candidates if _is_known(one, asked, optimizer))
    return replace(found, candidates=known) if known else _NONE_KNOWN


_NONE_KNOWN = "No plan of several replicas whose steps the study knows is among the best."


def _is_known(candidate: Candidate, asked: PlanRequest, optimizer: str) -> bool:
    plan, rounds = candidate.plan, asked.rounds
    if plan.width == 1 or rounds is None or not rounds.averages:
        return plan.width > 1
    has_warmup = asked.delay_warmup_share > 0
    sites = asked.num_sites(plan.width)
    return agreement_steps(
        *rounds.agreement, optimizer, sites, plan.source.rule, has_warmup=has_warmup
    ).is_studied


def _unstudied(request: PlanRequest, choice: SyncChoice, optimizer: str) -> str:
    """Why a choice is not proposed; empty if it is."""
    averages = choice.rounds is not None and choice.rounds.averages
    what = choice.mode if averages else "codecs of sums"
    rule = None if request.schedule == AUTO else SCHEDULES[request.schedule].rule
    knows_rule = rule in (None, Rule.SYNCHRONOUS) or (
        averages and rule is Rule.FRESH and request.delay_warmup_share > 0
    )
    has_codec = request.codec not in ("none", AUTO) or bool(request.boundaries)
    unknown = {
        f"with {optimizer}": optimizer not in STUDIED_SUMS,
        f"under {request.schedule}": not knows_rule,
        "beside codecs of boundaries": has_codec,
        "with codecs": averages and not choice.sums.is_dense,
        "with principal components": request.whole_backwards,
        choice.unstudied: bool(choice.unstudied),
    }
    for words, is_unknown in unknown.items():
        if is_unknown:
            return f"The study has no figure of {what} {words}."
    if request.width == 1:
        return "One replica has no other to agree with."
    if averages and request.shard not in ("none", AUTO):
        return "Replicas that share state sum gradients in every batch."
    return ""


def _least_steps(asked: PlanRequest, optimizer: str) -> float:
    if asked.goal is Goal.THROUGHPUT:
        return 1.0
    steps = sum_steps(asked.sums.codec, optimizer).steps
    return steps * min(
        asked.agreement_penalty(replicas, optimizer, rule)
        for _, replicas in STUDIED_CELLS
        for rule in (Rule.SYNCHRONOUS, Rule.FRESH)
    )


def _sent_share(choice: SyncChoice) -> float:
    """What each of two replicas sends in a batch, for each byte of its gradients."""
    every = 1 if choice.rounds is None else choice.rounds.every
    return choice.sums.hop_share(2) / every


def _named(answer: Answer, choice: SyncChoice) -> Answer:
    """With plans that have the choice in them."""
    mode, codec = choice.mode, str(choice.sums.codec)
    candidates = tuple(
        replace(one, plan=replace(one.plan, sync_mode=mode, sum_codec=codec)) for one in answer.candidates
    )
    return replace(answer, candidates=candidates)


# What was considered, for people who ask why.


def _way(
    codecs: str, asked: PlanRequest, candidate: Candidate, profile: Profile, cluster: Cluster
) -> ConsideredWay:
    problem = PlanningProblem(profile, cluster, asked)
    draft = draft_of(candidate.plan, cluster)
    link, seconds = PlanEvaluator(problem).busiest_lane(draft)
    pairs = permutations({device for row in draft.grid for device in row}, 2)
    lanes = (lane for pair in pairs for lane in problem.path(*pair) if lane.name == link)
    rate = next((lane.bytes_per_s for lane in lanes), 0.0)
    found = _refused(codecs, asked, "")
    return replace(found, candidate=candidate, link=link, link_bytes=seconds * rate)


def _refused(codecs: str, asked: PlanRequest, why: str) -> ConsideredWay:
    choice = SyncChoice(asked.sums, asked.rounds)
    words = "none" if codecs == AUTO else codecs
    return ConsideredWay(words, str(asked.sums.codec), choice.mode, refusal=why)


def _words(candidate: Candidate) -> str:
    """The codecs of a plan's boundaries, each once."""
    words = dict.fromkeys(word for one in candidate.plan.codecs for word in (one.forward, one.backward))
    return ", ".join(words) or "none"


def _ordered(ways: list[ConsideredWay], goal: Goal) -> tuple[ConsideredWay, ...]:
    """The best first, and last those without a plan."""

    def cost(way: ConsideredWay) -> tuple[bool, float]:
        found = way.candidate
        return found is None, 0.0 if found is None else found.forecast.cost(goal)

    return tuple(sorted(ways, key=cost))
