"""The check: whether a placement keeps every rule, and what it comes to.

It goes by the nodes and edges alone, as the problem is stated, and shares no code with what finds placements:
no items, no nets, no ideals, no steps. So what it confirms does not rest on what it checks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from bireme.grouping import grouped
from bireme.placement.latency import NodeOrder, latency_of, pieces_of
from bireme.placement.workload import Objective, Workload, device_names

_SLACK = 2e-12
"""Relative room for the rounding of sums of bytes that are not whole; more than what searches allow."""

_MOST_NODES = 8
"""Of a path that a sentence shows."""

_MOST_SENTENCES = 10
"""About broken rules of one kind; more are only counted."""


@dataclass(frozen=True, slots=True)
class PlacementVerdict:
    """What was found: a sentence for every broken rule, and the numbers of a placement that can be counted.

    `contiguous` is the published rule: no path leaves a device and enters it again (for latency: a piece of
    an accelerator). `ordered` says more: the devices can be in a line that all forward edges follow. Where
    nodes have no device there is, or nothing can run, `value` is infinite.
    """

    problems: tuple[str, ...]
    value: float
    loads: tuple[float, ...]
    contiguous: bool
    ordered: bool

    @property
    def valid(self) -> bool:
        """Whether no rule is broken."""
        return not self.problems


@dataclass(slots=True)
class DeviceWork:
    """What a device does: its forward and backward times of computing and of moving, and what it holds."""

    compute: list[float] = field(default_factory=lambda: [0.0, 0.0])
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    size_bytes: float = 0.0
    num_nodes: int = 0

    @property
    def forward(self) -> float:
        """Its forward load."""
        return self.compute[0] + self.moved[0]

    @property
    def backward(self) -> float:
        """Its backward load."""
        return self.compute[1] + self.moved[1]


def check(
    workload: Workload,
    devices: Sequence[int],
    objective: Objective,
    *,
    contiguous: bool = True,
    num_pieces: int = 1,
    pieces: Sequence[int] | None = None,
) -> PlacementVerdict:
    """Check the device of each node and, for latency, its piece; without pieces, `pieces_of` cuts them.

    `contiguous` says whether a device must be contiguous. A piece for latency always must.
    """
    missing = tuple(_without_device(workload, devices))
    if missing:
        return PlacementVerdict(missing, math.inf, (), contiguous=False, ordered=False)
    placed = _Placed(workload, devices)
    problems = [*_unsupported(placed), *_too_large(placed), *_torn_colours(placed, objective)]
    if objective is Objective.LATENCY:
        cut = tuple(pieces_of(workload, devices) if pieces is None else pieces)
        if len(cut) != len(workload.nodes):
            raise ValueError(f"{len(cut)} pieces for {len(workload.nodes)} nodes")
        problems += _too_many_pieces(placed, cut, num_pieces)
        entered_again = _torn_pieces(placed, cut)
        problems += entered_again
        report = latency_of(workload, devices, cut)
        if report.reason and not problems:
            problems.append(report.reason)
        value, loads = report.latency, tuple(report.device_finish)
    else:
        entered_again = _torn_devices(placed)
        problems += entered_again if contiguous else ()
        works = work_of(workload, devices)
        value = _value(works, objective)
        loads = tuple(work.forward + work.backward for work in works)
    return PlacementVerdict(
        tuple(problems), value, loads, contiguous=not entered_again, ordered=_in_line(placed)
    )


def work_of(workload: Workload, devices: Sequence[int], pieces: Sequence[int] = ()) -> tuple[DeviceWork, ...]:
    """What each device does.

    An output is moved once for each device, or piece of one, that makes it or needs it; CPUs move nothing.
    """
    works = tuple(DeviceWork() for _ in device_names(workload))
    runs = list(zip(devices, pieces or [0] * len(devices), strict=True))
    place_of = {node.id: place for place, node in enumerate(workload.nodes)}
    elsewhere: list[set[tuple[int, int]]] = [set() for _ in runs]
    for edge in workload.edges:
        source, target = place_of[edge.source], place_of[edge.target]
        if runs[source] != runs[target]:
            elsewhere[source].add(runs[target])
    costs = workload.costs
    for node, run, others in zip(workload.nodes, runs, elsewhere, strict=True):
        on_accelerator = run[0] < workload.num_accelerators
        work = works[run[0]]
        work.compute[node.is_backward] += node.accelerator_time if on_accelerator else node.cpu_time
        work.size_bytes += node.size_bytes
        work.num_nodes += 1
        for device, _ in others | {run} if others else ():
            if device < workload.num_accelerators:
                works[device].moved[node.is_backward] += costs[node.id]
    return works


def _value(works: Sequence[DeviceWork], objective: Objective) -> float:
    if objective is Objective.FLUSH:
        return max(work.forward for work in works) + max(work.backward for work in works)
    return max(work.forward + work.backward for work in works)


class _Placed:
    """A workload with the device of each node, and words for both."""

    def __init__(self, workload: Workload, devices: Sequence[int]) -> None:
        self.workload = workload
        self.devices = devices
        self.names = device_names(workload)
        is_backward = {node.id: node.is_backward for node in workload.nodes}
        self.forward_edges = [edge for edge in workload.edges if not is_backward[edge.target]]

    def on_accelerator(self, place: int) -> bool:
        return self.devices[place] < self.workload.num_accelerators

    def told(self, place: int) -> str:
        return f"{self.workload.nodes[place]} on {self.names[self.devices[place]]}"


def _without_device(workload: Workload, devices: Sequence[int]) -> Iterator[str]:
    if len(devices) != len(workload.nodes):
        yield f"There are devices for {len(devices)} nodes, and the workload has {len(workload.nodes)}."
        return
    most = workload.num_accelerators + workload.num_cpus
    wrong = (
        f"{node} is on device number {device}, and there are {most}, numbered from 0."
        for node, device in zip(workload.nodes, devices, strict=True)
        if not 0 <= device < most
    )
    yield from _few(wrong, "nodes are on devices that are not there")


def _unsupported(placed: _Placed) -> Iterator[str]:
    wrong = (
        f"{placed.told(place)}: accelerators do not support it."
        for place, node in enumerate(placed.workload.nodes)
        if placed.on_accelerator(place) and not node.supported
    )
    return _few(wrong, "nodes are on accelerators that do not support them")


def _too_large(placed: _Placed) -> Iterator[str]:
    sizes = [0.0] * len(placed.names)
    for node, device in zip(placed.workload.nodes, placed.devices, strict=True):
        sizes[device] += node.size_bytes
    limit = placed.workload.accelerator_bytes
    whole = all(node.size_bytes == int(node.size_bytes) for node in placed.workload.nodes)
    is_exact = whole and sum(sizes) < 2**53
    for device in range(placed.workload.num_accelerators):
        if sizes[device] > limit * (1 if is_exact else 1 + _SLACK):
            name = placed.names[device]
            yield f"The nodes on {name} take {sizes[device]:.15g} bytes, and it has {limit:.15g}."


def _torn_colours(placed: _Placed, objective: Objective) -> Iterator[str]:
    # For latency all CPUs are one machine.
    most = placed.workload.num_accelerators if objective is Objective.LATENCY else len(placed.names)
    machines = [min(device, most) for device in placed.devices]
    first: dict[int, int] = {}
    torn: dict[int, int] = {}
    for place, node in enumerate(placed.workload.nodes):
        if node.colour is not None:
            other = first.setdefault(node.colour, place)
            if machines[other] != machines[place]:
                torn.setdefault(node.colour, place)
    wrong = (
        f"Colour {colour} is torn apart: {placed.told(first[colour])}, {placed.told(place)}."
        for colour, place in torn.items()
    )
    return _few(wrong, "colours are torn apart")


def _torn_devices(placed: _Placed) -> list[str]:
    """A sentence for each device that a path of forward nodes leaves and enters again."""
    graph = NodeOrder(placed.workload, placed.forward_edges)
    paths = _entered_again(graph, placed.devices)
    return [
        f"{placed.names[device]} is not contiguous: a path leaves it and enters it again, "
        f"{_told_path(placed, paths[device])}."
        for device in sorted(paths)
    ]


def _torn_pieces(placed: _Placed, pieces: Sequence[int]) -> list[str]:
    """A sentence for each piece of an accelerator that a path leaves and enters again."""
    count = max(pieces) + 1
    owners = [
        device * count + piece if placed.on_accelerator(place) else -1
        for place, (device, piece) in enumerate(zip(placed.devices, pieces, strict=True))
    ]
    paths = _entered_again(NodeOrder(placed.workload, placed.workload.edges), owners)
    return [
        f"Piece {owner % count} of {placed.names[owner // count]} is not contiguous: a path leaves it and "
        f"enters it again, {_told_path(placed, paths[owner])}."
        for owner in sorted(paths)
    ]


def _too_many_pieces(placed: _Placed, pieces: Sequence[int], num_pieces: int) -> Iterator[str]:
    found: dict[int, set[int]] = defaultdict(set)
    for place, piece in enumerate(pieces):
        if placed.on_accelerator(place):
            found[placed.devices[place]].add(piece)
    for device in sorted(found):
        if len(found[device]) > num_pieces:
            yield (
                f"{placed.names[device]} runs {len(found[device])} pieces in turn, and may run {num_pieces}. "
                "--pieces allows more."
            )


def _entered_again(graph: NodeOrder, owners: Sequence[int]) -> dict[int, list[int]]:
    """For each owner that a path leaves and enters again, such a path; nodes of owner -1 belong to nobody."""
    bits = [1 << owner if owner >= 0 else 0 for owner in owners]
    # The owners, as bits, that some path to a node has left before it.
    left = [0] * len(owners)
    paths: dict[int, list[int]] = {}
    for place in graph.order:
        passed = 0
        for source in graph.producers[place]:
            passed |= left[source]
            if owners[source] != owners[place]:
                passed |= bits[source]
        left[place] = passed & ~bits[place]
        if passed & bits[place] and owners[place] not in paths:
            paths[owners[place]] = _way_back(graph, owners, left, place)
    return paths


def _way_back(graph: NodeOrder, owners: Sequence[int], left: Sequence[int], place: int) -> list[int]:
    """The path to a node from where its owner was left, looked for against the edges."""
    bit = 1 << owners[place]
    path = [place]
    while len(path) == 1 or owners[path[-1]] != owners[place]:
        sources = graph.producers[path[-1]]
        start = next((s for s in sources if owners[s] == owners[place]), None) if len(path) > 1 else None
        path.append(start if start is not None else next(s for s in sources if left[s] & bit))
    return path[::-1]


def _told_path(placed: _Placed, path: Sequence[int]) -> str:
    shown = [placed.told(place) for place in path]
    if len(shown) > _MOST_NODES:
        shown = [*shown[: _MOST_NODES // 2], "…", *shown[-_MOST_NODES // 2 :]]
    return " -> ".join(shown)


def _in_line(placed: _Placed) -> bool:
    """Whether no devices follow each other in a circle over forward edges."""
    device_of = {node.id: device for node, device in zip(placed.workload.nodes, placed.devices, strict=True)}
    ends = {(device_of[edge.source], device_of[edge.target]) for edge in placed.forward_edges}
    try:
        TopologicalSorter(grouped((b, a) for a, b in ends if a != b)).prepare()
    except CycleError:
        return False
    return True


def _few(sentences: Iterator[str], what: str) -> Iterator[str]:
    """The first of many sentences, and how many more there are."""
    count = 0
    for sentence in sentences:
        count += 1
        if count <= _MOST_SENTENCES:
            yield sentence[0].upper() + sentence[1:]
    if count > _MOST_SENTENCES:
        yield f"{count - _MOST_SENTENCES} more {what}."
