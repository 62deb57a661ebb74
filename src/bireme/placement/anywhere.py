"""The best placement of a workload where devices need not be contiguous, and how much of that is proven.

A short annealing, then the integer program; what that leaves open is given a longer annealing and, from the
better of the two, the integer program again.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from random import Random
from time import monotonic

import numpy as np

from bireme.compiled import IS_COMPILED
from bireme.errors import BiremeError
from bireme.placement.annealing import Annealing
from bireme.placement.annealing_loops import Heat, Neighbors, anneal_loads, state_of, tables_of
from bireme.placement.contiguous import ContiguousSplit, carried_over, cut_chain
from bireme.placement.contraction import (
    FoundPlacement,
    Items,
    Ragged,
    Weightless,
    items_of,
    placed,
    simple_bound,
)
from bireme.placement.integer import solve_any
from bireme.placement.workload import Objective, Workload

_LARGEST_NET = 30
"""A net of more items says little about which two of them belong together."""

_USUAL_ITEMS, _MOST_HEAT = 150, 4.0
"""For this number of items temperatures are used as they are; for fewer they are up to 4 times higher."""


def improve(
    items: Items,
    objective: Objective,
    *,
    start: Sequence[int] | None,
    time_limit_s: float,
    seed: int = 0,
    num_moves: int | None = None,
) -> FoundPlacement:
    """The best placement found in time by annealing, never worse than a start that fits; the order of items
    is not kept.

    With `num_moves` about that number is tried, however long it takes, and the result is always the same.
    The search ends early at a value that is proven to be the best. Raises `BiremeError` if no placement that
    fits was found.
    """
    starts = [random_start(items, Random(seed))]
    with suppress(BiremeError):
        starts.append(greedy(items, objective).where)
    if start is not None:
        starts.append(tuple(start))
    bound = simple_bound(items, objective)
    search = _LoadAnnealing(items, objective, seed)
    search.run(
        [np.array(one, np.int64) for one in starts],
        time_limit_s=time_limit_s,
        lower_bound=bound,
        num_moves=num_moves,
    )
    if search.best_value == math.inf:
        raise BiremeError(
            f"No placement was found that fits: the operators take {items.size.sum():g} bytes, and "
            f"{items.num_accelerators} accelerators have {items.accelerator_bytes:g} each. Give the search "
            "more time, or more memory."
        )
    best = placed(items, objective, search.walk.best.tolist())
    return replace(best, lower_bound=min(bound, best.value))


class _LoadAnnealing(Annealing):
    """Annealing of items by the loads of devices."""

    def __init__(self, items: Items, objective: Objective, seed: int) -> None:
        times = items.cpu_time if items.num_cpus else items.accelerator_time
        super().__init__(_near(items), float(times.sum()), float(items.size.sum()), seed)
        # The fewer items there are, the larger each of them is, and the more heat it needs.
        heat = min(_USUAL_ITEMS / len(items), _MOST_HEAT)
        self.hot, self.cold = (0.15 * heat, 0.03 * heat), 1.5e-3 * heat
        self._items = items
        self._tables = tables_of(items, objective)

    def anneal(self, heat: Heat, num_moves: int) -> float:
        """As `Annealing` says; loads are counted afresh before, and then followed."""
        state = state_of(self._items, self._tables, self.walk.slots)
        return anneal_loads(self.near, self._tables, state, self.walk, heat, num_moves)


def _near(items: Items) -> Neighbors:
    """Items that share a net are neighbors, unless it is one of the largest nets."""
    before: list[set[int]] = [set() for _ in range(len(items))]
    after: list[set[int]] = [set() for _ in range(len(items))]
    for pins in map(items.pins.row, range(len(items.pins))):
        for item in pins if len(pins) <= _LARGEST_NET else ():
            before[item].update(pin for pin in pins if pin < item)
            after[item].update(pin for pin in pins if pin > item)
    numbers = np.arange(len(items) + 1, dtype=np.int64)
    lower, higher = (Ragged.of([sorted(row) for row in side]) for side in (before, after))
    return Neighbors(
        numbers[:-1],
        numbers,
        numbers[:-1],
        items.supported,
        lower.starts,
        lower.values,
        higher.starts,
        higher.values,
        num_pieces=1,
        num_accelerated=items.num_accelerators,
        num_slots=items.num_devices,
        alone=0.7,
    )


HAS_SOLVER = find_spec("highspy") is not None
"""Whether integer programs can be solved here."""

_FIRST_MOVES = 300_000 if IS_COMPILED else 5_000
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
        """The best placement that annealing finds in these seconds or moves; bounded by counting work."""
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
