"""Stages: consecutive units as one function of parameters, buffers and inputs.

The function is built from the graph's operators and is as fast as the module they came from. It knows no
weights: two versions of them are two calls with different arguments.
"""

import importlib
import operator as python_operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bireme.errors import BiremeError
from bireme.model.graph import Argument, Graph, Operator, Reference, State, Token, Value
from bireme.model.length import Length, evaluate
from bireme.model.units import Unit

__all__ = ["StageFunction", "merged", "stage_function"]

Tensors = Mapping[str, torch.Tensor]


class StageFunction:
    """Runs some consecutive units.

    `receives` are the tensors that come from the stage before, `sends` those for the stage behind,
    `inputs` those of the model's inputs that it needs. Calling it gives what it sends and the model's
    outputs that are made in it, all by name.
    """

    def __init__(self, graph: Graph, units: Sequence[Unit]) -> None:
        self.receives = units[0].receives
        self.sends = units[-1].sends
        self.inputs = merged(unit.inputs for unit in units)
        self.parameters = merged(unit.parameters for unit in units)
        self.buffers = merged(unit.buffers for unit in units)
        self._constants = {state.name: state for state in graph.constants}
        self._built: dict[torch.device, Callable[..., tuple[Any, ...]]] = {}
        self._graph = graph
        self._values = {v.name: v for op in graph.operators for v in op.outputs if v is not None}
        self._values |= {value.name: value for value in graph.inputs}
        self._places = sorted({place for unit in units for place in unit.operators})
        made = {v.name for place in self._places for v in graph.operators[place].outputs if v is not None}
        self.outputs = tuple(
            output.name
            for output in graph.outputs
            if isinstance(output.value, Reference) and output.value.name in made
        )

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensors, *, device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the stage; `inputs` holds what it receives and what it needs of the model's inputs."""
        given = [parameters[name] for name in self.parameters]
        given += [buffers[name] for name in self.buffers]
        given += [inputs[name] for name in (*self.inputs, *self.receives)]
        where = device or (given[0].device if given else torch.device("cpu"))
        if where not in self._built:
            self._built[where] = self._build(where)
        results = self._built[where](*given)
        return dict(zip((*self.sends, *self.outputs), results, strict=True))

    def _build(self, device: torch.device) -> Callable[..., tuple[Any, ...]]:
        builder = _Builder(device)
        for name in (*self.parameters, *self.buffers, *self.inputs, *self.receives):
            builder.take(name, self._values.get(name))
        read = {name for place in self._places for name in self._graph.operators[place].reads()}
        for state in self._constants.values():
            if state.name in read:
                builder.hold(state)
        for place in self._places:
            builder.call(self._graph.operators[place])
        named = {output.name: output.value for output in self._graph.outputs}
        results = [Reference(name) for name in self.sends]
        return builder.finish([*results, *(named[name] for name in self.outputs)])


def stage_function(graph: Graph, units: Sequence[Unit]) -> StageFunction:
    """The function of some consecutive units of a graph."""
    if not units:
        raise BiremeError("A stage needs at least one unit.")
    return StageFunction(graph, units)


def merged(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """All names, each once, in the order they come."""
    return tuple(dict.fromkeys(name for part in names for name in part))


class _Builder:
    """Writes a graph of torch.fx from operators, and turns it into Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph = torch.fx.Graph()
        self.nodes: dict[str, Any] = {}
        self.root = torch.nn.Module()
        self.is_outside = False
        self.before: torch.fx.Node | None = None
        self.batch_axis: tuple[torch.fx.Node, int, int] | None = None
        """A tensor that comes in, an axis of it, and how many times the batch that is long."""
        self.batch: torch.fx.Node | None = None

    def take(self, name: str, value: Value | None) -> None:
        self.nodes[name] = self.graph.placeholder(f"a{len(self.nodes)}")
        for axis, length in enumerate(value.shape if value is not None else ()):
            times = _times_batch(length)
            if times is not None and self.batch_axis is None:
                self.batch_axis = self.nodes[name], axis, times

    def hold(self, state: State) -> None:
        attribute = f"constant{len(self.nodes)}"
        dtype = getattr(torch, state.dtype)
        data = (
            torch.frombuffer(bytearray(state.data), dtype=dtype)
            if state.data
            else torch.empty(0, dtype=dtype)
        )
        self.root.register_buffer(attribute, data.reshape(state.shape).to(self.device))
        self.nodes[state.name] = self.graph.get_attr(attribute)

    def call(self, operator: Operator) -> None:
        self._switch_grad(operator.no_grad)
        node = self.graph.call_function(
            _resolved(operator.target),
            self._given(operator.arguments),
            {key: self._given(value) for key, value in operator.keywords},
        )
        for place, value in enumerate(operator.outputs):
            if value is not None:
                part = (
                    self.graph.call_function(python_operator.getitem, (node, place))
                    if operator.is_tuple
                    else node
                )
                self.nodes[value.name] = part

    def finish(self, results: Sequence[Argument]) -> Callable[..., tuple[Any, ...]]:
        self._switch_grad(False)
        self.graph.output(tuple(self._given(result) for result in results))
        return torch.fx.GraphModule(self.root, self.graph)

    def _switch_grad(self, outside: bool) -> None:
        """Enter or leave a stretch that autograd does not see; behind it things are as they were."""
        if outside == self.is_outside:
            return
        if outside:
            self.before = self.graph.call_function(torch.is_grad_enabled)
            self.graph.call_function(torch._C._set_grad_enabled, (False,))
        else:
            self.graph.call_function(torch._C._set_grad_enabled, (self.before,))
        self.is_outside = outside

    def _length(self, expression: str) -> Any:
        if self.batch is None:
            if self.batch_axis is None:
                raise BiremeError(
                    "A stage that gets no tensor with the batch as an axis cannot know its size."
                )
            tensor, axis, times = self.batch_axis
            self.batch = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
            if times > 1:
                self.batch = self.graph.call_function(python_operator.floordiv, (self.batch, times))
        return (
            self.batch if expression == "b" else self.graph.call_function(evaluate, (expression, self.batch))
        )

    def _given(self, argument: Argument) -> Any:
        match argument:
            case Reference(name):
                return self.nodes[name]
            case Token("device"):
                return self.device
            case Token("length", expression):
                return self._length(expression)
            case Token("float", name):
                return float(name)
            case Token(_, name):
                return getattr(torch, name)
            case (Token("slice"), *parts):
                return slice(*(self._given(part) for part in parts))
            case tuple():
                return tuple(self._given(part) for part in argument)
        return argument


def _times_batch(length: Length) -> int | None:
    """How many times the batch a length is, where it is just that: `b`, `5*b`."""
    if isinstance(length, int):
        return None
    times, one, two = (evaluate(length, batch) for batch in (1, 2, 3))
    return times if times > 0 and one == 2 * times and two == 3 * times else None


def _resolved(target: str) -> Callable[..., Any]:
    """The operator of that name: `aten.linear.default`, or a function of Python's operator or math module."""
    space, _, rest = target.partition(".")
    found: Callable[..., Any]
    if space in ("operator", "math"):
        found = getattr(importlib.import_module(space), rest)
        return found
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError) as error:
        raise BiremeError(
            f"The graph calls {target}, which this process does not have. Import the package that brings it "
            "before running the stage."
        ) from error
    return found
