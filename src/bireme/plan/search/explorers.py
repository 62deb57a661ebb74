"""The ways through the space of plans: all of it where that is small, the likely part of it, and one device
that runs the model in parts.

The first two go by shape, then mapping, then cuts, then how many micro-batches are sliced or run ahead.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, count, islice, pairwise
from operator import itemgetter

import numpy as np

from bireme.plan.forecast import PlanKind
from bireme.plan.partition.chain import RangeBytes
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan_request import AUTO
from bireme.plan.program_plan import even_cuts
from bireme.plan.search.contention import links_between
from bireme.plan.search.cutting import all_drafts, num_cuts_and_sets, promising_drafts
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.evaluated import EvaluatedDraft, EvaluatedDrafts
from bireme.plan.search.mapping import all_grids, exchanged, keeps_home, promising_grids
from bireme.plan.search.paged_walk import AS_GOOD
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.generators.shape import Shape
from bireme.schedule.program import Rule, banks_needed

# What a shape would take, roughly: PipeDream-2BW's cost functions, to say what to look at first.
#
#     pace  = max( work of a stage, messages over a link, gradient ring / m )    for schedules that do not
# drain     batch = m · pace · (1 + bubble) + gradient ring                            for those that do
#
# After the paper (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 4).
# What we changed: times are of all w replicas, not of one; micro-batches are a whole number; replicas that
# fill one server have its fast links; schedules that drain have their bubble; units are measured, so
# embedding and head count; a device is as fast as it is; messages are under way while stages compute. Nothing
# is decided by these numbers alone but the order.

_OVER = 100.0
"""How much worse a shape looks that would not fit if its stages were equal; it may fit all the same."""

_HALF_BUBBLE = 2 / 3
"""A sliced start-up is half a forward, of a third of the work."""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of the whole chain at a micro-batch size."""

    work_s: float
    again_s: float
    parameter_bytes: float
    gradient_bytes: float
    buffer_bytes: float
    optimizer_bytes: float
    kept_bytes: float
    boundary_bytes: float
    returned_bytes: float
    workspace_bytes: float


