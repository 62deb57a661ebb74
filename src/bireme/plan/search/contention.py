"""Who meets whom on the links: the bytes of a batch on every lane, and what is under way at the same time.

A mapping is first judged by its bytes alone: no lane can be done sooner than all its bytes at its full rate.
Replicas that are simulated one by one then meet on wires that carry the messages of all.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from bireme.cluster.cluster import Lane
from bireme.plan.agreements import ring_share
from bireme.plan.partition.loads import RowLink
from bireme.plan.search.draft import Grid
from bireme.plan.search.problem import PlanningProblem
from bireme.simulate.links import ring_lanes, ring_latency_s
from bireme.simulate.network import Network, Path, Wire


@dataclass(frozen=True, slots=True)
class Ring:
    """A sum over devices in a ring, alone on the links: how long it takes for gradients of so many bytes."""

    seconds: float
    num_bytes: float


def ring_over(problem: PlanningProblem, devices: Sequence[int], num_bytes: float) -> Ring:
    """Around the devices in the order of their numbers, which keeps those of a server together."""
    lanes = ring_lanes(problem.path, devices)
    per_hop = ring_share(len(set(devices))) * num_bytes
    slowest_s = max((per_hop * times / lane.bytes_per_s for lane, times in lanes.items()), default=0.0)
    return Ring(slowest_s + ring_latency_s(problem.cluster, devices), num_bytes)


def busiest_lane(
    problem: PlanningProblem,
    grid: Grid,
    rank_of_stage: Sequence[int],
    boundary_bytes: Sequence[tuple[Sequence[float], Sequence[float]]],
    ring_bytes: Sequence[float],
) -> tuple[str, float]:
    """The lane that needs longest for its bytes, and how long that is.

    `boundary_bytes` are those that cross each boundary of each replica forth and back, `ring_bytes` those
    that the ring of each rank moves over each hop.
    """
    total: defaultdict[Lane, float] = defaultdict(float)
    for replica, (forth, back) in enumerate(boundary_bytes):
        for boundary, (one, other) in enumerate(pairwise(rank_of_stage)):
            here, there = grid[one][replica], grid[other][replica]
            for lane in problem.path(here, there):
                total[lane] += forth[boundary]
            for lane in problem.path(there, here):
                total[lane] += back[boundary]
    for row, num_bytes in zip(grid, ring_bytes, strict=True):
        if num_bytes:
            for lane, times in ring_lanes(problem.path, row).items():
                total[lane] += times * num_bytes
    seconds = {lane.name: num_bytes / lane.bytes_per_s for lane, num_bytes in total.items()}
    name = max(seconds, key=lambda lane: (seconds[lane], lane), default="")
    return name, seconds.get(name, 0.0)


_Ends = tuple[int, int]
"""The ranks at both ends of a message; a rank twice stands for its ring."""

_Loads = tuple[tuple[_Ends, float], ...]
"""How many messages between two ranks, or hops of a ring, cross a lane at the same time."""


class ReplicaNetworks:
    """The network of each replica of a grid, with the messages of the others, which are taken to be in step.

    Replicas in step send each message at the same time, so that of one stands for those of all: it has the
    load of all on the lanes that it passes, and loads the lanes of the others where a ring meets them.
    `message_bytes` are those of a micro-batch between two ranks, by its size: a message that is smaller than
    ours is on a lane for a part of the time.

    Lanes that are loaded alike are one wire, the slowest of them.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        grid: Grid,
        sizes: Sequence[int],
        message_bytes: Mapping[int, Mapping[_Ends, float]],
    ) -> None:
        self._problem = problem
        self._grid = grid
        self._sizes = sizes
        self._message_bytes = message_bytes
        self._pairs = sorted(message_bytes[sizes[0]])
        self._crossing: defaultdict[Lane, Counter[tuple[_Ends, int]]] = defaultdict(Counter)
        for replica, size in enumerate(sizes):
            for ends in self._pairs:
                for lane in self._way(replica, ends):
                    self._crossing[lane][ends, size] += 1
        self._hops: defaultdict[Lane, list[tuple[_Ends, int]]] = defaultdict(list)
        if len(sizes) > 1:
            for rank, row in enumerate(grid):
                for lane, times in ring_lanes(problem.path, row).items():
                    self._hops[lane].append(((rank, rank), times))
        self._loads: dict[tuple[Lane, int], _Loads] = {}
        self._with_rings: dict[int, dict[_Loads, Lane]] = {}

    def of(self, replica: int) -> Network:
        """The network of a replica; equal for replicas that meet the others alike, but for names."""
        size = self._sizes[replica]
        passing: defaultdict[Lane, list[_Ends]] = defaultdict(list)
        for ends in self._pairs:
            for lane in self._way(replica, ends):
                passing[lane].append(ends)
        slowest: dict[tuple[_Loads, tuple[_Ends, ...]], Lane] = {}
        least: dict[_Loads, float] = {}
        for lane, own in passing.items():
            loads = self._loads_on(lane, size)
            _keep_slower(slowest, (loads, tuple(own)), lane)
            least[loads] = min(least.get(loads, math.inf), lane.bytes_per_s)
        for loads, lane in self._ring_lanes(size).items():
            if lane.bytes_per_s < least.get(loads, math.inf):
                slowest[loads, ()] = lane
        wires: defaultdict[_Ends, dict[int, float]] = defaultdict(dict)
        elsewhere: defaultdict[_Ends, list[tuple[int, float]]] = defaultdict(list)
        for number, (loads, passed_by) in enumerate(slowest):
            for ends, load in loads:
                if ends in passed_by or ends[0] == ends[1]:
                    wires[ends][number] = load
                else:
                    elsewhere[ends].append((number, load))

        def path(ends: _Ends, latency_s: float) -> Path:
            own = wires[ends]
            return Path(tuple(own), latency_s, tuple(own.values()), tuple(elsewhere[ends]))

        latency = self._problem.cluster.latency
        return Network(
            tuple(Wire(lane.name, lane.bytes_per_s) for lane in slowest.values()),
            {
                ends: path(ends, latency(self._grid[ends[0]][replica], self._grid[ends[1]][replica]))
                for ends in self._pairs
            },
            {rank: path((rank, rank), late_s) for rank, late_s in enumerate(self._ring_latencies_s)},
        )

    @cached_property
    def _ring_latencies_s(self) -> list[float]:
        if len(self._sizes) == 1:
            return []
        return [ring_latency_s(self._problem.cluster, row) for row in self._grid]

    def _way(self, replica: int, ends: _Ends) -> tuple[Lane, ...]:
        return self._problem.path(self._grid[ends[0]][replica], self._grid[ends[1]][replica])

    def _loads_on(self, lane: Lane, size: int) -> _Loads:
        """The loads of a lane in the eyes of a replica with micro-batches of a size."""
        key = lane, size
        if key not in self._loads:
            found: defaultdict[_Ends, float] = defaultdict(float)
            for (ends, other), count in self._crossing[lane].items():
                own_bytes, bytes_there = (self._message_bytes[one][ends] for one in (size, other))
                found[ends] += count * (min(bytes_there / own_bytes, 1.0) if own_bytes else 1.0)
            self._loads[key] = (*sorted(found.items()), *self._hops.get(lane, ()))
        return self._loads[key]

    def _ring_lanes(self, size: int) -> dict[_Loads, Lane]:
        """The slowest lane of all that a ring crosses and that are loaded alike."""
        if size not in self._with_rings:
            found: dict[_Loads, Lane] = {}
            for lane in self._hops:
                _keep_slower(found, self._loads_on(lane, size), lane)
            self._with_rings[size] = found
        return self._with_rings[size]


_Key = TypeVar("_Key")


def _keep_slower(book: dict[_Key, Lane], key: _Key, lane: Lane) -> None:
    known = book.get(key)
    if known is None or lane.bytes_per_s < known.bytes_per_s:
        book[key] = lane


def links_between(
    problem: PlanningProblem, grid: Sequence[Sequence[int]], rank_of_stage: Sequence[int]
) -> list[RowLink]:
    """The path after each stage, for the worst placed replica while all messages are in flight."""
    flows: Counter[str] = Counter()
    ways: list[list[tuple[int, int]]] = []
    for one, other in pairwise(rank_of_stage):
        ends = [pair for a, b in zip(grid[one], grid[other], strict=True) for pair in ((a, b), (b, a))]
        ways.append(ends)
        flows.update(lane.name for pair in ends for lane in problem.path(*pair))
    return [
        RowLink(
            min(
                (lane.bytes_per_s / flows[lane.name] for pair in ends for lane in problem.path(*pair)),
                default=float("inf"),
            ),
            max((problem.cluster.latency(*pair) for pair in ends), default=0.0),
        )
        for ends in ways
    ]
