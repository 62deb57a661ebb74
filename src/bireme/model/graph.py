"""The noun of this room: a `Graph`, the operators of a model in the order they run.

It is data and imports no torch: names, shapes, arguments. Parameters and buffers are inputs of their own,
under the model's own qualified names; a tied parameter is one entry that several operators use. Everything
that is needed to run it is in it, so a graph read from a file is as good as the one that was captured.

Lengths that depend on the batch size are expressions in `b`, such as `16*b`.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from bireme.bounds import Count, Place

# Lengths of axes that may depend on the batch size: whole numbers, or small expressions in `b`.

Length = int | str
"""A number, or an expression in the batch size b: names, whole numbers, + − * // % and parentheses."""

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def evaluate(length: Length, batch: int) -> int:
    """The length at a batch size."""
    return length if isinstance(length, int) else _evaluated(length, batch)


def expand(expression: str, batch: Any) -> Any:
    """The same for a batch size that is no number yet, but something that can be reckoned with like one."""
    return _value(ast.parse(expression, mode="eval").body, batch)


@lru_cache(maxsize=4096)
def _evaluated(expression: str, batch: int) -> int:
    return int(expand(expression, batch))


def _value(node: ast.expr, batch: Any) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id="b"):
            return batch
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, batch), _value(right, batch))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, batch)
    raise ValueError(f"{ast.unparse(node)} is no length")


# What an operator can be given: plain values, lists, references to other values, and torch's own words.
#
# A file says a reference as `{"reference": name}` and a token as `{"token": kind, "name": name}`.


@dataclass(frozen=True, slots=True)
class Reference:
    """An argument that is the value, parameter, buffer, constant or input of that name."""

    name: Annotated[str, Field(alias="reference")]


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that is one of torch's own words (`dtype`, `layout`, `memory_format`, `device`), a number
    that is not finite (`float`), a `slice`, or a `length` that depends on the batch size."""

    kind: Annotated[str, Field(alias="token")]
    name: str = ""


def _form(plain: Any) -> str | None:
    """Which of the forms of an argument a file has."""
    if isinstance(plain, dict):
        return next((f"<{key}>" for key in ("reference", "token") if key in plain), None)
    return "<list>" if isinstance(plain, list | tuple) else "<value>"


if TYPE_CHECKING:
    Argument = bool | int | float | str | Reference | Token | tuple["Argument", ...] | None
else:
    Argument = TypeAliasType(
        "Argument",
        Annotated[
            Annotated[bool | int | float | str | None, Tag("<value>")]
            | Annotated[Reference, Tag("<reference>")]
            | Annotated[Token, Tag("<token>")]
            | Annotated[tuple["Argument", ...], Tag("<list>")],
            Discriminator(
                _form,
                custom_error_type="argument",
                custom_error_message="a value, a list, a reference or a token",
            ),
        ],
    )
"""What an operator can be given; to pydantic also how a file says it."""


def references(argument: Argument) -> Iterator[str]:
    """The names of everything an argument refers to."""
    if isinstance(argument, Reference):
        yield argument.name
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)


_FLOATING = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_NUMBERS = (*_FLOATING, "int64", "int32", "int16", "int8", "uint8")
_BYTES_OF = {"bool": 1} | {name: int(re.sub(r"\D", "", name)) // 8 for name in _NUMBERS}


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
        return self.num_elements(batch) * _BYTES_OF[self.dtype]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The shape and type of a weight whose content lies in the bytes of a state (`nf4.py`)."""

    shape: tuple[Place, Place]
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """A parameter, a buffer, or a tensor that the model's code holds as a constant.

    `aliases` are the other names of the same tensor (tied weights). A constant carries its `data`. A state
    with a `packed` weight has the shape and type of its bytes.
    """

    name: str
    shape: tuple[Place, ...]
    dtype: str
    is_parameter: bool = False
    trainable: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    data: bytes | None = None
    packed: PackedMatrix | None = None

    @property
    def unpacked(self) -> "ModelState":
        """The state of the weight that is packed in this one; this state if it is a plain tensor."""
        if self.packed is None:
            return self
        return replace(self, shape=self.packed.shape, dtype=self.packed.dtype, packed=None)

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes they take."""
        return self.num_elements * _BYTES_OF[self.dtype]


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

    @property
    def made(self) -> tuple[Value, ...]:
        """The results that are used."""
        return tuple(value for value in self.outputs if value is not None)

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
    def values(self) -> dict[str, Value]:
        """The inputs and the results of all operators, by name."""
        made = (value for operator in self.operators for value in operator.made)
        return {value.name: value for value in (*self.inputs, *made)}

    @property
    def made_by(self) -> dict[str, int]:
        """For every result the place of its operator."""
        return {value.name: place for place, one in enumerate(self.operators) for value in one.made}

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters, tied ones once."""
        return sum(parameter.num_bytes for parameter in self.parameters)


# What follows from a graph alone. Its fields have no fast hash, so a graph is found again by its identity.

_Found = TypeVar("_Found")
_MOST_GRAPHS = 8


def once_for_each_graph(make: Callable[[Graph], _Found]) -> Callable[[Graph], _Found]:
    """The function, with its results for the last few graphs remembered."""
    known: dict[int, tuple[Graph, _Found]] = {}

    @wraps(make)
    def found(graph: Graph) -> _Found:
        kept = known.get(id(graph))
        if kept is None or kept[0] is not graph:
            kept = known[id(graph)] = graph, make(graph)
            for number in [*known][:-_MOST_GRAPHS]:
                known.pop(number, None)
        return kept[1]

    return found


# Which values of a graph learn: they receive a gradient, because a trainable parameter comes before them.
#
# If nothing before a cut learns, as after a frozen embedding, no gradient crosses it.

_STOPS = ("aten.detach.", "aten.detach_.", "aten.argmax.", "aten.argsort.")


def learned_values(graph: Graph) -> frozenset[str]:
    """The names of the floating values that depend on a trainable parameter."""
    learned = {state.name for state in graph.parameters if state.trainable}
    found: set[str] = set()
    values: set[str] = set()
    for operator in graph.operators:
        values |= {value.name for value in operator.made if value.dtype in _FLOATING}
        if operator.no_grad or operator.target.startswith(_STOPS):
            continue
        if any(name in learned for name in operator.reads()):
            made = {value.name for value in operator.made} | set(operator.mutates)
            made &= values  # a buffer that is written to, such as a running mean, gets no gradient
            learned |= made
            found |= made
    return frozenset(found)