class _Estimator:
    """Orders shapes by what they would cost."""

    def __init__(self, problem: PlanningProblem, outlines: Outlines) -> None:
        self._problem = problem
        self._outlines = outlines
        self._totals: dict[int, _Totals] = {}
        self._limits = np.sort([problem.limits[device] for device in problem.devices])[::-1]

    def cost(self, outline: Outline) -> float:
        """Seconds of training per sample, or joules if energy is the goal."""
        rule = schedule_named(outline.schedule).rule
        m, p = outline.num_microbatches, outline.num_ranks
        totals = self._of(max(outline.sizes))
        again = self._runs_again(outline, rule, totals)
        num_units = self._problem.num_units
        # Units are not divided: of 10 on 4 ranks one has 3.
        pace_s = self._outlines.least_pace_s(outline) * (p * -(-num_units // p) / num_units)
        if again is None:
            pace_s *= _OVER
        elif again:
            pace_s *= totals.again_s / totals.work_s if totals.work_s else 1.0
        message_s, ring_s = self._links_s(outline, totals)
        batch_s = max(m * max(pace_s, message_s if p > 1 else 0.0) * (1 + self._bubble(outline)), ring_s)
        if rule is Rule.SYNCHRONOUS:
            batch_s += ring_s
        cost_s = outline.penalty(self._problem) * batch_s / outline.batch_size
        return cost_s * self._problem.least_power(outline.num_devices)

    def rough_cost(self, draft: Draft, floor_s: float) -> float:
        """The same for a plan whose busiest device or lane is known."""
        outline = draft.outline
        batch_s = floor_s * (1 + self._bubble(outline))
        if draft.rule is Rule.SYNCHRONOUS:
            batch_s += self._links_s(outline, self._of(max(outline.sizes)))[1]
        penalty = outline.penalty(self._problem, draft.lookahead)
        power = self._problem.power(device for row in draft.grid for device in row)
        return penalty * batch_s / outline.batch_size * power

    def _bubble(self, outline: Outline) -> float:
        m, fill = outline.num_microbatches, outline.num_ranks - 1
        match outline.schedule:
            case "sequential":
                return float(fill)
            case "gpipe" | "1f1b":
                return fill / m
            case "1f1b-sliced":
                return fill / m * (1 - _HALF_BUBBLE / 4)
            case "interleaved":
                return fill / m / outline.stages_per_rank
            case "zb-h1":
                return fill / m / 3
            case "zbv":
                return fill / m / 6
        return 0.0

    def _runs_again(self, outline: Outline, rule: Rule, totals: _Totals) -> bool | None:
        """Whether equal stages would have to run their forwards again to fit; None if they would not fit."""
        p, m = outline.num_ranks, outline.num_microbatches
        limit = float(self._limits[min(outline.num_devices, len(self._limits)) - 1])
        sharers = self._problem.request.num_sharers(outline.width)
        has_newest_apart = rule is Rule.FRESH and not self._problem.request.has_masters
        versions = banks_needed(rule, 0, p) + has_newest_apart / sharers
        under_way = {"gpipe": m, "sequential": 1}.get(outline.schedule, min(p, m))
        gradients = 1 + self._problem.kept_share(outline.width)
        state = versions * totals.parameter_bytes + gradients * totals.gradient_bytes
        state = (state + totals.buffer_bytes + totals.optimizer_bytes / sharers) / p + totals.workspace_bytes
        allowed = self._problem.request.recompute
        if allowed is not Recompute.ALWAYS and state + under_way * totals.kept_bytes / p <= limit:
            return False
        least = state + totals.kept_bytes / p + under_way * totals.boundary_bytes
        return True if allowed is not Recompute.NEVER and least <= limit else None

    def _links_s(self, outline: Outline, totals: _Totals) -> tuple[float, float]:
        """A micro-batch's messages and a batch's gradient ring, in the better of two placements."""
        p, w = outline.num_ranks, outline.width
        fast, slow = self._rates
        per_server = self._per_server
        # A server's card carries all that its devices send at once.
        message = totals.boundary_bytes + totals.returned_bytes
        request = self._problem.request
        ring = request.sums_within.hop_bytes(totals.gradient_bytes, slice(None), request.site_width(w)) / p
        if request.rounds is not None:
            ring += request.round_share(w) / request.rounds.every * totals.gradient_bytes / p
        sharing = per_server if w > 1 else 1
        if p <= per_server:
            together = (
                message / fast,
                ring / fast if w * p <= per_server else ring * min(per_server, p) / slow,
            )
        else:
            together = message * max(1, per_server // p) / slow, ring * per_server / slow
        if w <= per_server:
            crosses = p * w > per_server
            apart = message * min(w, sharing) / slow if crosses else message / fast, ring / fast
        else:
            apart = together
        return min(together, apart, key=lambda pair: outline.num_microbatches * pair[0] + pair[1])

    @cached_property
    def _per_server(self) -> int:
        devices = self._problem.devices
        return max(1, len(devices) // len({self._problem.servers[device] for device in devices}))

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Bytes a second inside a server and between two, as two typical devices have them."""
        problem = self._problem
        first = problem.devices[0]
        inside = [d for d in problem.devices[1:] if problem.servers[d] == problem.servers[first]]
        outside = [d for d in problem.devices if problem.servers[d] != problem.servers[first]]
        fast = problem.cluster.bandwidth(first, inside[0]) if inside else float("inf")
        slow = min(
            (problem.cluster.bandwidth(first, d) for d in outside[:: max(1, len(outside) // 8)]), default=fast
        )
        return (fast if inside else slow), slow

    def _of(self, size: int) -> _Totals:
        if size not in self._totals:
            chain, whole = self._problem.merged(size), (0, -1)
            tables = chain.bytes
            messages = (chain.boundary_bytes[:-1], chain.returned_bytes[:-1])
            values = (
                (chain.forward_s + chain.backward_s).sum(),
                (chain.forward_s + chain.recompute_backward_s).sum(),
                *(one[whole] for one in (tables.parameter, tables.gradient, tables.buffer)),
                *(one[whole] for one in (tables.optimizer, tables.kept)),
                *(np.median(one) if len(one) else 0.0 for one in messages),
                np.median(np.diag(tables.workspace, 1)),
            )
            self._totals[size] = _Totals(*map(float, values))
        return self._totals[size]


_MOST_PLANS = 6_000
"""So many plans are all gone through."""

_MOST_DEVICES = 8
"""Of clusters whose mappings may all be gone through."""

MOST_INSTRUCTIONS, LEAST_INSTRUCTIONS = 20_000, 8_000
"""To be simulated in the likely part of the space, with few devices and with many; the walk may simulate as
many again, and that of stages of unequal width the fewer of them.
"""

_BRIEF_INSTRUCTIONS = 20_000
"""To be simulated where the run is so short that a better plan would save less than it takes to find."""

_MOST_GRIDS = 24
"""Mappings of a shape that are compared by their links."""

FEW, _MOST_SHARE = 16, 8.0
"""Devices; with more, fewer things are tried, and with fewer more, up to so many times as many."""

_MOST_EXCHANGED, MOST_EXCHANGES = 32, 60
"""Devices of a cluster in which two are exchanged, and how often that is tried."""

_MOST_CUT = 2
"""Mappings of a shape that are cut."""

MOST_SHAPES, _LEAST_SHAPES = 12, 2
"""Shapes of a kind that are cut, of those that look best: with few devices, and with many."""

_MOST_FRUITLESS = 24
"""Of which nothing fits; then the kind is given up."""

_MOST_STEPS, _SIMPLER = 1024, 10
"""So many forwards are soon simulated; a shape of twice as many must look better by so many times `_ALIKE`.
"""

_ALIKE = 0.02
"""Estimates that differ by less are taken for equal."""


@dataclass(eq=False)
class Explorer:
    """Goes through plans; `how` describes the search for people."""

    _problem: PlanningProblem
    _outlines: Outlines
    _ledger: EvaluatedDrafts
    is_brief: bool = False
    how: str = field(default="", init=False)

    def _moved_cuts(self, draft: Draft) -> Iterator[tuple[int, ...]]:
        """The cuts of a draft with one moved to the next place before or after it."""
        bounds = self._problem.bounds
        place_of = {unit: place for place, unit in enumerate(bounds)}
        for which, cut in enumerate(draft.cuts):
            for step in (-1, 1):
                moved = bounds[place_of[cut] + step]
                cuts = (*draft.cuts[:which], moved, *draft.cuts[which + 1 :])
                if all(a < b for a, b in pairwise((0, *cuts, bounds[-1]))):
                    yield cuts


def few_enough(problem: PlanningProblem) -> bool:
    """Whether all plans can be gone through, those that the request excludes among them: so no constraint
    makes a search find more.
    """
    if len(problem.devices) > _MOST_DEVICES:
        return False
    free = replace(
        problem.request,
        schedule=AUTO,
        depth=None,
        width=None,
        micro_batch=None,
        synchronous=False,
        lookahead=True,
    )
    if free != problem.request:
        problem = PlanningProblem(problem.profile, problem.cluster, free)
    num_plans = 0
    grids: dict[tuple[int, tuple[int, ...]], int] = {}
    for outline in Outlines(problem):
        each = num_cuts_and_sets(problem, outline) * sum(1 for _ in _variants(outline, runs_ahead=True))
        num_plans += each
        if num_plans > _MOST_PLANS:
            return False
        key = outline.num_ranks, outline.sizes
        if key not in grids:
            found = all_grids(problem, outline, _MOST_PLANS // each)
            if found is None:
                return False
            grids[key] = len(found)
        num_plans += each * (grids[key] - 1)
    return num_plans <= _MOST_PLANS


def _variants(outline: Outline, *, runs_ahead: bool) -> Iterator[tuple[int | None, int]]:
    """How many micro-batches go in halves, and how many more run ahead."""
    schedule = schedule_named(outline.schedule)
    if schedule.slices:
        for num_sliced in range(1, min(outline.num_stages, outline.num_microbatches) + 1):
            yield num_sliced, 0
        return
    most = 0
    if schedule.most_lookahead is not None and runs_ahead:
        most = schedule.most_lookahead(Shape(outline.num_stages, outline.num_microbatches, 1))
    for lookahead in range(most + 1):
        yield None, lookahead


class ExhaustiveExplorer(Explorer):
    """Goes through all plans, leaving out those that cannot be the best of their kind.

    If it is to be brief it goes through the most promising ones of every kind in turns, and stops early.
    """

    def explore(self, shapes: Sequence[Outline]) -> None:
        """Judge every plan, the most promising shapes first."""
        ledger = self._ledger
        ordered = sorted(shapes, key=self._least_cost)
        most = math.inf
        if self.is_brief:
            ordered, most = _in_turns(ordered), _BRIEF_INSTRUCTIONS
        num_kinds = len({outline.kind for outline in shapes})
        num_plans = 0
        for place, outline in enumerate(ordered):
            ledger.progress(place / len(ordered))
            if place >= num_kinds and ledger.evaluator.num_instructions > most and ledger.all_best():
                self.how = f"the {ledger.num_evaluated:,} most promising plans simulated, as the run is short"
                return
            variants = list(_variants(outline, runs_ahead=self._problem.request.lookahead))
            for grid in all_grids(self._problem, outline, _MOST_PLANS) or []:
                for draft in all_drafts(self._problem, outline, grid):
                    num_plans += len(variants)
                    for num_sliced, lookahead in variants:
                        is_likely = self._look(replace(draft, num_sliced=num_sliced, lookahead=lookahead))
                        if not is_likely and num_sliced is None:
                            break  # more lookahead takes more memory
        ledger.progress(1.0)
        self.how = (
            f"all {num_plans:,} plans considered, {ledger.num_evaluated:,} simulated, the others ruled out"
        )

    def _least_cost(self, outline: Outline) -> float:
        least_s = self._outlines.least_s(outline) / outline.batch_size
        return least_s * self._problem.least_power(outline.num_devices)

    def _look(self, draft: Draft) -> bool:
        """Evaluate a draft if it can be the best of its kind; whether it can and fits."""
        ledger, outline = self._ledger, draft.outline
        if not ledger.could_win(outline, self._outlines.least_s(outline)):
            return False
        return ledger.could_win(outline, ledger.evaluator.least_s(draft)) and ledger.evaluated(draft).fits


def _in_turns(shapes: Sequence[Outline]) -> list[Outline]:
    """The first of every kind, then the second of every kind, …"""
    places: defaultdict[PlanKind, count[int]] = defaultdict(count)
    return [one for _, one in sorted(((next(places[one.kind]), one) for one in shapes), key=itemgetter(0))]


@dataclass(eq=False)
class HeuristicExplorer(Explorer):
    """Goes through the shapes that look best, and walks on from the best of every kind."""

    walks: bool = True

    def __post_init__(self) -> None:
        self._estimator = _Estimator(self._problem, self._outlines)
        self._share = min(_MOST_SHARE, FEW / len(self._problem.devices))
        self._most_instructions = max(LEAST_INSTRUCTIONS, round(MOST_INSTRUCTIONS * self._share))

    def explore(self, shapes: Sequence[Outline]) -> None:
        """Cut the best looking shapes of every kind, simulate what promises most, and walk on from there.

        What is found in a shape does not depend on the other shapes. So a search in some of these shapes
        finds nothing better, unless one of the limits on what is tried was reached.
        """
        ledger = self._ledger
        rough: list[tuple[bool, float, int, list[Draft]]] = []
        kinds = self._ranked(shapes)
        most = max(_LEAST_SHAPES, round(MOST_SHAPES * self._share))
        for place, ranked in enumerate(kinds.values()):
            ledger.progress(0.4 * place / len(kinds))
            of_kind: list[tuple[float, int, list[Draft]]] = []
            for number, outline in enumerate(ranked[:_MOST_FRUITLESS]):
                if number >= most and of_kind:
                    break
                drafts = list(self._drafts(outline))
                if drafts:
                    cost = min(self._rough_cost(draft) for draft in drafts)
                    of_kind.append((cost, len(rough) + number, drafts))
            rough += [(place > 0, *one) for place, one in enumerate(sorted(of_kind, key=itemgetter(0, 1)))]
        found: list[EvaluatedDraft] = []
        for _, _, _, drafts in sorted(rough, key=itemgetter(0, 1, 2)):
            outline = drafts[0].outline
            # The best of every kind is shown with the best of all, so each kind is simulated.
            is_known = outline.kind in {one.draft.outline.kind for one in ledger.all_best()}
            if is_known and ledger.evaluator.num_instructions > self._most_instructions:
                continue
            if ledger.could_win(outline, self._outlines.least_s(outline)):
                best = self._best_of(iter(drafts))
                # Where links are slow, what a shape is worth shows only when its stages run ahead.
                found += [] if best is None else [best, self._run_ahead(best)]
        ledger.progress(0.7)
        best_of_kinds = {one.draft for one in ledger.all_best()}
        walked: set[Outline] = set()
        for start in sorted(found, key=lambda one: (one.draft not in best_of_kinds, one.cost)):
            outline = start.draft.outline
            is_promising = start.draft in best_of_kinds or ledger.could_be_best(
                outline, self._outlines.least_s(outline)
            )
            if self.walks and outline not in walked and is_promising:
                walked.add(outline)
                self._walk(next(one for one in found if one.draft.outline == outline))
        ledger.progress(1.0)
        self.how = (
            f"{len(rough):,} of {len(shapes):,} shapes tried, {ledger.num_evaluated:,} plans simulated; the "
            "others looked slower"
        )

    def _rough_cost(self, draft: Draft) -> float:
        return self._estimator.rough_cost(draft, self._ledger.evaluator.least_s(draft))

    def _ranked(self, shapes: Sequence[Outline]) -> dict[PlanKind, list[Outline]]:
        """The shapes of each kind, the best looking first."""
        ranked: defaultdict[PlanKind, list[tuple[int, int, int]]] = defaultdict(list)
        for place, outline in enumerate(shapes):
            # Of shapes that look alike, the one with fewer steps to simulate is the simpler one.
            looks = round(math.log(self._estimator.cost(outline)) / _ALIKE)
            steps = outline.num_stages * min(outline.num_microbatches, 2 * outline.num_stages)
            looks += _SIMPLER * max(steps // _MOST_STEPS - 1, 0).bit_length()
            if (
                steps > _MOST_STEPS
                and outline.stages_per_rank > 1
                and self._problem.request.schedule == "auto"
            ):
                continue
            ranked[outline.kind].append((looks, steps, place))
        return {kind: [shapes[place] for _, _, place in sorted(found)] for kind, found in ranked.items()}

    def _drafts(self, outline: Outline) -> Iterator[Draft]:
        num_sliced = next(_variants(outline, runs_ahead=False))[0]
        for grid in self._grids(outline):
            for draft in promising_drafts(self._problem, outline, grid):
                yield replace(draft, num_sliced=num_sliced)

    def _grids(self, outline: Outline) -> list[Grid]:
        """The mappings whose links carry a batch soonest, those first that come first among equals."""
        most = max(_MOST_CUT, _MOST_GRIDS * FEW // max(outline.num_devices, FEW))
        grids = list(islice(promising_grids(self._problem, outline), most))
        if len(grids) <= _MOST_CUT:
            return grids
        units = self._problem.bounds
        step = (len(units) - 1) / outline.num_stages
        cuts = tuple(units[max(stage, round(stage * step))] for stage in range(1, outline.num_stages))
        scored = []
        for place, grid in enumerate(grids):
            floor = self._ledger.evaluator.floor(Draft(outline, grid, cuts))
            scored.append((floor.seconds, place))
        return [grids[place] for _, place in sorted(scored)[:_MOST_CUT]]

    def _walk(self, evaluated: EvaluatedDraft) -> None:
        """From neighbor to neighbor as long as that is better: slices, devices, cuts, and then lookahead."""
        best = evaluated
        for may_run_ahead in (False, True):
            is_better = True
            while is_better:
                before = best.cost
                for more in (self._sliced, self._exchanged, self._recut):
                    found = self._best_of(more(best.draft), best)
                    if found is not None and found.cost * AS_GOOD < best.cost:
                        best = found
                if may_run_ahead:
                    best = self._run_ahead(best)
                is_better = best.cost < before

    def _best_of(self, drafts: Iterator[Draft], best: EvaluatedDraft | None = None) -> EvaluatedDraft | None:
        """The best of a plan and others of its shape that fits, of as many as may still be simulated."""
        for draft in drafts:
            if best is not None and not self._could_gain(draft, best):
                continue
            found = self._ledger.evaluated(draft)
            if found.fits and (best is None or found.cost < best.cost):
                best = found
        return best

    def _could_gain(self, draft: Draft, best: EvaluatedDraft) -> bool:
        """Whether a draft may still be simulated, and could be enough better than the best to replace it."""
        ledger = self._ledger
        if ledger.evaluator.num_instructions > 2 * self._most_instructions:
            return False
        least = ledger.least_cost(draft.outline, ledger.evaluator.least_s(draft))
        return least * AS_GOOD < best.cost

    def _run_ahead(self, best: EvaluatedDraft) -> EvaluatedDraft:
        """The plan with the lookahead from which on more makes it no faster."""
        num_worse = 0
        for draft in self._ahead(best.draft):
            if num_worse > 1 or not self._could_gain(draft, best):
                break
            found = self._ledger.evaluated(draft)
            is_better = found.fits and found.cost * AS_GOOD < best.cost
            num_worse = 0 if is_better else num_worse + 1
            best = found if is_better else best
        return best

    def _sliced(self, draft: Draft) -> Iterator[Draft]:
        if draft.num_sliced:
            most = min(draft.outline.num_stages, draft.outline.num_microbatches)
            yield from (replace(draft, num_sliced=k) for k in range(draft.num_sliced + 1, most + 1))

    def _ahead(self, draft: Draft) -> Iterator[Draft]:
        if draft.num_sliced is None and draft.outline.num_stages > 1:
            outline = draft.outline
            links = links_between(self._problem, draft.grid, outline.rank_of_stage, outline.schedule)
            if any(link.bytes_per_s < float("inf") or link.latency_s for link in links):
                yield from (
                    replace(draft, lookahead=lookahead)
                    for _, lookahead in _variants(draft.outline, runs_ahead=self._problem.request.lookahead)
                    if lookahead > draft.lookahead and lookahead in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
                )

    def _exchanged(self, draft: Draft) -> Iterator[Draft]:
        if len(self._problem.devices) > _MOST_EXCHANGED:
            return
        for grid in islice(exchanged(self._problem, draft.grid), MOST_EXCHANGES):
            for other in promising_drafts(self._problem, draft.outline, grid)[:1]:
                yield replace(other, num_sliced=draft.num_sliced, lookahead=draft.lookahead)

    def _recut(self, draft: Draft) -> Iterator[Draft]:
        for cuts in self._moved_cuts(draft):
            if keeps_home(self._problem, draft.outline, draft.grid, cuts):
                yield replace(draft, cuts=cuts)


# One device in each replica that runs the model in parts, each of which runs its forward again.
#
# The device then holds the inputs of all parts and the activations of one, as with frameworks that checkpoint
# layer by layer. The last part keeps its activations: its backward follows its forward.

_NUMBERS_OF_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Each part more but the last runs its forward again, so the fewest parts that fit are the fastest."""


class InPartsExplorer(Explorer):
    """Goes through plans in parts."""

    def explore(self, outlines: list[Outline]) -> None:
        """Evaluate plans in parts for all shapes of one device in each replica."""
        before = self._ledger.num_evaluated
        for outline in outlines:
            if outline.schedule == "sequential" and outline.num_ranks == 1:
                for grid in promising_grids(self._problem, outline):
                    if self._ledger.could_win(outline, self._outlines.least_s(outline)):
                        self._explore_grid(outline, grid)
        self.how = f"{self._ledger.num_evaluated - before:,} plans in parts simulated"

    def _explore_grid(self, outline: Outline, grid: Grid) -> None:
        """Evaluate the plan of the fewest parts that fits. Plans whose bytes alone are too many are left out,
        but to show what is missing, that of the smallest micro-batches which takes least is evaluated.
        """
        problem, size = self._problem, max(outline.sizes)
        tables = problem.merged(size, outline.width).bytes
        limit = min(problem.limits[device] for row in grid for device in row)
        is_smallest = size == min(problem.sizes)
        if tables.state[0, -1] > limit and not is_smallest:
            return
        work = np.diag(tables.kept, 1).tolist()
        nearest = math.inf, Draft(outline, grid, ())
        for num_parts in _NUMBERS_OF_PARTS:
            if num_parts > len(work):
                break
            cuts = even_cuts(work, num_parts)
            parts = replace(outline, stages_per_rank=num_parts)
            at = tuple(problem.bounds[cut] for cut in cuts)
            draft = Draft(parts, grid, at, tuple(range(num_parts - 1)))
            least = _least_bytes(tables, list(pairwise((0, *cuts, len(work)))))
            nearest = min(nearest, (least, draft), key=itemgetter(0))
            if least <= limit and self._ledger.evaluated(draft).fits:
                return
        if is_smallest:
            self._ledger.evaluated(nearest[1])


def _least_bytes(tables: RangeBytes, parts: Sequence[tuple[int, int]]) -> float:
    """What a device keeps at the least during the backward of some part: the state of all, the inputs of the
    parts before it, and its own activations.
    """
    inputs = accumulate((tables.inputs[part] for part in parts), initial=0)
    most = max(before + tables.kept[part] for before, part in zip(inputs, parts, strict=False))
    return float(tables.state[0, -1] + most)
