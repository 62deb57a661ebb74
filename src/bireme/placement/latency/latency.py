"""How long one sample takes: the evaluation of a placement, and a value that no placement is below.

All CPUs are one machine that runs whatever is ready. An accelerator runs its nodes in *pieces*, one after
the other: a piece starts when all that it needs from outside is there, takes what its nodes compute plus
what moves in and out, and all its nodes are done at its end. Nothing here searches, and nothing is assumed
of the placement but its length.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bireme.errors import BiremeError
from bireme.placement.items import room as items_room
from bireme.placement.workload import Workload, device_names

__all__ = [
    "LatencyFound",
    "LatencyReport",
    "accelerators_bar",
    "latency_lower_bound",
    "latency_of",
    "pieces_of",
]


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
class LatencyReport:
    """When a sample, each node and each device are done; an idle device is done at 0.

    Where the placement cannot run, `reason` is a sentence that says why, the latency is infinite, and no
    finish is told. `pieces` are those it was evaluated with.
    """

    latency: float
    finish: tuple[float, ...]
    device_finish: tuple[float, ...]
    pieces: tuple[int, ...]
    reason: str | None = None


def latency_of(
    workload: Workload, devices: Sequence[int], pieces: Sequence[int] | None = None
) -> LatencyReport:
    """When one sample is through, with node `i` on device `devices[i]` and there in piece `pieces[i]`.

    Without pieces, the nodes of each accelerator are cut into as few as paths through them allow; see
    `pieces_of`.
    """
    num_nodes = len(workload.nodes)
    if len(devices) != num_nodes or (pieces is not None and len(pieces) != num_nodes):
        raise BiremeError(
            f"The placement has {len(devices)} devices and {len(devices if pieces is None else pieces)} "
            f"pieces, but the workload has {num_nodes} nodes. Give one of each per node."
        )
    reason = _misplaced(workload, devices)
    if reason is not None:
        return LatencyReport(math.inf, (), (), tuple(pieces or ()), reason)
    cut = pieces_of(workload, devices) if pieces is None else tuple(pieces)
    return _Schedule(workload, devices, cut).report()


def pieces_of(workload: Workload, devices: Sequence[int]) -> tuple[int, ...]:
    """For each node, how often a path to it leaves its accelerator's nodes and enters them again, at most.

    No path leaves one of these pieces and enters it again. Nodes on CPUs have piece 0.
    """
    pieces = [0] * len(workload.nodes)
    graph = _Graph(workload)
    for device in sorted({device for device in devices if device < workload.num_accelerators}):
        times_left = [-1] * len(pieces)
        for place in graph.order:
            inside = devices[place] == device
            for producer in graph.producers[place]:
                enters = inside and times_left[producer] >= 0 and devices[producer] != device
                times_left[place] = max(times_left[place], times_left[producer] + enters)
            if inside:
                times_left[place] = pieces[place] = max(times_left[place], 0)
    return tuple(pieces)


def latency_lower_bound(workload: Workload) -> float:
    """A latency that no placement is below, whatever the number of pieces.

    Every path takes at least the smaller times of its nodes. And a node whose best path by way of a CPU takes
    longer than a latency must be on an accelerator to reach that latency: such nodes must fit there, and one
    accelerator computes at least its share of them, after what leads to the first and before what follows the
    last. The bound is the smallest latency that passes.
    """
    graph = _Graph(workload)
    nodes = workload.nodes
    least = _least_times(workload)
    heads = _longest(graph.order, graph.producers, least)
    tails = _longest(graph.order[::-1], graph.consumers, least)
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
    least_head = least_tail = bound = math.inf
    room = workload.num_accelerators * _room(workload)
    bound = longest_path
    for place in reversed(places):
        total_time += nodes[place].accelerator_time
        total_bytes += nodes[place].size_bytes
        least_head, least_tail = min(least_head, heads[place]), min(least_tail, tails[place])
        needed = math.inf if total_bytes > room else least_head + least_tail
        needed += total_time / max(workload.num_accelerators, 1)
        bound = max(bound, min(needed, through_cpu[place]))
    return bound


def _least_times(workload: Workload) -> list[float]:
    """The time of each node on the fastest device that may run it and its colour."""
    barred = accelerators_bar(workload)
    return [
        node.cpu_time
        if node.id in barred
        else min(node.accelerator_time, node.cpu_time if workload.num_cpus else math.inf)
        for node in workload.nodes
    ]


def accelerators_bar(workload: Workload) -> set[int]:
    """The ids of nodes that no accelerator can take: it or its colour is unsupported or too large."""
    room = _room(workload)
    return {
        node.id
        for group in workload.classes()
        if not workload.num_accelerators
        or not all(node.supported for node in group)
        or sum(node.size_bytes for node in group) > room
        for node in group
    }


def _room(workload: Workload) -> float:
    return items_room(np.array([node.size_bytes for node in workload.nodes]), workload.accelerator_bytes)


class _Graph:
    """Who needs whom, by place, and an order in which all could run."""

    def __init__(self, workload: Workload) -> None:
        places = {node.id: place for place, node in enumerate(workload.nodes)}
        self.producers: list[list[int]] = [[] for _ in workload.nodes]
        self.consumers: list[list[int]] = [[] for _ in workload.nodes]
        for edge in dict.fromkeys((edge.source, edge.target) for edge in workload.edges):
            source, target = places[edge[0]], places[edge[1]]
            self.producers[target].append(source)
            self.consumers[source].append(target)
        waiting = [len(row) for row in self.producers]
        self.order = [place for place, count in enumerate(waiting) if not count]
        for place in self.order:
            for consumer in self.consumers[place]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    self.order.append(consumer)


def _longest(order: Iterable[int], earlier: list[list[int]], times: list[float]) -> list[float]:
    """The longest path that ends right before each node."""
    ends = [0.0] * len(times)
    for place in order:
        ends[place] = max((ends[other] + times[other] for other in earlier[place]), default=0.0)
    return ends


def _misplaced(workload: Workload, devices: Sequence[int]) -> str | None:
    """Why devices cannot take the nodes they are given, whatever the times."""
    names = device_names(workload)
    num_accelerators = workload.num_accelerators
    used: dict[int, float] = defaultdict(float)
    room = _room(workload)
    for node, device in zip(workload.nodes, devices, strict=True):
        if not 0 <= device < len(names):
            return f"{node} is on device {device}, but there are only {', '.join(names)}."
        if device < num_accelerators:
            used[device] += node.size_bytes
            if not node.supported:
                return f"{node} is on {names[device]}, but accelerators do not support it."
    for device, size in used.items():
        if size > room:
            return f"{names[device]} is given {size:g} bytes, but has {workload.accelerator_bytes:g}."
    # All CPUs are one machine, so a colour may be on two of them.
    machine = {
        node.id: min(device, num_accelerators) for node, device in zip(workload.nodes, devices, strict=True)
    }
    for group in workload.classes():
        other = next((node for node in group if machine[node.id] != machine[group[0].id]), None)
        if other is not None:
            return f"{group[0]} and {other} have the same colour, but not the same device."
    return None


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """What starts and ends at once: a piece of an accelerator, or one node on a CPU."""

    device: int
    number: int


class _Schedule:
    """The jobs of a placement, what they wait for, and what they take."""

    def __init__(self, workload: Workload, devices: Sequence[int], pieces: tuple[int, ...]) -> None:
        self.workload = workload
        self.graph = _Graph(workload)
        self.pieces = pieces
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

    def report(self) -> LatencyReport:
        """Run the jobs as soon as they can."""
        done: dict[_Job, float] = {}
        followers: dict[_Job, list[_Job]] = defaultdict(list)
        waiting = Counter({job: len(others) for job, others in self.waits_for.items()})
        for job, others in self.waits_for.items():
            for other in others:
                followers[other].append(job)
        ready = [job for job, count in waiting.items() if not count]
        for job in ready:
            start = max((done[other] for other in self.waits_for[job]), default=0.0)
            done[job] = start + self.takes[job]
            for follower in followers[job]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        if len(done) < len(self.takes):
            return LatencyReport(math.inf, (), (), self.pieces, self._circle(done))
        finish = tuple(done[job] for job in self.job_of)
        ends = [0.0] * (self.workload.num_accelerators + self.workload.num_cpus)
        for device, end in zip(self.devices, finish, strict=True):
            ends[device] = max(ends[device], end)
        return LatencyReport(max(finish), finish, tuple(ends), self.pieces)

    def _circle(self, done: dict[_Job, float]) -> str:
        """A sentence that names pieces which wait for each other."""
        way = [min(job for job in self.takes if job not in done)]
        while way[-1] not in way[:-1]:
            way.append(min(job for job in self.waits_for[way[-1]] if job not in done))
        circle = way[way.index(way[-1]) :]
        waits = " waits for ".join(self._name(job) for job in circle)
        return f"Pieces wait for each other in a circle: {waits}."

    def _name(self, job: _Job) -> str:
        name = device_names(self.workload)[job.device]
        if job.device < self.workload.num_accelerators:
            return f"piece {job.number} of {name}"
        return f"{self.workload.nodes[job.number]} on {name}"
