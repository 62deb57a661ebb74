"""Who meets whom on the links: the bytes of a batch on every lane, and the time they take there.

A mapping is first judged by that alone: no lane can be done sooner than all its bytes at its full rate.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bireme.cluster.cluster import Lane, Overlap
from bireme.plan.partition.loads import RowLink
from bireme.plan.search.problem import PlanningProblem
from bireme.simulate.links import hops, ring_share


@dataclass(frozen=True, slots=True)
class Ring:
    """A sum over devices in a ring, alone on the links: how long it takes for gradients of so many bytes."""

    seconds: float
    num_bytes: float


def ring_over(problem: PlanningProblem, devices: Sequence[int], num_bytes: float) -> Ring:
    """Around the devices in the order of their numbers, which keeps those of a server together."""
    per_hop = ring_share(len(set(devices))) * num_bytes
    return Ring(rings_s(problem, [HopBytes(devices, per_hop)]), num_bytes)


@dataclass(frozen=True, slots=True)
class HopBytes:
    """A ring over devices, and the bytes that go over each of its hops."""

    devices: Sequence[int]
    num_bytes: float

    def on_lanes(self, problem: PlanningProblem) -> Iterator[tuple[Lane, float]]:
        """The lanes of its hops, in the order of the devices' numbers, and the bytes there."""
        for hop in hops(sorted(set(self.devices))):
            for lane in problem.path(*hop):
                yield lane, self.num_bytes

    def late_s(self, problem: PlanningProblem) -> float:
        """The latency of the way around."""
        ring = sorted(set(self.devices))
        slowest_s = max((problem.cluster.latency(*hop) for hop in hops(ring)), default=0.0)
        return 2 * (len(ring) - 1) * slowest_s


def rings_s(problem: PlanningProblem, rings: Sequence[HopBytes]) -> float:
    """For how long rings are under way that begin at the same time, with nothing else on the links."""
    crossed: defaultdict[Lane, float] = defaultdict(float)
    for ring in rings:
        for lane, num_bytes in ring.on_lanes(problem):
            crossed[lane] += num_bytes
    slowest_s = max((num_bytes / lane.bytes_per_s for lane, num_bytes in crossed.items()), default=0.0)
    return slowest_s + max((ring.late_s(problem) for ring in rings), default=0.0)


@dataclass(frozen=True, slots=True)
class LaneTraffic:
    """The bytes of a batch per lane: of each replica's messages, and of the gradient rings of all."""

    messages: tuple[Mapping[Lane, float], ...]
    all_messages: Mapping[str, float]
    rings: Mapping[Lane, float]
    ring_bytes: Mapping[str, float]
    own_bytes: tuple[Mapping[str, float], ...]

    @staticmethod
    def of(
        problem: PlanningProblem,
        grid: Sequence[Sequence[int]],
        rank_of_stage: Sequence[int],
        boundary_bytes: Sequence[Sequence[float]],
        rings: Sequence[HopBytes],
        returned_bytes: Sequence[Sequence[float]] | None = None,
    ) -> "LaneTraffic":
        """Of a grid; `boundary_bytes` are those after each stage of each replica, `returned_bytes` those of
        the gradients that come back, as much unless given. `rings` are those of a batch.
        """
        messages: list[dict[Lane, float]] = []
        for replica, boundaries in enumerate(
            zip(boundary_bytes, returned_bytes or boundary_bytes, strict=True)
        ):
            own: defaultdict[Lane, float] = defaultdict(float)
            for stage in range(len(rank_of_stage) - 1):
                here, there = (grid[rank_of_stage[place]][replica] for place in (stage, stage + 1))
                for of_stages, ends in zip(boundaries, ((here, there), (there, here)), strict=True):
                    for lane in problem.path(*ends):
                        own[lane] += of_stages[stage]
            messages.append(own)
        of_rings: defaultdict[Lane, float] = defaultdict(float)
        for ring in rings:
            for lane, num_bytes in ring.on_lanes(problem):
                of_rings[lane] += num_bytes
        total: defaultdict[str, float] = defaultdict(float)
        for one in messages:
            for lane, num_bytes in one.items():
                total[lane.name] += num_bytes
        return LaneTraffic(
            tuple(messages),
            total,
            of_rings,
            {lane.name: num_bytes for lane, num_bytes in of_rings.items()},
            tuple({lane.name: num_bytes for lane, num_bytes in own.items()} for own in messages),
        )

    def share(self, replica: int, lane: str) -> float:
        """The part of a lane that a replica and the rings get: all of it where no other replica is on it."""
        rest = self.all_messages.get(lane, 0.0) - self.own_bytes[replica].get(lane, 0.0)
        if rest <= 0:
            return 1.0
        own = self.own_bytes[replica].get(lane, 0.0) + self.ring_bytes.get(lane, 0.0)
        return own / (own + rest) if own else 1.0

    def at(self, replica: int, lane: Lane) -> tuple[float, float]:
        """What a replica has of a lane, and the bytes of rings there."""
        return lane.bytes_per_s * self.share(replica, lane.name), self.ring_bytes.get(lane.name, 0.0)

    def slowest(self) -> tuple[str, float]:
        """The lane that needs longest for its bytes, and how long that is."""
        sums: defaultdict[Lane, float] = defaultdict(float)
        for one in (*self.messages, self.rings):
            for lane, num_bytes in one.items():
                sums[lane] += num_bytes
        seconds = {lane.name: num_bytes / lane.bytes_per_s for lane, num_bytes in sums.items()}
        name = max(seconds, key=lambda lane: (seconds[lane], lane), default="")
        return name, seconds.get(name, 0.0)


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
    return [
        RowLink(
            min(
                (lane.bytes_per_s / flows[lane.name] for pair in ends for lane in problem.path(*pair)),
                default=float("inf"),
            ),
            max((problem.cluster.latency(*pair) for pair in ends), default=0.0),
            overlap=Overlap.least(
                (problem.most_overlap(schedule), *(problem.cluster.overlap(*pair) for pair in ends))
            ),
        )
        for ends in ways
    ]
