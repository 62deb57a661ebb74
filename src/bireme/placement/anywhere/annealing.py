"""Good placements soon, where any placement will do: simulated annealing from simple starts.

The first pass cools from where the loads are loose; those after it warm up the best placement a little and
cool again. Two tracks with numbers of their own run side by side. Nothing is proven, but for what counting
work alone tells.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import isfinite
from random import Random
from time import monotonic

import numpy as np

from bireme.errors import BiremeError
from bireme.placement.anywhere.blocks import blocks_of
from bireme.placement.anywhere.kernel import AnnealingScratch, Heat, anneal
from bireme.placement.baselines.local_search import random_start
from bireme.placement.baselines.simple import greedy
from bireme.placement.bounds import simple_bound
from bireme.placement.found import FoundPlacement, fits, loads_of, value_of
from bireme.placement.items import Items
from bireme.placement.moves import MoveTables, overflow, state_of, tables_of
from bireme.placement.workload import Objective

__all__ = ["improve"]

NUM_TRACKS = 2

ARDOURS = (1.0, 3.0)
"""By how much the temperatures of each track are higher."""

HEATS = (0.02, 0.004, 0.004, 0.004, 0.004)
"""Temperatures that the passes begin at, as parts of the value. Each pass takes the same time."""

USUAL_ITEMS = 300
"""For so many items the temperatures are used as they are; fewer are larger, each, and need more heat."""

COLD = 0.0003
"""The temperature that each pass ends at."""

PRICE = 4.0
"""What a whole memory too much costs at first, in values; it rises while memory lacks."""

FIRST_ANNEALING_MOVES = 200
"""Of one temperature, where time limits, until it is known how long they take."""

MOST_MOVES = 5_000
"""Of one temperature, where the number of moves is limited."""

LEAST_STEPS = 100
"""Temperatures, where the number of moves is limited."""

SECONDS_AT_ONCE = 0.02
"""Of one temperature, where time limits."""

SMOOTH, SHARP, SHARP_FROM = 3, 6, 0.5
"""Squarings of the norm in the first part of each pass, and in the last."""

ROUNDING = 1e-12


def improve(
    items: Items,
    objective: Objective,
    *,
    start: Sequence[int] | None,
    time_limit_s: float,
    seed: int = 0,
    num_moves: int | None = None,
) -> FoundPlacement:
    """The best placement found in time, never worse than a start that fits; the order of items is not kept.

    With `num_moves` so many moves are tried, however long it takes, and the result is always the same. The
    search ends early at a value that is proven to be the best. Compiling the loops takes its own time, once
    on a machine. Raises `BiremeError` where nothing that fits was found.
    """
    if objective is Objective.LATENCY:
        raise BiremeError("The annealing does not know latency. Use the search for latency instead.")
    pace = _Pace(time_limit_s, None if num_moves is None else num_moves // NUM_TRACKS)
    bound = simple_bound(items, objective)
    starts = _starts(items, objective, start, seed)
    best = _best_that_fits(items, starts)
    if items.num_devices > 1 and (best is None or best.value > bound * (1 + ROUNDING)):
        best = _best_that_fits(items, [*starts, *_search(items, objective, starts, bound, pace, seed)])
    if best is None:
        raise BiremeError(
            f"No placement was found that fits: the operators take {items.size.sum():g} bytes, and "
            f"{items.num_accelerators} accelerators have {items.accelerator_bytes:g} each. Give the search "
            "more time, or more memory."
        )
    return FoundPlacement(best.where, best.value, min(bound, best.value))


def _starts(
    items: Items, objective: Objective, start: Sequence[int] | None, seed: int
) -> list[FoundPlacement]:
    """A random placement, the greedy split of the items in their order, and what was given."""
    starts = [_found(items, objective, random_start(items, Random(seed)))]
    with suppress(BiremeError):
        starts.append(greedy(items, objective))
    if start is not None:
        starts.append(_found(items, objective, start))
    return starts


def _found(items: Items, objective: Objective, where: Sequence[int]) -> FoundPlacement:
    return FoundPlacement(tuple(where), value_of(loads_of(items, where), objective), 0.0)


def _best_that_fits(items: Items, candidates: Sequence[FoundPlacement]) -> FoundPlacement | None:
    return min((one for one in candidates if fits(items, one.where)), key=lambda one: one.value, default=None)


class _Pace:
    """How far a track is, by time or by moves."""

    def __init__(self, time_limit_s: float, num_moves: int | None) -> None:
        self.time_limit_s = time_limit_s
        self.num_moves = num_moves
        self.began = monotonic()
        self.is_stopped = False

    def forgive(self, since: float) -> None:
        """Do not count the time since a moment."""
        self.began += monotonic() - since

    def progress(self, moves: int) -> float:
        """From 0 to 1 and past it."""
        if self.is_stopped:
            return 1.0
        if self.num_moves is not None:
            return moves / max(1, self.num_moves)
        return (monotonic() - self.began) / self.time_limit_s

    def first_moves(self) -> int:
        """How many moves to make at the first temperature."""
        if self.num_moves is None:
            return FIRST_ANNEALING_MOVES
        return max(1, min(MOST_MOVES, self.num_moves // LEAST_STEPS))

    def moves_at_once(self, before: int, took_s: float) -> int:
        """How many moves to make at one temperature, after so many that took so long."""
        if self.num_moves is not None:
            return self.first_moves()
        return max(100, min(4 * before, int(before * SECONDS_AT_ONCE / max(took_s, 1e-6))))


def _search(
    items: Items, objective: Objective, starts: list[FoundPlacement], bound: float, pace: _Pace, seed: int
) -> list[FoundPlacement]:
    """What the tracks find, each from one of the starts."""
    unit = (_best_that_fits(items, starts) or starts[0]).value or 1.0
    tables = tables_of(items, objective, unit=unit)
    tracks = [
        _Track(
            items, tables, starts[-1 - number % len(starts)].where, seed * NUM_TRACKS + number, bound / unit
        )
        for number in range(NUM_TRACKS)
    ]
    before = monotonic()
    tracks[0].anneal(Heat(0.0, PRICE, 1), 1)
    pace.forgive(before)
    with ThreadPoolExecutor(NUM_TRACKS) as pool:
        runs = [pool.submit(track.run, pace) for track in tracks]
        try:
            return [_found(items, objective, run.result()) for run in runs]
        finally:
            # Reached early only by an interruption: the tracks then end without their time.
            pace.is_stopped = True


class _Track:
    """One search: its arrays, and the numbers it draws."""

    def __init__(
        self, items: Items, tables: MoveTables, start: Sequence[int], seed: int, bound: float
    ) -> None:
        self.tables = tables
        self.blocks = blocks_of(items, Random(seed))
        self.state = state_of(items, tables, start, seed)
        self.scratch = AnnealingScratch(
            np.zeros_like(self.state.load), np.zeros(len(items), np.int64), np.zeros(len(items), np.int64)
        )
        self.goal = bound * (1 + ROUNDING)
        self.ardour = USUAL_ITEMS / len(items) * ARDOURS[seed % NUM_TRACKS]

    def anneal(self, heat: Heat, num_moves: int) -> None:
        """Try so many moves."""
        anneal(self.tables, self.blocks, self.state, self.scratch, heat, num_moves)

    def run(self, pace: _Pace) -> Sequence[int]:
        """Anneal as long as the pace allows; the best placement found, or the start where nothing fits."""
        state = self.state
        moves, at_once, number, price = 0, pace.first_moves(), 0, PRICE
        while (progress := pace.progress(moves)) < 1 and state.best_value[0] > self.goal:
            if int(progress * len(HEATS)) > number:
                number = int(progress * len(HEATS))
                if isfinite(state.best_value[0]):
                    state.where[:] = state.best
            cooled = progress * len(HEATS) % 1
            cooling = (COLD / HEATS[number]) ** cooled
            value = min(float(state.best_value[0]), float(state.load.max(axis=0).sum()))
            heat = Heat(
                value * self.ardour * HEATS[number] * cooling,
                value * price,
                SMOOTH if cooled < SHARP_FROM else SHARP,
            )
            began = monotonic()
            self.anneal(heat, at_once)
            moves += at_once
            price = price * 2 if overflow(self.tables, state) else max(PRICE, price * 0.9)
            at_once = pace.moves_at_once(at_once, monotonic() - began)
        return [int(device) for device in state.best]
