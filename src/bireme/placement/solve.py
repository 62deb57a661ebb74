"""From a request to a `Placement`: which solver runs on which items, for how long, and what that proves."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from bireme.errors import BiremeError
from bireme.placement.anywhere import HAS_SOLVER, Anywhere, greedy
from bireme.placement.check import check
from bireme.placement.contiguous import (
    MOST_IDEALS,
    Contiguous,
    ContiguousSplit,
    NoSplitFoundError,
    carried_over,
)
from bireme.placement.contraction import FoundPlacement, Items, Weightless, items_of, loads_of, simple_bound
from bireme.placement.integer import solve_contiguous
from bireme.placement.latency import LatencyFound, latency_lower_bound, latency_of, pieces_of
from bireme.placement.latency_program import solve_latency
from bireme.placement.latency_search import search_latency
from bireme.placement.workload import Method, Objective, Placement, Request, Workload

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
