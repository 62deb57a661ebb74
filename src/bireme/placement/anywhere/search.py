"""The best placement of a workload where devices need not be contiguous, and how much of that is proven.

A short annealing, then the integer program; what that leaves open is given a longer annealing and, from the
better of the two, the integer program again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from time import monotonic

import numpy as np

from bireme.errors import BiremeError
from bireme.placement.anywhere.annealing import improve
from bireme.placement.bounds import simple_bound
from bireme.placement.contiguous.search import ContiguousSplit, carried_over
from bireme.placement.contraction import Weightless, items_of
from bireme.placement.found import FoundPlacement
from bireme.placement.integer.anywhere import solve_any
from bireme.placement.items import Items
from bireme.placement.workload import Objective, Workload

__all__ = ["HAS_SOLVER", "Anywhere"]

HAS_SOLVER = find_spec("highspy") is not None
"""Whether integer programs can be solved here."""

FIRST_MOVES = 300_000
"""Of the short annealing: about a second."""

PROVEN = 1e-6
"""Relative: the solver's own tolerance, so that less of a gap is none."""


@dataclass(frozen=True, slots=True)
class Anywhere:
    """The search for a placement of a workload, until a moment of the monotonic clock.

    `split` is a contiguous one to begin with. `say` is told what is going on, for people, and
    `note` what they should know of the result.
    """

    workload: Workload
    objective: Objective
    split: ContiguousSplit | None = None
    seed: int = 0
    stop_at: float = math.inf
    say: Callable[[str], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None
    items: Items = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", _exact_items(self.workload))

    def start(self) -> FoundPlacement | None:
        """The contiguous split, as a placement of these items."""
        if self.split is None:
            return None
        bound = simple_bound(self.items, self.objective)
        return replace(carried_over(self.split, self.items, self.objective), lower_bound=bound)

    def annealed(
        self, start: FoundPlacement | None, seconds: float, num_moves: int | None = None
    ) -> FoundPlacement:
        """What annealing makes of a placement, in so many seconds or moves; bounded by counting work."""
        found = improve(
            self.items,
            self.objective,
            start=None if start is None else start.where,
            time_limit_s=max(0.1, seconds),
            seed=self.seed,
            num_moves=num_moves,
        )
        bound = simple_bound(self.items, self.objective)
        return replace(found, lower_bound=min(found.value, max(bound, start.lower_bound if start else 0.0)))

    def solved(self, start: FoundPlacement | None, seconds: float) -> FoundPlacement:
        """What the integer program makes of a placement."""
        found = solve_any(
            self.items,
            self.objective,
            time_limit_s=max(0.1, seconds),
            start=None if start is None else start.where,
        )
        bound = max(found.lower_bound, start.lower_bound if start else 0.0)
        return replace(found, lower_bound=min(bound, found.value))

    def best(self) -> FoundPlacement:
        """The best placement that the time allows; raises where none fits."""
        found = self._first()
        shares = (0.2, 0.3, 1.0)
        ways = (self.solved, self.annealed, self.solved) if HAS_SOLVER else (self.annealed,)
        for number, (share, way) in enumerate(zip(shares, ways, strict=False)):
            left = self.stop_at - monotonic()
            if left <= 0 or (found is not None and found.lower_bound >= found.value * (1 - PROVEN)):
                break
            self.say("integer program" if way == self.solved else "annealing")
            try:
                found = way(found, left * share if number < len(ways) - 1 else left)
            except BiremeError as error:
                if found is None:
                    raise
                self.note(f"A search found nothing better. {error}")
        if found is None:
            return self.annealed(None, 1.0)
        return found

    def _first(self) -> FoundPlacement | None:
        """A short annealing; what it cannot place at all the integer program may."""
        start = self.start()
        self.say("annealing")
        try:
            return self.annealed(start, 0.1 * (self.stop_at - monotonic()), FIRST_MOVES)
        except BiremeError:
            return start


def _exact_items(workload: Workload) -> Items:
    """Items of which the best placement is the best of the workload; operators without time merged if so."""
    joined = items_of(workload, contiguous=False, weightless=Weightless.JOIN)
    bare = items_of(workload, contiguous=False, weightless=Weightless.VANISH)
    if np.array_equal(bare.size, joined.size) or joined.size.sum() <= joined.accelerator_bytes:
        return joined
    return items_of(workload, contiguous=False, weightless=Weightless.STAY)
