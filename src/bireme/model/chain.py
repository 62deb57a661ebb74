"""The second front end: a chain of modules as a `Graph`, for a model that cannot be captured.

Every module is one operator, so Python in it may do what it likes; only between modules can the chain be
cut. What a module returns, one tensor or a tuple of them, is the next one's only argument, as in an
`nn.Sequential`, and the names of parameters and buffers are those they have there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.model.argument import Argument, Reference
from bireme.model.capture import Inputs, Loss, batch_size, resized
from bireme.model.convert import dtype_name
from bireme.model.graph import Graph, Operator, Output, Value
from bireme.model.length import Length
from bireme.model.links import LOSS, Caller, ChainLink, Modules, first_arguments, links_of
from bireme.model.stage import Resolve
from bireme.model.torch_private import DispatchMode, version_of

__all__ = ["chain", "chain_resolver"]

Tensors = Mapping[str, Tensor]


def chain(
    modules: Modules,
    example_inputs: Inputs,
    *,
    loss: Loss | None = None,
    training: bool = True,
    name: str | None = None,
) -> Graph:
    """The graph of modules that run one after the other.

    The first module is given the inputs that bear the names of its forward's parameters, or the first input
    if none does; of inputs without names, as many as its forward takes. All inputs are there for the loss.
    The modules run twice, without gradients and on copies of their buffers, to find what crosses between
    them; if they are on the meta device, no number is needed.
    """
    links = links_of(modules)
    inputs = _by_name(example_inputs, links)
    first = first_arguments(next(iter(links.values())).module, example_inputs)
    batch = batch_size(inputs)
    operators = _traced(links, first, inputs, loss, training)
    try:
        larger = _traced(links, first, resized(inputs, batch + 1), loss, training)
        operators = tuple(_for_any_batch(*both, batch) for both in zip(operators, larger, strict=True))
        any_batch = True
    except Exception:  # the modules work at this batch size alone, and say so in whatever way they like
        any_batch = False
    states = {state.name: state for link in links.values() for state in link.states}
    axes: list[Length] = ["b" if any_batch else batch]
    return Graph(
        name=name or (type(modules).__name__ if isinstance(modules, nn.Module) else "Chain"),
        training=training,
        batch=batch,
        any_batch=any_batch,
        inputs=tuple(
            Value(key, (*axes, *tensor.shape[1:]), dtype_name(tensor.dtype)) for key, tensor in inputs.items()
        ),
        parameters=tuple(state for state in states.values() if state.is_parameter),
        buffers=tuple(state for state in states.values() if not state.is_parameter),
        constants=(),
        operators=operators,
        outputs=_outputs(operators, has_loss=loss is not None),
    )


def chain_resolver(graph: Graph, modules: Modules, *, loss: Loss | None = None) -> Resolve:
    """What `stage_function` needs to run a chain's graph: the modules and the loss that it was made of."""
    caller = Caller(links_of(modules), tuple(value.name for value in graph.inputs), loss, graph.training)
    return caller.function_of


def _made_by(operator: Operator) -> tuple[str, ...]:
    return tuple(value.name for value in operator.outputs if value is not None)


