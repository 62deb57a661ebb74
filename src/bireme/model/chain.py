"""The second front end: a chain of modules as a `Graph`, for a model that cannot be captured.

Every module is one operator, so Python in it may do what it likes; only between modules can the chain be
cut. What a module returns, one tensor or a tuple of them, is the next one's only argument, as in an
`nn.Sequential`, and the names of parameters and buffers are those they have there.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.model.capture import Inputs, Loss, batch_size, resized
from bireme.model.convert import aliases_of, dtype_name, first_names, named_tensors
from bireme.model.graph import Argument, Graph, Length, ModelState, Operator, Output, Reference, Value
from bireme.model.stage import Resolve
from bireme.model.torch_private import DispatchMode, tensor_places, version_of

# The links of a chain: modules that run one after the other, each called with its weights as arguments.

_LOSS = "chain.loss"
"""The target of the operator that is the loss; it is given the last link's result and all inputs."""

Modules = nn.Sequential | Sequence[nn.Module]


@dataclass(frozen=True, slots=True)
class _ChainLink:
    """One module of a chain."""

    module: nn.Module
    target: str
    names: dict[str, str]
    """The module's own names of its parameters and buffers, and under which they are in the graph."""
    states: tuple[ModelState, ...]


def _links_of(modules: Modules) -> dict[str, _ChainLink]:
    """The modules by their names in an nn.Sequential."""
    if isinstance(modules, nn.Sequential):
        inside = modules.named_modules(remove_duplicate=False)
        whole = {key: module for key, module in inside if key and "." not in key}
    else:
        whole = {str(place): module for place, module in enumerate(modules)}
    if not whole:
        raise BiremeError("The chain has no modules. It needs at least one.")
    for key, module in whole.items():
        if not isinstance(module, nn.Module):
            raise BiremeError(f"Link {key} of the chain is a {type(module).__name__}. It must be a module.")
    tensors = {
        f"{key}.{local}": tensor for key, module in whole.items() for local, tensor in named_tensors(module)
    }
    first = first_names(tensors.items())
    aliases = aliases_of(first)
    links = {}
    for key, module in whole.items():
        names = {local: first[f"{key}.{local}"] for local, _ in named_tensors(module)}
        persistent = set(module.state_dict(keep_vars=True))
        states = tuple(
            ModelState(
                name=name,
                shape=tuple(tensors[name].shape),
                dtype=dtype_name(tensors[name].dtype),
                is_parameter=isinstance(tensors[name], nn.Parameter),
                trainable=isinstance(tensors[name], nn.Parameter) and tensors[name].requires_grad,
                persistent=local in persistent,
                aliases=tuple(aliases[name]),
            )
            for local, name in names.items()
            if name == f"{key}.{local}"
        )
        links[key] = _ChainLink(module, _target(module), names, states)
    return links


def _target(module: nn.Module) -> str:
    """The same for modules of the same class that show themselves alike and hold tensors alike."""
    kind = type(module)
    held = [(local, tuple(t.shape), t.dtype, t.requires_grad) for local, t in named_tensors(module)]
    told = repr((kind.__module__, kind.__qualname__, repr(module), held))
    return f"chain.{kind.__name__}.{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _resolver(
    links: Mapping[str, _ChainLink], inputs: tuple[str, ...], loss: Loss | None, training: bool
) -> Resolve:
    """Makes functions of the operators of a chain: a module called with the weights it is given, or the loss.

    They take the operator's two arguments, what is given and the module's states. An operator is refused if
    the modules are not those that it was made of.
    """

    def resolved(operator: Operator) -> Callable[..., Any]:
        if operator.target == _LOSS:
            if loss is None:
                raise BiremeError("The chain's graph ends in a loss. Give the loss that it was made with.")
            return _function_of_loss(loss, inputs)
        link = links.get(operator.module)
        if link is None or link.target != operator.target:
            found = f"{type(link.module).__name__} of another kind" if link is not None else "nothing"
            raise BiremeError(
                f"The graph has {operator.target} as link {operator.module} of its chain, and the modules "
                f"have {found} there. Give the modules that the graph was made of."
            )
        return _function_of_link(link, training)

    return resolved


def _function_of_loss(loss: Loss, names: tuple[str, ...]) -> Callable[..., Any]:
    are_named = names != tuple(str(place) for place in range(len(names)))

    def call_loss(given: tuple[Any, tuple[Tensor, ...]], _states: tuple[()]) -> Any:
        returned, inputs = given
        return loss(returned, dict(zip(names, inputs, strict=True)) if are_named else inputs)

    return call_loss


