"""The noun of this room: a `Graph`, the operators of a model in the order they run.

It is data and imports no torch: names, shapes, arguments. Parameters and buffers are inputs of their own,
under the model's own qualified names; a tied parameter is one entry that several operators use. Everything
that is needed to run it is in it, so a graph read from a file is as good as the one that was captured.

Lengths that depend on the batch size are expressions in `b`, such as `16*b`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from bireme.bounds import Count, Place
from bireme.model.argument import Argument, Reference, Token, references
from bireme.model.length import evaluate

__all__ = [
    "Argument",
    "Graph",
    "ModelState",
    "Operator",
    "Output",
    "Reference",
    "Token",
    "Value",
    "references",
]

BYTES_OF = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an operator makes, or that comes in from outside."""

    name: str
    shape: tuple[Place | str, ...]
    dtype: str

    def num_elements(self, batch: int) -> int:
        """How many elements it has at a batch size."""
        return prod(evaluate(length, batch) for length in self.shape)

    def num_bytes(self, batch: int) -> int:
        """How many bytes they take."""
        return self.num_elements(batch) * BYTES_OF[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelState:
    """A parameter, a buffer, or a tensor that the model's code holds as a constant.

    `aliases` are the other names of the same tensor (tied weights). A constant carries its `data`.
    """

    name: str
    shape: tuple[Place, ...]
    dtype: str
    is_parameter: bool = False
    trainable: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    data: bytes | None = None

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes they take."""
        return self.num_elements * BYTES_OF[self.dtype]


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of one of torch's operators, or of a module of a chain.

    `outputs` names what it makes, None where a result is not used; an operator with one result has
    `is_tuple` unset. `flops` is of one call at the captured batch size, where it is known. `mutates` are
    the buffers it changes. Where `no_grad` is set it runs outside autograd.
    """

    target: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    outputs: tuple[Value | None, ...]
    is_tuple: bool = False
    no_grad: bool = False
    mutates: tuple[str, ...] = ()
    is_random: bool = False
    is_pointwise: bool = False
    flops: float = 0.0
    module: str = ""

    @property
    def is_of_chain(self) -> bool:
        """Whether it is a whole module, or the loss, of a chain: then it runs with these at hand only."""
        return self.target.startswith("chain.")

    def reads(self) -> Iterator[str]:
        """The names of what it is given."""
        yield from references(self.arguments)
        yield from references(tuple(argument for _, argument in self.keywords))


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the model and its name there, such as `loss` or `logits`."""

    name: str
    value: Argument


@dataclass(frozen=True, slots=True)
class Graph:
    """A model as its operators, in training or in evaluation mode.

    Shapes hold for every batch size where `any_batch` is set, and for `batch` alone otherwise.
    """

    name: str
    training: bool
    batch: Count
    any_batch: bool
    inputs: tuple[Value, ...]
    parameters: tuple[ModelState, ...]
    buffers: tuple[ModelState, ...]
    constants: tuple[ModelState, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[Output, ...]

    @property
    def gradient_shapes(self) -> tuple[tuple[Place, ...], ...]:
        """The shapes of the gradients that training makes, tied ones once."""
        return tuple(state.shape for state in self.parameters if state.trainable)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters, tied ones once."""
        return sum(parameter.num_bytes for parameter in self.parameters)
