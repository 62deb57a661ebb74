"""Stages: consecutive units as one function of parameters, buffers and inputs.

The function is built from the graph's operators and is as fast as the module they came from. It knows no
weights: two versions of them are two calls with different arguments. Whether the graph was captured or is a
chain of modules shows only in what resolves its operators.
"""

import importlib
import operator as python_operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bireme.codec.codec import scattered
from bireme.devices import default_generator, is_accelerator
from bireme.errors import BiremeError, first_line
from bireme.model.fused_loss import FUSED
from bireme.model.fused_operator import linear_cross_entropy, without_gradients
from bireme.model.graph import (
    Argument,
    Graph,
    Length,
    ModelState,
    Operator,
    Reference,
    Token,
    Value,
    evaluate,
    expand,
)
from bireme.model.nf4 import NF4_LINEAR, NF4_WEIGHT
from bireme.model.nf4_operator import nf4_linear, unpacked
from bireme.model.torch_private import compiler_errors, cpp_compiler, set_grad_enabled
from bireme.model.units import Unit

Tensors = Mapping[str, torch.Tensor]

_DRAWING = threading.Lock()
"""Held while a stage draws from a generator that belongs to the whole process."""

Resolve = Callable[[Operator], Callable[..., Any]]
"""From an operator of a graph to what is called with its arguments."""


_OWN: Mapping[str, Callable[..., Any]] = {
    FUSED: linear_cross_entropy,
    NF4_LINEAR: nf4_linear,
    NF4_WEIGHT: unpacked,
}
"""What runs for operators that are no operators of torch."""


def torch_operator(operator: Operator) -> Callable[..., Any]:
    """What the operator's target names: an operator of torch, or a function of Python's operator module."""
    if operator.is_of_chain:
        raise BiremeError(
            f"The graph is a chain with {operator.target} in it, which is code of yours and not in the "
            "graph. Give the modules and the loss that it was made of: StageFunction(graph, units, "
            "resolve=chain_resolver(graph, modules, loss=loss))."
        )
    if operator.target in _OWN:
        return _OWN[operator.target]
    space, _, rest = operator.target.partition(".")
    found: Callable[..., Any]
    if space in ("operator", "math"):
        found = getattr(importlib.import_module(space), rest)
        return found
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError) as error:
        raise BiremeError(
            f"The graph calls {operator.target}, which this process does not have. Import the package that "
            "brings it before running the stage."
        ) from error
    return found


