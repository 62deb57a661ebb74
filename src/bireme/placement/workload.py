"""The noun: a `Workload`, operators with their times and sizes, what flows between them, and the devices.

Times have no unit of their own: loads and values come out in the one they went in with (milliseconds, in
published files). Moving a node's output between an accelerator and the memory of the host takes the `cost`
of its edges, the same for each edge; who computes on a CPU has the data where it is.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from bireme.errors import BiremeError
from bireme.grouping import grouped

_SAME_COST = 1e-6
"""Costs on a node's edges that differ by less, relative or at all, are the same number, written twice: the
larger one counts."""

_MOST_TIME = 1e100
"""Or bytes, or cost: past that sums of many lose their meaning."""

_MOST_DEVICES = 4096
"""Of either kind: past that a number is a slip of the hand."""


class Objective(StrEnum):
    """What a placement shall make small.

    `THROUGHPUT` and `TRAINING` are the load of the busiest device, on which a saturated pipeline waits; where
    there are backward nodes, forward and backward of a device count together. `FLUSH` is the largest forward
    load and the largest backward load, added, as in a pipeline that drains between the two. `LATENCY` is when
    one sample is through.
    """

    THROUGHPUT = "throughput"
    TRAINING = "training"
    FLUSH = "training-flush"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `size_bytes` counts on accelerators only; nodes of one `colour` share a device.

    An accelerator can run it only where it is `supported`. `layer` and `name` are for people.
    """

    id: int
    accelerator_time: float
    cpu_time: float
    size_bytes: float = 0.0
    supported: bool = True
    is_backward: bool = False
    colour: int | None = None
    layer: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"node {self.id} ({self.name})" if self.name else f"node {self.id}"


