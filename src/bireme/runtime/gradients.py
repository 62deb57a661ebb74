"""The gradients of a stage's batches under way, each batch's in arenas of its own.

Two batches may run on the same leaves at once (under 2BW the first two both run on the first version), so a
leaf's own `.grad` belongs to no batch. Here it is lent, for one backward at a time, the sum of the batch that
the backward is for, and autograd adds in place. Sums have at least 32 bits, whatever the leaves have.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bireme.codec.lowrank import Product
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, Arena, ArenaAllocator, LentArena
from bireme.runtime.parameter_groups import ParameterGroup, ParameterGroupPart, without
from bireme.runtime.principal import BatchStreams, PrincipalGradients
from bireme.runtime.sharers import GradientParts


class GradientSums:
    """The sums of one batch. `held` are the parameters that have had a gradient.

    A parameter without one has no sum, not zero: an optimizer leaves it alone then, and does not even decay
    it. `streams` has those gradients that are kept as principal components, if any are. `parts` has this
    replica's parts of those in `views` that replicas add up as they come, if any do.
    """

    __slots__ = ("arenas", "held", "memory", "parts", "source", "streams", "views", "whole_views")

    def __init__(
        self,
        arenas: Sequence[Arena],
        names: Sequence[str],
        memory: ArenaAllocator,
        source: Callable[[], ArenaAllocator],
        parts: GradientParts | None = None,
    ) -> None:
        self.arenas = tuple(arenas)
        self.parts = parts
        self.memory, self.source = memory, source
        views = {name: view for arena in arenas for name, view in arena.views.items()}
        self.views: Mapping[str, Tensor] = {name: views[name] for name in names}
        self.whole_views = self.views
        """Those that are not kept in parts."""
        if parts is not None:
            apart = self.views.keys() - set(parts.names)
            self.whole_views = {name: views[name] for name in names if name in apart}
        self.held: set[str] = set()
        self.streams: BatchStreams | None = None

    def into(self, leaves: Mapping[str, Tensor]) -> "_Lending":
        """Within this context `torch.autograd.backward` adds the leaves' gradients to the sums."""
        if self.parts is not None:
            self.parts.take()
        return _Lending(self, leaves)

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that was computed apart, as by the weight half of a split backward."""
        if self.parts is not None:
            self.parts.take()
        if name in self.held:
            self.views[name].add_(gradient)
        else:
            self.views[name].copy_(gradient)
            self.held.add(name)

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each parameter in the arenas with its sum, or the piece of it, if it has one."""
        parts = self.parts
        if parts is not None:
            yield from ((name, parts.piece(name)) for name in parts.names)
        whole = self.whole_views.items()
        yield from ((name, view if name in self.held else None) for name, view in whole)

    def all_items(self) -> Iterator[tuple[str, Tensor | Product | None]]:
        """Each parameter with its gradient, if it has one."""
        yield from self.items()
        if self.streams is not None:
            yield from self.streams.items()


def _plain() -> ArenaAllocator:
    return PLAIN


