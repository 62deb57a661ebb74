"""Who meets whom on links and processors: the bytes of a batch on every lane, and what is under way then.

A mapping is first judged by its bytes alone: no lane can be done sooner than all its bytes at its full rate.
Replicas that are simulated one by one then meet on wires that carry the messages of all.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import TypeVar

from bireme.cluster.cluster import Lane, Link, Overlap
from bireme.grouping import grouped
from bireme.plan.partition.loads import RowLink
from bireme.plan.search.draft import Grid
from bireme.plan.search.problem import PlanningProblem
from bireme.simulate.links import ring_lanes, ring_latency_s, ring_parts
from bireme.simulate.network import Network, Path, Processors, Wire, busy_bytes


@dataclass(frozen=True, slots=True)
class HopBytes:
    """A ring over devices, and the bytes that go over each of its hops."""

    devices: Sequence[int]
    num_bytes: float

    def on_lanes(self, problem: PlanningProblem) -> Iterator[tuple[Lane, float]]:
        """The lanes of its hops, in the order of the devices' numbers, and the bytes there."""
        curved = problem.ring_curved(self.devices)
        busy = busy_bytes(curved, self.num_bytes, ring_parts(self.devices)) if curved else self.num_bytes
        for lane, times in ring_lanes(problem.path, self.devices).items():
            yield lane, times * busy


def rings_s(problem: PlanningProblem, rings: Sequence[HopBytes], *, in_round: bool = False) -> float:
    """For how long rings are under way that begin at the same time, with nothing else on the links; those of
    a round if they are `in_round`.
    """
    crossed: defaultdict[Lane, float] = defaultdict(float)
    for ring in rings:
        for lane, num_bytes in ring.on_lanes(problem):
            crossed[lane] += num_bytes
    slowest_s = max((num_bytes / lane.bytes_per_s for lane, num_bytes in crossed.items()), default=0.0)
    latencies_s = (ring_latency_s(problem.cluster, ring.devices, in_round=in_round) for ring in rings)
    return slowest_s + max(latencies_s, default=0.0)


def busiest_lane(
    problem: PlanningProblem, flows: Iterable[tuple[int, int, float, int]], rings: Sequence[HopBytes]
) -> tuple[str, float]:
    """The lane that needs longest for its bytes, and how long that is.

    `flows` are the bytes of a message from one device to another, and the number of such messages.
    """
    total: defaultdict[str, float] = defaultdict(float)
    rates: dict[str, float] = {}
    for here, there, num_bytes, count in flows:
        busy = count * busy_bytes(problem.curved(here, there), num_bytes)
        for lane in problem.path(here, there):
            total[lane.name] += busy
            rates[lane.name] = lane.bytes_per_s
    for ring in rings:
        for lane, num_bytes in ring.on_lanes(problem):
            total[lane.name] += num_bytes
            rates[lane.name] = lane.bytes_per_s
    seconds = {name: num_bytes / rates[name] for name, num_bytes in total.items()}
    name = max(seconds, key=lambda lane: (seconds[lane], lane), default="")
    return name, seconds.get(name, 0.0)


_Ends = tuple[int, int]
"""The ranks at both ends of a message; a rank twice stands for its ring."""

_Loads = tuple[tuple[_Ends, float], ...]
"""How many messages between two ranks, or hops of a ring, cross a lane at the same time."""


