"""Seconds without a device to measure on: from what each operator multiplies and moves.

An operator takes as long as the slower of its arithmetic and its memory traffic, at the part of the device's
figures that programs usually attain, and never less than a start takes. Backward it takes as long again for
every operand that learns. It is an estimate and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bireme.cluster.catalogue import catalogue, namesake
from bireme.cluster.device import Device
from bireme.errors import BiremeError, closest
from bireme.model.fused_loss import FUSED, keeps_all_logits
from bireme.model.graph import Graph, Operator, Value
from bireme.model.nf4 import UNPACKING_BYTES
from bireme.model.units import Unit
from bireme.profile.profile import Profile, Rates, UnitCost, UnitWork

ATTAINED_FLOPS = 0.5
ATTAINED_BYTES = 0.7
START_S = {"cuda": 5e-6, "xpu": 5e-6, "mps": 5e-6, "cpu": 2e-6, "emulated": 2e-6}

_MOST_PRODUCTS = 2
"""A product has two operands, and a gradient for each is a product as large. Attention has three operands and
two products."""

_VIEWS = (
    *("aten.view.", "aten._unsafe_view.", "aten.view_as.", "aten.reshape.", "aten.flatten."),
    *("aten.unflatten.", "aten.transpose.", "aten.permute.", "aten.movedim.", "aten.t.", "aten.numpy_T."),
    *("aten.mT.", "aten.expand.", "aten.expand_as.", "aten.unsqueeze.", "aten.squeeze."),
    *("aten.slice.", "aten.select.", "aten.narrow.", "aten.split.", "aten.split_with_sizes.", "aten.chunk."),
    *("aten.unbind.", "aten.unfold.", "aten.alias.", "aten.detach.", "aten.sym_", "operator.", "math."),
)  # fmt: skip
"""Operators that move no numbers."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of a unit. `spread` is how far measurements of forward and backward lie apart, relative to
    their median; 0 in an estimate. The halves of the backward are None if they were not asked for.
    """

    forward_s: float
    backward_s: float
    recompute_backward_s: float
    backward_input_s: float | None
    backward_weight_s: float | None
    spread: float


def estimate_unit(graph: Graph, unit: Unit, learned: frozenset[str], batch: int, device: Device) -> Seconds:
    """The seconds of a unit; `learned` are the values that a gradient comes back to."""
    if not device.bytes_per_s or not device.float32_flops_per_s or not device.bfloat16_flops_per_s:
        raise BiremeError(f"The speed of {device.name} is not known. Describe it in a .json file.")
    trainable = {state.name for state in graph.parameters if state.trainable}
    traffic = _Traffic(graph, batch)
    forward_s = early_s = input_s = weight_s = 0.0
    for operator in (graph.operators[place] for place in unit.operators):
        took_s = _operator_s(graph, operator, traffic, batch, device)
        forward_s += took_s
        if operator.no_grad or not any(value.name in learned for value in operator.made):
            continue
        read = set(operator.reads())
        if operator.target == FUSED and not keeps_all_logits(graph, operator, batch):
            early_s += took_s * (bool(read & learned) + bool(read & trainable))
            continue
        # Without a product there is one pass over what came back, however many operands there are.
        input_s += took_s * min(len(read & learned), _MOST_PRODUCTS if operator.flops else 1)
        weight_s += took_s * min(len(read & trainable), 1)
    if not any(name in learned for name in unit.receives):
        # Nobody waits for a gradient from here.
        input_s, weight_s = 0.0, input_s + weight_s
    backward_s = input_s + weight_s
    return Seconds(forward_s + early_s, backward_s, forward_s + backward_s, input_s, weight_s, 0.0)


def unit_work(graph: Graph, unit: Unit, batch: int) -> UnitWork:
    """The work of a unit's forward on a micro-batch."""
    traffic = _Traffic(graph, batch)
    flops = product_bytes = other_bytes = num_calls = 0
    for operator in (graph.operators[place] for place in unit.operators):
        if operator.target.startswith(_VIEWS):
            continue
        num_calls += 1
        other_bytes += round(traffic.unpacked_bytes(operator))
        if operator.flops:
            flops += round(operator.flops * batch / graph.batch)
            product_bytes += traffic.num_bytes(operator)
        else:
            other_bytes += traffic.num_bytes(operator)
    return UnitWork(flops, product_bytes, other_bytes, num_calls)