@dataclass(frozen=True, slots=True)
class Edge:
    """The output of `source` goes to `target`; moving it over takes `cost`."""

    source: int
    target: int
    cost: float
    size_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A graph of operators, and how many accelerators of how many bytes and how many CPUs there are."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float

    def __post_init__(self) -> None:
        self._check_devices()
        nodes = self._check_nodes()
        self._check_edges(nodes)
        self._check_order(nodes)
        self._check_room()

    @property
    def is_training(self) -> bool:
        """Whether it has backward nodes."""
        return any(node.is_backward for node in self.nodes)

    @property
    def costs(self) -> dict[int, float]:
        """What it takes to move a node's output, for every node that has an edge: the most that one says."""
        costs: dict[int, float] = {}
        for edge in self.edges:
            costs[edge.source] = max(costs.get(edge.source, 0.0), edge.cost)
        return costs

    def classes(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes that share a device by their colour, in the order of their first."""
        keys = (("node", n.id) if n.colour is None else ("colour", n.colour) for n in self.nodes)
        return tuple(map(tuple, grouped(zip(keys, self.nodes, strict=True)).values()))

    def _check_devices(self) -> None:
        for count, what in ((self.num_accelerators, "accelerators"), (self.num_cpus, "CPUs")):
            if not 0 <= count <= _MOST_DEVICES:
                raise BiremeError(f"The workload has {count} {what}; it must be 0 to {_MOST_DEVICES}.")
        if not self.num_accelerators + self.num_cpus:
            raise BiremeError("The workload has no device: neither an accelerator nor a CPU.")
        if math.isnan(self.accelerator_bytes) or self.accelerator_bytes < 0:
            raise BiremeError(
                f"The memory of an accelerator is {self.accelerator_bytes}; it must be 0 bytes or more."
            )

    def _check_nodes(self) -> dict[int, Node]:
        if not self.nodes:
            raise BiremeError("The workload has no nodes, so there is nothing to place.")
        nodes: dict[int, Node] = {}
        for node in self.nodes:
            if node.id in nodes:
                raise BiremeError(f"Two nodes have the id {node.id}. Ids must differ.")
            nodes[node.id] = node
            for number, what in (
                (node.accelerator_time, "time on an accelerator"),
                (node.cpu_time, "time on a CPU"),
                (node.size_bytes, "size"),
            ):
                if not 0 <= number < math.inf:
                    raise BiremeError(f"The {what} of {node} is {number}; it must be a number of 0 or more.")
                if number > _MOST_TIME:
                    raise BiremeError(
                        f"The {what} of {node} is {number:g}; it must be {_MOST_TIME:g} at most."
                    )
        return nodes

    def _check_edges(self, nodes: dict[int, Node]) -> None:
        costs: dict[int, float] = {}
        for edge in self.edges:
            for end, what in ((edge.source, "starts"), (edge.target, "ends")):
                if end not in nodes:
                    raise BiremeError(
                        f"The edge {edge.source} -> {edge.target} {what} at node {end}, which is not there."
                    )
            if not 0 <= edge.cost <= _MOST_TIME:
                raise BiremeError(
                    f"The edge {edge.source} -> {edge.target} costs {edge.cost}; it must be a number of 0 or "
                    f"more, {_MOST_TIME:g} at most."
                )
            known = costs.setdefault(edge.source, edge.cost)
            if not math.isclose(known, edge.cost, rel_tol=_SAME_COST, abs_tol=_SAME_COST):
                raise BiremeError(
                    f"Edges of {nodes[edge.source]} cost {costs[edge.source]:g} and {edge.cost:g}; each "
                    "moves the same output, so their costs must be equal."
                )
            if nodes[edge.source].is_backward and not nodes[edge.target].is_backward:
                raise BiremeError(
                    f"The edge {edge.source} -> {edge.target} goes from a backward node to a forward node; "
                    "a backward runs after all it could feed."
                )

    def _check_order(self, nodes: dict[int, Node]) -> None:
        order = TopologicalSorter[int]()
        for edge in self.edges:
            order.add(edge.target, edge.source)
        try:
            order.prepare()
        except CycleError as error:
            cycle: list[int] = error.args[1][:-1]
            first = cycle.index(next(edge.source for edge in self.edges if edge.source in cycle))
            cycle = [*cycle[first:], *cycle[:first], cycle[first]]
            way = " -> ".join([*map(str, cycle[:8]), "…"] if len(cycle) > 9 else map(str, cycle))
            raise BiremeError(
                f"The graph has a cycle, so no order can run it: {nodes[cycle[0]]} waits for itself by way "
                f"of {way}."
            ) from None

    def _check_room(self) -> None:
        if self.num_cpus:
            return
        for group in self.classes():
            unsupported = next((node for node in group if not node.supported), None)
            if unsupported is not None:
                raise BiremeError(
                    f"There is no device for {unsupported}: accelerators do not support it, and there is no "
                    "CPU."
                )
            size = sum(node.size_bytes for node in group)
            if size > self.accelerator_bytes:
                others = f" and {len(group) - 1} nodes of its colour" if len(group) > 1 else ""
                raise BiremeError(
                    f"There is no device for {group[0]}{others}: it takes {size:g} bytes, an accelerator has "
                    f"{self.accelerator_bytes:g}, and there is no CPU."
                )


def device_names(workload: Workload) -> tuple[str, ...]:
    """What its devices are called: the accelerators first, then the CPUs."""
    accelerators = (f"acc{number}" for number in range(workload.num_accelerators))
    return (*accelerators, *(f"cpu{number}" for number in range(workload.num_cpus)))


# The noun: a `Placement`, the device of every node of a workload, what it comes to, and what is proven.


@dataclass(frozen=True, slots=True)
class Placement:
    """Who runs what. `devices[i]` is the number of the device of node `i`, accelerators first, then CPUs.

    `value` is what the objective comes to, `loads` the load of each device (for latency, when it is done).
    `lower_bound` is proven: no placement of the kind asked for is below it. `pieces[i]` tells, for latency,
    which run of its accelerator node `i` belongs to. `num_ideals` is known where they were counted,
    `has_too_many_ideals` set where the dynamic program gave up on them.
    """

    objective: Objective
    method: str
    contiguous: bool
    devices: tuple[int, ...]
    value: float
    lower_bound: float
    loads: tuple[float, ...]
    pieces: tuple[int, ...] = ()
    num_ideals: int | None = None
    has_too_many_ideals: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far the value may be from the best one, relative to it."""
        return max(0.0, (self.value - self.lower_bound) / self.value) if self.value else 0.0


# What somebody asks of a placement: the objective, the way, and for how long.


class Method(StrEnum):
    """The ways to place. `AUTO` takes the best that the graph and the time allow."""

    AUTO = "auto"
    DP = "dp"
    DPL = "dpl"
    MILP = "milp"
    ANNEAL = "anneal"
    GREEDY = "greedy"
    EXPERT = "expert"


class Granularity(StrEnum):
    """What of a model is placed: every operator by itself, or the units that a plan may cut between."""

    OPERATORS = "operators"
    UNITS = "units"


@dataclass(frozen=True, slots=True)
class Request:
    """What to place for and how.

    `contiguous` asks for devices that can be in a line, each with one connected stretch of it. Latency has
    a rule of its own: up to `num_pieces` connected stretches on each accelerator. `expert` are the devices of
    the nodes as somebody has chosen them, and `expert_pieces` their pieces for latency, if any. `seed` is
    that of the methods that draw.
    """

    objective: Objective = Objective.THROUGHPUT
    method: Method = Method.AUTO
    contiguous: bool = True
    time_limit_s: float | None = None
    seed: int = 0
    num_pieces: int = 1
    expert: tuple[int, ...] | None = None
    expert_pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise BiremeError(f"The time limit is {self.time_limit_s} s; it must be more than 0.")
        if not 1 <= self.num_pieces <= 64:
            raise BiremeError(f"An accelerator runs 1 to 64 pieces in turn, not {self.num_pieces}.")
        if (self.method is Method.EXPERT) != (self.expert is not None):
            raise BiremeError("The method `expert` and the file of the expert's split go together.")
