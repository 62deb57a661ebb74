"""How long one sample takes: the evaluation of a placement, and a value that no placement is below.

All CPUs are one machine that runs whatever is ready. An accelerator runs its nodes in *pieces*, one after
the other: a piece starts when all that it needs from outside is there, takes what its nodes compute plus
what moves in and out, and all its nodes are done at its end. Nothing here searches, and nothing is assumed
of the placement but its length.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bireme.grouping import grouped
from bireme.placement.contraction import Floats, Integers, PlacedParts, Ragged, room, turned, walk_in_depth
from bireme.placement.workload import Edge, Workload, device_names


@dataclass(frozen=True, slots=True)
class LatencyFound:
    """A placement of nodes: the device and the piece of each, its latency, and a proven bound from below.

    The pieces of an accelerator run in the order of their numbers; a node on a CPU has piece 0.
    """

    devices: tuple[int, ...]
    pieces: tuple[int, ...]
    value: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class _LatencyReport:
    """When a sample, each node and each device are done; an idle device is done at 0.

    Where pieces wait for each other, `reason` is a sentence that says so, the latency is infinite, and no
    finish is given.
    """

    latency: float
    finish: tuple[float, ...]
    device_finish: tuple[float, ...]
    reason: str | None = None


def latency_of(
    workload: Workload, devices: Sequence[int], pieces: Sequence[int] | None = None
) -> _LatencyReport:
    """When one sample is done, with node `i` on device `devices[i]` and there in piece `pieces[i]`.

    The devices must be able to take their nodes, which `check.py` checks. Without pieces, the nodes of each
    accelerator are cut into as few as paths through them allow; see `pieces_of`.
    """
    cut = pieces_of(workload, devices) if pieces is None else tuple(pieces)
    return _Schedule(workload, devices, cut).report()


def pieces_of(workload: Workload, devices: Sequence[int]) -> tuple[int, ...]:
    """For each node, how often a path to it leaves its accelerator's nodes and enters them again, at most.

    No path leaves one of these pieces and enters it again. Nodes on CPUs have piece 0.
    """
    pieces = [0] * len(workload.nodes)
    graph = NodeOrder(workload, workload.edges)
    for device in sorted({device for device in devices if device < workload.num_accelerators}):
        for place, times in times_left(graph.order, graph.producers, devices, device).items():
            pieces[place] = times
    return tuple(pieces)


def times_left(
    order: Iterable[int], producers: Sequence[Sequence[int]], devices: Sequence[int], device: int
) -> dict[int, int]:
    """For each number on a device, how often a path to it leaves the device and enters it again, at most."""
    found = [-1] * len(producers)
    for place in order:
        is_inside = devices[place] == device
        for producer in producers[place]:
            enters = is_inside and found[producer] >= 0 and devices[producer] != device
            found[place] = max(found[place], found[producer] + enters)
        if is_inside:
            found[place] = max(found[place], 0)
    return {place: times for place, times in enumerate(found) if devices[place] == device}


def latency_lower_bound(workload: Workload) -> float:
    """A latency that no placement is below, whatever the number of pieces.

    Every path takes at least the smaller times of its nodes. And a node whose best path by way of a CPU takes
    longer than a latency must be on an accelerator to reach that latency: such nodes must fit there, and one
    accelerator computes at least its share of them, after what leads to the first and before what follows the
    last. The bound is the smallest latency that passes.
    """
    graph = NodeOrder(workload, workload.edges)
    nodes = workload.nodes
    least = _least_times(workload)
    heads = longest(graph.order, graph.producers, least)
    tails = longest(graph.order[::-1], graph.consumers, least)
    through_cpu = [
        head + (node.cpu_time if workload.num_cpus else math.inf) + tail
        for head, node, tail in zip(heads, nodes, tails, strict=True)
    ]
    longest_path = max(head + time + tail for head, time, tail in zip(heads, least, tails, strict=True))
    places = sorted(
        (place for place in range(len(nodes)) if through_cpu[place] > longest_path),
        key=lambda place: through_cpu[place],
    )
    # From the last threshold down: below a threshold, its node and all later ones are forced.
    total_time = total_bytes = 0.0
    least_head = least_tail = math.inf
    most_bytes = workload.num_accelerators * _room(workload)
    bound = longest_path
    for place in reversed(places):
        total_time += nodes[place].accelerator_time
        total_bytes += nodes[place].size_bytes
        least_head, least_tail = min(least_head, heads[place]), min(least_tail, tails[place])
        needed = math.inf if total_bytes > most_bytes else least_head + least_tail
        needed += total_time / max(workload.num_accelerators, 1)
        bound = max(bound, min(needed, through_cpu[place]))
    return bound


def _least_times(workload: Workload) -> list[float]:
    """The time of each node on the fastest device that may run it and its colour."""
    barred = _accelerators_bar(workload)
    return [
        node.cpu_time
        if node.id in barred
        else min(node.accelerator_time, node.cpu_time if workload.num_cpus else math.inf)
        for node in workload.nodes
    ]


def _accelerators_bar(workload: Workload) -> set[int]:
    """The ids of nodes that no accelerator can take: it or its colour is unsupported or too large."""
    most_bytes = _room(workload)
    return {
        node.id
        for group in workload.classes()
        if not workload.num_accelerators
        or not all(node.supported for node in group)
        or sum(node.size_bytes for node in group) > most_bytes
        for node in group
    }


def _room(workload: Workload) -> float:
    return room(np.array([node.size_bytes for node in workload.nodes]), workload.accelerator_bytes)


class NodeOrder:
    """Producers and consumers of each node over some edges, by place, and an order in which all could run."""

    def __init__(self, workload: Workload, edges: Iterable[Edge]) -> None:
        places = {node.id: place for place, node in enumerate(workload.nodes)}
        self.producers: list[list[int]] = [[] for _ in workload.nodes]
        self.consumers: list[list[int]] = [[] for _ in workload.nodes]
        for source, target in dict.fromkeys((edge.source, edge.target) for edge in edges):
            self.producers[places[target]].append(places[source])
            self.consumers[places[source]].append(places[target])
        self.order = [*TopologicalSorter(dict(enumerate(self.producers))).static_order()]


def longest(order: Iterable[int], earlier: Sequence[Sequence[int]], times: Sequence[float]) -> list[float]:
    """The longest path that ends right before each node."""
    ends = [0.0] * len(times)
    for place in order:
        ends[place] = max((ends[other] + times[other] for other in earlier[place]), default=0.0)
    return ends


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """What starts and ends at once: a piece of an accelerator, or one node on a CPU."""

    device: int
    number: int


class _Schedule:
    """The jobs of a placement, what they wait for, and what they take."""

    def __init__(self, workload: Workload, devices: Sequence[int], pieces: tuple[int, ...]) -> None:
        self.workload = workload
        self.graph = NodeOrder(workload, workload.edges)
        self.devices = devices
        self.job_of = [
            _Job(device, piece if device < workload.num_accelerators else place)
            for place, (device, piece) in enumerate(zip(devices, pieces, strict=True))
        ]
        self.takes = self._durations()
        self.waits_for = self._waits_for()

    def _durations(self) -> dict[_Job, float]:
        workload, costs = self.workload, self.workload.costs
        takes: dict[_Job, float] = defaultdict(float)
        for place, node in enumerate(workload.nodes):
            job = self.job_of[place]
            on_accelerator = job.device < workload.num_accelerators
            takes[job] += node.accelerator_time if on_accelerator else node.cpu_time
            users = {self.job_of[consumer] for consumer in self.graph.consumers[place]} - {job}
            for mover in users | ({job} if users else set()):
                if mover.device < workload.num_accelerators:
                    takes[mover] += costs[node.id]
        return takes

    def _waits_for(self) -> dict[_Job, set[_Job]]:
        waits_for: dict[_Job, set[_Job]] = {job: set() for job in self.takes}
        for place, producers in enumerate(self.graph.producers):
            waits_for[self.job_of[place]] |= {self.job_of[producer] for producer in producers}
        for job in waits_for:
            waits_for[job].discard(job)
        on_accelerators = sorted(job for job in self.takes if job.device < self.workload.num_accelerators)
        for previous, job in pairwise(on_accelerators):
            if previous.device == job.device:
                waits_for[job].add(previous)
        return waits_for

    def report(self) -> _LatencyReport:
        """Run the jobs as soon as they can."""
        done: dict[_Job, float] = {}
        try:
            for job in TopologicalSorter(self.waits_for).static_order():
                start = max((done[other] for other in self.waits_for[job]), default=0.0)
                done[job] = start + self.takes[job]
        except CycleError as error:
            waits = " waits for ".join(map(self._name, reversed(error.args[1])))
            reason = f"Pieces wait for each other in a circle: {waits}."
            return _LatencyReport(math.inf, (), (), reason)
        finish = tuple(done[job] for job in self.job_of)
        ends = [0.0] * (self.workload.num_accelerators + self.workload.num_cpus)
        for device, end in zip(self.devices, finish, strict=True):
            ends[device] = max(ends[device], end)
        return _LatencyReport(max(finish), finish, tuple(ends))

    def _name(self, job: _Job) -> str:
        name = device_names(self.workload)[job.device]
        if job.device < self.workload.num_accelerators:
            return f"piece {job.number} of {name}"
        return f"{self.workload.nodes[job.number]} on {name}"


# What the searches for a short latency work on: `LatencySteps`, nodes in an order in which they could run.
#
# Unlike items, steps are single nodes: what shares a colour shares an accelerator, but on CPUs each of its
# nodes starts when it can.


@dataclass(frozen=True, slots=True, eq=False)
class LatencySteps(PlacedParts):
    """Steps, the families that share a device, and what is moved.

    Family `family[i]` holds step `i`; where `can_accelerate` is false, no accelerator can take the family,
    and its times there are those on a CPU. A net is the output of the step `net_source`, which the steps
    `net_users`, all others, use: it costs `net_cost` to move, never 0.
    """

    family: Integers
    families: Ragged
    can_accelerate: NDArray[np.bool_]
    net_source: Integers
    net_users: Ragged
    net_cost: Floats

    def spread(self, of_steps: Sequence[int]) -> tuple[int, ...]:
        """A number for each node, from one for each step."""
        of_places = {place: int(own) for (place,), own in zip(self.members, of_steps, strict=True)}
        return tuple(of_places[place] for place in range(len(self)))


def steps_of(workload: Workload) -> LatencySteps:
    """The steps of a workload, in the order of a walk in depth."""
    graph, nodes, costs = NodeOrder(workload, workload.edges), workload.nodes, workload.costs
    order = walk_in_depth(dict(enumerate(graph.consumers)))
    number_of = {place: number for number, place in enumerate(order)}
    after = [sorted(number_of[user] for user in graph.consumers[place]) for place in order]
    first_of = {node.id: family[0].id for family in workload.classes() for node in family}
    families = grouped((first_of[nodes[place].id], number) for number, place in enumerate(order))
    renumbered = {first: number for number, first in enumerate(families)}
    barred = _accelerators_bar(workload)
    can_accelerate = np.array([nodes[place].id not in barred for place in order], np.bool_)
    cpu_time = np.array([nodes[place].cpu_time for place in order], np.float64)
    accelerator_time = np.array([nodes[place].accelerator_time for place in order], np.float64)
    moved = [number for number, place in enumerate(order) if costs.get(nodes[place].id, 0.0) > 0]
    return LatencySteps(
        members=tuple((place,) for place in order),
        # Some write a huge time to say "cannot", which would drown all others in a sum.
        accelerator_time=np.where(can_accelerate, accelerator_time, cpu_time),
        cpu_time=cpu_time,
        size=np.array([nodes[place].size_bytes for place in order], np.float64),
        family=np.array([renumbered[first_of[nodes[place].id]] for place in order], np.int64),
        families=Ragged.of(list(families.values())),
        can_accelerate=can_accelerate[[row[0] for row in families.values()]],
        before=Ragged.of(turned(after, len(order))),
        after=Ragged.of(after),
        net_source=np.array(moved, np.int64),
        net_users=Ragged.of([after[number] for number in moved]),
        net_cost=np.array([costs[nodes[order[number]].id] for number in moved], np.float64),
        num_accelerators=workload.num_accelerators,
        num_cpus=workload.num_cpus,
        accelerator_bytes=workload.accelerator_bytes,
    )
