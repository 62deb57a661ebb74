"""From a request to a `Placement`: which solver runs on which items, for how long, and what that proves."""

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
from bireme.placement.check import check
from bireme.placement.contiguous import (
    MOST_IDEALS,
    Contiguous,
    ContiguousSplit,
    NoSplitFoundError,
    carried_over,
    cut_chain,
)
from bireme.placement.contraction import (
    FoundPlacement,
    Items,
    Ragged,
    Weightless,
    items_of,
    loads_of,
    placed,
    simple_bound,
)
from bireme.placement.integer import solve_any, solve_contiguous
from bireme.placement.latency import LatencyFound, latency_lower_bound, latency_of, pieces_of
from bireme.placement.latency_program import solve_latency
from bireme.placement.latency_search import search_latency
from bireme.placement.workload import Method, Objective, Placement, Request, Workload

# The best placement of a workload where devices need not be contiguous, and how much of that is proven.
#
# A short annealing, then the integer program; what that leaves open is given a longer annealing and, from the
# better of the two, the integer program again.

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


_TIME_LIMIT_S = 60.0
"""How long a search goes on, unless somebody says; the dynamic program asked for by name has no limit."""

_FOR_THE_START = 0.25
"""Of the time limit, for the contiguous split that other placements begin with."""

_LEAST_S = 0.1
"""What an integer program is given even if the time is over."""

_MOST_ITEMS_IN_PROGRAM = 5_000
"""Whose order is closed as a square of so many rows."""

_FOR_LATENCY = (Method.AUTO, Method.MILP, Method.ANNEAL)


def solve(
    workload: Workload, request: Request, progress: Callable[[str], None] = lambda _: None
) -> Placement:
    """The placement that is asked for; raises `BiremeError` where there is none.

    `progress` is told what is going on, in a few words.
    """
    return _Solving(workload, request, progress).placement()