def _function_of_link(link: _ChainLink, training: bool) -> Callable[..., Any]:
    module = link.module
    # `torch.func.functional_call` puts other tensors there too, and looks for these places at every call.
    own_places = {one.name: (one.table, one.key) for one in tensor_places(module)}
    places = [own_places[name] for name in link.names]
    inside = list(module.modules())

    def call_link(given: tuple[Any, ...], states: tuple[Tensor, ...]) -> Any:
        others = [inner for inner in inside if inner.training is not training]
        own = [table[name] for table, name in places]
        try:
            for inner in others:
                inner.training = training
            for (table, name), state in zip(places, states, strict=True):
                table[name] = state
            returned = module(*given)
            made = [table[name] for table, name in places]
        finally:
            for (table, name), tensor in zip(places, own, strict=True):
                table[name] = tensor
            for inner in others:
                inner.training = not training
        for now, state in zip(made, states, strict=True):
            if now is not state:  # the module has replaced its buffer with another tensor
                with torch.no_grad():
                    state.copy_(now)
        return returned

    return call_link


def _first_arguments(module: nn.Module, example_inputs: Inputs) -> tuple[Argument, ...]:
    """What the first module is called with, by position."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if not isinstance(example_inputs, Mapping):
        takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        count = len(example_inputs) if takes_all else min(len(parameters), len(example_inputs))
        return tuple(Reference(str(place)) for place in range(count))
    known = [place for place, parameter in enumerate(parameters) if parameter.name in example_inputs]
    if not known:
        return (Reference(next(iter(example_inputs))),)
    given: list[Argument] = []
    for parameter in parameters[: known[-1] + 1]:
        if parameter.name in example_inputs:
            given.append(Reference(parameter.name))
        elif parameter.default is None or isinstance(parameter.default, bool | int | float | str):
            given.append(parameter.default)
        else:
            raise BiremeError(
                f"The first module of the chain, a {type(module).__name__}, needs {parameter.name}, and the "
                f"example inputs are {', '.join(example_inputs)}. Name one of them {parameter.name}."
            )
    return tuple(given)


_Tensors = Mapping[str, Tensor]


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
    links = _links_of(modules)
    inputs = _by_name(example_inputs, links)
    first = _first_arguments(next(iter(links.values())).module, example_inputs)
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
    """What `StageFunction` needs to run a chain's graph: the modules and the loss that it was made of."""
    return _resolver(_links_of(modules), tuple(value.name for value in graph.inputs), loss, graph.training)


def _by_name(example_inputs: Inputs, links: Mapping[str, _ChainLink]) -> dict[str, Tensor]:
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


class _Watch(DispatchMode):
    """Notes whether anything is drawn at random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _traced(
    links: Mapping[str, _ChainLink],
    first: tuple[Argument, ...],
    inputs: _Tensors,
    loss: Loss | None,
    training: bool,
) -> tuple[Operator, ...]:
    """The operators with the shapes they have for these inputs."""
    resolve = _resolver(links, tuple(inputs), loss, training)
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
            operators.append(_run(bare, f"chain_{key}", resolve, values))
            made = tuple(Reference(value.name) for value in operators[-1].made)
            given = (made if operators[-1].is_tuple else made[0],)
        if loss is not None:
            everything = given[0], tuple(Reference(name) for name in inputs)
            bare = Operator(_LOSS, arguments=(everything, ()), keywords=(), outputs=())
            operators.append(_run(bare, "chain_loss", resolve, values))
    return tuple(operators)


def _run(bare: Operator, name: str, resolve: Resolve, values: dict[str, Tensor]) -> Operator:
    """The operator with what running it tells; what it makes is put among the values."""
    held = {one: version_of(values[one]) for one in bare.reads()}
    with FlopCounterMode(display=False) as counter, _Watch() as watch:
        returned = resolve(bare)(*_filled(bare.arguments, values))
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


def _filled(argument: Argument, values: _Tensors) -> Any:
    match argument:
        case Reference(name):
            return values[name]
        case tuple():
            return tuple(_filled(part, values) for part in argument)
    return argument


def _for_any_batch(operator: Operator, larger: Operator, batch: int) -> Operator:
    """The operator with lengths in b, from what it makes for `batch` samples and for one more."""
    outputs = []
    for one, more in zip(operator.made, larger.made, strict=True):
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
    *_, last = (operator for operator in operators if operator.target != _LOSS)
    if last.is_tuple:
        results = [Output(str(place), Reference(value.name)) for place, value in enumerate(last.made)]
    else:
        is_loss = last.made[0].shape == () and not has_loss
        results = [Output("loss" if is_loss else "output", Reference(last.made[0].name))]
    return (*((Output("loss", Reference("chain_loss")),) if has_loss else ()), *results)