class StageFunction:
    """Runs some consecutive units of a graph.

    `receives` are the tensors that come from the stage before, `sends` those for the next stage,
    `inputs` those of the model's inputs that it needs. Calling it gives what it sends and the model's
    outputs that are made in it, all by name. `writes` are those of its buffers that it changes, `is_random`
    tells whether anything in it is drawn.

    Of the model's outputs it gives those in `outputs`, or all; what is not given is freed early. `also` are
    names of values inside the stage to give besides. `resolve` says what runs for an operator; a chain needs
    `chain_resolver` with its modules. With `compile` torch compiles the stage at its first call and again
    where a batch size needs it. Its numbers are equal then but for rounding, and what is drawn at random, as
    by dropout, differs: a seed has no effect.
    """

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        *,
        resolve: Resolve = torch_operator,
        compile: bool = False,  # noqa: A002 (torch's word for it)
        outputs: Collection[str] | None = None,
        also: Sequence[str] = (),
    ) -> None:
        if not units:
            raise BiremeError("A stage needs at least one unit.")
        self.receives = units[0].receives
        self.sends = units[-1].sends
        self.inputs = _merged(unit.inputs for unit in units)
        self.parameters = _merged(unit.parameters for unit in units)
        self.buffers = _merged(unit.buffers for unit in units)
        self._compiles = compile
        self._constants = {state.name: state for state in graph.constants}
        self._built: dict[torch.device, Callable[..., tuple[Any, ...]]] = {}
        self._held: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        self._graph = graph
        self._values = graph.values
        places = sorted({place for unit in units for place in unit.operators})
        self._calls = [(place, graph.operators[place], resolve(graph.operators[place])) for place in places]
        made = {value.name for _, operator, _ in self._calls for value in operator.made}
        self.outputs = tuple(
            output.name
            for output in graph.outputs
            if isinstance(output.value, Reference)
            and output.value.name in made
            and (outputs is None or output.name in outputs)
        )
        self._given = (*self.inputs, *self.receives)
        self._results = (*self.sends, *self.outputs, *also)
        changed = {name for _, operator, _ in self._calls for name in operator.mutates}
        self.writes = tuple(name for name in self.buffers if name in changed)
        self._unit_of = {
            place: unit.index
            for unit in units
            for place in unit.operators
            if graph.operators[place].is_random
        }
        self.is_random = bool(self._unit_of)

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensors,
        *,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the stage; `inputs` holds what it receives and what it needs of the model's inputs.

        With a `seed` every unit draws from a stream of its own, which depends on the seed and on the unit's
        place in the model alone, and the state of torch's generator is left as it was.
        """
        given = [
            *map(parameters.__getitem__, self.parameters),
            *map(buffers.__getitem__, self.buffers),
            *map(inputs.__getitem__, self._given),
        ]
        where = device or (given[0].device if given else torch.device("cpu"))
        run = self._built.get(where) or self._build(where)
        if seed is None or not self.is_random:
            results = run(*given, None)
        else:
            generator = default_generator(where)
            with _DRAWING:
                state = generator.get_state()
                try:
                    results = run(*given, seed)
                finally:
                    # torch's checkpoint leaves by an exception as soon as it has what it needs.
                    generator.set_state(state)
        return dict(zip(self._results, results, strict=True))

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What the model's code holds as constants, on a device that the stage runs on."""
        if device not in self._built:
            self._build(device)
        return self._held[device]

    def _build(self, device: torch.device) -> Callable[..., tuple[Any, ...]]:
        builder = _Builder(device)
        for name in (*self.parameters, *self.buffers, *self._given):
            builder.take(name, self._values.get(name))
        read = {name for _, operator, _ in self._calls for name in operator.reads()}
        for state in self._constants.values():
            if state.name in read:
                builder.hold(state)
        self._held[device] = tuple(builder.root.buffers())
        seed = builder.graph.placeholder("seed")
        seeded: int | None = None
        for place, operator, target in self._calls:
            unit = self._unit_of.get(place)
            if unit is not None and unit != seeded and not self._compiles:
                builder.graph.call_function(_start_stream, (seed, unit, device))
                seeded = unit
            builder.call(operator, target)
        named = {output.name: output.value for output in self._graph.outputs if output.name in self.outputs}
        built = builder.finish([named.get(name, Reference(name)) for name in self._results])
        # A call of the module itself would look for hooks first, which nobody can have set.
        run = self._built[device] = _compiled(built, device) if self._compiles else built.forward
        return run


