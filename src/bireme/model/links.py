"""The links of a chain: modules that run one after the other, each called with its weights as arguments."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.argument import Argument, Reference
from bireme.model.capture import Inputs, Loss
from bireme.model.convert import dtype_name
from bireme.model.graph import ModelState, Operator
from bireme.model.torch_private import own_buffers, own_parameters

__all__ = ["LOSS", "Caller", "ChainLink", "Modules", "first_arguments", "links_of"]

LOSS = "chain.loss"
"""The target of the operator that is the loss; it is given the last link's result and all inputs."""

Modules = nn.Sequential | Sequence[nn.Module]


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One module of a chain."""

    module: nn.Module
    target: str
    names: dict[str, str]
    """The module's own names of its parameters and buffers, and under which they are in the graph."""
    states: tuple[ModelState, ...]


def links_of(modules: Modules) -> dict[str, ChainLink]:
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
        f"{key}.{local}": tensor for key, module in whole.items() for local, tensor in _tensors(module)
    }
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            aliases.setdefault(first[id(tensor)], []).append(name)
    links = {}
    for key, module in whole.items():
        names = {local: first[id(tensor)] for local, tensor in _tensors(module)}
        persistent = set(module.state_dict(keep_vars=True))
        states = tuple(
            ModelState(
                name=name,
                shape=tuple(tensors[name].shape),
                dtype=dtype_name(tensors[name].dtype),
                is_parameter=isinstance(tensors[name], nn.Parameter),
                trainable=isinstance(tensors[name], nn.Parameter) and tensors[name].requires_grad,
                persistent=local in persistent,
                aliases=tuple(aliases.get(name, ())),
            )
            for local, name in names.items()
            if name == f"{key}.{local}"
        )
        links[key] = ChainLink(module, _target(module), names, states)
    return links


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _target(module: nn.Module) -> str:
    """The same for modules of the same class that show themselves alike and hold tensors alike."""
    kind = type(module)
    held = [(local, tuple(t.shape), t.dtype, t.requires_grad) for local, t in _tensors(module)]
    told = repr((kind.__module__, kind.__qualname__, repr(module), held))
    return f"chain.{kind.__name__}.{hashlib.sha256(told.encode()).hexdigest()[:16]}"


class Caller:
    """Makes functions of the operators of a chain: a module called with the weights it is given, or the loss.

    They take the operator's two arguments, what is given and the module's states.
    """

    def __init__(
        self, links: Mapping[str, ChainLink], inputs: tuple[str, ...], loss: Loss | None, training: bool
    ) -> None:
        self.links = links
        self.inputs = inputs
        self.loss = loss
        self.training = training

    def function_of(self, operator: Operator) -> Callable[..., Any]:
        """What runs for an operator, if the modules are those that it was made of."""
        if operator.target == LOSS:
            if self.loss is None:
                raise BiremeError("The chain's graph ends in a loss. Give the loss that it was made with.")
            return self._function_of_loss(self.loss)
        link = self.links.get(operator.module)
        if link is None or link.target != operator.target:
            found = f"{type(link.module).__name__} of another kind" if link is not None else "nothing"
            raise BiremeError(
                f"The graph has {operator.target} as link {operator.module} of its chain, and the modules "
                f"have {found} there. Give the modules that the graph was made of."
            )
        return self._function_of_link(link)

    def _function_of_loss(self, loss: Loss) -> Callable[..., Any]:
        names = self.inputs
        are_named = names != tuple(str(place) for place in range(len(names)))

        def call_loss(given: tuple[Any, tuple[Tensor, ...]], _states: tuple[()]) -> Any:
            returned, inputs = given
            return loss(returned, dict(zip(names, inputs, strict=True)) if are_named else inputs)

        return call_loss

    def _function_of_link(self, link: ChainLink) -> Callable[..., Any]:
        training, module = self.training, link.module
        places = _places(module, link.names)
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


def _places(module: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Where a module keeps its tensors, so that others can be put there for one call.

    `torch.func.functional_call` does the same, and looks for these places at every call.
    """
    found = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = own_parameters(owner)
        found.append((table if leaf in table else own_buffers(owner), leaf))
    return found


def first_arguments(module: nn.Module, example_inputs: Inputs) -> tuple[Argument, ...]:
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
