"""Weights from a seed, for a part of a model: those of one stage, the same whatever the other stages are.

The model may lie on the meta device and is left as it was. Its own code initialises the weights, one module
after the other: all others are on the meta device meanwhile, where initialising costs nothing.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bireme.errors import BiremeError, closest
from bireme.model.torch_private import DispatchMode, own_buffers, own_parameters, schema_of, storage_id

__all__ = ["materialise"]

STANDARD_DEVIATION = 0.02
"""Of a parameter with several axes that no code of the model initialises."""


def materialise(
    model: nn.Module,
    names: Iterable[str],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    guesses: bool = True,
) -> dict[str, Tensor]:
    """The parameters and buffers of these names, as the model's own code initialises them.

    Every module's `reset_parameters` runs, and then `_init_weights` of the model around it where there is
    one, children before parents. What they draw depends on the seed, the module's name and the module's code
    alone: not on what else is asked for, and not on the device, for they draw on the CPU. A tied parameter
    is made once, under its first name.

    A parameter that none of this code writes to is normal with a deviation of 0.02 where it has several axes,
    one where it has one and is called `weight`, and zero else. If the model holds numbers, its buffers that
    nothing writes to keep theirs, and so does a parameter whose elements are all equal. Without `guesses`
    a parameter on the meta device that none of this code writes to is refused. `dtype` is for
    parameters; without it, and for buffers, the model's own holds. The caller's random state is untouched.
    """
    parts = _Parts(model)
    firsts = {name: parts.first_name(name) for name in names}
    wanted = dict.fromkeys(firsts.values())
    made: dict[str, Tensor] = {}
    with parts.swapped(), torch.random.fork_rng(devices=[]), torch.no_grad():
        for module in dict.fromkeys(first.rpartition(".")[0] for first in wanted):
            fresh = parts.bring(module)
            draws = _initialised(model, module, seed)
            for first in (name for name in fresh if name in wanted):
                tensor = _made(first, parts, draws, guesses=guesses)
                converts = dtype is not None and parts.is_parameter(first) and tensor.is_floating_point()
                made[first] = tensor.detach().to(device, dtype if converts else tensor.dtype)
            parts.take_away(fresh)
    return {name: made[first] for name, first in firsts.items()}


class _Parts:
    """Where each tensor of a model is, and what is made in its place."""

    def __init__(self, model: nn.Module) -> None:
        self.place: dict[str, tuple[nn.Module, str]] = {}
        """Module and name there of every tensor, under all its names."""
        self.own: dict[str, Tensor] = {}
        self.fresh: dict[str, Tensor] = {}
        self.of_module: dict[str, list[str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for local, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                if tensor is not None:
                    name = f"{prefix}.{local}" if prefix else local
                    self.place[name] = module, local
                    self.own[name] = tensor
                    self.of_module.setdefault(prefix, []).append(name)
        self.first: dict[int, str] = {}
        for name, tensor in self.own.items():
            self.first.setdefault(id(tensor), name)

    def first_name(self, name: str) -> str:
        """The name under which a tensor is made that may have others."""
        if name not in self.own:
            raise BiremeError(f"The model has no parameter or buffer {name}. {closest(name, self.own)}")
        return self.first[id(self.own[name])]

    def is_parameter(self, name: str) -> bool:
        return isinstance(self.own[name], nn.Parameter)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace all tensors with ones without numbers; then put all back."""
        modules = {module for module, _ in self.place.values()}
        before = [(module, dict(own_parameters(module)), dict(own_buffers(module))) for module in modules]
        try:
            for name in self.own:
                self._put(name, "meta")
            yield
        finally:
            for module, parameters, buffers in before:
                own_parameters(module).update(parameters)
                own_buffers(module).update(buffers)

    def bring(self, module: str) -> list[str]:
        """Give a module's own tensors memory.

        Not a tied one which is first elsewhere: as if it was tied to that one later.
        """
        fresh = [name for name in self.of_module[module] if self.first_name(name) == name]
        for name in fresh:
            self._put(name, "cpu")
        return fresh

    def take_away(self, names: Iterable[str]) -> None:
        """Undo this."""
        for name in names:
            self._put(name, "meta")

    def _put(self, name: str, device: str) -> None:
        module, local = self.place[name]
        fresh = torch.empty_like(self.own[name], device=device, requires_grad=False)
        if self.is_parameter(name):
            fresh = own_parameters(module)[local] = nn.Parameter(fresh, requires_grad=False)
        else:
            own_buffers(module)[local] = fresh
        self.fresh[name] = fresh

    def now(self, name: str) -> Tensor:
        """What is where a tensor was; the model's code may have put something of its own there."""
        module, local = self.place[name]
        found = own_parameters(module).get(local, own_buffers(module).get(local))
        assert found is not None
        return found