def _merged(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
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

    def hold(self, state: ModelState) -> None:
        attribute = f"constant{len(self.nodes)}"
        dtype = getattr(torch, state.dtype)
        data = (
            torch.frombuffer(bytearray(state.data), dtype=dtype)
            if state.data
            else torch.empty(0, dtype=dtype)
        )
        self.root.register_buffer(attribute, data.reshape(state.shape).to(self.device))
        self.nodes[state.name] = self.graph.get_attr(attribute)

    def call(self, operator: Operator, target: Callable[..., Any]) -> None:
        self._switch_grad(operator.no_grad)
        node = self.graph.call_function(
            target,
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

    def finish(self, results: Sequence[Argument]) -> torch.nn.Module:
        self._switch_grad(False)
        self.graph.output(tuple(self._given(result) for result in results))
        return torch.fx.GraphModule(self.root, self.graph)

    def _switch_grad(self, outside: bool) -> None:
        """Enter or leave a stretch that autograd does not see; after it the state is as before."""
        if outside == self.is_outside:
            return
        if outside:
            self.before = self.graph.call_function(torch.is_grad_enabled)
            self.graph.call_function(set_grad_enabled, (False,))
        else:
            self.graph.call_function(set_grad_enabled, (self.before,))
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
        return self.batch if expression == "b" else expand(expression, torch.fx.Proxy(self.batch)).node

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


def _start_stream(seed: int | None, unit: int, device: torch.device) -> None:
    """Let what a unit draws next depend on the seed and on the unit alone."""
    if seed is not None:
        default_generator(device).manual_seed(scattered((seed - 1) * 0x9E3779B97F4A7C15 + unit) >> 1)


def _compiled(function: Callable[..., tuple[Any, ...]], device: torch.device) -> Callable[..., Any]:
    """The function, compiled by torch when it is called; what can go wrong there is said in a sentence."""
    if not is_accelerator(device) and cpp_compiler() is None:
        raise BiremeError(
            "A stage on the cpu is compiled with a C++ compiler, and torch finds none. Install g++, name "
            "yours in the environment variable CXX, or leave compile out."
        )
    compiled = torch.compile(function)

    def run(*given: Any) -> Any:
        try:
            return compiled(*given)
        except compiler_errors() as error:
            reason = first_line(error).rstrip(".:")
            raise BiremeError(f"torch.compile fails on a stage: {reason}. Leave compile out.") from error

    return run


def _times_batch(length: Length) -> int | None:
    """How many times the batch a length is, where it is just that: `b`, `5*b`."""
    if isinstance(length, int):
        return None
    times, one, two = (evaluate(length, batch) for batch in (1, 2, 3))
    return times if times > 0 and one == 2 * times and two == 3 * times else None


# A stage of which some units keep nothing for their backward but what comes into them.
#
# It is called like any stage function. Units in a row that recompute do so together, under the same weights
# and the same draws, for both are arguments.


class SegmentedFunction:
    """Some consecutive units as one function, those with an index in `recomputed` run again in the
    backward.
    """

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        recomputed: Collection[int],
        *,
        resolve: Resolve = torch_operator,
        compile: bool = False,  # noqa: A002 (torch's word for it)
        outputs: Collection[str] | None = None,
    ) -> None:
        runs = [(again, list(run)) for again, run in groupby(units, lambda unit: unit.index in recomputed)]
        self._segments = [
            (again, StageFunction(graph, run, resolve=resolve, compile=compile, outputs=outputs))
            for again, run in runs
        ]
        functions = [function for _, function in self._segments]
        self.receives = functions[0].receives
        self.sends = functions[-1].sends
        self.parameters = _merged(function.parameters for function in functions)
        self.buffers = _merged(function.buffers for function in functions)
        self.inputs = _merged(function.inputs for function in functions)
        self.writes = _merged(function.writes for function in functions)
        self.outputs = _merged(function.outputs for function in functions)
        self.is_random = any(function.is_random for function in functions)

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensors,
        *,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> dict[str, Tensor]:
        """Run the units, as `StageFunction` does."""
        values = dict(inputs)
        for again, function in self._segments:
            if again and torch.is_grad_enabled():
                values |= _checkpointed(function, parameters, buffers, values, device, seed)
            else:
                values |= function(parameters, buffers, values, device=device, seed=seed)
        return {name: values[name] for name in (*self.sends, *self.outputs)}

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """What the model's code holds as constants, on a device that the stage runs on."""
        return tuple(one for _, function in self._segments for one in function.constants(device))


def _checkpointed(
    function: StageFunction,
    parameters: Tensors,
    buffers: Tensors,
    values: Tensors,
    device: torch.device | None,
    seed: int | None,
) -> dict[str, Tensor]:
    """The function's results, of which autograd keeps only what came in."""
    given = {name: values[name] for name in (*function.inputs, *function.receives)}
    own = {name: parameters[name] for name in function.parameters}
    has_run = False

    def run(weights: Tensors, received: Tensors) -> dict[str, Tensor]:
        nonlocal has_run
        # What the forward writes to its buffers it wrote the first time.
        kept = untouched(buffers, function.writes) if has_run else buffers
        with nullcontext() if has_run else without_gradients():
            has_run = True
            return function(weights, kept, received, device=device, seed=seed)

    found: dict[str, Tensor] = checkpoint(run, own, given, use_reentrant=False, preserve_rng_state=False)
    return found


def untouched(buffers: Tensors, writes: Iterable[str]) -> Tensors:
    """Buffers for a forward that must not change them: copies of those that it writes to."""
    return {**buffers, **{name: buffers[name].clone() for name in writes}}
