"""Frozen weights of linear layers in four bits: which weights of a graph, and what replaces their layers.

A weight becomes bytes as in QLoRA (Dettmers et al. 2023): each value is one of the 16 levels of NF4, times a
scale. Blocks of 64 values have a scale of 8 bits, and 256 blocks have a factor of 32 bits for their scales.
That is 4.127 bits for each weight. The bytes are a frozen parameter under the name of the weight, so a stage
owns, offloads, shares and saves them as it does any other.

    hidden ─ linear(weight, bias)          hidden ─ nf4_linear(bytes, bias, rows, columns)

It is data and imports no torch; `nf4_operator` is what runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bireme.errors import BiremeError
from bireme.grouping import grouped
from bireme.model.fused_loss import FUSED
from bireme.model.graph import (
    Argument,
    Graph,
    ModelState,
    Operator,
    PackedMatrix,
    Reference,
    Token,
    Value,
    references,
)

NF4_LINEAR, NF4_WEIGHT = "bireme.nf4_linear", "bireme.nf4_weight"
"""Takes the input, the bytes, the bias or None, and the rows and columns of the weight; takes the bytes, the
rows, the columns and a type, and gives the weight."""

BLOCK, GROUP = 64, 256
"""Values that share a scale, and blocks that share a factor of their scales."""

FACTOR_BYTES = 4

BITS = 4 + 8 / BLOCK + 8 * FACTOR_BYTES / (BLOCK * GROUP)
"""Of a value."""

UNPACKING_BYTES = 10.5
"""Bytes of memory that are read and written to unpack a value into 16 bits: half a byte is read and becomes a
number of 4 bytes for two values; these give two levels, which are multiplied with their scales in place."""

_LINEAR = "aten.linear.default"
_ALIGNED = 64
"""The bytes of a weight are a multiple of this number, so that offloaded weights leave no gaps."""


def num_blocks(num_values: int) -> int:
    """The blocks of a weight; the last one is filled up with zeros."""
    return -(-num_values // BLOCK)


def num_groups(num_values: int) -> int:
    """The groups of blocks, of which the last one may have fewer."""
    return -(-num_blocks(num_values) // GROUP)


def nf4_bytes(num_values: int) -> int:
    """The bytes of a weight: two values in each, a scale for each block, and a factor for each group."""
    num_bytes = num_blocks(num_values) * (BLOCK // 2 + 1) + num_groups(num_values) * FACTOR_BYTES
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def with_nf4(graph: Graph) -> Graph:
    """The graph with NF4 bytes for every frozen weight of a linear layer but the last, which is the head.
    Refuses a graph without such a weight.
    """
    packed = {state.name: state for state in _packed(graph)}
    if not packed:
        raise BiremeError(
            f'model.frozen_dtype is "nf4", but {graph.name} has no linear layer with a frozen weight before '
            "its last layer. Train an adapter with model.lora.rank, name what learns in model.train or "
            "model.freeze, or leave model.frozen_dtype out."
        )
    return replace(
        graph,
        parameters=tuple(packed.get(state.name, state) for state in graph.parameters),
        operators=tuple(made for one in graph.operators for made in _replaced(one, packed)),
    )


def _packed(graph: Graph) -> Iterator[ModelState]:
    """The states of the weights in four bits."""
    uses = grouped((name, operator) for operator in graph.operators for name in operator.reads())
    given = {name for output in graph.outputs for name in references(output.value)}
    head = _head(graph)
    for state in graph.parameters:
        readers = uses.get(state.name, [])
        is_free = not state.trainable and len(state.shape) == 2 and state.name not in given
        is_of_head = any(one.module == head or one.module.startswith(f"{head}.") for one in readers)
        is_table = any(one.target.startswith("aten.embedding.") for one in readers)
        if is_free and not is_of_head and not is_table and any(_weight(one) == state.name for one in readers):
            packed = PackedMatrix((state.shape[0], state.shape[1]), state.dtype)
            yield replace(state, shape=(nf4_bytes(state.num_elements),), dtype="uint8", packed=packed)


def _head(graph: Graph) -> str:
    """The module of the last linear layer, without the modules that peft has put into it."""
    layers = [one.module for one in graph.operators if one.target in (_LINEAR, FUSED)]
    return layers[-1].partition(".lora_")[0].removesuffix(".base_layer") if layers else ""


def _weight(operator: Operator) -> str:
    """The name of the weight of a linear layer; empty for another operator."""
    weight = operator.arguments[1] if operator.target == _LINEAR and not operator.keywords else None
    return weight.name if isinstance(weight, Reference) else ""


def _replaced(operator: Operator, packed: Mapping[str, ModelState]) -> Iterator[Operator]:
    """The operators for one that may read packed weights: a linear layer multiplies by the bytes. Any other,
    as one of DoRA that takes the lengths of rows, gets a weight that is unpacked for it.
    """
    weight = _weight(operator)
    if weight in packed:
        hidden, _, bias = (*operator.arguments, None)[:3]
        operator = replace(
            operator,
            target=NF4_LINEAR,
            arguments=(hidden, Reference(weight), bias, *packed[weight].unpacked.shape),
        )
    whole: dict[str, Argument] = {}
    for name in dict.fromkeys(operator.reads()) if weight not in packed else ():
        if name in packed:
            plain = packed[name].unpacked
            made = Value(f"{name} for {operator.made[0].name}", plain.shape, plain.dtype)
            whole[name] = Reference(made.name)
            given: tuple[Argument, ...] = (Reference(name), *plain.shape, Token("dtype", plain.dtype))
            yield Operator(NF4_WEIGHT, given, (), (made,), no_grad=True, module=operator.module)
    yield replace(
        operator,
        arguments=tuple(_with(one, whole) for one in operator.arguments),
        keywords=tuple((key, _with(one, whole)) for key, one in operator.keywords),
    )


def _with(argument: Argument, whole: Mapping[str, Argument]) -> Argument:
    """The argument with other references."""
    if isinstance(argument, Reference):
        return whole.get(argument.name, argument)
    return tuple(_with(part, whole) for part in argument) if isinstance(argument, tuple) else argument
