"""The file of a `Graph`: JSON, with everything in it that is needed to run the graph.

What is read equals what was saved, to the last bit of every number. The hash of a graph is the hash of what
its file says, but for its name.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import Argument, Graph, Operator, Output, Reference, State, Token, Value

__all__ = ["graph_hash", "load_graph", "save_graph"]

FORMAT = 1


def save_graph(graph: Graph, path: Path) -> None:
    """Write a graph to a file: whole, or not at all."""
    write_text_atomically(path, json.dumps(_plain(graph), allow_nan=False, separators=(",", ":")) + "\n")


def load_graph(path: Path) -> Graph:
    """The graph in a file."""
    document = read_json(path, _GraphDocument)
    try:
        graph = document.graph()
        _check(graph)
    except ValueError as error:
        raise BiremeError(f"{path} is damaged: {error}. Capture the model again.") from error
    return graph


def graph_hash(graph: Graph) -> str:
    """Sixteen hexadecimal digits that are the same for equal graphs, whatever they are called.

    A graph that holds for any batch size is the same at whichever it was captured.
    """
    plain = _plain(graph)
    del plain["name"]
    if graph.any_batch:
        del plain["batch"]
        for operator in plain["operators"]:
            del operator["flops"]
    text = json.dumps(plain, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(graph: Graph) -> dict[str, Any]:
    """The graph in the words of JSON."""
    return {
        "format": FORMAT,
        "name": graph.name,
        "training": graph.training,
        "batch": graph.batch,
        "any_batch": graph.any_batch,
        "inputs": [asdict(value) for value in graph.inputs],
        "parameters": [_plain_state(state) for state in graph.parameters],
        "buffers": [_plain_state(state) for state in graph.buffers],
        "constants": [_plain_state(state) for state in graph.constants],
        "operators": [_plain_operator(operator) for operator in graph.operators],
        "outputs": [
            {"name": output.name, "value": _plain_argument(output.value)} for output in graph.outputs
        ],
    }


def _plain_state(state: State) -> dict[str, Any]:
    data = None if state.data is None else base64.b64encode(state.data).decode()
    return asdict(state) | {"data": data}


def _plain_operator(operator: Operator) -> dict[str, Any]:
    return {
        "target": operator.target,
        "arguments": _plain_argument(operator.arguments),
        "keywords": [[key, _plain_argument(value)] for key, value in operator.keywords],
        "outputs": [None if value is None else asdict(value) for value in operator.outputs],
        "is_tuple": operator.is_tuple,
        "no_grad": operator.no_grad,
        "mutates": list(operator.mutates),
        "is_random": operator.is_random,
        "is_pointwise": operator.is_pointwise,
        "flops": float(operator.flops),
        "module": operator.module,
    }


def _plain_argument(argument: Argument) -> Any:
    match argument:
        case Reference(name):
            return {"reference": name}
        case Token(kind, name):
            return {"token": kind, "name": name}
        case tuple():
            return [_plain_argument(part) for part in argument]
    return argument


def _argument(plain: Any) -> Argument:
    match plain:
        case {"reference": str(name), **rest} if not rest:
            return Reference(name)
        case {"token": str(kind), "name": str(name), **rest} if not rest:
            return Token(kind, name)
        case list():
            return tuple(_argument(part) for part in plain)
        case None | bool() | int() | float() | str() | Reference() | Token() | tuple():
            return plain
    raise ValueError("a value, a list, a reference or a token")


_Argument = Annotated[Any, BeforeValidator(_argument)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ValueDocument(_Document):
    name: str
    shape: list[Annotated[int, Field(ge=0)] | str]
    dtype: str

    def value(self) -> Value:
        return Value(self.name, tuple(self.shape), self.dtype)


class _StateDocument(_Document):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    dtype: str
    is_parameter: bool
    trainable: bool
    persistent: bool
    aliases: list[str]
    data: str | None

    def state(self) -> State:
        try:
            data = None if self.data is None else base64.b64decode(self.data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the numbers of {self.name} are not base64") from error
        state = State(
            name=self.name,
            shape=tuple(self.shape),
            dtype=self.dtype,
            is_parameter=self.is_parameter,
            trainable=self.trainable,
            persistent=self.persistent,
            aliases=tuple(self.aliases),
            data=data,
        )
        if data is not None and len(data) != _num_bytes(state):
            raise ValueError(f"{self.name} has {len(data)} bytes where its shape needs {_num_bytes(state)}")
        return state


class _OperatorDocument(_Document):
    target: str
    arguments: list[_Argument]
    keywords: list[Annotated[list[_Argument], Field(min_length=2, max_length=2)]]
    outputs: list[_ValueDocument | None]
    is_tuple: bool
    no_grad: bool
    mutates: list[str]
    is_random: bool
    is_pointwise: bool
    flops: float
    module: str

    def operator(self) -> Operator:
        return Operator(
            target=self.target,
            arguments=tuple(self.arguments),
            keywords=tuple((str(key), value) for key, value in self.keywords),
            outputs=tuple(None if found is None else found.value() for found in self.outputs),
            is_tuple=self.is_tuple,
            no_grad=self.no_grad,
            mutates=tuple(self.mutates),
            is_random=self.is_random,
            is_pointwise=self.is_pointwise,
            flops=self.flops,
            module=self.module,
        )


class _OutputDocument(_Document):
    name: str
    value: _Argument


class _GraphDocument(_Document):
    format: Literal[1]
    name: str
    training: bool
    batch: Annotated[int, Field(ge=1)]
    any_batch: bool
    inputs: list[_ValueDocument]
    parameters: list[_StateDocument]
    buffers: list[_StateDocument]
    constants: list[_StateDocument]
    operators: list[_OperatorDocument]
    outputs: list[_OutputDocument]

    def graph(self) -> Graph:
        return Graph(
            name=self.name,
            training=self.training,
            batch=self.batch,
            any_batch=self.any_batch,
            inputs=tuple(found.value() for found in self.inputs),
            parameters=tuple(found.state() for found in self.parameters),
            buffers=tuple(found.state() for found in self.buffers),
            constants=tuple(found.state() for found in self.constants),
            operators=tuple(found.operator() for found in self.operators),
            outputs=tuple(Output(found.name, found.value) for found in self.outputs),
        )


def _num_bytes(state: State) -> int:
    try:
        return state.num_bytes
    except KeyError as error:
        raise ValueError(f"{state.name} is of the unknown type {state.dtype}") from error


def _check(graph: Graph) -> None:
    """Every value is there before it is used, and once."""
    known: set[str] = set()

    def define(names: Iterator[str]) -> None:
        for name in names:
            if name in known:
                raise ValueError(f"there are two values called {name}")
            known.add(name)

    define(value.name for value in graph.inputs)
    define(state.name for state in (*graph.parameters, *graph.buffers, *graph.constants))
    for operator in graph.operators:
        for name in (*operator.reads(), *operator.mutates):
            if name not in known:
                raise ValueError(f"{operator.target} uses {name}, which nothing before it makes")
        define(value.name for value in operator.outputs if value is not None)
    for output in graph.outputs:
        if isinstance(output.value, Reference) and output.value.name not in known:
            raise ValueError(f"the output {output.name} is {output.value.name}, which nothing makes")
