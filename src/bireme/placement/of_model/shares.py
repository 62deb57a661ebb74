"""How what a unit takes divides among its operators: by what is estimated for each from flops and bytes.

A profile knows units, as single operators are too short to measure. The estimate need not be right in
seconds, only in proportion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bireme.cluster.device import Device
from bireme.model.graph import Graph
from bireme.model.units import Unit
from bireme.profile.estimate import estimate_unit

__all__ = ["OperatorEstimate", "divided", "estimates_of"]


@dataclass(frozen=True, slots=True)
class OperatorEstimate:
    """The seconds of one call, forward and backward."""

    forward_s: float
    backward_s: float


def estimates_of(
    graph: Graph, learned: frozenset[str], micro_batch: int, device: Device
) -> tuple[OperatorEstimate, ...]:
    """An estimate for every operator of a graph; `learned` are the values that a gradient comes back to.

    Each is looked at as the one operator of a unit, with what it is given coming from outside.
    """
    states = {s.name: s for s in (*graph.parameters, *graph.buffers, *graph.constants)}
    values = {value.name: value for value in graph.inputs}
    values |= {v.name: v for operator in graph.operators for v in operator.outputs if v is not None}
    alone = Unit(0, "", (0,), (), (), (), (), (), "")
    found = []
    for operator in graph.operators:
        read = dict.fromkeys(operator.reads())
        held = [states[name] for name in read if name in states]
        part = replace(
            graph,
            inputs=tuple(values[name] for name in read if name in values),
            parameters=tuple(state for state in held if state.is_parameter),
            buffers=tuple(state for state in held if not state.is_parameter),
            constants=(),
            operators=(operator,),
            outputs=(),
        )
        took = estimate_unit(part, alone, learned, micro_batch, device)
        found.append(OperatorEstimate(took.forward_s, took.backward_input_s + took.backward_weight_s))
    return tuple(found)


def divided(total: float, weights: Mapping[int, float]) -> dict[int, float]:
    """A total in proportion to weights; in equal parts if each weight is zero."""
    weight = sum(weights.values())
    if not weight:
        return {key: total / len(weights) for key in weights}
    return {key: total * own / weight for key, own in weights.items()}