class GradientPool:
    """Arenas for as many batches as are under way at once; those of a batch that is done are used again.

    `names` are the parameters in the order in which sums are gone through. Those of `principal` are in no
    arena. `memory` gives the memory of each batch's sums; copies of sums lie with torch in any case. `parts`
    are those of the parameter groups, where replicas share the optimizer. Where they share the weights too,
    sums are kept in parts, but those of the parameters in `summed_apart`.
    """

    def __init__(
        self,
        parameter_groups: Sequence[ParameterGroup],
        names: Sequence[str],
        device: torch.device,
        principal: PrincipalGradients | None = None,
        memory: Callable[[], ArenaAllocator] | None = None,
        parts: Sequence[ParameterGroupPart] = (),
        *,
        summed_apart: Collection[str] | None = None,
    ) -> None:
        self.parts = parts
        self._summed_apart = None if summed_apart is None else frozenset(summed_apart)
        memory = memory or _plain
        apart = {} if principal is None else principal.shapes
        self._parameter_groups = without(parameter_groups, apart) if apart else tuple(parameter_groups)
        self._names = tuple(name for name in names if name not in apart)
        self.principal = principal
        self._most_stream_bytes = 0
        self._device = device
        self._memory = memory
        self._free: dict[Callable[[], ArenaAllocator], list[GradientSums]] = {memory: [], _plain: []}
        """By who gave their memory."""
        self._of_batch: dict[int, GradientSums] = {}
        """The sums of the batches under way."""
        self._num_sets = 0
        self._set_bytes = sum(parameter_group.num_bytes for parameter_group in self._parameter_groups)

    def reserve(self, batch: int) -> ArenaAllocator:
        """The memory of the sums of a batch, which may not have begun yet."""
        return self._sums_of(batch).memory

    def open(self, batch: int) -> GradientSums:
        """Sums for a batch that begins."""
        sums = self._sums_of(batch)
        if self.principal is not None:
            sums.streams = self.principal.open(batch)
        return sums

    def _sums_of(self, batch: int) -> GradientSums:
        if batch not in self._of_batch:
            self._of_batch[batch] = self._opened(self._memory)
        return self._of_batch[batch]

    def _opened(self, source: Callable[[], ArenaAllocator]) -> GradientSums:
        if self._free[source]:
            return self._free[source].pop()
        self._num_sets += 1
        memory = source()
        if self._summed_apart is not None:
            return self._opened_in_parts(self._summed_apart, memory, source)
        arenas = [
            Arena(parameter_group.slots, parameter_group.dtype, self._device, memory)
            for parameter_group in self._parameter_groups
        ]
        return GradientSums(arenas, self._names, memory, source)

    def _opened_in_parts(
        self, summed_apart: frozenset[str], memory: ArenaAllocator, source: Callable[[], ArenaAllocator]
    ) -> GradientSums:
        arenas, lent, parts = [], [], []
        for parameter_group, part in zip(self._parameter_groups, self.parts, strict=True):
            if summed_apart.isdisjoint(parameter_group.slots):
                lent.append(LentArena(parameter_group.slots, parameter_group.dtype, self._device))
                parts.append(part)
            else:
                arenas.append(Arena(parameter_group.slots, parameter_group.dtype, self._device))
        own = GradientParts(lent, parts, self._device, memory)
        self._set_bytes = sum(arena.num_bytes for arena in arenas) + own.num_bytes
        return GradientSums([*arenas, *lent], self._names, memory, source, own)

    @torch.no_grad()
    def open_copy(self, sums: GradientSums) -> GradientSums:
        """A copy of sums, in arenas of its own, with torch. Streams, which no sum changes, are the same."""
        copy = self._opened(_plain)
        copy.streams = None if sums.streams is None else sums.streams.summed()
        for target, source in zip(copy.arenas, sums.arenas, strict=True):
            target.flat.copy_(source.flat)
        copy.held |= sums.held
        return copy

    def release(self, sums: GradientSums) -> None:
        """Take back sums that have been applied."""
        self._of_batch = {batch: own for batch, own in self._of_batch.items() if own is not sums}
        sums.held.clear()
        if sums.parts is not None:
            sums.parts.held.clear()
        if sums.streams is not None:
            self._most_stream_bytes = max(self._most_stream_bytes, sums.streams.num_bytes)
            sums.streams = None
        self._free[sums.source].append(sums)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arenas that stay, and the most that streams have taken in addition."""
        return self._num_sets * (self._set_bytes + self._most_stream_bytes)


class _Lending:
    """Lends sums to leaves and takes them back; a generator would cost several times as much.

    Autograd allocates the gradient of a leaf that has no sum. It is moved into the arena as soon as it is
    there, so no more than one gradient lies outside at a time.
    """

    __slots__ = ("_hooks", "_leaves", "_sums")

    def __init__(self, sums: GradientSums, leaves: Mapping[str, Tensor]) -> None:
        self._sums = sums
        self._leaves = leaves
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        leaves, held = self._leaves, self._sums.held
        for name, view in self._sums.views.items():
            if name in held:
                leaves[name].grad = view
            else:
                move = partial(_move_in, self._sums, name)
                self._hooks.append(leaves[name].register_post_accumulate_grad_hook(move))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for name in self._sums.views:
            self._leaves[name].grad = None


def _move_in(sums: GradientSums, name: str, leaf: Tensor) -> None:
    """Move a leaf's first gradient of a batch into its place."""
    assert leaf.grad is not None, "the hook is called when a gradient has come"
    if leaf.grad.is_sparse:
        raise BiremeError(
            f"The gradient of {name} is sparse, and the engine sums dense ones only. Make its embedding with "
            "sparse=False."
        )
    view = sums.views[name]
    leaf.grad = view.copy_(leaf.grad)
    sums.held.add(name)
