"""Whether a model keeps documents apart that share a sample: given where each begins, and checked.

A model that takes `position_ids` may make of them the mask of its attention, and then no document looks at
another. That it does is not taken on trust: the masks of the captured model are computed for two documents,
and looked at.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.argument import Argument, Reference
from bireme.model.graph import Graph, Operator
from bireme.model.length import evaluate
from bireme.model.sources import ModelSource
from bireme.model.stage import stage_function
from bireme.model.units import Unit

__all__ = ["check_documents_apart", "with_positions"]

POSITIONS = "position_ids"
ATTENTION = "scaled_dot_product_attention"
MASK = 3
"""Which of attention's arguments says what is seen."""

MIXES = ("conv", "scan")
"""Words in the names of operators that mix neighbouring places without asking a mask."""

REMEDY = 'Set data.packing to "none", or to "stream" if documents may look at each other.'
HIDDEN = -1e4
"""What a mask of numbers adds at least where nothing is to be seen."""


def with_positions(source: ModelSource) -> ModelSource:
    """The model with positions among its example inputs: two documents in each sample."""
    accepted = inspect.signature(source.model.forward).parameters
    ids = source.example_inputs.get("input_ids")
    if POSITIONS not in accepted or ids is None:
        raise BiremeError(
            f'data.packing is "documents", and the model {source.text} takes no position_ids, by which it '
            f"would tell documents apart. {REMEDY}"
        )
    positions = _two_documents(ids.shape[1]).expand(ids.shape).contiguous()
    return replace(source, example_inputs=source.example_inputs | {POSITIONS: positions})


def check_documents_apart(graph: Graph, name: str) -> None:
    """Refuse a captured model in which one document of a sample looks at another."""
    found = [operator for operator in graph.operators if ATTENTION in operator.target]
    mixing = next((one.target for one in graph.operators if any(word in one.target for word in MIXES)), None)
    if not found or mixing is not None:
        how = f"mixes tokens by {mixing}" if mixing else "has no attention that could be checked"
        raise BiremeError(f'data.packing is "documents", and the model {name} {how}. {REMEDY}')
    for mask in dict.fromkeys(_mask_of(operator) for operator in found):
        if mask is None or _leaks(graph, mask):
            raise BiremeError(
                f'data.packing is "documents", and in the model {name} one document of a sample looks at '
                f"another, for its attention does not go by position_ids. {REMEDY}"
            )


def _mask_of(operator: Operator) -> str | None:
    """The value that masks an attention; None where it sees all that is before a place."""
    argument: Argument = dict(operator.keywords).get("attn_mask")
    if argument is None and len(operator.arguments) > MASK:
        argument = operator.arguments[MASK]
    return argument.name if isinstance(argument, Reference) else None


def _leaks(graph: Graph, mask: str) -> bool:
    """Whether the second of two documents sees a token of the first."""
    positions = next((value for value in graph.inputs if value.name == POSITIONS), None)
    places = list(_making(graph, mask))
    read = {name for place in places for name in graph.operators[place].reads()}
    inputs = tuple(value for value in graph.inputs if value.name in read)
    states = {state.name for state in (*graph.parameters, *graph.buffers)}
    if positions is None or positions.name not in read or read & states:
        return True
    unit = Unit(0, "mask", tuple(places), (), (), (), (), tuple(value.name for value in inputs), "")
    shapes = {value.name: [evaluate(length, graph.batch) for length in value.shape] for value in inputs}
    given = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    length = shapes[POSITIONS][1]
    given[POSITIONS] = _two_documents(length).expand(shapes[POSITIONS]).contiguous()
    made = stage_function(graph, [unit], outputs=(), also=(mask,))({}, {}, given)[mask]
    seen = made if made.dtype == torch.bool else made > HIDDEN
    first = _first_size(length)
    return bool(seen[..., first:, :first].any())


def _making(graph: Graph, name: str) -> Iterator[int]:
    """The places of the operators that a value is made by, in their order."""
    wanted = {name}
    found = []
    for place in reversed(range(len(graph.operators))):
        operator = graph.operators[place]
        if any(value is not None and value.name in wanted for value in operator.outputs):
            wanted.update(operator.reads())
            found.append(place)
    return reversed(found)


def _first_size(length: int) -> int:
    return (length + 1) // 2


def _two_documents(length: int) -> Tensor:
    """Positions of two documents, one after the other."""
    return torch.arange(length) % _first_size(length)
