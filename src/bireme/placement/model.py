"""From a captured model, a profile of it and a cluster to a workload, and from a placement to a plan.

The profile is of a device at speed 1. Times come out in milliseconds. What a step of the optimizer takes is
in no node: it is paid once for a batch, not for every sample that passes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import Cluster, PlacedDevice
from bireme.cluster.device import Device
from bireme.cluster.symmetry import Symmetry
from bireme.errors import BiremeError
from bireme.grouping import grouped
from bireme.model.graph import Graph
from bireme.placement.check import check
from bireme.placement.pieces import PieceMessage, PiecesSource, PlacedPieces, operator_pieces, unit_pieces
from bireme.placement.workload import Edge, Granularity, Node, Placement, Workload
from bireme.plan.plan import Plan
from bireme.plan.plan_file import check_profile_fits
from bireme.plan.search.shapes import PARTS
from bireme.profile.profile import Profile

# The devices of a cluster as the placement of operators sees them: a `_Fleet`.
#
# There all accelerators are equal, all CPUs are, and every output goes by way of the host's memory at one
# price for its bytes. A cluster whose devices differ in what counts is refused; of links that differ the
# slowest represents all.

_MS = 1e3
"""Milliseconds in a second."""

_STANDS_IN = {"cuda": "a100", "emulated": "laptop", "cpu": "laptop"}
"""Whose figures tell how the seconds of a unit divide, where those of the devices are not known."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What one end of a way between two devices pays: this share of the time a message takes."""

    bytes_per_s: float
    latency_s: float
    share: float

    def cost_ms(self, num_bytes: float) -> float:
        return self.share * (num_bytes / self.bytes_per_s + self.latency_s) * _MS


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Devices by name, the accelerators first and then the CPUs; `typical` is one of the accelerators.

    The speeds are relative to where the model was profiled.
    """

    names: tuple[str, ...]
    num_accelerators: int
    accelerator_bytes: int
    accelerator_speed: float
    cpu_speed: float
    typical: Device
    ways: tuple[_Way, ...]

    @property
    def num_cpus(self) -> int:
        """How many of the devices are CPUs that go with accelerators."""
        return len(self.names) - self.num_accelerators

    def cost_ms(self, num_bytes: float) -> float:
        """What moving so many bytes costs each accelerator that sends or receives them, in milliseconds.

        Between two accelerators each end pays half of the time that the message takes from one to the other.
        So it counts once in all: a sample that passes by is as late as the link makes it, and the loads of
        the two together hold what the link carries. An accelerator that talks to a CPU pays all of it, as the
        CPU pays nothing. One price has to serve for both, and for all pairs of devices: the highest.
        """
        return max((way.cost_ms(num_bytes) for way in self.ways), default=0.0)


def fleet_of(cluster: Cluster) -> _Fleet:
    """The fleet of a cluster.

    CUDA devices and emulated ones are accelerators; where there are any, processors are CPUs. Where there are
    only processors, those are the accelerators: each has its memory and pays for its messages.
    """
    accelerators = [one for one in cluster.devices() if one.device.kind != "cpu"]
    cpus = [one for one in cluster.devices() if one.device.kind == "cpu"]
    if not accelerators:
        accelerators, cpus = cpus, []
    _check_equal(accelerators, "accelerators")
    _check_equal(cpus, "CPUs")
    typical = accelerators[0].device
    figures = typical.bytes_per_s, typical.float32_flops_per_s, typical.bfloat16_flops_per_s
    return _Fleet(
        names=tuple(one.name for one in (*accelerators, *cpus)),
        num_accelerators=len(accelerators),
        accelerator_bytes=typical.memory_bytes,
        accelerator_speed=typical.speed,
        cpu_speed=cpus[0].device.speed if cpus else typical.speed,
        typical=typical if all(figures) else device_named(_STANDS_IN[typical.kind]),
        ways=_ways(cluster, accelerators, cpus),
    )


def _check_equal(devices: Sequence[PlacedDevice], what: str) -> None:
    """Refuse devices of which one is faster or, among accelerators, has more memory."""
    for other in devices[1:]:
        first = devices[0]
        is_as_fast = first.device.speed == other.device.speed
        is_as_large = what == "CPUs" or first.device.memory_bytes == other.device.memory_bytes
        if not (is_as_fast and is_as_large):
            raise BiremeError(
                f"{first.name} ({_words(first.device)}) and {other.name} ({_words(other.device)}) differ, "
                f"and placing operators treats all {what} for equal. Use bireme plan, which handles unequal "
                "devices, or give a cluster of equal devices."
            )


def _words(device: Device) -> str:
    return f"speed {device.speed:g}, {device.memory_bytes:,} bytes"


def _ways(
    cluster: Cluster, accelerators: Sequence[PlacedDevice], cpus: Sequence[PlacedDevice]
) -> tuple[_Way, ...]:
    """All ways that may turn out the dearest, each once."""
    of_accelerators = [cluster.number_of(one.name) for one in accelerators]
    of_cpus = [cluster.number_of(one.name) for one in cpus]
    # One of several devices that can stand for each other meets all ways there are.
    alike = Symmetry(cluster).classes()
    sources = sorted({group[0] for group in alike}.intersection(of_accelerators))
    ways: set[_Way] = set()
    for number in sources:
        for others, share in ((of_accelerators, 0.5), (of_cpus, 1.0)):
            for other in others:
                if other != number:
                    for ends in ((number, other), (other, number)):
                        ways.add(_Way(cluster.bandwidth(*ends), cluster.latency(*ends), share))
    return tuple(sorted(ways, key=lambda way: (way.bytes_per_s, way.latency_s, way.share)))


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """A workload made from a model, and what its nodes and devices stand for.

    `units[i]` is the unit of node `i`, `operators[i]` the places in the graph of what it runs. Nodes of the
    same operators are its forward, its backward, and those that stand for one of its results or gradients.
    `device_names[d]` is what the cluster calls device `d`.
    """

    workload: Workload
    units: tuple[int, ...]
    operators: tuple[tuple[int, ...], ...]
    unit_names: tuple[str, ...]
    device_names: tuple[str, ...]
    micro_batch: int


def workload_of(
    graph: Graph,
    profile: Profile,
    cluster: Cluster,
    *,
    micro_batch: int,
    training: bool,
    granularity: Granularity = Granularity.OPERATORS,
    copy_tied: bool = False,
) -> ModelWorkload:
    """The workload of a model at a micro-batch size that the profile knows.

    **Times.** The profile has the seconds of units. Those of an operator are a share of them, in proportion
    to an estimate from its flops and bytes; that is as good as the estimate, though the sum of a unit is
    right. A device of the cluster takes them divided by its speed.

    **Costs** are of the bytes of a value, on the slowest way between the devices (`_Fleet.cost_ms`). Between
    units all that crosses is one message; among operators each value is, and late by itself.

    **Training** adds a backward node of the same colour to each that a gradient comes to. Gradients go back
    the way values came, at the cost of the same bytes. Where several operators use a value, its gradient is
    passed from the last of them to the first and added up on the way, so that a device with some of them
    sends it once, as it receives the value once.

    **Sizes** are of parameters and buffers, in training of gradients, the optimizer's state and what one
    micro-batch keeps for its backward too. A pipeline keeps several micro-batches, and some schedules several
    versions of the weights; how many, no workload can say. What a unit works with for a moment is left out.

    **Tied parameters** bind all operators that use them to one device, and in a contiguous placement all that
    lies between them too. With `copy_tied` each unit has its own copy, as in a pipeline of Bireme's; that
    the copies' gradients are added up once in a batch is then in no cost.
    """
    _check(graph, profile, micro_batch)
    fleet = fleet_of(cluster)
    source = PiecesSource.of(graph, profile, micro_batch=micro_batch, training=training, copy_tied=copy_tied)
    pieces = (
        unit_pieces(source) if granularity is Granularity.UNITS else operator_pieces(source, fleet.typical)
    )
    writer = _Writer(pieces, fleet)
    writer.write_forward()
    if training:
        writer.write_backward()
    of_nodes = [pieces.pieces[number] for number in writer.piece_of]
    return ModelWorkload(
        workload=Workload(
            tuple(writer.nodes),
            tuple(writer.edges),
            fleet.num_accelerators,
            fleet.num_cpus,
            float(fleet.accelerator_bytes),
        ),
        units=tuple(piece.unit for piece in of_nodes),
        operators=tuple(piece.operators for piece in of_nodes),
        unit_names=tuple(unit.name for unit in source.units),
        device_names=fleet.names,
        micro_batch=micro_batch,
    )


def _check(graph: Graph, profile: Profile, micro_batch: int) -> None:
    check_profile_fits(profile, graph)
    profile.units[0].at(micro_batch)  # refuses a size that the profile does not know
    if not graph.any_batch and graph.batch != micro_batch:
        raise BiremeError(
            f"The graph of {graph.name} holds for micro-batches of {graph.batch} samples alone, not of "
            f"{micro_batch}: the model's code fixes the size. Capture it at that size."
        )


class _Writer:
    """Writes pieces and messages as nodes and edges.

    All edges of a node cost the same, as each moves the same output. So an operator with several results has
    a node without time for each of them, and one that sends several gradients a node for each of those. They
    have its colour, so that nothing is paid between them and it.
    """

    def __init__(self, pieces: PlacedPieces, fleet: _Fleet) -> None:
        self.pieces = pieces
        self.fleet = fleet
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.piece_of: list[int] = []
        self._cost: dict[int, float] = {}
        self._forward: list[int] = []
        self._backward: dict[int, int] = {}

    def write_forward(self) -> None:
        """The forward nodes, and the values between them."""
        sent = grouped((message.maker, message) for message in self.pieces.messages)
        ways: list[tuple[int, PieceMessage]] = []
        for number, piece in enumerate(self.pieces.pieces):
            node = self._node(number, piece.name, piece.forward_s, size_bytes=piece.size_bytes)
            self._forward.append(node)
            messages = sent.get(number, [])
            for place, message in enumerate(messages):
                maker = node
                if len(messages) > 1:
                    maker = self._node(number, f"{piece.name}, result {place}", 0.0)
                    self._edge(node, maker)
                self._cost[maker] = self.fleet.cost_ms(message.num_bytes)
                ways.append((maker, message))
        for maker, message in ways:
            for user in message.users:
                self._edge(maker, self._forward[user])

    def write_backward(self) -> None:
        """The backward nodes, last first, and the gradients between them."""
        returned = [message for message in self.pieces.messages if self._returns(message)]
        gets: dict[int, list[int]] = defaultdict(list)
        for place, message in enumerate(returned):
            for user in filter(self._learns, message.users):
                gets[user].append(place)
        senders: dict[int, list[int]] = defaultdict(list)
        for number in reversed(range(len(self.pieces.pieces))):
            if self._learns(number):
                node = self._backward_of(number)
                for place in gets[number]:
                    alone = len(gets[number]) == 1
                    sender = node if alone else self._gradient(number, node, returned[place].maker)
                    self._cost[sender] = self.fleet.cost_ms(returned[place].gradient_bytes or 0)
                    senders[place].append(sender)
        for place, message in enumerate(returned):
            for one, other in pairwise((*senders[place], self._backward[message.maker])):
                self._edge(one, other)

    def _backward_of(self, number: int) -> int:
        piece = self.pieces.pieces[number]
        node = self._node(number, f"{piece.name} backward", piece.backward_s or 0.0, is_backward=True)
        self._backward[number] = node
        self._edge(self._forward[number], node)
        return node

    def _gradient(self, number: int, backward: int, maker: int) -> int:
        """A node for one of several gradients that a piece sends."""
        piece, of = self.pieces.pieces[number], self.pieces.pieces[maker]
        node = self._node(number, f"{piece.name} backward, gradient of {of.name}", 0.0, is_backward=True)
        self._edge(backward, node)
        return node

    def _returns(self, message: PieceMessage) -> bool:
        """Whether a gradient of it comes back."""
        is_wanted = message.gradient_bytes is not None and self._learns(message.maker)
        return is_wanted and any(map(self._learns, message.users))

    def _learns(self, number: int) -> bool:
        return self.pieces.pieces[number].backward_s is not None

    def _node(
        self, number: int, name: str, seconds: float, *, size_bytes: float = 0.0, is_backward: bool = False
    ) -> int:
        piece = self.pieces.pieces[number]
        node = Node(
            len(self.nodes),
            accelerator_time=seconds * _MS / self.fleet.accelerator_speed,
            cpu_time=seconds * _MS / self.fleet.cpu_speed,
            size_bytes=size_bytes,
            is_backward=is_backward,
            colour=piece.colour,
            layer=piece.unit,
            name=name,
        )
        self.nodes.append(node)
        self.piece_of.append(number)
        return node.id

    def _edge(self, source: int, target: int) -> None:
        self.edges.append(Edge(source, target, self._cost.get(source, 0.0)))


# From a placement of a model back to a `Plan` that the engine runs, where it is a chain of stages.
#
# A plan cuts between units and gives each device one stretch of them. A placement of operators that cuts
# inside units can be rounded to their boundaries, which changes its value.


@dataclass(frozen=True, slots=True)
class _PlacedPlan:
    """A plan, the device of each node under it, and what the objective comes to now and came to before."""

    plan: Plan
    devices: tuple[int, ...]
    value: float
    value_before: float

    @property
    def note(self) -> str:
        """What rounding to the boundaries of units has changed, as a sentence; empty where nothing."""
        if self.value == self.value_before:
            return ""
        change = 100 * (self.value / self.value_before - 1) if self.value_before else float("inf")
        return (
            f"Cuts were moved to the nearest boundaries of units; the value is {self.value:.6g} ms instead "
            f"of {self.value_before:.6g} ms ({change:+.1f} %)."
        )


def plan_of(
    model: ModelWorkload, placement: Placement, *, num_microbatches: int, schedule: str = "2bw"
) -> _PlacedPlan:
    """The plan that runs each unit where the placement has it, stages in the order of the chain.

    If the placement is no chain of stages at the boundaries of units, the devices are in the order of what
    they run, each cut goes to the nearest boundary in time, and a device that is left without a unit is not
    used. Units that a colour binds together stay so.
    """
    if len(placement.devices) != len(model.workload.nodes):
        raise BiremeError(
            f"The placement has devices for {len(placement.devices)} nodes, and the model's workload has "
            f"{len(model.workload.nodes)}. It was made for another workload."
        )
    if schedule in PARTS:
        raise BiremeError(
            f"{schedule} gives each device several stages, and a placement gives it one stretch of the "
            "model. Use another schedule, such as 1f1b or 2bw."
        )
    devices, value = placement.devices, placement.value
    if not _is_in_line(model, devices):
        devices = _snapped(model, placement.devices)
        verdict = check(
            model.workload, devices, placement.objective, contiguous=False, num_pieces=len(devices)
        )
        if not verdict.valid:
            raise BiremeError(
                f"{verdict.problems[0]} That is with the cuts moved to the boundaries of units. Place units "
                "in place of operators."
            )
        value = verdict.value
    device_of = dict(zip(model.units, devices, strict=True))
    stages = [unit for unit in sorted(device_of) if device_of[unit] != device_of.get(unit - 1)]
    plan = Plan(
        cuts=tuple(stages[1:]),
        num_microbatches=num_microbatches,
        schedule=schedule,
        micro_batch_sizes=(model.micro_batch,),
        devices=tuple((model.device_names[device_of[unit]],) for unit in stages),
    )
    return _PlacedPlan(plan, devices, value, placement.value)


def _is_in_line(model: ModelWorkload, devices: Sequence[int]) -> bool:
    """Whether the placement is a chain of stages that are cut at the boundaries of units."""
    by_unit = grouped(zip(model.units, devices, strict=True))
    line = [key for key, _ in groupby(set(by_unit[unit]) for unit in sorted(by_unit))]
    return all(len(own) == 1 for own in line) and len({min(own) for own in line}) == len(line)


def _snapped(model: ModelWorkload, devices: Sequence[int]) -> tuple[int, ...]:
    """The device of each node when every cut is moved to the nearest boundary of units."""
    nodes = model.workload.nodes
    time_of_device: dict[int, float] = defaultdict(float)
    places: dict[int, list[int]] = defaultdict(list)
    time_of_unit = [0.0] * len(model.unit_names)
    for place, (node, device) in enumerate(zip(nodes, devices, strict=True)):
        time_of_device[device] += node.accelerator_time
        time_of_unit[model.units[place]] += node.accelerator_time
        if not node.is_backward:
            places[device].append(place)
    line = sorted(places, key=lambda device: (sum(places[device]) / len(places[device]), device))
    through = list(accumulate(time_of_unit, initial=0.0))
    boundaries = _boundaries(model)
    device_of_unit: list[int] = []
    done = 0.0
    for device in line:
        done += time_of_device[device]
        boundary = min(boundaries, key=lambda unit: abs(through[unit] - done))
        device_of_unit += [device] * (boundary - len(device_of_unit))
    device_of_unit += [line[-1]] * (len(time_of_unit) - len(device_of_unit))
    return tuple(device_of_unit[unit] for unit in model.units)


def _boundaries(model: ModelWorkload) -> list[int]:
    """The units that a stage may begin with, and the end: not those between units of one colour."""
    first: dict[int, int] = {}
    inside: set[int] = set()
    for unit, node in sorted(zip(model.units, model.workload.nodes, strict=True), key=lambda pair: pair[0]):
        if node.colour is not None:
            inside.update(range(first.setdefault(node.colour, unit) + 1, unit + 1))
    return [unit for unit in range(len(model.unit_names) + 1) if unit not in inside]
