"""The file of a `Graph`: JSON, with everything in it that is needed to run the graph.

What is read equals what was saved, to the last bit of every number. The hash of a graph is the hash of what
its file says, but for its name.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import (
    Graph,
    ModelState,
    Operator,
    Output,
    PackedMatrix,
    Reference,
    Token,
    Value,
    once_for_each_graph,
)

_FORMAT = 1


def save_graph(graph: Graph, path: Path) -> None:
    """Write a graph to a file: whole, or not at all."""
    write_text_atomically(path, json.dumps(_plain(graph), allow_nan=False, separators=(",", ":")) + "\n")


def load_graph(path: Path) -> Graph:
    """The graph in a file."""
    graph = read_dataclass(path, Graph, number=_FORMAT)
    try:
        _check(graph)
    except ValueError as error:
        raise BiremeError(f"{path} is damaged: {error}. Capture the model again.") from error
    return graph


@once_for_each_graph
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
    return {"format": _FORMAT, **_table(graph)}


def _table(noun: Any) -> dict[str, Any]:
    return {field.name: _worded(getattr(noun, field.name)) for field in fields(noun)}


def _worded(thing: Any) -> Any:
    """Anything that a graph is made of in the words of JSON."""
    match thing:
        case Reference(name):
            return {"reference": name}
        case Token(kind, name):
            return {"token": kind, "name": name}
        case Operator():
            return _table(thing) | {"flops": float(thing.flops)}
        case ModelState(packed=None):
            found = _table(thing)
            del found["packed"]  # graphs without such weights keep their hash
            return found
        case Value() | ModelState() | PackedMatrix() | Output():
            return _table(thing)
        case tuple():
            return [_worded(part) for part in thing]
        case bytes():
            return base64.b64encode(thing).decode()
    return thing


def _num_bytes(state: ModelState) -> int:
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

    states = (*graph.parameters, *graph.buffers, *graph.constants)
    for state in states:
        if state.data is not None and len(state.data) != _num_bytes(state):
            raise ValueError(
                f"{state.name} has {len(state.data)} bytes where its shape needs {_num_bytes(state)}"
            )
    define(value.name for value in graph.inputs)
    define(state.name for state in states)
    for operator in graph.operators:
        for name in (*operator.reads(), *operator.mutates):
            if name not in known:
                raise ValueError(f"{operator.target} uses {name}, which nothing before it makes")
        define(value.name for value in operator.made)
    for output in graph.outputs:
        if isinstance(output.value, Reference) and output.value.name not in known:
            raise ValueError(f"the output {output.name} is {output.value.name}, which nothing makes")
