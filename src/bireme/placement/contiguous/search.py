"""The best contiguous split of a workload, and how much of that is proven.

The dynamic program runs on items into which operators without time are merged. Where these have a size and
memory is short, a second run that forgets the size proves that nothing was lost by it; where it proves too
little, a third one leaves them alone, if the ideals are not too many then.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from bireme.compiled import IS_COMPILED
from bireme.errors import BiremeError
from bireme.placement.bounds import simple_bound
from bireme.placement.contiguous.chain import no_split_fits, no_split_found
from bireme.placement.contiguous.dynamic import DynamicProgram
from bireme.placement.contiguous.ideals import Lattice, lattice_of
from bireme.placement.contiguous.linearised import cut_lines
from bireme.placement.contraction import Weightless, items_of
from bireme.placement.found import SLACK, FoundPlacement, loads_of, value_of
from bireme.placement.items import Items
from bireme.placement.workload import Objective, Workload

__all__ = ["MOST_IDEALS", "Contiguous", "ContiguousSplit", "carried_over"]

MOST_IDEALS = 1_000_000 if IS_COMPILED else 5_000
"""How many ideals the dynamic program goes through at most."""

MOST_CELLS = 60_000_000
"""Ideals times cells of each, which bounds the memory."""

MOST_BYTES = 500_000_000
"""Of the sets that the ideals are, which does so where items are many."""


@dataclass(frozen=True, slots=True)
class ContiguousSplit:
    """A contiguous split: of which items, and among how many ideals where they were counted."""

    items: Items
    found: FoundPlacement
    num_ideals: int | None = None


@dataclass(frozen=True, slots=True)
class Contiguous:
    """The search for a contiguous split of a workload, until a moment of the monotonic clock.

    `say` is told what is going on, for people.
    """

    workload: Workload
    objective: Objective
    seed: int = 0
    stop_at: float = math.inf
    most_ideals: int = MOST_IDEALS
    say: Callable[[str], None] = lambda _: None

    @property
    def most_ideals_here(self) -> int:
        """How many ideals `best` goes through at most, by time and memory."""
        return self._most_ideals_of(self._items(Weightless.JOIN))

    def best_of_lines(self) -> ContiguousSplit:
        """The best cut of some lines, with the bound from counting work.

        Raises `NoSplitFoundError` where no cut fits.
        """
        bare, items = self._items(Weightless.VANISH), self._items(Weightless.JOIN)
        try:
            found = self._cut_lines(items)
        except BiremeError:
            items = self._items(Weightless.STAY)
            found = self._cut_lines(items)
        return ContiguousSplit(
            items, replace(found, lower_bound=min(simple_bound(bare, self.objective), found.value))
        )

    def best(self) -> ContiguousSplit | None:
        """The best split of all, proven where the time suffices; None where the ideals are too many,
        or take too long to list.

        Raises where no split fits, and `NoSplitFoundError` where the time was too short to find any.
        """
        items, bare = self._items(Weightless.JOIN), self._items(Weightless.VANISH)
        lattice = self._lattice(items)
        if lattice is None:
            return None
        self.say(f"{len(lattice):,} ideals of {len(items)} items")
        found = self._search(items, lattice)
        is_light = np.array_equal(bare.size, items.size)
        if is_light and found is None:
            raise self._none_of(items)
        if is_light and found is not None:
            return ContiguousSplit(items, found, len(lattice))
        relaxed = self._search(bare, lattice, known=found)
        if relaxed is None:
            raise self._none_of(bare)
        if found is not None and relaxed.lower_bound >= found.value * (1 - SLACK):
            return ContiguousSplit(items, replace(found, lower_bound=found.value), len(lattice))
        return self._best_apart(
            ContiguousSplit(items, found, len(lattice)) if found else None, relaxed.lower_bound
        )

    def _best_apart(self, joined: ContiguousSplit | None, lower_bound: float) -> ContiguousSplit | None:
        """The best split where what takes no time may be apart from its neighbour, if there is time."""
        items = self._items(Weightless.STAY)
        lattice = None if self._is_over() else self._lattice(items)
        if lattice is not None:
            self.say(f"memory is short: {len(lattice):,} ideals with weights on their own")
            known = None if joined is None else carried_over(joined, items, self.objective)
            found = self._search(items, lattice, known=known)
            if found is not None:
                return ContiguousSplit(
                    items, replace(found, lower_bound=max(found.lower_bound, lower_bound)), len(lattice)
                )
            raise self._none_of(items)
        if joined is None and self._is_over():
            raise no_split_found(items, "in the time")
        if joined is None:
            return None  # lines may still have a cut
        return replace(joined, found=replace(joined.found, lower_bound=lower_bound))

    def _most_ideals_of(self, items: Items) -> int:
        cells = (min(items.num_accelerators, len(items)) + 1) * (min(items.num_cpus, len(items)) + 1)
        row_bytes = 8 * ((len(items) + 63) // 64)
        return min(self.most_ideals, MOST_CELLS // cells, MOST_BYTES // row_bytes)

    def _none_of(self, items: Items) -> BiremeError:
        """Why there is no split: nothing is proven once the time is over."""
        return no_split_found(items, "in the time") if self._is_over() else no_split_fits(items)

    def _is_over(self) -> bool:
        return monotonic() > self.stop_at

    def _items(self, weightless: Weightless) -> Items:
        return items_of(self.workload, contiguous=True, weightless=weightless)

    def _lattice(self, items: Items) -> Lattice | None:
        # Going through the ideals takes far longer than listing them: half the time must do for that.
        began = monotonic()
        stop_at = began + (self.stop_at - began) / 2
        return lattice_of(items, self._most_ideals_of(items), lambda: monotonic() > stop_at)

    def _search(
        self, items: Items, lattice: Lattice, *, known: FoundPlacement | None = None
    ) -> FoundPlacement | None:
        """The dynamic program, from the best split that is known."""
        if known is None:
            with suppress(BiremeError):
                known = self._cut_lines(items)
        program = DynamicProgram(items, lattice, self.stop_at)
        return program.best(self.objective, None if known is None else known.where)

    def _cut_lines(self, items: Items) -> FoundPlacement:
        return cut_lines(items, self.objective, seed=self.seed, is_over=self._is_over)


def carried_over(split: ContiguousSplit, items: Items, objective: Objective) -> FoundPlacement:
    """The same split, of finer items."""
    device_of = {
        place: device
        for members, device in zip(split.items.members, split.found.where, strict=True)
        for place in members
    }
    where = tuple(device_of[members[0]] for members in items.members)
    return FoundPlacement(where, value_of(loads_of(items, where), objective), split.found.lower_bound)
