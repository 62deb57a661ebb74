"""From torch's exported program to a `Graph`: the same operators, with names and words instead of objects."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from bireme.errors import BiremeError
from bireme.model.graph import Argument, Graph, Length, ModelState, Operator, Output, Reference, Token, Value
from bireme.model.torch_private import OpOverload, schema_of, storage_id, written

# Floating-point operations of the operators that are made of multiplications; the others count as none.

_Shape = tuple[int, ...]


def _flops_of(node: torch.fx.Node) -> float:
    """Of one call at the size it was captured with."""
    count = _COUNTS.get(str(node.target).removeprefix("aten.").rpartition(".")[0])
    result = node.meta.get("val")
    first = result[0] if isinstance(result, tuple | list) and result else result
    if count is None or not isinstance(first, torch.Tensor):
        return 0.0
    given = [_shape(argument) for argument in node.args]
    return float(count(given, _concrete(first)))


def _shape(argument: Any) -> _Shape:
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return _concrete(value) if isinstance(value, torch.Tensor) else ()


def _concrete(tensor: torch.Tensor) -> _Shape:
    """The lengths at the captured size: an expression's hint is what it was then."""
    return tuple(n if isinstance(n, int) else int(n.node.hint) for n in tensor.shape)


def _linear(given: list[_Shape], out: _Shape) -> int:
    return 2 * prod(out) * given[0][-1]


def _addmm(given: list[_Shape], out: _Shape) -> int:
    return 2 * prod(out) * given[1][-1]


def _convolution(given: list[_Shape], out: _Shape) -> int:
    return 2 * prod(out) * prod(given[1][1:])


def _attention(given: list[_Shape], out: _Shape) -> int:
    query, key = given[0], given[1]
    return 2 * prod(query) * key[-2] + 2 * prod(out) * key[-2]


_COUNTS: dict[str, Callable[[list[_Shape], _Shape], int]] = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul"), _linear),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "scaled_dot_product_attention": _attention,
}


_CHECKS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range_for_size.default",
        "aten.sym_constrain_range.default",
    }
)
"""Operators that only make sure of what capture has seen."""

_VALUES = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float

_INSIDE = "model."
"""Under this name the module lies in the one that is exported."""


def converted(
    exported: ExportedProgram,
    model: torch.nn.Module,
    *,
    name: str,
    training: bool,
    batch: int,
    any_batch: bool,
    outputs: tuple[str, ...],
) -> Graph:
    """The graph of an exported program of a module."""
    states = _States(exported, model)
    reader = _Reader(states.names)
    inputs = []
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            kind = states.kinds[node.name]
            if kind is InputKind.USER_INPUT:
                value = node.meta.get("val")
                reader.names[node] = Reference(node.name.removeprefix("inputs_"))
                if isinstance(value, torch.Tensor):
                    inputs.append(_value(node.name.removeprefix("inputs_"), value))
            else:
                reader.names[node] = Reference(states.names[node.name])
    reader.read(exported.graph_module, no_grad=False)
    (results,) = next(node for node in exported.graph.nodes if node.op == "output").args
    shown = results[-len(outputs) :] if outputs else ()
    return Graph(
        name=name,
        training=training,
        batch=batch,
        any_batch=any_batch,
        inputs=tuple(inputs),
        parameters=states.of(InputKind.PARAMETER),
        buffers=states.of(InputKind.BUFFER),
        constants=states.of(InputKind.CONSTANT_TENSOR),
        operators=tuple(reader.operators),
        outputs=tuple(
            Output(output, reader.argument(node)) for output, node in zip(outputs, shown, strict=True)
        ),
    )


