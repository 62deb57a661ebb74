"""What a pipeline is made from: a graph and its weights, from a model or from what was captured before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.argument import references
from bireme.model.capture import Inputs, Loss, capture
from bireme.model.graph import Graph
from bireme.model.stage import torch_operator
from bireme.model.torch_private import schema_of
from bireme.model.weights import materialise

__all__ = ["PreparedModel", "Weights", "prepared"]

Weights = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Gives parameters and buffers by name; the engine takes them over and writes to them."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model in training mode, maybe one in evaluation mode, and its weights."""

    graph: Graph
    evaluation: Graph | None
    weights: Weights


def prepared(
    model: Graph | nn.Module,
    *,
    evaluation: Graph | None,
    weights: Weights | None,
    example_inputs: Inputs | None,
    loss: Loss | None,
    seed: int,
) -> PreparedModel:
    """A graph as it is given; a module captured in both modes, with copies of its own weights.

    A module on the meta device gets weights from the seed.
    """
    if isinstance(model, Graph):
        _refuse_sparse_gradients(model)
        if weights is None:
            raise BiremeError(
                "A graph holds no weights. Give a function as weights= that has them by name, such as one "
                "that calls materialise(model, names, seed=0)."
            )
        return PreparedModel(model, evaluation, weights)
    if example_inputs is None:
        raise BiremeError(
            f"To capture {type(model).__name__}, the pipeline needs example_inputs=: a dict of tensors that "
            "the model can be called with."
        )
    graph = capture(model, example_inputs, loss=loss)
    _refuse_sparse_gradients(graph)
    if evaluation is None:
        evaluation = capture(model, example_inputs, loss=loss, training=False)
    return PreparedModel(graph, evaluation, weights or _own_weights(model, seed))


def _refuse_sparse_gradients(graph: Graph) -> None:
    """Gradients are summed in flat memory, which a sparse one has no place in."""
    for operator in graph.operators:
        schema = None if operator.is_of_chain else schema_of(torch_operator(operator))
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = dict(zip(names, operator.arguments, strict=False)) | dict(operator.keywords)
        if given.get("sparse") is True:
            table = next(references(operator.arguments), "a table")
            raise BiremeError(
                f"{table} is an embedding with sparse=True, and the engine sums dense gradients only. Make "
                "it with sparse=False; its gradient then takes as much memory as the table."
            )


def _own_weights(model: nn.Module, seed: int) -> Weights:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.is_meta for tensor in own.values()):
        return lambda names: materialise(model, names, seed=seed)
    return lambda names: {name: own[name].detach().clone() for name in names}
