"""Plans whose stages have unequal numbers of replicas: the likely plans, and the best of all.

A dynamic program finds the likely plans (`stage_widths.py`), the simulator evaluates them, and a walk
follows. On small clusters all plans are considered instead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise
from operator import itemgetter

from bireme.plan.partition.loads import Recompute
from bireme.plan.plan_request import UNEQUAL_WIDTHS
from bireme.plan.search.cutting import recompute_sets
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.evaluated import EvaluatedDraft
from bireme.plan.search.explorers import FEW, LEAST_INSTRUCTIONS, MOST_INSTRUCTIONS, Explorer
from bireme.plan.search.mapping import device_orders, exchanged
from bireme.plan.search.paged_walk import AS_GOOD
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outlines
from bireme.plan.search.stage_widths import (
    BatchShape,
    DeviceOrder,
    LikelyPlan,
    StageCosts,
    Widths,
    coarse_chain,
    cut_for,
    most_lookahead,
    placed_on,
)
from bireme.schedule.catalogue import schedule_named

MOST_PLANS = 6_000
"""If there are no more plans, all are considered."""

_FEWEST_DEVICES, _MOST_DEVICES, _MANY_DEVICES = 3, 8, 128
"""Of clusters whose plans may all be gone through, and of those in which stages may be of unequal width. All
ranks of such a plan are simulated, which takes long if there are more.
"""

_MOST_STAGES = 8
"""Stages of which some may be wider than others; deeper pipelines have stages of equal width."""

_MOST_ORDERS = 3
"""Orders of the devices."""

_AHEAD = (1, 2, 4, 8, 16, 32)
"""Lookaheads that are tried if links take time."""

_FAR = 1.25
"""A plan that is predicted to be this many times as slow as the best plan is not simulated."""


@dataclass(eq=False)
class UnequalExplorer(Explorer):
    """Goes through plans of unequal widths."""

    def __post_init__(self) -> None:
        share = min(1.0, FEW / len(self._problem.devices))
        most = max(LEAST_INSTRUCTIONS, round(MOST_INSTRUCTIONS * share))
        self._most = self._ledger.evaluator.num_instructions + most
        self.is_exhaustive = not self.is_brief and _few_enough(self._problem, self._outlines)
        """Whether all plans of unequal widths are gone through."""

    def explore(self) -> None:
        """Judge the plans of unequal widths that the request allows."""
        before = self._ledger.num_evaluated
        if len(self._problem.devices) < _FEWEST_DEVICES:
            return
        if len(self._problem.devices) > _MANY_DEVICES:
            self.how = "no plans of unequal widths, as there are too many devices"
            return
        if self.is_exhaustive:
            self._explore_all()
        else:
            self._explore_likely()
        count = self._ledger.num_evaluated - before
        words = "all plans of unequal widths considered, " if self.is_exhaustive else ""
        self.how = f"{words}{count:,} {'' if words else 'plans of unequal widths '}simulated"

    def _shapes(self) -> Iterator[BatchShape]:
        for schedule in self._problem.schedules:
            if schedule in UNEQUAL_WIDTHS:
                for size in self._problem.sizes:
                    for count in self._outlines.counts(size):
                        yield BatchShape(schedule, size, count)

    def _explore_all(self) -> None:
        """Evaluate all drafts that can be the best of their kind, the most promising first, with all their
        lookaheads. More lookahead takes more memory.
        """
        ledger, found = self._ledger, list[tuple[float, float, Draft]]()
        for draft in self._all_drafts():
            least_s = ledger.evaluator.least_s(draft)
            if ledger.could_win(draft.outline, least_s):
                found.append((ledger.least_cost(draft.outline, least_s), least_s, draft))
        for _, least_s, draft in sorted(found, key=itemgetter(0)):
            for lookahead in range(most_lookahead(self._problem, draft) + 1):
                if not ledger.could_win(draft.outline, least_s):
                    break
                if not ledger.evaluated(replace(draft, lookahead=lookahead)).fits:
                    break

    def _all_drafts(self) -> Iterator[Draft]:
        """All plans of unequal widths, without lookahead, whose shape can be the best of its kind."""
        problem, asked = self._problem, self._problem.request.stage_widths
        grids = [
            grid
            for grid in sorted(
                _all_grids(problem, problem.request.depth), key=lambda grid: sum(map(len, grid))
            )
            if isinstance(asked, str) or tuple(map(len, grid)) == asked
        ]
        for shape in self._shapes():
            for grid in grids:
                outline = shape.outline(tuple(map(len, grid)))
                if not self._ledger.could_win(outline, self._outlines.least_s(outline)):
                    continue
                for cuts in combinations(problem.bounds[1:-1], outline.num_stages - 1):
                    placed = placed_on(problem, Draft(outline, grid, cuts), grid)
                    if placed is not None:
                        for recompute in recompute_sets(problem, outline.num_stages):
                            yield replace(placed, recompute=recompute)

    def _explore_likely(self) -> None:
        """Simulate the plans of the dynamic program, for every schedule, size of micro-batches and number of
        stages, that could be the best of all, and walk on from there.
        """
        ledger = self._ledger
        found: dict[tuple[str, int, int], EvaluatedDraft] = {}
        for likely in sorted(
            self._likely(), key=lambda one: ledger.least_cost(one.draft.outline, one.seconds)
        ):
            draft, outline = likely.draft, likely.draft.outline
            is_enough = found and ledger.evaluator.num_instructions > self._most
            if is_enough or not ledger.could_be_best(outline, likely.seconds / _FAR):
                break
            if not ledger.could_be_best(outline, ledger.evaluator.least_s(draft)):
                continue
            best = self._evaluated(draft)
            if best is not None:
                best = self._run_ahead(best)
                key = outline.schedule, outline.sizes[0], outline.num_ranks
                if key not in found or best.cost < found[key].cost:
                    found[key] = best
        self._most = max(self._most, ledger.evaluator.num_instructions) + LEAST_INSTRUCTIONS
        for start in sorted(found.values(), key=lambda one: one.cost):
            outline = start.draft.outline
            if not self.is_brief and ledger.could_be_best(outline, self._outlines.least_s(outline)):
                self._walk(start)

    def _likely(self) -> Iterator[LikelyPlan]:
        """The plans that the dynamic program finds."""
        problem = self._problem
        rows = [DeviceOrder(problem, order) for order in _orders(problem)]
        known: dict[tuple[DeviceOrder, bool, int, int], list[tuple[int, ...]]] = {}
        for shape in self._shapes():
            if not self._is_worth_it(shape):
                continue
            rule = schedule_named(shape.schedule).rule
            chain = problem.merged(shape.size, 1, rule)
            fine = StageCosts(chain, rule, problem.request.recompute)
            coarse = StageCosts(coarse_chain(chain), rule, problem.request.recompute)
            for row in rows:
                key = row, shape.drains, shape.size, shape.num_microbatches
                if key not in known:
                    known[key] = list(self._widths(row, coarse, shape))
                for widths in known[key]:
                    found = cut_for(problem, row, fine, shape, widths)
                    if found is not None:
                        yield found

    def _is_worth_it(self, shape: BatchShape) -> bool:
        """Whether any plan of a shape could be the best of all, if its work were divided as if there were no
        units, over two stages.
        """
        outline = shape.outline((max(1, len(self._problem.devices) - 1), 1))
        return self._ledger.could_be_best(outline, self._outlines.least_s(outline))

    def _widths(self, row: DeviceOrder, costs: StageCosts, shape: BatchShape) -> Iterator[tuple[int, ...]]:
        """The widths that are asked for, or for each number of stages the best unequal ones."""
        depth, asked = self._problem.request.depth, self._problem.request.stage_widths
        if isinstance(asked, tuple):
            yield asked
            return
        most = min(_MOST_STAGES, costs.num_units, len(row.order) - 1)
        if not 2 <= (depth or 2) <= most:
            return
        widths = Widths(row, costs, shape, depth or most)
        for num_stages in [depth] if depth else range(2, most + 1):
            best = widths.best(num_stages)
            if best is not None:
                yield best

    def _evaluated(self, draft: Draft) -> EvaluatedDraft | None:
        """A draft that fits, with stages that run forwards again if they must; None if that is not enough."""
        found = self._ledger.evaluated(draft)
        if found.fits or self._problem.request.recompute is not Recompute.WHERE_NEEDED:
            return found if found.fits else None
        stages = found.forecast.stages
        over = {place for place, stage in enumerate(stages) if stage.peak_bytes > stage.limit_bytes}
        if over <= set(draft.recompute):
            return None
        again = self._ledger.evaluated(replace(draft, recompute=tuple(sorted({*draft.recompute, *over}))))
        return again if again.fits else None

    def _run_ahead(self, best: EvaluatedDraft) -> EvaluatedDraft:
        """The plan with the lookahead from which on more makes it no faster."""
        most = most_lookahead(self._problem, best.draft)
        for lookahead in _AHEAD:
            if lookahead > most or self._is_over(best.draft, best):
                break
            found = self._ledger.evaluated(replace(best.draft, lookahead=lookahead))
            if not found.fits or found.cost * AS_GOOD >= best.cost:
                break
            best = found
        return best

    def _is_over(self, draft: Draft, best: EvaluatedDraft) -> bool:
        """Whether a draft cannot be better than another, or enough was simulated."""
        evaluator = self._ledger.evaluator
        least_cost = self._ledger.least_cost(draft.outline, evaluator.least_s(draft))
        return evaluator.num_instructions > self._most or least_cost >= best.cost

    def _walk(self, best: EvaluatedDraft) -> None:
        """From neighbor to neighbor as long as that is better."""
        is_better = True
        while is_better:
            is_better = False
            for draft in self._neighbors(best.draft):
                if self._is_over(draft, best):
                    continue
                found = self._evaluated(draft)
                if found is not None and found.cost * AS_GOOD < best.cost:
                    best, is_better = found, True
                    break

    def _neighbors(self, draft: Draft) -> Iterator[Draft]:
        """The plans with one cut moved, with one device in the next stage, and with two devices exchanged."""
        problem = self._problem
        for cuts in self._moved_cuts(draft):
            yield from self._on(replace(draft, cuts=cuts), draft.grid)
        if isinstance(problem.request.stage_widths, str):
            for here, there in pairwise(range(len(draft.grid))):
                for giver, taker in ((here, there), (there, here)):
                    rows = [list(row) for row in draft.grid]
                    rows[taker].append(rows[giver].pop())
                    if rows[giver]:
                        yield from self._on(draft, tuple(map(tuple, rows)))
        if len(problem.devices) <= FEW:
            for grid in islice(exchanged(problem, draft.grid), 2 * FEW):
                yield from self._on(draft, grid)

    def _on(self, draft: Draft, grid: Grid) -> Iterator[Draft]:
        """The draft on other devices, if the widths are unequal and pinned units stay on their devices."""
        found = placed_on(self._problem, draft, grid)
        if len(set(map(len, grid))) > 1 and found is not None:
            yield replace(found, lookahead=min(draft.lookahead, most_lookahead(self._problem, found)))


def _orders(problem: PlanningProblem) -> list[tuple[int, ...]]:
    """Orders of the devices that differ in more than names."""
    found: dict[tuple[tuple[float, float, bool], ...], tuple[int, ...]] = {}
    for order in device_orders(problem, len(problem.devices)):
        before = (-1, *(problem.servers[device] for device in order))
        look = tuple(
            (problem.usual_speeds[device], problem.limits[device], problem.servers[device] == server)
            for device, server in zip(order, before, strict=False)
        )
        found.setdefault(look, order)
    return list(islice(found.values(), _MOST_ORDERS))


# All plans of a small cluster.


def _few_enough(problem: PlanningProblem, outlines: Outlines) -> bool:
    """Whether all plans can be gone through, those that the request excludes among them: so no constraint
    makes a search find more.
    """
    if len(problem.devices) > _MOST_DEVICES:
        return False
    most = max(
        (count for size in problem.profile.micro_batches for count in outlines.counts(size)), default=0
    )
    num_kinds = len(UNEQUAL_WIDTHS) * sum(
        len(outlines.counts(size)) for size in set(problem.profile.micro_batches)
    )
    num_sets = 2 if problem.request.recompute is Recompute.WHERE_NEEDED else 1
    num_plans = 0
    for grid in _all_grids(problem, None):
        num_cuts = math.comb(problem.num_units - 1, len(grid) - 1)
        num_plans += num_kinds * num_cuts * num_sets ** len(grid) * max(most - 1, 1)
        if num_plans > MOST_PLANS:
            return False
    return True


def _all_grids(problem: PlanningProblem, depth: int | None) -> Iterator[Grid]:
    """All ways to give stages unequal numbers of devices, but those that exchanging equal devices makes
    alike. The devices of a stage are in the order of their numbers, in which they take micro-batches, so it
    matters which of several equal devices are in a stage with an unlike device.
    """
    devices = sorted(problem.devices)
    alike = _alike_neighbors(problem, devices)
    for num_stages in [depth] if depth else range(2, min(len(devices), problem.num_units + 1)):
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for stages in _stages_of_devices(alike, num_stages):
            rows = [list[int]() for _ in range(num_stages + 1)]
            for device, stage in zip(devices, stages, strict=True):
                rows[stage].append(device)
            grid = tuple(map(tuple, rows[:-1]))
            widths = tuple(map(len, grid))
            if 0 in widths or len(set(widths)) == 1:
                continue
            order = tuple(device for row in grid for device in row)
            key = widths, problem.symmetry.canonical(order) if problem.is_symmetric else order
            if key not in seen:
                seen.add(key)
                yield grid


def _alike_neighbors(problem: PlanningProblem, devices: Sequence[int]) -> list[bool]:
    """Whether a device and the device before it can change places while all others stay."""
    alike, order = [False] * len(devices), tuple(devices)
    for place in range(1, len(devices) if problem.is_symmetric else 1):
        changed = (*order[: place - 1], order[place], order[place - 1], *order[place + 1 :])
        alike[place] = problem.symmetry.canonical(order) == problem.symmetry.canonical(changed)
    return alike


def _stages_of_devices(
    alike: Sequence[bool], num_stages: int, chosen: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """The stage of each device, or `num_stages` if the device is idle. Of two neighbors that are alike, the
    first has no later stage than the second.
    """
    if len(chosen) == len(alike):
        yield chosen
        return
    for stage in range(chosen[-1] if alike[len(chosen)] else 0, num_stages + 1):
        yield from _stages_of_devices(alike, num_stages, (*chosen, stage))