@dataclass(eq=False)
class ReplicaNetworks:
    """The network of each replica of a grid, with the messages of the others, which are taken to be in step.

    Replicas in step send each message at the same time, so that of one stands for those of all: it has the
    load of all on the lanes that it passes, and loads the lanes of the others where a ring meets them.
    `message_bytes` are those of a micro-batch between two ranks, by its size: a message that is smaller than
    ours is on a lane for a part of the time. Gradients are summed in a ring within each of the `sites`. No
    message overlaps with more than `most_overlap`.

    Lanes that are loaded alike are one wire, the slowest of them.
    """

    _problem: PlanningProblem
    _grid: Grid
    _sizes: Sequence[int]
    _message_bytes: Mapping[int, Mapping[_Ends, float]]
    _sites: Sequence[slice]
    _most_overlap: Overlap

    def __post_init__(self) -> None:
        self._pairs = sorted(self._message_bytes[self._sizes[0]])
        self._crossing: defaultdict[Lane, Counter[tuple[_Ends, int]]] = defaultdict(Counter)
        for replica, size in enumerate(self._sizes):
            for ends in self._pairs:
                for lane in self._way(replica, ends):
                    self._crossing[lane][ends, size] += 1
        self._hops: defaultdict[Lane, Counter[_Ends]] = defaultdict(Counter)
        self._rings: list[defaultdict[Lane, list[_Ends]]] = []
        for site in self._sites:
            crossed: defaultdict[Lane, list[_Ends]] = defaultdict(list)
            for rank, row in enumerate(self._grid):
                for lane, times in ring_lanes(self._problem.path, row[site]).items():
                    crossed[lane].append((rank, rank))
                    self._hops[lane][rank, rank] += times
            self._rings.append(crossed)
        self._members: dict[int, frozenset[int]] = {}
        self._loads: dict[tuple[Lane, int], _Loads] = {}
        self._with_rings: dict[tuple[int, int], dict[tuple[_Loads, tuple[_Ends, ...]], Lane]] = {}

    def of(self, replica: int) -> Network:
        """The network of a replica; equal for replicas that meet the others alike, but for names."""
        size = self._sizes[replica]
        site = next(number for number, own in enumerate(self._sites) if replica < own.stop)
        passing = grouped((lane, ends) for ends in self._pairs for lane in self._way(replica, ends))
        slowest: dict[tuple[_Loads, tuple[_Ends, ...]], Lane] = {}
        least: dict[tuple[_Loads, tuple[_Ends, ...]], float] = {}
        for lane, own in passing.items():
            loads, rings = self._loads_on(lane, size), tuple(self._rings[site].get(lane, ()))
            _keep_slower(slowest, (loads, (*own, *rings)), lane)
            least[loads, rings] = min(least.get((loads, rings), math.inf), lane.bytes_per_s)
        for key, lane in self._ring_lanes(site, size).items():
            if lane.bytes_per_s < least.get(key, math.inf):
                slowest[key] = lane
        wires: defaultdict[_Ends, dict[int, float]] = defaultdict(dict)
        elsewhere: defaultdict[_Ends, list[tuple[int, float]]] = defaultdict(list)
        for number, (loads, passed_by) in enumerate(slowest):
            for ends, load in loads:
                if ends in passed_by:
                    wires[ends][number] = load
                else:
                    elsewhere[ends].append((number, load))

        def path(ends: _Ends, latency_s: float, curved: tuple[Link, ...], parts: int = 1) -> Path:
            own, others = wires[ends], tuple(elsewhere[ends])
            return Path(tuple(own), latency_s, Overlap.FULL, tuple(own.values()), others, curved, parts)

        problem, members = self._problem, self._sites[site]

        def message_path(ends: _Ends) -> Path:
            here, there = (self._grid[rank][replica] for rank in ends)
            overlap = Overlap.least((problem.overlap(here, there), self._most_overlap))
            found = path(ends, problem.latency(here, there), problem.curved(here, there))
            return found if overlap is Overlap.FULL else replace(found, overlap=overlap)

        def ring_path(rank: int, late_s: float) -> Path:
            devices = self._grid[rank][members]
            curved = problem.ring_curved(devices)
            return path((rank, rank), late_s, curved, ring_parts(devices) if curved else 1)

        return Network(
            tuple(Wire(lane.name, lane.bytes_per_s) for lane in slowest.values()),
            {ends: message_path(ends) for ends in self._pairs},
            {rank: ring_path(rank, late_s) for rank, late_s in enumerate(self._ring_latencies_s[site])},
            self._agreement_s(replica, site),
        )

    def _agreement_s(self, replica: int, site: int) -> float:
        """How late the agreement on a batch is: of the ranks of the site, or of the replica alone if the sum
        over replicas is a round.
        """
        if self._problem.sums_in_rounds:
            alone = frozenset(row[replica] for row in self._grid)
            return self._problem.agreement_s(alone)
        if site not in self._members:
            own = self._sites[site]
            self._members[site] = frozenset(chain.from_iterable(row[own] for row in self._grid))
        return self._problem.agreement_s(self._members[site])

    @cached_property
    def _ring_latencies_s(self) -> list[list[float]]:
        problem = self._problem
        codec = problem.request.sums_within.codec

        def late_s(devices: Sequence[int]) -> float:
            is_direct, in_round = codec.is_cut(len(devices)), problem.sums_in_rounds
            return ring_latency_s(problem.cluster, devices, is_direct=is_direct, in_round=in_round)

        return [[late_s(row[site]) for row in self._grid] for site in self._sites]

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
            rings = self._hops.get(lane, Counter[_Ends]())
            self._loads[key] = (*sorted(found.items()), *sorted(rings.items()))
        return self._loads[key]

    def _ring_lanes(self, site: int, size: int) -> dict[tuple[_Loads, tuple[_Ends, ...]], Lane]:
        """The slowest lane of all that the same rings of a site cross and that are loaded alike."""
        if (site, size) not in self._with_rings:
            found: dict[tuple[_Loads, tuple[_Ends, ...]], Lane] = {}
            for lane, rings in self._rings[site].items():
                _keep_slower(found, (self._loads_on(lane, size), tuple(rings)), lane)
            self._with_rings[site, size] = found
        return self._with_rings[site, size]