class _States:
    """The parameters, buffers and constants of a program, each once under its first name in the module."""

    def __init__(self, exported: ExportedProgram, model: torch.nn.Module) -> None:
        self.kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
        self.names: dict[str, str] = {}
        self.found: dict[InputKind, dict[str, ModelState]] = {}
        first = first_names(named_tensors(model))
        aliases = aliases_of(first)
        for spec in exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT or spec.target is None:
                continue
            own = spec.target.removeprefix(_INSIDE)
            state_name = first.get(own, own)
            self.names[spec.arg.name] = state_name
            tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            if not isinstance(tensor, torch.Tensor):
                raise BiremeError(
                    f"The model holds {own}, a {type(tensor).__name__}; only tensors can be moved."
                )
            is_parameter = spec.kind is InputKind.PARAMETER
            self.found.setdefault(spec.kind, {})[state_name] = ModelState(
                name=state_name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                is_parameter=is_parameter,
                trainable=is_parameter and tensor.requires_grad,
                persistent=spec.persistent is not False,
                aliases=tuple(aliases.get(state_name, ())),
                data=_data(tensor) if spec.kind is InputKind.CONSTANT_TENSOR else None,
            )

    def of(self, kind: InputKind) -> tuple[ModelState, ...]:
        return tuple(self.found.get(kind, {}).values())


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a module and then its buffers, tied ones under all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def tensors_within(given: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dictionaries."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict | list | tuple):
        for one in given.values() if isinstance(given, dict) else given:
            yield from tensors_within(one)


def first_names(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """For every name of a tensor the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def aliases_of(first: Mapping[str, str]) -> dict[str, list[str]]:
    """The other names of each tensor that has several, by its first one."""
    found: dict[str, list[str]] = {original: [] for original in first.values()}
    for name, original in first.items():
        if name != original:
            found[original].append(name)
    return found


def _data(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "meta":
        raise BiremeError("The model makes a tensor from numbers on the meta device, where there are none.")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(raw.untyped_storage())[: raw.numel()] if raw.numel() else b""


class _Reader:
    """Goes through the nodes of a graph module and of those inside it, and writes down the operators."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names: dict[torch.fx.Node, Argument] = {}
        self.operators: list[Operator] = []
        self.taken = set(names.values())

    def read(self, module: torch.fx.GraphModule, *, no_grad: bool) -> None:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        for node in nodes:
            target = str(node.target)
            if target in _CHECKS or (
                node.target is operator.getitem and node.args[0] in self.names and self._take(node)
            ):
                continue
            if target == "aten.set_.source_Tensor" and len({*map(self.argument, node.args)}) == 1:
                # A parametrization sets a weight to itself. For autograd that would be a change of it.
                self.names[node] = self.argument(node.args[0])
                continue
            if target == "wrap_with_set_grad_enabled":
                enabled, inner, *given = node.args
                self._inline(module, node, inner, given, no_grad=not enabled)
            elif target == "wrap_with_autocast":
                _device, _dtype, enabled, _cache, inner, *given = node.args
                if enabled:
                    raise BiremeError(
                        "The model switches autocast on inside its forward. Choose the precision of training "
                        "instead, and leave autocast to Bireme."
                    )
                self._inline(module, node, inner, given, no_grad=no_grad)
            elif not isinstance(node.meta.get("val"), torch.SymInt):
                self._operator(node, no_grad=no_grad)

    def _inline(
        self,
        module: torch.fx.GraphModule,
        node: torch.fx.Node,
        inner: Any,
        given: list[Any],
        *,
        no_grad: bool,
    ) -> None:
        inside = getattr(module, str(inner.target))
        places = [n for n in inside.graph.nodes if n.op == "placeholder"]
        for place, argument in zip(places, given, strict=True):
            self.names[place] = self.argument(argument)
        self.read(inside, no_grad=no_grad)
        (results,) = next(n for n in inside.graph.nodes if n.op == "output").args
        self.names[node] = tuple(self.argument(result) for result in results)

    def _take(self, node: torch.fx.Node) -> bool:
        """A part of a result that has been read already needs no operator."""
        source, place = node.args
        assert isinstance(source, torch.fx.Node)
        whole = self.names[source]
        if isinstance(whole, tuple) and isinstance(place, int):
            self.names[node] = whole[place]
            return True
        return False

    def _operator(self, node: torch.fx.Node, *, no_grad: bool) -> None:
        result = node.meta.get("val")
        is_tuple = isinstance(result, tuple | list)
        results = list(result) if isinstance(result, tuple | list) else [result]
        base = self._fresh(node.name)
        outputs = tuple(
            _value(f"{base}.{place}" if is_tuple else base, value) if isinstance(value, _VALUES) else None
            for place, value in enumerate(results)
        )
        arguments = self.argument(node.args)
        assert isinstance(arguments, tuple)
        keywords = tuple((key, self.argument(value)) for key, value in node.kwargs.items())
        self.operators.append(
            Operator(
                target=_target_name(node.target),
                arguments=arguments,
                keywords=keywords,
                outputs=outputs,
                is_tuple=is_tuple,
                no_grad=no_grad,
                mutates=tuple(dict.fromkeys(self._mutated(node))) if _writes(node) else (),
                is_random=_has_tag(node, torch.Tag.nondeterministic_seeded),
                is_pointwise=_has_tag(node, torch.Tag.pointwise),
                flops=_flops_of(node),
                module=_module(node),
            )
        )
        references = tuple(None if value is None else Reference(value.name) for value in outputs)
        self.names[node] = references if is_tuple else references[0]

    def _fresh(self, name: str) -> str:
        fresh, count = name, 0
        while fresh in self.taken:
            count += 1
            fresh = f"{name}_{count}"
        self.taken.add(fresh)
        return fresh

    def _mutated(self, node: torch.fx.Node) -> Iterator[str]:
        """What an operator writes to, under every name of its memory: views and what they look at."""
        changed = [*written(node.target, node.args, node.kwargs)]
        if str(node.target) == "aten.batch_norm.default" and node.args[5]:
            # Its schema hides that it moves the running statistics in training.
            changed += node.args[3:5]
        memory = {_memory_of(given) for given in changed if isinstance(given, torch.fx.Node)} - {None}
        for other, name in self.names.items():
            if isinstance(name, Reference) and (other in changed or _memory_of(other) in memory):
                yield name.name

    def argument(self, given: Any) -> Argument:
        match given:
            case torch.fx.Node():
                length = given.meta.get("val")
                if isinstance(length, torch.SymInt):
                    return Token("length", str(_length(length)))
                return self.names[given]
            case tuple() | list():
                return tuple(self.argument(part) for part in given)
            case slice():
                return (Token("slice"), *(self.argument(p) for p in (given.start, given.stop, given.step)))
            case None | bool() | int() | str():
                return given
            case float():
                return given if math.isfinite(given) else Token("float", str(given))
            case torch.dtype():
                return Token("dtype", dtype_name(given))
            case torch.device():
                return Token("device")
            case torch.layout():
                return Token("layout", str(given).removeprefix("torch."))
            case torch.memory_format():
                return Token("memory_format", str(given).removeprefix("torch."))
        raise BiremeError(
            f"The model calls an operator with a {type(given).__name__}, which no graph can hold."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `float32`."""
    return str(dtype).removeprefix("torch.")


def _value(name: str, value: Any) -> Value:
    if isinstance(value, torch.Tensor):
        return Value(name, tuple(_length(n) for n in value.shape), dtype_name(value.dtype))
    return Value(name, (), "number")


def _writes(node: torch.fx.Node) -> bool:
    schema = schema_of(node.target)
    declared = schema is not None and schema.is_mutable
    return declared or str(node.target) == "aten.batch_norm.default"


def _memory_of(node: torch.fx.Node) -> int | None:
    """The same number for values that share memory."""
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def _length(n: Any) -> Length:
    return n if isinstance(n, int) else _in_batch_sizes(n.node.expr)


@lru_cache(maxsize=1024)
def _in_batch_sizes(expression: Any) -> str:
    import sympy  # 30 MiB, in processes that neither capture nor step too if it were above

    b = sympy.Symbol("b", integer=True, positive=True)
    return str(expression.subs(dict.fromkeys(expression.free_symbols, b)))


def _target_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__.removeprefix('_')}.{target.__name__}"


def _has_tag(node: torch.fx.Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def _module(node: torch.fx.Node) -> str:
    """The qualified name of the module whose forward made the call."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return str(names[-1]).removeprefix("model").removeprefix(".") if names else ""
