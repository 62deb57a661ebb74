"""What a search has evaluated: the best of every kind and shape, and how many plans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bireme.plan.forecast import Candidate, Forecast
from bireme.plan.search.draft import Draft
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline
from bireme.plan.summary import PlanKind

__all__ = ["EvaluatedDraft", "EvaluatedDrafts"]

MOST_SHOWN = 16
"""Largest number of candidates in an answer, including the best of every kind."""

SLACK = 1e-9
"""Relative: so much better is rounding."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class EvaluatedDraft:
    """A draft plan and its forecast. `power` is what a second of it counts (see `PlanningProblem.power`)."""

    draft: Draft
    forecast: Forecast
    power: float

    @property
    def cost(self) -> float:
        """Cost per sample, in seconds or, where energy is the goal, in joules."""
        return self.forecast.cost_s_per_sample * self.power

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.peak_bytes <= stage.limit_bytes for stage in self.forecast.stages)


class EvaluatedDrafts:
    """Evaluates drafts and remembers the best."""

    def __init__(
        self, problem: PlanningProblem, evaluator: PlanEvaluator, progress: Callable[[float], None]
    ) -> None:
        self._problem = problem
        self.evaluator = evaluator
        self.progress = progress
        self._of_kind: dict[PlanKind, EvaluatedDraft] = {}
        self._of_shape: dict[tuple[str, int, int], EvaluatedDraft] = {}
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
        best = self._of_kind.get(PlanKind.of(outline))
        if best is None:
            return True
        penalty = self._problem.penalty(
            outline.schedule, outline.num_stages, outline.num_microbatches, outline.width
        )
        least_s = penalty * least_batch_s / outline.batch_size
        return least_s * self._problem.least_power(outline.num_devices) < best.cost * (1 - SLACK)

    def evaluated(self, draft: Draft) -> EvaluatedDraft:
        """What the plan evaluator says; the best are remembered."""
        known = self._seen.get(draft)
        if known is not None:
            return known
        power = self._problem.power(device for row in draft.grid for device in row)
        found = self._seen[draft] = EvaluatedDraft(draft, self.evaluator.forecast(draft), power)
        if found.fits:
            kind, shape = PlanKind.of(draft.outline), _shape(draft.outline)
            _keep(self._of_kind, kind, found)
            _keep(self._of_shape, shape, found)
        return found

    def candidates(self) -> tuple[Candidate, ...]:
        """The best, those of every kind among them, by what they cost."""
        shown = {one.draft: one for one in self._of_kind.values()}
        for one in sorted(self._of_shape.values(), key=lambda one: one.cost):
            if len(shown) < MOST_SHOWN:
                shown.setdefault(one.draft, one)
        ordered = sorted(shown.values(), key=lambda one: (one.cost, one.draft.outline.num_devices))
        return tuple(self._candidate(one) for one in ordered)

    def _candidate(self, found: EvaluatedDraft) -> Candidate:
        draft, problem = found.draft, self._problem
        codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
        return Candidate(draft.plan(problem.names, codecs), found.forecast)


def _shape(outline: Outline) -> tuple[str, int, int]:
    return outline.schedule, outline.width, outline.num_ranks


def _keep(book: dict[Key, EvaluatedDraft], key: Key, found: EvaluatedDraft) -> None:
    best = book.get(key)
    if best is None or found.cost < best.cost * (1 - SLACK):
        book[key] = found
