"""Who meets whom on the links: the bytes of a batch on every lane, and the time they take there.

A mapping is first judged by that alone: no lane can be done sooner than all its bytes at its full rate.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bireme.cluster.cluster import Lane
from bireme.plan.agreements import hops, ring_share
from bireme.plan.partition.loads import RowLink
from bireme.plan.search.problem import PlanningProblem


@dataclass(frozen=True, slots=True)
class Ring:
    """A sum over devices in a ring, alone on the links: how long it takes for gradients of so many bytes."""

    seconds: float
    num_bytes: float


def ring_over(problem: PlanningProblem, devices: Sequence[int], num_bytes: float) -> Ring:
    """Around the devices in the order of their numbers, which keeps those of a server together."""
    ring = sorted(set(devices))
    all_hops = hops(ring)
    crossed = Counter(lane for hop in all_hops for lane in problem.path(*hop))
    per_hop = ring_share(len(ring)) * num_bytes
    slowest_s = max((per_hop * times / lane.bytes_per_s for lane, times in crossed.items()), default=0.0)
    late_s = 2 * (len(ring) - 1) * max((problem.cluster.latency(*hop) for hop in all_hops), default=0.0)
    return Ring(slowest_s + late_s, num_bytes)


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
        reduce_bytes: Sequence[float],
        returned_bytes: Sequence[Sequence[float]] | None = None,
    ) -> "LaneTraffic":
        """Of a grid; `boundary_bytes` are those after each stage of each replica, `returned_bytes` those of
        the gradients that come back, as much unless given.

        `reduce_bytes` are those that each rank's ring moves over each hop.
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
        rings: defaultdict[Lane, float] = defaultdict(float)
        for rank, num_bytes in enumerate(reduce_bytes):
            if num_bytes and len(grid[rank]) > 1:
                for hop in hops(sorted(grid[rank])):
                    for lane in problem.path(*hop):
                        rings[lane] += num_bytes
        total: defaultdict[str, float] = defaultdict(float)
        for one in messages:
            for lane, num_bytes in one.items():
                total[lane.name] += num_bytes
        return LaneTraffic(
            tuple(messages),
            total,
            rings,
            {lane.name: num_bytes for lane, num_bytes in rings.items()},
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
