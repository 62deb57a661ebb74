"""One optimizer state for any number of weight versions.

Ordinary torch optimizers do the arithmetic. Their groups are given, for one step at a time, whatever tensors
are to be stepped, with the state of the parameters of these names. What may be assumed of an optimizer is
that it treats each parameter apart from the others, and that it keeps what it remembers of a parameter in
`optimizer.state` and what it remembers of all of them in its groups. All of torch's do but LBFGS.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, Arena, ArenaAllocator
from bireme.model.torch_private import step_optimizer
from bireme.runtime.parameter_groups import (
    ParameterGroup,
    ParameterGroupPart,
    owners_of,
    parameter_groups_of,
    part_of,
)

NamedTensors = list[tuple[str, Tensor]]

OptimizerFactory = Callable[[NamedTensors], Optimizer | Sequence[Optimizer]]
"""Makes what steps the given parameters. Each of them must be in just one group of one optimizer."""

# Arenas for what optimizers remember of each element of their parameters.
#
# Optimizers make their state themselves, at a parameter's first step, nearly all of it by `zeros_like`.
# Within `made_here` that gives places in arenas, so the state never lies twice; what is made otherwise is
# moved.


class _StateArenas:
    """The arenas of the parameters on some parameter groups."""

    def __init__(self, parameter_groups: Iterable[ParameterGroup], memory: ArenaAllocator = PLAIN) -> None:
        self._memory = memory
        self._parameter_group_of = {
            name: parameter_group for parameter_group in parameter_groups for name in parameter_group.slots
        }
        self._arenas: dict[tuple[ParameterGroup, torch.dtype], list[Arena]] = {}
        self._kept: dict[str, dict[str, Arena]] = {}
        """For each parameter the arenas in which it has something, by the keys of its state."""
        self._made: dict[str, list[Arena]] = {}
        """For each parameter the arenas in which zeros were made for it, whose keys are not known yet."""

    @property
    def num_bytes(self) -> int:
        return sum(arena.num_bytes for arenas in self._arenas.values() for arena in arenas)

    def hold(self, name: str, key: str) -> bool:
        """Whether what is remembered of a parameter under a key lies in an arena."""
        return key in self._kept.get(name, {})

    @contextmanager
    def made_here(self, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within this context, zeros like a parameter's tensor or its gradient are places in arenas."""
        names = {id(tensor): name for name, both in tensors.items() for tensor in both}
        if not names:
            yield
            return

        def place(like: Tensor, dtype: torch.dtype) -> Tensor | None:
            name = names.get(id(like))
            if name is None or like.shape != self._parameter_group_of[name].slots[name].shape:
                return None
            arena = self._free(name, dtype, like.device)
            self._made.setdefault(name, []).append(arena)
            view = arena.views[name]
            view.zero_()
            return view

        with _ZerosPlaced(place):
            yield

    def taken_in(self, name: str, key: str, value: Tensor) -> Tensor:
        """A tensor of a parameter's state, in an arena if it has an element for each of the parameter's."""
        kept = self._kept.setdefault(name, {})
        if key not in kept:
            made = self._made.get(name, [])
            arena = next((one for one in made if one.views[name] is value), None)
            if arena is not None:
                made.remove(arena)
            elif (
                value.ndim
                and value.numel()
                and value.shape == self._parameter_group_of[name].slots[name].shape
            ):
                arena = self._free(name, value.dtype, value.device)
            else:
                return value
            kept[key] = arena
        view = kept[key].views[name]
        return view if view is value else view.copy_(value)

    def room(self, name: str, key: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The place of what is remembered of each element of a parameter under a key."""
        kept = self._kept.setdefault(name, {})
        if key not in kept:
            kept[key] = self._free(name, dtype, device)
        return kept[key].views[name]

    def forget(self) -> None:
        """Nothing is remembered any more; the arenas are used again."""
        self._kept.clear()
        self._made.clear()

    def _free(self, name: str, dtype: torch.dtype, device: torch.device) -> Arena:
        """An arena in which a parameter's slot is free."""
        parameter_group = self._parameter_group_of[name]
        taken = [*self._kept.get(name, {}).values(), *self._made.get(name, [])]
        arenas = self._arenas.setdefault((parameter_group, dtype), [])
        for arena in arenas:
            if not any(arena is one for one in taken):
                return arena
        arenas.append(Arena(parameter_group.slots, dtype, device, self._memory))
        return arenas[-1]


class _ZerosPlaced(TorchFunctionMode):
    """Asks for a place where `torch.zeros_like` is called; elsewhere nothing changes."""

    def __init__(self, place: Callable[[Tensor, torch.dtype], Tensor | None]) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is torch.zeros_like and args:
            placed = self._place(args[0], options.get("dtype") or args[0].dtype)
            if placed is not None:
                return placed
        return func(*args, **options)


Tensors = Mapping[str, Tensor]

_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers that treat each element apart, so that a large parameter can be tried slice by slice."""

_BY_PARAMETER = _ELEMENTWISE | {optim.Muon}
"""Optimizers whose groups never change, so that a step may be made in several calls."""

SETTINGS = frozenset({"params", "param_names", "lr"})
"""What is in a group and is no memory of the optimizer's."""

_GROUP = "group."
"""Begins the names of what an optimizer remembers in a parameter's group."""


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where a parameter is stepped: its optimizer, and which of its groups."""

    name: str
    shape: torch.Size
    optimizer: Optimizer
    group: int

    @property
    def may_be_sliced(self) -> bool:
        """Whether parts of the parameter can be stepped apart."""
        return type(self.optimizer) in _ELEMENTWISE

    @property
    def may_be_apart(self) -> bool:
        """Whether the parameter can be stepped apart from the optimizer's others."""
        return type(self.optimizer) in _BY_PARAMETER


class StepShare(Protocol):
    """Which of several members this replica is, of those that step a part of each parameter group."""

    member: int
    num_members: int


@dataclass(slots=True, eq=False)
class Stepped:
    """A tensor to be stepped in place, its gradient, and the state to do it with, which may be replaced."""

    home: Home
    tensor: Tensor
    gradient: Tensor
    state: dict[str, Any] = field(default_factory=dict)


class Stepper:
    """Steps tensors of the names, shapes and dtypes of `parameters`, of which it keeps only the state.

    The factory's optimizers must hold every parameter once. `parameter_groups` lay the parameters out so that
    those of one optimizer and dtype, and of equal entries in `alike`, lie together. `memory` is for the
    state. With `share` it steps one member's part of each parameter group only: flat pieces of parameters,
    by name, and whole parameters of an optimizer that needs them whole.
    """

    def __init__(
        self,
        parameters: Tensors,
        factory: OptimizerFactory,
        alike: Mapping[str, Hashable] | None = None,
        memory: ArenaAllocator = PLAIN,
        share: StepShare | None = None,
    ) -> None:
        self._factory = factory
        self.parts: tuple[ParameterGroupPart, ...] = ()
        """Those of the parameter groups, if it steps parts only."""
        self._homes = self._made(parameters)
        numbers = {id(one): index for index, one in enumerate(self._optimizers)}
        owners = None if share is None else self._owners(share)
        self.parameter_groups = parameter_groups_of(
            parameters,
            {
                name: (numbers[id(home.optimizer)], alike[name] if alike else None)
                for name, home in self._homes.items()
            },
            owners,
        )
        if share is not None:
            self.parts = tuple(
                part_of(
                    group,
                    share.member,
                    share.num_members,
                    owners if owners and not owners.keys().isdisjoint(group.slots) else None,
                )
                for group in self.parameter_groups
            )
            self._homes = self._owned(self._homes)
        self._arenas = _StateArenas(self.own_parameter_groups, memory)
        self._states: dict[str, dict[str, Any]] = {}

    @property
    def own_parameter_groups(self) -> Sequence[ParameterGroup]:
        """The layout of what it steps."""
        return [part.own for part in self.parts] or self.parameter_groups

    @property
    def homes(self) -> Sequence[Home]:
        """What it steps, in the order of the parameter groups."""
        return [
            self._homes[name]
            for parameter_group in self.own_parameter_groups
            for name in parameter_group.slots
        ]

    def state(self, name: str) -> Mapping[str, Any]:
        """What is remembered of a parameter so far. Not a copy."""
        return self._states.get(name, {})

    @torch.no_grad()
    def step(self, weights: Tensors, gradients: Tensors, *, lr_factor: float = 1.0) -> None:
        """Step the weights that have gradients, in place, at the groups' rates times `lr_factor`."""
        stepped = [
            Stepped(home, weights[home.name], gradients[home.name], self._states.get(home.name, {}))
            for home in self.homes
            if home.name in gradients
        ]
        new = {one.home.name: (one.tensor, one.gradient) for one in stepped if not one.state}
        with self._arenas.made_here(new):
            self.run(stepped, lr_factor)
        for one in stepped:
            self.keep(one)

    def keep(self, one: Stepped) -> None:
        """Remember a parameter's state; tensors like the parameter move into arenas if they are not there."""
        for key, value in one.state.items():
            if isinstance(value, Tensor):
                one.state[key] = self._arenas.taken_in(one.home.name, key, value)
        if one.state:
            self._states[one.home.name] = one.state

    def room(self, name: str, key: str, like: Tensor) -> Tensor:
        """Where something is remembered for each element of a parameter, in the dtype of `like`."""
        return self._arenas.room(name, key, like.dtype, like.device)

    def run(self, stepped: Iterable[Stepped], lr_factor: float) -> None:
        """One step of the optimizers, with nothing but these tensors in their groups."""
        by_optimizer: dict[Optimizer, list[Stepped]] = {}
        for one in stepped:
            by_optimizer.setdefault(one.home.optimizer, []).append(one)
        for optimizer, own in by_optimizer.items():
            _step(optimizer, own, lr_factor)

    def kinds(self, weights: Tensors) -> dict[str, dict[str, torch.dtype]]:
        """Of each of these weights, the keys under which the optimizers remember a number for each element,
        and its dtype; known before the first step.
        """
        tried = []
        for home in self.homes:
            like = weights[home.name]
            zeros = torch.zeros([2] * like.ndim, dtype=like.dtype, device=like.device)
            tried.append(Stepped(home, zeros, torch.zeros_like(zeros)))
        with self.unchanged_groups():
            self.run(tried, 1.0)
        return {
            one.home.name: {
                key: value.dtype
                for key, value in one.state.items()
                if isinstance(value, Tensor) and value.is_floating_point()
                if value.ndim and value.shape == one.tensor.shape
            }
            for one in tried
        }

    @contextmanager
    def unchanged_groups(self) -> Iterator[None]:
        """After this context the optimizers' groups are what they were before it."""
        groups = [
            group for one in self._optimizers if type(one) not in _BY_PARAMETER for group in one.param_groups
        ]
        kept = [copy.deepcopy(_memory_of(group)) for group in groups]
        try:
            yield
        finally:
            for group, memory in zip(groups, kept, strict=True):
                for key in [key for key in _memory_of(group) if key not in memory]:
                    del group[key]
                group.update(memory)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What the optimizers remember of each parameter, by its name; the tensors themselves, not copies.

        What they remember in a group is there for each of its parameters, as `group.KEY`.
        """
        found = {name: dict(self._states[name]) for name in self._homes if self._states.get(name)}
        for name, home in self._homes.items():
            changed = self._changed_in_group(home)
            if changed:
                found.setdefault(name, {}).update({f"{_GROUP}{key}": value for key, value in changed.items()})
        return found

    def load_state_dict(
        self, states: Mapping[str, Mapping[str, Any]], parameters: Tensors, stepped: Tensors | None = None
    ) -> None:
        """Take over copies of the entries of `states` under this stepper's names; the others are not for it.

        A parameter without an entry starts from scratch, like one that has never had a gradient. The factory
        is called again to that end, with `parameters`. Where it steps parts, states are of its pieces, and so
        are those that are `stepped`.
        """
        self._homes = self._owned(self._made(parameters))
        self._states = {}
        self._arenas.forget()
        for name, home in self._homes.items():
            own: dict[str, Any] = {}
            group = home.optimizer.param_groups[home.group]
            for key, value in states.get(name, {}).items():
                if key.startswith(_GROUP):
                    remembered = key.removeprefix(_GROUP)
                    group[remembered] = _as_before(value, group.get(remembered))
                else:
                    own[key] = _adopted(key, value, home, (stepped or parameters)[name])
            if own:
                self.keep(Stepped(home, parameters[name], parameters[name], own))

    def state_bytes(self) -> int:
        """The bytes of all that the optimizers remember so far."""
        return self._arenas.num_bytes + sum(
            value.nbytes
            for name, state in self._states.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and not self._arenas.hold(name, key)
        )

    def _made(self, parameters: Tensors) -> dict[str, Home]:
        """Have the factory make the optimizers, and find each parameter in them, in the given order."""
        # By `.data`, so that nothing an optimizer does with them concerns autograd.
        own = {name: nn.Parameter(tensor.data) for name, tensor in parameters.items()}
        made = self._factory([*own.items()]) if own else ()
        self._optimizers = (made,) if isinstance(made, Optimizer) else tuple(made)
        found = {home.name: home for home in _homes(own, self._optimizers)}
        self._first_memory = {
            id(group): copy.deepcopy(_memory_of(group))
            for one in self._optimizers
            for group in one.param_groups
        }
        for one in self._optimizers:
            for group in one.param_groups:
                group["params"] = []
        return {name: found[name] for name in own}

    def _owners(self, share: StepShare) -> dict[str, int]:
        """The owners of the parameters that are stepped whole."""
        sizes = {name: home.shape.numel() for name, home in self._homes.items() if not home.may_be_sliced}
        return owners_of(sizes, share.num_members)

    def _owned(self, homes: dict[str, Home]) -> dict[str, Home]:
        """The homes of the pieces, where it steps parts only."""
        if not self.parts:
            return homes
        slots = {name: slot for part in self.parts for name, slot in part.own.slots.items()}
        return {
            name: replace(home, shape=torch.Size(slots[name].shape))
            for name, home in homes.items()
            if name in slots
        }

    def _changed_in_group(self, home: Home) -> dict[str, Any]:
        """What an optimizer remembers in a group, which is what has changed there since it was made."""
        if type(home.optimizer) in _BY_PARAMETER:
            return {}
        group = home.optimizer.param_groups[home.group]
        first = self._first_memory[id(group)]
        return {
            key: value
            for key, value in _memory_of(group).items()
            if key not in first or not _same(value, first[key])
        }


def _homes(own: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer]) -> Iterator[Home]:
    """Find each parameter in the optimizers, and refuse optimizers that cannot be used."""
    names = {parameter: name for name, parameter in own.items()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, optim.LBFGS):
            raise BiremeError(
                "LBFGS steps all parameters together, but a stage has only some. Use another optimizer."
            )
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise BiremeError(
                f"{kind} keeps separate weights for training and evaluation and swaps them in "
                "train() and eval(), which the engine does not call. Use one with a single set of weights."
            )
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.pop(parameter, None)
                if name is None:
                    raise BiremeError(
                        f"An optimizer {kind} holds a tensor of shape {tuple(parameter.shape)} that is not "
                        "among the parameters it was given, or that another one holds too. Give each "
                        "parameter that the factory is called with to one optimizer, as it is."
                    )
                yield Home(name, parameter.shape, optimizer, index)
    if names:
        raise BiremeError(
            f"No optimizer holds the parameter {next(iter(names.values()))}. Give every parameter that the "
            "factory is called with to one optimizer; a frozen parameter must not require "
            "gradients in the model."
        )


def _step(optimizer: Optimizer, stepped: Sequence[Stepped], lr_factor: float) -> None:
    """One step of one optimizer; what it remembers of the tensors is in their `state` afterwards."""
    all_groups = optimizer.param_groups
    indices = dict.fromkeys(one.home.group for one in stepped)
    groups = [all_groups[index] for index in indices]
    rates = [group.get("lr") for group in groups]
    for one in stepped:
        all_groups[one.home.group]["params"].append(one.tensor)
        one.tensor.grad = one.gradient
        if one.state:
            optimizer.state[one.tensor] = one.state
    for group, rate in zip(groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate * lr_factor
    optimizer.param_groups = groups
    try:
        step_optimizer(optimizer)
    finally:
        optimizer.param_groups = all_groups
        for group, rate in zip(groups, rates, strict=True):
            group["params"] = []
            if rate is not None:
                group["lr"] = rate
        for one in stepped:
            one.tensor.grad = None
            one.state = optimizer.state.pop(one.tensor, {})


def _memory_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in SETTINGS}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _as_before(value: Any, before: Any) -> Any:
    """A loaded value of a group as what it was before it was written as a tensor."""
    if not isinstance(value, Tensor) or isinstance(before, Tensor):
        return value
    if value.ndim:
        return type(before)(value.tolist()) if isinstance(before, (list, tuple)) else value.tolist()
    return type(before)(value.item()) if isinstance(before, (bool, int, float)) else value.item()


def _adopted(key: str, value: Any, home: Home, parameter: Tensor) -> Any:
    """A copy of a loaded state's value where the optimizer would have made it.

    torch's own loading gives every tensor the parameter's dtype; NAdam's float32 product of momenta would go
    on with other numbers then.
    """
    if not isinstance(value, Tensor):
        return value
    group = home.optimizer.param_groups[home.group]
    counts_at_home = key == "step" and not group.get("fused") and not group.get("capturable")
    is_like_parameter = value.ndim > 0 and value.shape == home.shape and value.is_floating_point()
    return value.to(
        value.device if counts_at_home else parameter.device,
        parameter.dtype if is_like_parameter else value.dtype,
        copy=True,
    )
