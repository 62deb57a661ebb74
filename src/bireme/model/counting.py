"""How many things the loss of some inputs is the mean of: tokens that count, or else samples.

A batch's loss is the mean over all of it. Cut into micro-batches, each with a mean of its own, it is their
mean weighted by these counts; only then is a pipeline's loss that of one process. The count is read off the
graph: what its loss is the mean of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.model.fused_loss import FUSED, LOSS, MEAN, loss_arguments
from bireme.model.graph import Argument, Graph, Operator, Reference
from bireme.model.stage import StageFunction
from bireme.model.units import Unit


@dataclass(frozen=True, slots=True)
class Count:
    """From the inputs of some samples to the weight that the mean of their losses has.

    It depends on the inputs in `reads` alone, and on the number of samples where there are none.
    """

    reads: tuple[str, ...]
    weigh: Callable[[Mapping[str, Tensor]], float]

    def __call__(self, inputs: Mapping[str, Tensor]) -> float:
        """The weight."""
        return self.weigh(inputs)


_MEANS = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default")
"""The losses that leave out some targets. Their first five arguments are those of a cross-entropy."""


def count_of(graph: Graph) -> Count:
    """The count for a graph."""
    found = _mean_loss(graph)
    if found is None:
        return Count((), _num_samples)
    given = loss_arguments(found)
    target, ignored = given["target"], given["ignore_index"]
    assert isinstance(target, Reference)
    if any(value.name == target.name for value in graph.inputs):
        return Count((target.name,), lambda inputs: _num_counted(inputs[target.name], ignored))
    places = _makers(graph, target.name)
    if places is None:
        return Count((), _num_samples)
    read = {name for place in places for name in graph.operators[place].reads()}
    unit = Unit(
        index=0,
        name="target",
        operators=places,
        receives=(),
        sends=(target.name,),
        parameters=(),
        buffers=(),
        inputs=tuple(value.name for value in graph.inputs if value.name in read),
        structure="",
    )
    function = StageFunction(graph, [unit])

    def count(inputs: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            made = function({}, {}, inputs)[target.name]
        return _num_counted(made, ignored)

    return Count(unit.inputs, count)


def _num_counted(target: Tensor, ignored: Argument) -> float:
    return float(torch.ne(target, ignored).sum())  # type: ignore[arg-type]  # it is a number there


def _num_samples(inputs: Mapping[str, Tensor]) -> float:
    return float(max(len(value) for value in inputs.values() if value.ndim))


def _mean_loss(graph: Graph) -> Operator | None:
    """The operator that makes the loss, if it is a mean over targets of which some may be left out."""
    loss = next((output.value for output in graph.outputs if output.name == LOSS), None)
    place = graph.made_by.get(loss.name) if isinstance(loss, Reference) else None
    if place is None or graph.operators[place].target not in (*_MEANS, FUSED):
        return None
    operator = graph.operators[place]
    given = loss_arguments(operator)
    target = given["target"]
    value = graph.values.get(target.name) if isinstance(target, Reference) else None
    is_plain = value is not None and value.dtype == "int64"
    return operator if is_plain and given["weight"] is None and given["reduction"] == MEAN else None


def _makers(graph: Graph, name: str) -> tuple[int, ...] | None:
    """The operators that make a value of inputs and constants alone; None where it takes more than these."""
    made_by = graph.made_by
    known = {value.name for value in graph.inputs} | {constant.name for constant in graph.constants}
    needed: set[int] = set()
    todo = [name]
    while todo:
        one = todo.pop()
        if one in known:
            continue
        place = made_by.get(one)
        if place is None or graph.operators[place].is_random or graph.operators[place].mutates:
            return None
        needed.add(place)
        known.add(one)
        todo.extend(graph.operators[place].reads())
    return tuple(sorted(needed))