class _Solving:
    """One request on its way."""

    def __init__(self, workload: Workload, request: Request, progress: Callable[[str], None]) -> None:
        self.workload, self.request, self.say = workload, request, progress
        self.objective = request.objective
        self.began = monotonic()
        self.limit_s = _TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
        self.is_contiguous = request.contiguous and request.method is not Method.ANNEAL
        self.has_too_many_ideals = False
        self.notes: list[str] = []

    @property
    def stop_at(self) -> float:
        """When the time is over, by the monotonic clock."""
        return self.began + self.limit_s

    def placement(self) -> Placement:
        """The placement, by the method that is asked for."""
        if self.request.expert is not None:
            return self._given(self.request.expert)
        if self.objective is Objective.LATENCY:
            return self._latency()
        if self.objective is not Objective.THROUGHPUT and not self.workload.is_training:
            self.notes.append("There are no backward nodes: this is the throughput of inference.")
        if self.request.contiguous and not self.is_contiguous:
            self.notes.append(f"The method {self.request.method} ignores contiguity.")
        match self.request.method:
            case Method.AUTO:
                return self._automatic()
            case Method.DP:
                return self._dynamic()
            case Method.DPL:
                return self._of_split(Method.DPL, self._contiguous().best_of_lines())
            case Method.MILP:
                return self._integer()
            case Method.ANNEAL:
                anywhere = self._anywhere()
                found = anywhere.annealed(anywhere.start(), self.stop_at - monotonic())
                return self._of(Method.ANNEAL, anywhere.items, found)
        return self._greedy()

    def _contiguous(self, *, is_limited: bool = True) -> Contiguous:
        stop_at = self.stop_at if is_limited else math.inf
        return Contiguous(self.workload, self.objective, self.request.seed, stop_at, MOST_IDEALS, self.say)

    def _anywhere(self, *, is_thorough: bool = False) -> Anywhere:
        """Placements of any kind, from a contiguous one; a thorough search begins with the best of those."""
        split = None
        contiguous = replace(self._contiguous(), stop_at=self.began + _FOR_THE_START * self.limit_s)
        with suppress(BiremeError):  # some that are not contiguous may fit
            split = contiguous.best() if is_thorough else None
            split = split or contiguous.best_of_lines()
        return Anywhere(
            self.workload, self.objective, split, self.request.seed, self.stop_at, self.say, self.notes.append
        )

    def _automatic(self) -> Placement:
        if not self.is_contiguous:
            anywhere = self._anywhere(is_thorough=True)
            return self._of(Method.AUTO, anywhere.items, anywhere.best())
        contiguous = self._contiguous()
        try:
            split = contiguous.best()
            if split is not None:
                return self._of_split(Method.DP, split)
            self.has_too_many_ideals = True
            self.notes.append(
                f"There are more than {contiguous.most_ideals_here:,} ideals, or more than could be listed "
                "in time, so the graph was cut as a line, in many orders."
            )
            return self._of_split(Method.DPL, contiguous.best_of_lines())
        except NoSplitFoundError:
            if not HAS_SOLVER:
                raise
            self.notes.append(
                "No cut of a line was found that fits, so an integer program looked for a split."
            )
            return self._integer_contiguous(None)

    def _dynamic(self) -> Placement:
        contiguous = self._contiguous(is_limited=self.request.time_limit_s is not None)
        split = contiguous.best()
        if split is None:
            raise BiremeError(
                f"The graph has more than {contiguous.most_ideals_here:,} ideals, or more than could be "
                "listed in time, too many for the dynamic program. Use --method dpl, or leave out the "
                "method."
            )
        return self._of_split(Method.DP, split)

    def _integer(self) -> Placement:
        anywhere = self._anywhere()
        if not self.is_contiguous:
            found = anywhere.solved(anywhere.start(), self.stop_at - monotonic())
            return self._of(Method.MILP, anywhere.items, found)
        return self._integer_contiguous(anywhere.split)

    def _integer_contiguous(self, split: ContiguousSplit | None) -> Placement:
        items = items_of(self.workload, contiguous=True, weightless=Weightless.STAY)
        if len(items) > _MOST_ITEMS_IN_PROGRAM:
            raise BiremeError(
                f"The graph has {len(items):,} pieces, and the integer program for contiguous splits takes "
                f"{_MOST_ITEMS_IN_PROGRAM:,} at most. Use --method dpl, or leave out the method."
            )
        start = None if split is None else carried_over(split, items, self.objective).where
        left = max(_LEAST_S, self.stop_at - monotonic())
        found = solve_contiguous(items, self.objective, time_limit_s=left, start=start)
        return self._of(Method.MILP, items, found)

    def _greedy(self) -> Placement:
        items = items_of(self.workload, contiguous=True, weightless=Weightless.STAY)
        return self._of(Method.GREEDY, items, self._bounded(greedy(items, self.objective)))

    def _bounded(self, found: FoundPlacement) -> FoundPlacement:
        """The same, bounded by counting work."""
        bare = items_of(self.workload, contiguous=False, weightless=Weightless.VANISH)
        return replace(found, lower_bound=min(found.value, simple_bound(bare, self.objective)))

    def _of_split(self, method: Method, split: ContiguousSplit) -> Placement:
        found = split.found if self.is_contiguous else self._bounded(split.found)
        return self._of(method, split.items, found, num_ideals=split.num_ideals)

    def _of(
        self, method: Method, items: Items, found: FoundPlacement, num_ideals: int | None = None
    ) -> Placement:
        devices = [0] * len(self.workload.nodes)
        for members, device in zip(items.members, found.where, strict=True):
            for place in members:
                devices[place] = device
        return Placement(
            self.objective,
            method,
            self.is_contiguous,
            tuple(devices),
            found.value,
            found.lower_bound,
            tuple(loads_of(items, found.where).sum(axis=1).tolist()),
            num_ideals=num_ideals,
            has_too_many_ideals=self.has_too_many_ideals,
            notes=tuple(self.notes),
        )

    def _given(self, devices: Sequence[int]) -> Placement:
        """What somebody else's split comes to."""
        is_latency = self.objective is Objective.LATENCY
        verdict = check(
            self.workload,
            devices,
            self.objective,
            num_pieces=self.request.num_pieces,
            contiguous=self.request.contiguous,
            pieces=self.request.expert_pieces or None,
        )
        if not verdict.valid:
            raise BiremeError(verdict.problems[0])
        if is_latency:
            bound = latency_lower_bound(self.workload)
            pieces = self.request.expert_pieces or pieces_of(self.workload, devices)
        else:
            bound, pieces = self._bounded(FoundPlacement((), verdict.value, 0.0)).lower_bound, ()
        return Placement(
            self.objective,
            Method.EXPERT,
            verdict.ordered,
            tuple(devices),
            verdict.value,
            min(bound, verdict.value),
            verdict.loads,
            pieces,
        )

    def _latency(self) -> Placement:
        method = self.request.method
        if method not in _FOR_LATENCY:
            known = ", ".join(_FOR_LATENCY)
            raise BiremeError(f"The method {method} does not place for latency. Take {known} or expert.")
        found: LatencyFound | None = None
        is_alone = method is Method.ANNEAL or (method is Method.AUTO and not HAS_SOLVER)
        try:
            self.say("annealing")
            found = search_latency(
                self.workload,
                num_pieces=self.request.num_pieces,
                time_limit_s=self.limit_s * (1.0 if is_alone else 0.3),
                seed=self.request.seed,
            )
        except BiremeError:
            if is_alone:
                raise
        if not is_alone and (found is None or found.lower_bound < found.value):
            self.say("integer program")
            try:
                found = solve_latency(
                    self.workload,
                    num_pieces=self.request.num_pieces,
                    time_limit_s=max(_LEAST_S, self.stop_at - monotonic()),
                    start=found,
                )
            except BiremeError as error:
                if found is None:
                    raise
                self.notes.append(f"The integer program found nothing better. {error}")
        assert found is not None
        return Placement(
            self.objective,
            method,
            contiguous=True,
            devices=found.devices,
            value=found.value,
            lower_bound=found.lower_bound,
            loads=latency_of(self.workload, found.devices, found.pieces).device_finish,
            pieces=found.pieces,
            notes=tuple(self.notes),
        )