def rates_of(device: Device, dtype: str) -> Rates | None:
    """The rates that the description of a device gives, or that of its name in the catalogue; None if
    neither does, or if it stands for several: how long they take to exchange their parts is not known.
    """
    if device.members > 1:
        return None
    for known in (device, namesake(device.name)):
        if known is not None and known.bytes_per_s and known.flops_per_s(dtype):
            return Rates(dtype, known.flops_per_s(dtype), known.bytes_per_s)
    return None


def roofline_s(work: UnitWork, rates: Rates, kind: str) -> float:
    """The seconds of a unit's forward on a device of these rates: its products take as long as the slower of
    their arithmetic and their traffic, its other operators as their traffic, and no call less than a start.
    """
    bytes_per_s = rates.bytes_per_s * ATTAINED_BYTES
    arithmetic_s = work.flops / (rates.flops_per_s * ATTAINED_FLOPS)
    moved_s = max(arithmetic_s, work.product_bytes / bytes_per_s) + work.other_bytes / bytes_per_s
    return max(moved_s, work.num_calls * START_S[kind])


def estimated_update_s(
    gradient_bytes: int, optimizer_bytes: int, optimizer_flops: int, device: Device
) -> float:
    """An optimizer step: it reads gradients, reads and writes as many bytes of weights, and all its state."""
    moved_s = (3 * gradient_bytes + 2 * optimizer_bytes) / (device.bytes_per_s * ATTAINED_BYTES)
    return moved_s + optimizer_flops / (device.bfloat16_flops_per_s * ATTAINED_FLOPS)


def computed_dtype(graph: Graph, operator: Operator) -> str:
    """The type of number that an operator's products are of."""
    if operator.target == FUSED:
        return graph.values[next(operator.reads())].dtype  # of the hidden states
    return next((value.dtype for value in operator.made), "float32")