def _by_name(example_inputs: Inputs, links: Mapping[str, ChainLink]) -> dict[str, Tensor]:
    """The tensors among the inputs, on the modules' device."""
    if isinstance(example_inputs, Mapping):
        named = dict(example_inputs)
    else:
        named = {str(place): value for place, value in enumerate(example_inputs)}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise BiremeError(f"The input {name} is a {type(value).__name__}. A chain is given tensors.")
    held = (tensor for link in links.values() for tensor in link.module.parameters())
    device = next((tensor.device for tensor in held), torch.device("cpu"))
    return {name: value.detach().to(device) for name, value in named.items()}


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes whether anything is drawn at random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _traced(
    links: Mapping[str, ChainLink],
    first: tuple[Argument, ...],
    inputs: Tensors,
    loss: Loss | None,
    training: bool,
) -> tuple[Operator, ...]:
    """The operators with the shapes they have for these inputs."""
    caller = Caller(links, tuple(inputs), loss, training)
    values = dict(inputs)
    for link in links.values():
        values |= {link.names[local]: tensor for local, tensor in link.module.named_parameters()}
        values |= {link.names[local]: tensor.clone() for local, tensor in link.module.named_buffers()}
    operators: list[Operator] = []
    given = first
    devices = {tensor.device for tensor in inputs.values() if is_accelerator(tensor.device)}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        for key, link in links.items():
            states = tuple(Reference(name) for name in link.names.values())
            bare = Operator(link.target, arguments=(given, states), keywords=(), outputs=(), module=key)
            operators.append(_run(bare, f"chain_{key}", caller, values))
            made = tuple(Reference(name) for name in _made_by(operators[-1]))
            given = (made if operators[-1].is_tuple else made[0],)
        if loss is not None:
            everything = given[0], tuple(Reference(name) for name in inputs)
            bare = Operator(LOSS, arguments=(everything, ()), keywords=(), outputs=())
            operators.append(_run(bare, "chain_loss", caller, values))
    return tuple(operators)


def _run(bare: Operator, name: str, caller: Caller, values: dict[str, Tensor]) -> Operator:
    """The operator with what running it tells; what it makes is put among the values."""
    held = {one: version_of(values[one]) for one in bare.reads()}
    with FlopCounterMode(display=False) as counter, _Watch() as watch:
        returned = caller.function_of(bare)(*_filled(bare.arguments, values))
    is_tuple = isinstance(returned, tuple | list)
    outputs = []
    for place, part in enumerate(returned if is_tuple else (returned,)):
        if not isinstance(part, Tensor):
            who = (
                f"Link {bare.module} of the chain ({bare.target})" if bare.module else "The loss of the chain"
            )
            raise BiremeError(
                f"{who} returns a {type(part).__name__}. Return a tensor, or a tuple of tensors: only "
                "they can go to another device."
            )
        outputs.append(
            Value(f"{name}.{place}" if is_tuple else name, tuple(part.shape), dtype_name(part.dtype))
        )
        values[outputs[-1].name] = part
    return replace(
        bare,
        outputs=tuple(outputs),
        is_tuple=is_tuple,
        mutates=tuple(one for one, version in held.items() if version_of(values[one]) != version),
        is_random=watch.has_drawn,
        flops=float(counter.get_total_flops()),
    )


def _filled(argument: Argument, values: Tensors) -> Any:
    match argument:
        case Reference(name):
            return values[name]
        case tuple():
            return tuple(_filled(part, values) for part in argument)
    return argument


def _for_any_batch(operator: Operator, larger: Operator, batch: int) -> Operator:
    """The operator with lengths in b, from what it makes for `batch` samples and for one more."""
    outputs = []
    for one, more in zip(operator.outputs, larger.outputs, strict=True):
        assert one is not None
        assert more is not None
        lengths = tuple(_length(*pair, batch) for pair in zip(one.shape, more.shape, strict=True))
        outputs.append(replace(one, shape=lengths))
    return replace(operator, outputs=tuple(outputs))


def _length(one: Length, more: Length, batch: int) -> Length:
    assert isinstance(one, int)
    assert isinstance(more, int)
    step, rest = more - one, one - (more - one) * batch
    if not step:
        return one
    product = "b" if step == 1 else f"{step}*b"
    return f"{product} + {rest}" if rest else product


def _outputs(operators: tuple[Operator, ...], *, has_loss: bool) -> tuple[Output, ...]:
    """The results of the last module by name, the loss ahead of them."""
    *_, last = (operator for operator in operators if operator.target != LOSS)
    made = _made_by(last)
    if last.is_tuple:
        results = [Output(str(place), Reference(name)) for place, name in enumerate(made)]
    else:
        is_scalar = last.outputs[0] is not None and last.outputs[0].shape == ()
        results = [Output("loss" if is_scalar and not has_loss else "output", Reference(made[0]))]
    return (*((Output("loss", Reference("chain_loss")),) if has_loss else ()), *results)