_Key = TypeVar("_Key")


def _keep_slower(book: dict[_Key, Lane], key: _Key, lane: Lane) -> None:
    known = book.get(key)
    if known is None or lane.bytes_per_s < known.bytes_per_s:
        book[key] = lane


def links_between(
    problem: PlanningProblem, grid: Sequence[Sequence[int]], rank_of_stage: Sequence[int], schedule: str
) -> list[RowLink]:
    """The path after each stage under a schedule, for the worst placed replica while all messages are in
    flight.
    """
    flows: Counter[str] = Counter()
    ways: list[list[tuple[int, int]]] = []
    for one, other in pairwise(rank_of_stage):
        ends = [pair for a, b in zip(grid[one], grid[other], strict=True) for pair in ((a, b), (b, a))]
        ways.append(ends)
        flows.update(lane.name for pair in ends for lane in problem.path(*pair))
    most_overlap = problem.most_overlap(schedule)
    return [
        RowLink(
            min(
                (lane.bytes_per_s / flows[lane.name] for pair in ends for lane in problem.path(*pair)),
                default=float("inf"),
            ),
            max((problem.latency(*pair) for pair in ends), default=0.0),
            overlap=Overlap.least({most_overlap, *(problem.overlap(*pair) for pair in ends)}),
            curved=tuple(dict.fromkeys(link for pair in ends for link in problem.curved(*pair))),
        )
        for ends in ways
    ]


# Who shares a processor: devices of one server that want more cores than it has.
#
# A replica is simulated on its part of the cores, which is that of its threads among all that compute there.


def cores_needed(problem: PlanningProblem, device_s: Mapping[int, float]) -> list[tuple[float, str]]:
    """For how long a batch keeps the cores of each server busy that its devices share, and their name."""
    work_s: defaultdict[int, float] = defaultdict(float)
    for device, seconds in device_s.items():
        work_s[problem.servers[device]] += problem.threads[device] * seconds
    servers = problem.cluster.servers
    return [
        (seconds / servers[place].num_cores, f"the cores of {servers[place].name}")
        for place, seconds in work_s.items()
        if servers[place].num_cores
    ]


def processors_of(problem: PlanningProblem, grid: Sequence[Sequence[int]], replica: int) -> Processors | None:
    """The cores that the ranks of a replica share, machines in the order in which ranks come to them.

    None where every rank has its own.
    """
    wanted: defaultdict[int, int] = defaultdict(int)
    for device in (device for row in grid for device in row):
        wanted[problem.servers[device]] += problem.threads[device]
    own = [row[replica] for row in grid]
    # An accelerator computes on nobody's cores: it counts as a machine of its own.
    machines = [problem.servers[device] if problem.threads[device] else -1 - device for device in own]
    threads = [max(1, problem.threads[device]) for device in own]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    cores = []
    for machine in numbers:
        here = sum(count for count, one in zip(threads, machines, strict=True) if one == machine)
        has = problem.cluster.servers[machine].num_cores if machine >= 0 else 0
        cores.append(here * min(1.0, has / wanted[machine]) if has else float(here))
    found = Processors(tuple(cores), tuple(numbers[machine] for machine in machines), tuple(threads))
    return found if found.is_shared() else None
