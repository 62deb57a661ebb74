"""Seconds without a device to measure on: from what each operator multiplies and moves.

An operator takes as long as the slower of its arithmetic and its memory traffic, at the part of the device's
figures that programs usually attain, and never less than a start takes. Backward it takes as long again for
every operand that learns. It is an estimate and says so.
"""

from dataclasses import dataclass

from bireme.cluster.catalogue import namesake
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.model.fused_loss import FUSED, fused_work
from bireme.model.graph import Graph, Operator, Value
from bireme.model.nf4 import UNPACKING_BYTES
from bireme.model.units import Unit
from bireme.profile.profile import Rates, UnitWork

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
class _Estimate:
    """The seconds of a unit: forward, the same without gradients, and the two halves of its backward."""

    forward_s: float
    plain_forward_s: float
    backward_input_s: float
    backward_weight_s: float


def estimate_unit(graph: Graph, unit: Unit, learned: frozenset[str], batch: int, device: Device) -> _Estimate:
    """The seconds of a unit; `learned` are the values that a gradient comes back to."""
    if not device.bytes_per_s or not device.float32_flops_per_s or not device.bfloat16_flops_per_s:
        raise BiremeError(f"The speed of {device.name} is not known. Describe it in a .json file.")
    trainable = {state.name for state in graph.parameters if state.trainable}
    traffic = _Traffic(graph, batch)
    forward_s = early_s = input_s = weight_s = 0.0
    for operator in (graph.operators[place] for place in unit.operators):
        took_s = _operator_s(graph, operator, traffic, batch, device)
        forward_s += took_s
        if operator.no_grad or not any(v is not None and v.name in learned for v in operator.outputs):
            continue
        read = set(operator.reads())
        if operator.target == FUSED and not fused_work(graph, operator, batch).keeps_logits:
            early_s += took_s * (bool(read & learned) + bool(read & trainable))
            continue
        # Without a product there is one pass over what came back, however many operands there are.
        input_s += took_s * min(len(read & learned), _MOST_PRODUCTS if operator.flops else 1)
        weight_s += took_s * min(len(read & trainable), 1)
    if not any(name in learned for name in unit.receives):
        # Nobody waits for a gradient from here.
        input_s, weight_s = 0.0, input_s + weight_s
    return _Estimate(forward_s + early_s, forward_s, input_s, weight_s)


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
        return fused_work(graph, operator, graph.batch).dtype
    return next((value.dtype for value in operator.outputs if value is not None), "float32")


class _Traffic:
    """The bytes that an operator reads and writes."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self._batch = batch
        states = (*graph.parameters, *graph.buffers, *graph.constants)
        self._state_bytes = {state.name: state.num_bytes for state in states}
        self._packed = {
            state.name: UNPACKING_BYTES * state.unpacked.num_elements for state in states if state.packed
        }
        self._values: dict[str, Value] = {value.name: value for value in graph.inputs}
        self._values |= {v.name: v for op in graph.operators for v in op.outputs if v is not None}

    def num_bytes(self, operator: Operator) -> int:
        """What one call moves."""
        read = dict.fromkeys(operator.reads())
        moved = sum(self._bytes_of(value) for value in operator.outputs if value is not None)
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