class _Draws(DispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Seeds every draw by where it is made, and remembers which storages are written to."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seed = seed
        self.where = ""
        self.num_draws = 0
        self.written: set[int] = set()

    def start(self, where: str) -> None:
        self.where, self.num_draws = where, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            text = f"{self.seed}/{self.where}/{self.num_draws}"
            digest = hashlib.sha256(text.encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            self.num_draws += 1
        schema = schema_of(func)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                if isinstance(given, Tensor):
                    self.written.add(storage_id(given))
        return func(*args, **kwargs)


def _initialised(model: nn.Module, module: str, seed: int) -> _Draws:
    """Run all code of the model that initialises a module's own tensors."""
    draws = _Draws(seed)
    with draws:
        for name, method, initialise in _initialisers(model, module):
            draws.start(f"{module}/{name}/{method}")
            try:
                initialise()
            except Exception as error:  # the code is the model's: anything can come out of it
                raise BiremeError(
                    f"{method} of {name or 'the model'} cannot run for {module or 'its own tensors'} alone: "
                    f"{error}. Save the whole model's weights to a folder, and read them from there."
                ) from error
    return draws


def _initialisers(model: nn.Module, module: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """What the model's constructor runs on a module and on those around it, in order, with names."""
    parts = module.split(".") if module else []
    around = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = {name: model.get_submodule(name) for name in around}
    for name in around:
        for method in ("reset_parameters", "_reset_parameters"):
            reset = getattr(found[name], method, None)
            if reset is not None and _takes(reset, 0):
                yield name, method, reset
                break
    for place, name in enumerate(around):
        for outer in around[place:]:
            initialise = getattr(found[outer], "_init_weights", None)
            if initialise is not None and _takes(initialise, 1):
                yield name, "_init_weights", partial(initialise, found[name])
                break


def _takes(function: Any, num_arguments: int) -> bool:
    """Whether it can be called with so many arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False
    return True


def _made(name: str, parts: _Parts, draws: _Draws, *, guesses: bool) -> Tensor:
    """What a wanted tensor has become."""
    own, now = parts.own[name], parts.now(name)
    is_written = now is not parts.fresh[name] or storage_id(now) in draws.written
    if parts.is_parameter(name):
        if not own.is_meta and (own.numel() > 1 or not is_written) and _is_constant(own):
            return own.detach().cpu().clone()
        if not is_written and not guesses:
            raise BiremeError(
                f"New weights come from reset_parameters() and _init_weights() of the model's modules, and "
                f"none of them writes {name}. Let a reset_parameters() of its module write it, or leave out "
                "model.from_scratch to start with the weights that the function makes."
            )
        return now if is_written else _by_default(name, now, draws)
    if is_written:
        return now
    if own.is_meta:
        raise BiremeError(
            f"The model is on the meta device, where its buffer {name} holds no numbers, and no code but its "
            "constructor writes them. Build the model on the cpu, or let a reset_parameters() of its module "
            "write them."
        )
    return own.detach().cpu().clone()


def _is_constant(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return bool((flat == flat[:1]).all())


def _by_default(name: str, parameter: Tensor, draws: _Draws) -> Tensor:
    if parameter.ndim > 1:
        draws.start(name)
        with draws:
            return nn.init.normal_(parameter, 0.0, STANDARD_DEVIATION)
    is_scale = parameter.ndim == 1 and name.split(".")[-1] == "weight"
    return nn.init.constant_(parameter, 1.0 if is_scale else 0.0)
