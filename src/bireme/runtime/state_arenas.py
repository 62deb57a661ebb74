"""Arenas for what optimisers remember of each element of their parameters.

Optimisers make their state themselves, at a parameter's first step, nearly all of it by `zeros_like`. Within
`made_here` that gives places in arenas, so the state never lies twice; what is made otherwise is moved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bireme.memory.arena import Arena
from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.runtime.shelf import ParameterGroup

__all__ = ["StateArenas"]


class StateArenas:
    """The arenas of the parameters on some shelves."""

    def __init__(self, shelves: Iterable[ParameterGroup], memory: ArenaAllocator = PLAIN) -> None:
        self._memory = memory
        self._shelf_of = {name: shelf for shelf in shelves for name in shelf.slots}
        self._arenas: dict[tuple[ParameterGroup, torch.dtype], list[Arena]] = {}
        self._kept: dict[str, dict[str, Arena]] = {}
        """For each parameter the arenas in which it has something, by the keys of its state."""
        self._made: dict[str, list[Arena]] = {}
        """For each parameter the arenas in which zeros were made for it, whose keys are not known yet."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all arenas."""
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
            if name is None or like.shape != self._shelf_of[name].slots[name].shape:
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
            elif value.ndim and value.numel() and value.shape == self._shelf_of[name].slots[name].shape:
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
        shelf = self._shelf_of[name]
        taken = [*self._kept.get(name, {}).values(), *self._made.get(name, [])]
        arenas = self._arenas.setdefault((shelf, dtype), [])
        for arena in arenas:
            if not any(arena is one for one in taken):
                return arena
        arenas.append(Arena(shelf.slots, dtype, device, self._memory))
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