class _Traffic:
    """The bytes that an operator reads and writes."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self._batch = batch
        states = (*graph.parameters, *graph.buffers, *graph.constants)
        self._state_bytes = {state.name: state.num_bytes for state in states}
        self._packed = {
            state.name: UNPACKING_BYTES * state.unpacked.num_elements for state in states if state.packed
        }
        self._values = graph.values

    def num_bytes(self, operator: Operator) -> int:
        """What one call moves."""
        read = dict.fromkeys(operator.reads())
        moved = sum(self._bytes_of(value) for value in operator.made)
        moved += sum(self._bytes_of(self._values[name]) for name in read if name in self._values)
        held = sum(self._state_bytes.get(name, 0) for name in read)
        # Without a product it is a look-up, which reads only the rows it gives, or less than what flows by.
        return moved + (held if operator.flops else min(held, moved))

    def unpacked_bytes(self, operator: Operator) -> float:
        """What one call moves before its product, to unpack its weight."""
        return sum(self._packed.get(name, 0.0) for name in dict.fromkeys(operator.reads()))

    def _bytes_of(self, value: Value) -> int:
        return value.num_bytes(self._batch) if value.dtype != "number" else 0


def _operator_s(graph: Graph, operator: Operator, traffic: _Traffic, batch: int, device: Device) -> float:
    if operator.target.startswith(_VIEWS):
        return 0.0
    flops_per_s = device.flops_per_s(computed_dtype(graph, operator)) * ATTAINED_FLOPS
    arithmetic_s = operator.flops * batch / graph.batch / flops_per_s
    bytes_per_s = device.bytes_per_s * ATTAINED_BYTES
    product_s = max(arithmetic_s, traffic.num_bytes(operator) / bytes_per_s)
    return max(product_s + traffic.unpacked_bytes(operator) / bytes_per_s, START_S[device.kind])


# Which seconds count on which device of a cluster: those of a profile that was made on such a device, or
# those of another device's profile, scaled unit by unit by the rates of both.

_TIMES = ("forward_s", "backward_s", "recompute_backward_s", "backward_input_s", "backward_weight_s")
"""The seconds of a unit that are scaled by the roofline of its forward."""


def _is_called(device: Device, name: str) -> bool:
    """Whether a device has this name, is like the ready device of this name, or is of this kind."""
    known = catalogue().get(name)
    return name in (device.name, device.kind) or (known is not None and known.name == device.name)


def check_kinds(profile: Profile, devices: Sequence[Device]) -> None:
    """Refuse profiles for kinds of devices that are not there."""
    for kind in profile.kinds:
        if not any(_is_called(device, kind.name) for device in devices):
            names = sorted({name for device in devices for name in (device.name, device.kind)})
            raise BiremeError(
                f"There is a profile for {kind.name}, but no device of that name or kind. "
                f"{closest(kind.name, names)}"
            )


@dataclass(frozen=True, slots=True)
class DeviceProfiles:
    """The profiles of a cluster's devices: `of_device` has for each device the index of its profile, and
    `memory_speeds` the speed of its memory relative to where that was made; None if only its `speed` gives
    it.
    """

    profiles: tuple[Profile, ...]
    of_device: tuple[int, ...]
    memory_speeds: tuple[float | None, ...]


def device_profiles(profile: Profile, devices: Sequence[Device]) -> DeviceProfiles:
    """The profiles whose seconds count on these devices, the given one first.

    A device has the profile of its kind. Without one it has the given profile, scaled by the rates of the two
    devices if both are known and no device of the cluster has a speed of its own.
    """
    check_kinds(profile, devices)
    profiles = [profile]
    known: dict[Device, tuple[int, float | None]] = {}
    by_rates: dict[tuple[Rates, str], int] = {}
    base = profile.rates if all(device.speed == 1 for device in devices) else None
    for device in devices:
        if device in known:
            continue
        own = [one for one in profile.kinds if _is_called(device, one.name)]
        kind = min(own, key=lambda one: one.name == device.kind, default=None)  # its name before its kind
        rates = None if base is None else rates_of(device, base.dtype)
        index, memory_speed = 0, None
        if kind is not None:
            index = next((place for place, one in enumerate(profiles) if one is kind.profile), len(profiles))
            profiles += [kind.profile] if index == len(profiles) else []
        elif base is not None and rates is not None and rates != base:
            memory_speed = rates.bytes_per_s / base.bytes_per_s
            index = by_rates.setdefault((rates, device.kind), len(profiles))
            profiles += [_scaled(profile, rates, device)] if index == len(profiles) else []
        if device.members > 1 and kind is None and device.speed == 1:
            raise BiremeError(
                f"{device.name} stands for {device.members} devices that run each operator together, and how "
                "fast they do so is not known. Give it the profile of such a device (--profile NAME=FILE, "
                "plan.profiles), or its speed in the cluster file."
            )
        known[device] = index, memory_speed
    found = [known[device] for device in devices]
    return DeviceProfiles(
        tuple(profiles), tuple(index for index, _ in found), tuple(speed for _, speed in found)
    )


def _scaled(profile: Profile, rates: Rates, device: Device) -> Profile:
    """The profile with the seconds of units on a device of these rates. Seconds of optimizer steps stay."""

    def scaled(cost: UnitCost) -> UnitCost:
        assert profile.rates is not None
        if cost.work is None:
            return cost
        there_s = roofline_s(cost.work, profile.rates, profile.device_kind)
        times = roofline_s(cost.work, rates, device.kind) / there_s if there_s else 1.0
        seconds = {name: getattr(cost, name) for name in _TIMES}
        return replace(cost, **{name: one and one * times for name, one in seconds.items()})

    units = [replace(unit, costs=tuple(map(scaled, unit.costs))) for unit in profile.units]
    return replace(
        profile,
        units=tuple(units),
        device=device.name,
        device_kind=device.kind,
        rates=rates,
        engine=profile.engine if device.kind == profile.device_kind else None,
        kinds=(),
    )
