"""A walk over drafts that page, from a plan that would be best with room for everything.

Each step changes one thing: how many parts the stage of each rank is cut into, how many micro-batches a sweep
has, which ranks recompute, how large micro-batches are. A draft that does not fit its tiers is passed over,
but what it would need is remembered. Whether updates are made on the host is decided by the first draft that
fits; where they are, the best is tried with updates on the device too.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from operator import gt
from time import perf_counter
from typing import Protocol

from bireme.bounds import bytes_text
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Candidate, Forecast, MemoryWay, NoRoomError, NothingFits
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Paging
from bireme.plan.plan_request import PlanRequest
from bireme.plan.program_plan import even_cuts
from bireme.plan.search.draft import Draft, draft_of
from bireme.plan.search.draft_paging import TiedGradients, budgets_of, update_places
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.mapping import keeps_home
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile
from bireme.schedule.budgets import TierTooSmallError, check_working_sets, least_device_bytes
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.program import Rule
from bireme.schedule.residency import resident

_MOST_WALKED, _BRIEFLY_WALKED = 16, 6
"""Drafts that are simulated from one plan, and where a better plan would save less than it takes to find."""

_HOPELESS = 2
"""Times the cost of the best known plan. There is no walk from a plan that costs more: a heuristic, which
excludes nothing before a plan fits.
"""

_FAR_BEHIND = 1.1
"""Times the cost of a plan: if smaller micro-batches cost more, no smaller ones are tried. A heuristic."""

_MOST_PARTS = 64
"""Of a rank."""

_MOST_PASSES = 2048
"""Forwards of a batch, over all stages; with more, a draft takes too long to simulate."""

_MOST_TOGGLED = 8
"""Ranks whose recomputation is decided one by one."""

_AHEAD = (0, 1, 4)
"""Instructions ahead that are tried for the best."""
_APART_AHEAD = (1, 4, 16)
"""The same where stages update apart: what an update needs travels during the backwards of other stages."""


AS_GOOD = 1.001
"""A thousandth of a batch is not worth another part, a longer sweep or another stashed micro-batch."""


class PagedWalk:
    """Evaluates drafts that page, and remembers what those needed that do not fit."""

    def __init__(self, problem: PlanningProblem, *, is_brief: bool, worst_cost: float = math.inf) -> None:
        self._problem = problem
        self._worst_cost = worst_cost
        """That of a plan which fits: plans that cost as much are of no use. Infinite if none is known."""
        self._most = _BRIEFLY_WALKED if is_brief else _MOST_WALKED
        self._evaluator = PlanEvaluator(problem)
        self._seen: dict[Draft, Forecast | None] = {}
        self._fitting: dict[Draft, Draft] = {}
        """Drafts with what makes them fit."""
        self._candidates: dict[Draft, Candidate] = {}
        self._places = self._allowed = update_places(problem)
        self._too_large: list[tuple[Draft, bool]] = []
        """Drafts whose working set is larger than a device, and whether they were to update on the host."""
        self._error: BiremeError | None = None
        within_s = None if problem.request.memory is None else problem.request.memory.within_s
        self._end_s = math.inf if within_s is None else perf_counter() + within_s

    @property
    def is_over(self) -> bool:
        """Whether the time for the search is over."""
        return perf_counter() > self._end_s

    @property
    def num_tried(self) -> int:
        """How many drafts were simulated, or found not to fit."""
        return len(self._seen)

    def fits(self, draft: Draft) -> bool:
        """Whether a draft fits without paging."""
        return self._evaluator.forecast(draft).fits

    def best_from(self, seed: Draft, least_cost: float, most_cost: float = math.inf) -> Candidate | None:
        """The best plan that is found from one that may not fit, and costs that with room for everything.

        If it costs `most_cost` or more its copies are not tuned, and if the first that fits costs far more
        there is no walk.
        """
        at = next((one for one in self._first(seed) if self._forecast(one) is not None), None)
        if at is None:
            return None
        least, num_before = self._cost(at), self.num_tried
        is_better = least < _HOPELESS * most_cost
        while is_better and least > least_cost * AS_GOOD and self.num_tried - num_before < self._most:
            is_better = False
            for other in self._beside(at):
                if self.is_over:
                    break
                if self._is_hopeless(other, least):
                    continue
                cost = math.inf if self._forecast(other) is None else self._cost(other)
                if cost * AS_GOOD < least:
                    at, least, is_better = other, cost, True
                    break
                is_smaller = other.outline.num_microbatches > at.outline.num_microbatches
                if is_smaller and least * _FAR_BEHIND < cost < math.inf:
                    break  # the smaller ones come last
        if least >= self._worst_cost:
            return None
        return self._settled(at) if least < most_cost else self._candidate(self._fitting[at])

    def best_seen(self, *, again: bool) -> Candidate | None:
        """The best of all that was simulated and pages, of those that recompute or of the others."""
        best = min(self._paging(again=again), key=self._cost, default=None)
        return None if best is None else self._candidate(self._fitting[best])

    def _paging(self, *, again: bool) -> list[Draft]:
        """All that was simulated and pages, of those that recompute or of the others."""
        return [
            draft
            for draft, promised in self._seen.items()
            if promised and promised.tiers and bool(draft.recompute) == again
        ]

    def can_fit(self, seed: Draft) -> bool:
        """Whether a draft fits if it pages, is cut into parts, recomputes, or has smaller micro-batches."""
        return any(self._forecast(one) is not None for one in self._first(seed))

    def refusal(self) -> BiremeError:
        """Why nothing fits, with the device memory that would be enough."""
        if not self._too_large:
            return self._error or NoRoomError("No plan can offload: there is none to begin with.")
        needed, place = min((self._needed_bytes(*one), place) for place, one in enumerate(self._too_large))
        num_bytes, least = math.ceil(needed), self._too_large[place][0]
        devices = [device for row in least.grid for device in row]
        given = math.floor(min(self._problem.limits[device] for device in devices))
        is_asked = num_bytes <= min(self._problem.room[device] for device in devices)
        remedy = f" Set memory.device to {num_bytes} or more." if is_asked else ""
        return NoRoomError(
            "No plan fits, even with offloading: the device memory of each process must be at least "
            f"{bytes_text(num_bytes)} ({num_bytes} bytes), and is {bytes_text(given)} ({given} bytes)."
            f"{remedy}"
        )

    def _first(self, seed: Draft) -> Iterator[Draft]:
        """Drafts that need less and less on the device."""
        for one in (seed, *self._smaller(seed)):
            for parts in self._parts(one):
                yield parts
                yield from islice(self._recomputing(parts), 1)

    def _beside(self, draft: Draft) -> Iterator[Draft]:
        """The neighbors of a draft."""
        yield from self._sweeps(draft)
        everyone, now = sorted(set(draft.outline.rank_of_stage)), self._ranks_again(draft)
        yield from self._recomputing(draft)
        parts = list(self._parts(self._whole(draft)))
        place = next((i for i, one in enumerate(parts) if one.cuts == draft.cuts), 0)
        for other in (place + 1, place - 1):
            if 0 <= other < len(parts):
                yield self._on_ranks(replace(parts[other], sweep=draft.sweep), now)
        if self._may_recompute and 1 < len(everyone) <= _MOST_TOGGLED:
            yield from (self._on_ranks(draft, now ^ {rank}) for rank in everyone)
        yield from self._smaller(draft)

    def _parts(self, draft: Draft) -> Iterator[Draft]:
        """The draft with each rank's stage whole, in two parts, in four, ..."""
        yield draft
        outline, bounds = draft.outline, self._problem.bounds
        if outline.stages_per_rank > 1 or schedule_named(outline.schedule).stages_per_rank > 1:
            return
        stages = draft.stages(bounds[-1])
        units = [[unit for unit in bounds if begin <= unit < end] for begin, end in stages]
        num_parts = 2
        while num_parts <= min(_MOST_PARTS, *map(len, units)):
            if outline.num_ranks * num_parts * outline.num_microbatches > _MOST_PASSES:
                return
            cuts = [
                cut
                for own, (_, end) in zip(units, stages, strict=True)
                for cut in (own[0], *self._cut_in(own, end, num_parts, max(outline.sizes)))
            ]
            yield replace(
                draft,
                outline=replace(outline, stages_per_rank=num_parts),
                cuts=tuple(cuts[1:]),
                recompute=tuple(
                    stage * num_parts + part for stage in draft.recompute for part in range(num_parts)
                ),
            )
            num_parts *= 2

    def _cut_in(self, units: list[int], end: int, num_parts: int, size: int) -> Iterator[int]:
        """Where to cut a stage that begins at the first of the units into parts of about equal bytes."""
        tables = self._problem.whole(size).bytes
        state = tables.parameter + tables.gradient + tables.optimizer + tables.kept
        work = [float(state[one, other]) for one, other in zip(units, (*units[1:], end), strict=True)]
        yield from (units[cut] for cut in even_cuts(work, num_parts))

    def _whole(self, draft: Draft) -> Draft:
        """The draft with one stage on each rank, where its parts are neighbors."""
        outline = draft.outline
        per_rank = outline.stages_per_rank
        if per_rank == 1 or schedule_named(outline.schedule).stages_per_rank > 1:
            return draft
        ranks = self._ranks_again(draft)
        return replace(
            draft,
            outline=replace(outline, stages_per_rank=1),
            cuts=draft.cuts[per_rank - 1 :: per_rank],
            recompute=tuple(sorted(ranks)),
        )

    def _sweeps(self, draft: Draft) -> Iterator[Draft]:
        """The next longer and the next shorter sweep."""
        m = draft.outline.num_microbatches
        if schedule_named(draft.outline.schedule).slices:
            return
        possible = [sweep for sweep in range(1, m + 1) if m % sweep == 0]
        place = possible.index(draft.sweep)
        for other in (place + 1, place - 1):
            if 0 <= other < len(possible):
                yield replace(draft, sweep=possible[other])

    @property
    def _may_recompute(self) -> bool:
        return self._problem.request.recompute is Recompute.WHERE_NEEDED

    def _recomputing(self, draft: Draft) -> Iterator[Draft]:
        """All ranks recompute, and none does."""
        if self._may_recompute:
            everyone = set(draft.outline.rank_of_stage)
            for ranks in (everyone, set[int]()):
                if ranks != self._ranks_again(draft):
                    yield self._on_ranks(draft, ranks)

    @staticmethod
    def _on_ranks(draft: Draft, ranks: set[int]) -> Draft:
        """The draft whose stages on these ranks recompute."""
        again = (stage for stage, rank in enumerate(draft.outline.rank_of_stage) if rank in ranks)
        return replace(draft, recompute=tuple(again))

    def _ranks_again(self, draft: Draft) -> set[int]:
        ranks = draft.outline.rank_of_stage
        return {ranks[stage] for stage in draft.recompute}

    def _smaller(self, draft: Draft) -> Iterator[Draft]:
        """More micro-batches of fewer samples."""
        outline = draft.outline
        for size in sorted(self._problem.sizes, reverse=True):
            times, rest = divmod(min(outline.sizes), size)
            if times > 1 and not rest and all(one % times == 0 for one in outline.sizes):
                sizes = tuple(one // times for one in outline.sizes)
                if set(sizes) <= set(self._problem.sizes):
                    more = outline.num_microbatches * times
                    yield replace(draft, outline=replace(outline, sizes=sizes, num_microbatches=more))

    def _forecast(self, draft: Draft) -> Forecast | None:
        """What a draft promises; None where it does not fit."""
        if draft in self._seen:
            return self._seen[draft]
        self._seen[draft] = None
        problem = self._problem
        if not keeps_home(problem, draft.outline, draft.grid, draft.cuts):
            return None
        found: list[tuple[Forecast, Draft]] = []
        for place in self._places:
            one = self._fitting_at(draft, host_updates=place)
            found += [] if one is None else [one]
            if one is not None and (one[1].paging is None or one[1].paging.host_updates != place):
                break  # there is one way only
        if not found:
            return None
        forecast, fitting = min(found, key=lambda one: one[0].batch_s)
        if fitting.paging is not None and (len(found) > 1 or fitting.paging.host_updates):
            self._places = (fitting.paging.host_updates,)
        self._seen[draft], self._fitting[draft] = forecast, fitting
        return forecast

    def _overflows(self, draft: Draft) -> bool:
        """Whether a rank keeps more than all its tiers hold: first by its state, which needs no program, then
        by the peak of its program.
        """
        rooms = [
            math.inf if one.host_bytes is None else one.device_bytes + one.host_bytes + one.disk_bytes
            for one in budgets_of(self._problem, draft.grid)
        ]
        if any(map(gt, self._evaluator.least_kept_bytes(draft), rooms)):
            return True
        asked = self._problem.request.memory
        if min(rooms) == math.inf or (asked is not None and asked.updates_apart):
            return False
        program, sizes = draft.resident_program(), self._evaluator.sizes(draft)
        return any(
            room < math.inf and resident(program, rank, sizes).peak_bytes > room
            for rank, room in enumerate(rooms)
        )

    def _fitting_at(self, draft: Draft, *, host_updates: bool) -> tuple[Forecast, Draft] | None:
        """What a draft promises that updates there, and the draft so; None where it does not fit."""
        try:
            # Planning the copies of a draft that cannot fit takes long, unless a refusal needs its numbers.
            has_reason = self._too_large or isinstance(self._error, TierTooSmallError)
            if has_reason and self._overflows(draft):
                return None
            paging = None
            if self._problem.request.memory is not None:
                paging = self._evaluator.paging(draft, host_updates=host_updates)
            program = draft.resident_program()
            if paging is not None and program.num_sharers == 1 and not paging.is_summed:
                check_working_sets(program, paging.cut(program))  # before longer programs are made
            placed = replace(draft, paging=paging)
            found = self._evaluator.forecast(placed, is_brief=True)
        except TierTooSmallError as error:
            if error.tier == "device":
                self._too_large.append((draft, host_updates))
            else:
                self._error = error
            return None
        except BiremeError as error:
            self._error = self._error or error
            return None
        return (found, placed) if found.fits else None

    def _needed_bytes(self, draft: Draft, host_updates: bool) -> float:
        """What the device of every rank must have at the least."""
        paging = self._evaluator.paging(draft, host_updates=host_updates)
        assert paging is not None, "what does not fit pages"
        program = draft.resident_program()
        return least_device_bytes(program, paging.cut(program), is_summed=paging.is_summed)

    def _is_hopeless(self, draft: Draft, least: float) -> bool:
        """Whether a draft would be no better than the best, and than the best that recomputes as it does,
        even with room for everything: paging only adds time.
        """
        if draft in self._seen:
            return False
        alike = list(map(self._cost, self._paging(again=bool(draft.recompute))))
        if not alike:
            return False
        roomy = self.cost_with_room(draft)
        return roomy * AS_GOOD >= least and roomy >= min(alike)

    def cost_with_room(self, draft: Draft) -> float:
        """The cost of a draft with room for everything; 0 if the draft is refused, for then offloading gives
        the reason.
        """
        try:
            return self._evaluator.forecast(self._roomy(draft)).cost(self._problem.request.goal)
        except BiremeError:
            return 0.0

    def _roomy(self, draft: Draft) -> Draft:
        """The draft that is simulated with room for everything."""
        return draft

    def _cost(self, draft: Draft) -> float:
        found = self._seen[draft]
        return math.inf if found is None else found.cost(self._problem.request.goal)

    def _settled(self, draft: Draft) -> Candidate:
        """The plan of a draft, with the lead of its copies and the order of its updates that are fastest."""
        best, forecast = self._fitting[draft], self._seen[draft]
        if best.paging is not None and _waits(forecast) and not self.is_over:
            tried = [best.program(is_brief=True)]
            for other in self._variants(best, best.paging):
                if self.is_over:
                    break
                try:
                    program = other.program(is_brief=True)
                    if any(program is one for one in tried):
                        continue
                    tried.append(program)
                    found = self._evaluator.forecast(other, is_brief=True)
                except TierTooSmallError:
                    continue  # updates on the device need more of it
                if forecast is None or found.batch_s * AS_GOOD < forecast.batch_s:
                    best, forecast = other, found
        return self._candidate(best)

    def _variants(self, draft: Draft, paging: Paging) -> Iterator[Draft]:
        """The same with other leads and orders of updates, and with updates on the device too."""
        outline, asked = draft.outline, self._problem.request.memory
        ways = [(False, False), (True, False)][: outline.stages_per_rank]
        leads = [(ahead, *way) for ahead in _AHEAD for way in ways]
        is_asked = asked is not None and asked.updates_apart and outline.width == 1
        if is_asked and draft.rule is Rule.SYNCHRONOUS and not paging.is_summed:
            leads += [(ahead, False, True) for ahead in _APART_AHEAD]
        places = self._allowed if paging.host_updates else (False,)
        for place, (ahead, together, apart) in product(places, leads):
            other = replace(
                paging, ahead=ahead, updates_together=together, updates_apart=apart, host_updates=place
            )
            if other != paging:
                yield replace(draft, paging=other)

    def _candidate(self, draft: Draft) -> Candidate:
        if draft not in self._candidates:
            codecs = self._problem.codecs(draft.outline.rank_of_stage, draft.codecs)
            plan = draft.plan(self._problem.names, codecs)
            self._candidates[draft] = Candidate(plan, self._evaluator.forecast(draft))
        return self._candidates[draft]


def _waits(forecast: Forecast | None) -> bool:
    """Whether any rank waits for its chunks for long."""
    return forecast is None or any(
        tier.waited_s > (AS_GOOD - 1) * forecast.batch_s for tier in forecast.tiers
    )


# Plans that page, weighed against plans that fit without: recomputation, more stages, smaller micro-batches.
#
# If memory limits, ordinary searches are made: one within the budgets, which knows all that helps but paging,
# one as if there were room for everything, and one as if devices had the memory of all their tiers. What the
# last two find is then made to fit by paging, by a walk: parts of a rank that follow each other, sweeps,
# recomputation of all stages, of none or of those of a rank, and smaller micro-batches, each as long as the
# predicted time falls. Paging only adds time, so plans that are slower with room for everything than a plan
# that is known to fit are left alone.


class Search(Protocol):
    """An ordinary search on a cluster; `is_tight` where hardly any plan fits, `is_rough` if plans are looked
    for that are to be changed.
    """

    def __call__(
        self, machines: Cluster, request: PlanRequest, /, *, is_tight: bool = False, is_rough: bool = False
    ) -> Answer | NothingFits:
        """What it finds."""


MOST_SEEDS, BRIEF_SEEDS = 4, 2
"""Plans that would be best with room for everything, which are made to fit; fewer for a run that is short."""

_TIERS_FILLED = 0.9
"""What stages take of all tiers: chunks leave a part of each empty."""

_ROOM_BYTES = 2**60
"""What a device has that has room for everything."""


def with_paging(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    search: Search,
    most_cost: float,
    walked: set[Draft],
    *,
    is_brief: bool,
    compares: bool = True,
) -> Answer | NothingFits:
    """The best plan that fits, whether it pages or not, and what the other ways would take, if it `compares`.

    Plans that cost more than `most_cost` with room for everything are not made to page, and those that cost
    more when they page are left out; if nothing is left, this raises NoRoomError. If the best plan costs
    more, nothing is said of the other ways. Plans in `walked` were made to page in another search on some of
    these devices, which has said what a device needs at the least; those of this search are added.
    """

    def cost(candidate: Candidate) -> float:
        return candidate.forecast.cost(request.goal)

    _check_updates(profile, request)
    unlimited = replace(request, memory=None, memory_fraction=1.0)
    roomy = search(with_room(cluster), unlimited, is_rough=True)
    problem = PlanningProblem(profile, cluster, request)
    walk = PagedWalk(problem, is_brief=is_brief, worst_cost=most_cost)
    is_first = not walked
    if isinstance(roomy, Answer) and cost(roomy.best) * AS_GOOD >= most_cost:
        raise NoRoomError("No plan is fast enough, even with room for everything.")
    if isinstance(roomy, NothingFits) or walk.fits(draft_of(roomy.best.plan, cluster)):
        return search(cluster, request)
    plain = search(cluster, request, is_tight=True)
    fits = plain if isinstance(plain, Answer) else None
    least = most_cost if fits is None else min(most_cost, cost(fits.best))
    paged: list[Candidate] = []
    most_seeds = BRIEF_SEEDS if is_brief else MOST_SEEDS
    seeds = list(roomy.candidates[:most_seeds])
    limited = _with_tiers(problem)
    if limited is not None and not _fit(limited, problem, seeds[0]):
        within = search(limited, unlimited, is_rough=True)
        seeds += within.candidates[:most_seeds] if isinstance(within, Answer) else ()
    for seed in sorted(dict.fromkeys(seeds), key=cost):
        if walk.is_over and (fits or paged):
            break
        draft = draft_of(seed.plan, cluster)
        if cost(seed) * AS_GOOD < least and draft not in walked:
            walked.add(draft)
            best = walk.best_from(draft, cost(seed), least)
            if best is not None:
                paged.append(best)
                least = min(least, cost(best))
    if fits is None and not paged:
        raise walk.refusal() if is_first else NoRoomError("No plan is fast enough, or none fits.")
    candidates = sorted([*paged, *(() if fits is None else fits.candidates)], key=cost)
    basis = fits or roomy
    how = f"{basis.origin.how}; {walk.num_tried:,} plans that offload simulated"
    return Answer(
        tuple(candidates),
        replace(basis.origin, how=how, cluster=cluster_hash(cluster)),
        basis.num_tried + walk.num_tried,
        tuple(_ways(plain, roomy, walk)) if compares and cost(candidates[0]) < most_cost else (),
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
    return cluster.with_devices(lambda device: replace(device, memory_bytes=_ROOM_BYTES))


def _with_tiers(problem: PlanningProblem) -> Cluster | None:
    """The cluster whose devices have the memory of all their tiers; None if that is unlimited everywhere.

    Stages that fit there are cut for hosts of unlike memory.
    """
    numbers = range(len(problem.names))
    budgets = budgets_of(problem, tuple((one,) for one in numbers))
    if all(one.host_bytes is None for one in budgets):
        return None
    room = (
        _ROOM_BYTES
        if own.host_bytes is None
        else int(_TIERS_FILLED * (own.device_bytes + own.host_bytes + own.disk_bytes)) + process_bytes
        for own, process_bytes in zip(budgets, problem.process_bytes, strict=True)
    )
    return problem.cluster.with_devices(lambda device: replace(device, memory_bytes=next(room)))


def _fit(limited: Cluster, problem: PlanningProblem, seed: Candidate) -> bool:
    """Whether a plan fits a cluster, by the bytes of its stages."""
    room = PlanningProblem(
        problem.profile, limited, replace(problem.request, memory=None, memory_fraction=1.0)
    )
    limits = dict(zip(room.names, room.limits, strict=True))
    return all(
        peak_bytes <= limits[device]
        for stage in seed.forecast.stages
        for device, peak_bytes, _ in stage.bytes_of_devices()
    )


def _ways(plain: Answer | NothingFits, roomy: Answer, walk: PagedWalk) -> Iterator[MemoryWay]:
    """What each way to live with the memory would take, and what it would be with room for everything."""
    if isinstance(plain, NothingFits):
        yield MemoryWay("without offloading", None, str(plain))
    else:
        yield MemoryWay("without offloading", plain.best)
    for words, again in (("offloading", False), ("offloading and recomputation", True)):
        yield MemoryWay(words, walk.best_seen(again=again), "Nothing that was tried fits.")
    yield MemoryWay("room for everything", roomy.best)
