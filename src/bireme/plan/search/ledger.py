"""What a search has judged: the best of every kind and of every shape, and how much was looked at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bireme.plan.forecast import Candidate, Forecast
from bireme.plan.search.draft import Draft
from bireme.plan.search.ground import Ground
from bireme.plan.search.judging import Judge
from bireme.plan.search.shapes import Outline
from bireme.plan.summary import Kind

__all__ = ["Judged", "Ledger"]

MOST_SHOWN = 16
"""Candidates of an answer, those of every kind among them."""

SLACK = 1e-9
"""Relative: so much better is rounding."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft and what the judge says of it."""

    draft: Draft
    forecast: Forecast

    @property
    def cost_s(self) -> float:
        """What a sample costs."""
        return self.forecast.cost_s_per_sample

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.peak_bytes <= stage.limit_bytes for stage in self.forecast.stages)


class Ledger:
    """Judges drafts and remembers the best."""

    def __init__(self, ground: Ground, judge: Judge, progress: Callable[[float], None]) -> None:
        self._ground = ground
        self.judge = judge
        self.progress = progress
        self._of_kind: dict[Kind, Judged] = {}
        self._of_shape: dict[tuple[str, int, int], Judged] = {}
        self._seen: dict[Draft, Judged] = {}

    @property
    def num_judged(self) -> int:
        """How many drafts were simulated."""
        return len(self._seen)

    def misfits(self) -> list[Judged]:
        """What was simulated and does not fit."""
        return [judged for judged in self._seen.values() if not judged.fits]

    def all_best(self) -> list[Judged]:
        """The best of every kind, the best of all first."""
        return sorted(self._of_kind.values(), key=lambda judged: judged.cost_s)

    def could_win(self, outline: Outline, least_batch_s: float) -> bool:
        """Whether a plan whose batch takes that at the least could be the best of its kind."""
        best = self._of_kind.get(Kind.of(outline))
        if best is None:
            return True
        penalty = self._ground.penalty(outline.schedule, outline.num_stages, outline.num_microbatches)
        return penalty * least_batch_s / outline.batch_size < best.cost_s * (1 - SLACK)

    def judged(self, draft: Draft) -> Judged:
        """What the judge says; the best are remembered."""
        known = self._seen.get(draft)
        if known is not None:
            return known
        judged = self._seen[draft] = Judged(draft, self.judge.forecast(draft))
        if judged.fits:
            kind, shape = Kind.of(draft.outline), _shape(draft.outline)
            _keep(self._of_kind, kind, judged)
            _keep(self._of_shape, shape, judged)
        return judged

    def candidates(self) -> tuple[Candidate, ...]:
        """The best, those of every kind among them, by what they cost."""
        shown = {judged.draft: judged for judged in self._of_kind.values()}
        for judged in sorted(self._of_shape.values(), key=lambda judged: judged.cost_s):
            if len(shown) < MOST_SHOWN:
                shown.setdefault(judged.draft, judged)
        ordered = sorted(shown.values(), key=lambda judged: (judged.cost_s, judged.draft.outline.num_devices))
        return tuple(Candidate(one.draft.plan(self._ground.names), one.forecast) for one in ordered)


def _shape(outline: Outline) -> tuple[str, int, int]:
    return outline.schedule, outline.width, outline.num_ranks


def _keep(book: dict[Key, Judged], key: Key, judged: Judged) -> None:
    best = book.get(key)
    if best is None or judged.cost_s < best.cost_s * (1 - SLACK):
        book[key] = judged
