"""Where the memory of a stage lies that training changes: with torch, or in ranges that chunks come to.

This is the interface by which weight banks and stages know of paging, and what it is without: nothing is
asked twice, nothing is copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.schedule.instruction import Item

__all__ = ["UNPAGED", "StageMemory", "Stash"]


class Stash:
    """Room for what one micro-batch keeps."""

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy in the room."""
        return tensor

    def saving(self, _others: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Within this context, what autograd saves goes into the room, but for the memory of the others."""
        return nullcontext()


UNPAGED = Stash()
"""Micro-batches keep what they keep with torch."""


class StageMemory:
    """Memory that is always there."""

    is_paged = False
    """Whether reading what there is makes copies of it."""
    has_master = False
    """Whether weights must be made from a master copy, because the version before may be elsewhere."""

    def bank(self, _number: int) -> ArenaAllocator:
        """For the weights of a bank."""
        return PLAIN

    def optimizer(self) -> ArenaAllocator:
        """For what an optimiser steps and remembers, besides banks."""
        return PLAIN

    def gradients(self) -> ArenaAllocator:
        """For the sums of one batch more."""
        return PLAIN

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights that do not learn, where they stay; maybe copies."""
        return weights

    def before_gradients(self, reserve: Callable[[], ArenaAllocator]) -> None:
        """`reserve` is to be asked for memory of `gradients` when a batch's first is about to come."""

    def stash(self, _batch: int, _microbatch: int) -> Stash:
        """For what a micro-batch keeps between its passes."""
        return UNPAGED

    def lasting(self, tensor: Tensor) -> Tensor:
        """A result of a pass that can be read when what the pass used has left; a copy if it lies there."""
        return tensor

    def opened(self, _item: Item, _number: int = 0) -> AbstractContextManager[None]:
        """Within this context an item may be read and written between instructions."""
        return nullcontext()

    def lent(self, _items: Sequence[tuple[Item, int]]) -> AbstractContextManager[bool]:
        """Within this context items, each with its number, can be read where they lie, between instructions;
        False if the device has no room for them.
        """
        return nullcontext(True)

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor with its content, whichever tier has it; a copy if it is paged."""
        return tensor
