"""The best placement of a workload where devices need not be contiguous, and how much of that is proven.

A short annealing, then the integer program; what that leaves open is given a longer annealing and, from the
better of the two, the integer program again.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import isfinite
from random import Random
from time import monotonic

import numpy as np

from bireme.errors import BiremeError
from bireme.placement.annealing import (
    AnnealingScratch,
    Heat,
    MoveTables,
    anneal,
    blocks_of,
    overflow,
    state_of,
    tables_of,
)
from bireme.placement.contiguous import ContiguousSplit, carried_over, cut_chain
from bireme.placement.contraction import (
    FoundPlacement,
    Items,
    Weightless,
    fits,
    items_of,
    placed,
    simple_bound,
)
from bireme.placement.integer import solve_any
from bireme.placement.workload import Objective, Workload

# Good placements soon, where any placement will do: simulated annealing from simple starts.
#
# The first pass cools from where the loads are loose; those after it warm up the best placement a little and
# cool again. Two tracks with numbers of their own run side by side. Nothing is proven, but for what counting
# work alone tells.

_NUM_TRACKS = 2

_ARDOURS = (1.0, 3.0)
"""By how much the temperatures of each track are higher."""

_HEATS = (0.02, 0.004, 0.004, 0.004, 0.004)
"""Temperatures that the passes begin at, as parts of the value. Each pass takes the same time."""

_USUAL_ITEMS = 300
"""For so many items the temperatures are used as they are; fewer are larger, each, and need more heat."""

_COLD = 0.0003
"""The temperature that each pass ends at."""

_PRICE = 4.0
"""What a whole memory too much costs at first, in values; it rises while memory lacks."""

_FIRST_ANNEALING_MOVES = 200
"""Of one temperature, where time limits, until it is known how long they take."""

_MOST_MOVES = 5_000
"""Of one temperature, where the number of moves is limited."""

_LEAST_STEPS = 100
"""Temperatures, where the number of moves is limited."""

_SECONDS_AT_ONCE = 0.02
"""Of one temperature, where time limits."""

_SMOOTH, _SHARP, _SHARP_FROM = 3, 6, 0.5
"""Squarings of the norm in the first part of each pass, and in the last."""

_ROUNDING = 1e-12


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

    The objective is not latency, which `latency/` places for.

    With `num_moves` so many moves are tried, however long it takes, and the result is always the same. The
    search ends early at a value that is proven to be the best. Compiling the loops takes its own time, once
    on a machine. Raises `BiremeError` where nothing that fits was found.
    """
    pace = _Pace(time_limit_s, None if num_moves is None else num_moves // _NUM_TRACKS)
    bound = simple_bound(items, objective)
    starts = _starts(items, objective, start, seed)
    best = _best_that_fits(items, starts)
    if items.num_devices > 1 and (best is None or best.value > bound * (1 + _ROUNDING)):
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
    starts = [placed(items, objective, random_start(items, Random(seed)))]
    with suppress(BiremeError):
        starts.append(greedy(items, objective))
    if start is not None:
        starts.append(placed(items, objective, start))
    return starts


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
            return _FIRST_ANNEALING_MOVES
        return max(1, min(_MOST_MOVES, self.num_moves // _LEAST_STEPS))

    def moves_at_once(self, before: int, took_s: float) -> int:
        """How many moves to make at one temperature, after so many that took so long."""
        if self.num_moves is not None:
            return self.first_moves()
        return max(100, min(4 * before, int(before * _SECONDS_AT_ONCE / max(took_s, 1e-6))))


def _search(
    items: Items, objective: Objective, starts: list[FoundPlacement], bound: float, pace: _Pace, seed: int
) -> list[FoundPlacement]:
    """What the tracks find, each from one of the starts."""
    unit = (_best_that_fits(items, starts) or starts[0]).value or 1.0
    tables = tables_of(items, objective, unit=unit)
    tracks = [
        _Track(
            items, tables, starts[-1 - number % len(starts)].where, seed * _NUM_TRACKS + number, bound / unit
        )
        for number in range(_NUM_TRACKS)
    ]
    before = monotonic()
    tracks[0].anneal(Heat(0.0, _PRICE, 1), 1)
    pace.forgive(before)
    with ThreadPoolExecutor(_NUM_TRACKS) as pool:
        runs = [pool.submit(track.run, pace) for track in tracks]
        try:
            return [placed(items, objective, run.result()) for run in runs]
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
        self.goal = bound * (1 + _ROUNDING)
        self.ardour = _USUAL_ITEMS / len(items) * _ARDOURS[seed % _NUM_TRACKS]

    def anneal(self, heat: Heat, num_moves: int) -> None:
        """Try so many moves."""
        anneal(self.tables, self.blocks, self.state, self.scratch, heat, num_moves)

    def run(self, pace: _Pace) -> Sequence[int]:
        """Anneal as long as the pace allows; the best placement found, or the start where nothing fits."""
        state = self.state
        moves, at_once, number, price = 0, pace.first_moves(), 0, _PRICE
        while (progress := pace.progress(moves)) < 1 and state.best_value[0] > self.goal:
            if int(progress * len(_HEATS)) > number:
                number = int(progress * len(_HEATS))
                if isfinite(state.best_value[0]):
                    state.where[:] = state.best
            cooled = progress * len(_HEATS) % 1
            cooling = (_COLD / _HEATS[number]) ** cooled
            value = min(float(state.best_value[0]), float(state.load.max(axis=0).sum()))
            heat = Heat(
                value * self.ardour * _HEATS[number] * cooling,
                value * price,
                _SMOOTH if cooled < _SHARP_FROM else _SHARP,
            )
            began = monotonic()
            self.anneal(heat, at_once)
            moves += at_once
            price = price * 2 if overflow(self.tables, state) else max(_PRICE, price * 0.9)
            at_once = pace.moves_at_once(at_once, monotonic() - began)
        return [int(device) for device in state.best]


HAS_SOLVER = find_spec("highspy") is not None
"""Whether integer programs can be solved here."""

_FIRST_MOVES = 300_000
"""Of the short annealing: about a second."""

_PROVEN = 1e-6
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
        return _bounded(found, start)

    def solved(self, start: FoundPlacement | None, seconds: float) -> FoundPlacement:
        """What the integer program makes of a placement."""
        where, seconds = None if start is None else start.where, max(0.1, seconds)
        return _bounded(solve_any(self.items, self.objective, time_limit_s=seconds, start=where), start)

    def best(self) -> FoundPlacement:
        """The best placement that the time allows; raises where none fits."""
        found = self._first()
        shares = (0.2, 0.3, 1.0)
        ways = (self.solved, self.annealed, self.solved) if HAS_SOLVER else (self.annealed,)
        for number, (share, way) in enumerate(zip(shares, ways, strict=False)):
            left = self.stop_at - monotonic()
            if left <= 0 or (found is not None and found.lower_bound >= found.value * (1 - _PROVEN)):
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
            return self.annealed(start, 0.1 * (self.stop_at - monotonic()), _FIRST_MOVES)
        except BiremeError:
            return start


def _bounded(found: FoundPlacement, start: FoundPlacement | None) -> FoundPlacement:
    """A placement with the higher one of its bound and of its start's."""
    bound = max(found.lower_bound, start.lower_bound if start else 0.0)
    return replace(found, lower_bound=min(bound, found.value))


def _exact_items(workload: Workload) -> Items:
    """Items of which the best placement is the best of the workload; operators without time merged if so."""
    joined = items_of(workload, contiguous=False, weightless=Weightless.JOIN)
    bare = items_of(workload, contiguous=False, weightless=Weightless.VANISH)
    if np.array_equal(bare.size, joined.size) or joined.size.sum() <= joined.accelerator_bytes:
        return joined
    return items_of(workload, contiguous=False, weightless=Weightless.STAY)


# Placements that searches begin with: a random one, and the best cut by times alone.
#
# Neither proves a bound.


def random_start(items: Items, random: Random) -> tuple[int, ...]:
    """Each item on an accelerator drawn from those that have room for it, else on a CPU.

    Where there is neither, on the emptiest accelerator, so what comes of it may not fit. Large items draw
    first.
    """
    left = [items.room] * items.num_accelerators
    cpus = range(items.num_accelerators, items.num_devices)
    where = [0] * len(items)
    order = list(range(len(items)))
    random.shuffle(order)
    for item in sorted(order, key=lambda item: -items.size[item]):
        roomy = [device for device, room in enumerate(left) if items.size[item] <= room]
        if roomy and items.supported[item]:
            where[item] = random.choice(roomy)
        elif cpus:
            where[item] = random.choice(cpus)
        else:
            where[item] = left.index(max(left))
        if where[item] < len(left):
            left[where[item]] -= items.size[item]
    return tuple(where)


def greedy(items: Items, objective: Objective) -> FoundPlacement:
    """The cut of the items in their order that is best by times alone.

    What moves between devices is paid but not looked at. Raises `BiremeError` where no cut of this order
    fits. The split is contiguous where the items are numbered topologically.
    """
    still = replace(items, net_cost=np.zeros_like(items.net_cost))
    return placed(items, objective, cut_chain(still, Objective.THROUGHPUT).where)
