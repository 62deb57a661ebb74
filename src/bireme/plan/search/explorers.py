"""Two ways through the space of plans: all of it where that is small, and the likely part of it.

Both go by shape, then mapping, then cuts, then how many micro-batches are sliced or run ahead.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from operator import itemgetter
from typing import Protocol

from bireme.plan.search.contention import links_between
from bireme.plan.search.cutting import all_drafts, num_cuts_and_sets, promising_drafts
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.estimate import Estimator
from bireme.plan.search.evaluated import EvaluatedDraft, EvaluatedDrafts
from bireme.plan.search.homes import keeps_home
from bireme.plan.search.mapping import all_grids, exchanged, promising_grids
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines
from bireme.plan.summary import PlanKind
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.generators.shape import Shape

__all__ = ["ExhaustiveExplorer", "Explorer", "HeuristicExplorer", "few_enough"]

MOST_PLANS = 6_000
"""So many plans are all gone through."""

MOST_DEVICES = 8
"""Of clusters whose mappings may all be gone through."""

MOST_INSTRUCTIONS, LEAST_INSTRUCTIONS = 40_000, 8_000
"""To be simulated in the likely part of the space, with few devices and with many; the walk may as many."""

BRIEF_INSTRUCTIONS = 20_000
"""To be simulated where the run is so short that a better plan would save less than it takes to find."""

MOST_GRIDS = 24
"""Mappings of a shape that are compared by their links."""

FEW, MOST_SHARE = 16, 4.0
"""Devices; with more, fewer things are tried, and with fewer more, up to so many times as many."""

MOST_EXCHANGED, MOST_EXCHANGES = 32, 60
"""Devices of a cluster in which two are exchanged, and how often that is tried."""

MOST_CUT = 2
"""Mappings of a shape that are cut."""

MOST_SHAPES, LEAST_SHAPES = 12, 2
"""Shapes of a kind that are cut, of those that look best: with few devices, and with many."""

MOST_FRUITLESS = 24
"""Of which nothing fits; then the kind is given up."""

MOST_STEPS, SIMPLER = 1024, 10
"""So many forwards are soon simulated; a shape of twice as many must look better by so many times `ALIKE`."""

ALIKE = 0.02
"""Estimates that differ by less are taken for equal."""

AS_GOOD = 1.001
"""A thousandth of a batch is not worth another stashed micro-batch."""


class Explorer(Protocol):
    """Goes through plans; `how` says what was done, for people."""

    how: str

    def explore(self, shapes: Sequence[Outline]) -> None:
        """Judge what these shapes have to offer."""


def few_enough(problem: PlanningProblem, shapes: Sequence[Outline]) -> bool:
    """Whether all plans can be gone through."""
    if len(problem.devices) > MOST_DEVICES:
        return False
    num_plans = 0
    grids: dict[tuple[int, tuple[int, ...]], int] = {}
    for outline in shapes:
        each = num_cuts_and_sets(problem, outline) * len(
            list(_variants(outline, runs_ahead=problem.request.lookahead))
        )
        num_plans += each
        if num_plans > MOST_PLANS:
            return False
        key = outline.num_ranks, outline.sizes
        if key not in grids:
            found = all_grids(problem, outline, MOST_PLANS // each)
            if found is None:
                return False
            grids[key] = len(found)
        num_plans += each * (grids[key] - 1)
    return num_plans <= MOST_PLANS


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


class ExhaustiveExplorer:
    """Goes through all plans, leaving out those that cannot be the best of their kind.

    If it is to be brief it goes through the most promising ones of every kind in turns, and stops early.
    """

    def __init__(
        self, problem: PlanningProblem, outlines: Outlines, ledger: EvaluatedDrafts, *, is_brief: bool
    ) -> None:
        self._problem = problem
        self._outlines = outlines
        self._ledger = ledger
        self._is_brief = is_brief
        self.how = ""

    def explore(self, shapes: Sequence[Outline]) -> None:
        """Judge every plan, the most promising shapes first."""
        ledger = self._ledger
        ordered = sorted(shapes, key=self._least_cost)
        most = math.inf
        if self._is_brief:
            ordered, most = _in_turns(ordered), BRIEF_INSTRUCTIONS
        num_kinds = len({PlanKind.of(outline) for outline in shapes})
        num_plans = 0
        for place, outline in enumerate(ordered):
            ledger.progress(place / len(ordered))
            if place >= num_kinds and ledger.evaluator.num_instructions > most and ledger.all_best():
                self.how = f"the {ledger.num_evaluated:,} most promising plans simulated, as the run is short"
                return
            for grid in all_grids(self._problem, outline, MOST_PLANS) or []:
                for draft in all_drafts(self._problem, outline, grid):
                    for num_sliced, lookahead in _variants(
                        outline, runs_ahead=self._problem.request.lookahead
                    ):
                        num_plans += 1
                        self._look(replace(draft, num_sliced=num_sliced, lookahead=lookahead))
        ledger.progress(1.0)
        self.how = (
            f"all {num_plans:,} plans considered, {ledger.num_evaluated:,} simulated, the others ruled out"
        )

    def _least_cost(self, outline: Outline) -> float:
        least_s = self._outlines.least_s(outline) / outline.batch_size
        return least_s * self._problem.least_power(outline.num_devices)

    def _look(self, draft: Draft) -> None:
        ledger, outline = self._ledger, draft.outline
        if not ledger.could_win(outline, self._outlines.least_s(outline)):
            return
        if ledger.could_win(outline, ledger.evaluator.least_s(draft)):
            ledger.evaluated(draft)


def _in_turns(shapes: Sequence[Outline]) -> list[Outline]:
    """The first of every kind, then the second of every kind, …"""
    places: defaultdict[PlanKind, count[int]] = defaultdict(count)
    return [
        one for _, one in sorted(((next(places[PlanKind.of(one)]), one) for one in shapes), key=itemgetter(0))
    ]


class HeuristicExplorer:
    """Goes through the shapes that look best, and walks on from the best of every kind."""

    def __init__(self, problem: PlanningProblem, outlines: Outlines, ledger: EvaluatedDrafts) -> None:
        self._problem = problem
        self._outlines = outlines
        self._ledger = ledger
        self._estimator = Estimator(problem, outlines)
        self._share = min(MOST_SHARE, FEW / len(problem.devices))
        self._most_instructions = max(LEAST_INSTRUCTIONS, round(MOST_INSTRUCTIONS * self._share))
        self.how = ""

    def explore(self, shapes: Sequence[Outline]) -> None:
        """Cut the best looking shapes of every kind, simulate what promises most, and walk on from there."""
        ledger = self._ledger
        drafts: dict[PlanKind, list[tuple[float, int, Draft]]] = {}
        num_shapes = 0
        kinds = self._ranked(shapes)
        for place, (kind, ranked) in enumerate(kinds.items()):
            ledger.progress(0.4 * place / len(kinds))
            most = max(LEAST_SHAPES, round(MOST_SHAPES * self._share))
            found: list[tuple[float, int, Draft]] = []
            for number, outline in enumerate(ranked[:MOST_FRUITLESS]):
                if number >= most and found:
                    break
                num_shapes += 1
                for draft in self._drafts(outline):
                    floor_s = ledger.evaluator.least_s(draft)
                    found.append((self._estimator.rough_cost(draft, floor_s), len(found), draft))
            drafts[kind] = sorted(found, key=lambda one: one[:2])
        for of_kind in drafts.values():
            # The best of every kind is shown with the best of all, so each is simulated.
            for place, (_, _, draft) in enumerate(of_kind):
                del of_kind[: place + 1]
                if self._evaluate(draft).fits:
                    break
        ledger.progress(0.6)
        rest = sorted((one for of_kind in drafts.values() for one in of_kind), key=lambda one: one[0])
        for _, _, draft in rest:
            if ledger.evaluator.num_instructions > self._most_instructions:
                break
            if ledger.could_win(draft.outline, ledger.evaluator.least_s(draft)):
                self._evaluate(draft)
                # Where links are slow, what a shape is worth shows only when its stages run ahead.
                self._best_of(self._ahead(draft))
        ledger.progress(0.8)
        for evaluated in ledger.all_best():
            self._walk(evaluated)
        ledger.progress(1.0)
        self.how = (
            f"{num_shapes:,} of {len(shapes):,} shapes tried, {ledger.num_evaluated:,} plans simulated; the "
            "others looked slower"
        )

    def _ranked(self, shapes: Sequence[Outline]) -> dict[PlanKind, list[Outline]]:
        """The shapes of each kind, the best looking first."""
        ranked: defaultdict[PlanKind, list[tuple[int, int, int]]] = defaultdict(list)
        for place, outline in enumerate(shapes):
            # Of shapes that look alike, the one with fewer steps to simulate is the simpler one.
            looks = round(math.log(self._estimator.cost(outline)) / ALIKE)
            steps = outline.num_stages * min(outline.num_microbatches, 2 * outline.num_stages)
            looks += SIMPLER * max(steps // MOST_STEPS - 1, 0).bit_length()
            if (
                steps > MOST_STEPS
                and outline.stages_per_rank > 1
                and self._problem.request.schedule == "auto"
            ):
                continue
            ranked[PlanKind.of(outline)].append((looks, steps, place))
        return {kind: [shapes[place] for _, _, place in sorted(found)] for kind, found in ranked.items()}

    def _drafts(self, outline: Outline) -> Iterator[Draft]:
        num_sliced = next(_variants(outline, runs_ahead=False))[0]
        for grid in self._grids(outline):
            for draft in promising_drafts(self._problem, outline, grid):
                yield replace(draft, num_sliced=num_sliced)

    def _evaluate(self, draft: Draft) -> EvaluatedDraft:
        return self._ledger.evaluated(draft)

    def _grids(self, outline: Outline) -> list[Grid]:
        """The mappings whose links carry a batch soonest, those first that come first among equals."""
        most = max(MOST_CUT, MOST_GRIDS * FEW // max(outline.num_devices, FEW))
        grids = list(islice(promising_grids(self._problem, outline), most))
        if len(grids) <= MOST_CUT:
            return grids
        units = self._problem.bounds
        step = (len(units) - 1) / outline.num_stages
        cuts = tuple(units[max(stage, round(stage * step))] for stage in range(1, outline.num_stages))
        scored = []
        for place, grid in enumerate(grids):
            floor = self._ledger.evaluator.floor(Draft(outline, grid, cuts))
            scored.append((floor.seconds, place))
        return [grids[place] for _, place in sorted(scored)[:MOST_CUT]]

    def _walk(self, evaluated: EvaluatedDraft) -> None:
        """From neighbour to neighbour as long as that is better: slices, lookahead, devices, cuts."""
        best, is_better = evaluated, True
        while is_better:
            is_better = False
            for more in (self._sliced, self._ahead, self._exchanged, self._recut):
                found = self._best_of(more(best.draft))
                if found is not None and found.cost * AS_GOOD < best.cost:
                    best, is_better = found, True

    def _best_of(self, drafts: Iterator[Draft]) -> EvaluatedDraft | None:
        """The best that fits, of as many as may still be simulated."""
        ledger, best = self._ledger, None
        for draft in drafts:
            if ledger.evaluator.num_instructions > 2 * self._most_instructions:
                break
            if ledger.could_win(draft.outline, ledger.evaluator.least_s(draft)):
                found = self._evaluate(draft)
                if found.fits and (best is None or found.cost < best.cost):
                    best = found
        return best

    def _sliced(self, draft: Draft) -> Iterator[Draft]:
        if draft.num_sliced:
            most = min(draft.outline.num_stages, draft.outline.num_microbatches)
            yield from (replace(draft, num_sliced=k) for k in range(draft.num_sliced + 1, most + 1))

    def _ahead(self, draft: Draft) -> Iterator[Draft]:
        if draft.num_sliced is None and draft.outline.num_stages > 1:
            links = links_between(self._problem, draft.grid, draft.outline.rank_of_stage)
            if any(link.bytes_per_s < float("inf") or link.latency_s for link in links):
                yield from (
                    replace(draft, lookahead=lookahead)
                    for _, lookahead in _variants(draft.outline, runs_ahead=self._problem.request.lookahead)
                    if lookahead in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
                )

    def _exchanged(self, draft: Draft) -> Iterator[Draft]:
        if len(self._problem.devices) > MOST_EXCHANGED:
            return
        for grid in islice(exchanged(self._problem, draft.grid), MOST_EXCHANGES):
            for other in promising_drafts(self._problem, draft.outline, grid)[:1]:
                yield replace(other, num_sliced=draft.num_sliced, lookahead=draft.lookahead)

    def _recut(self, draft: Draft) -> Iterator[Draft]:
        bounds = self._problem.bounds
        place_of = {unit: place for place, unit in enumerate(bounds)}
        for which, cut in enumerate(draft.cuts):
            for step in (-1, 1):
                moved = bounds[place_of[cut] + step]
                cuts = (*draft.cuts[:which], moved, *draft.cuts[which + 1 :])
                rises = all(a < b for a, b in zip((0, *cuts), (*cuts, bounds[-1]), strict=True))
                if rises and keeps_home(self._problem, draft.outline, draft.grid, cuts):
                    yield replace(draft, cuts=cuts)
