"""The weights of one shelf: an arena for each bank, and one for the newest weights where they are apart."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.memory.arena import Arena
from bireme.runtime.shelf import Shelf
from bireme.runtime.stage_memory import StageMemory
from bireme.schedule.instruction import Item

__all__ = ["ShelfWeights", "copy_by_name"]

Tensors = Mapping[str, Tensor]


class ShelfWeights:
    """The arenas of one shelf: its banks, and the newest weights where they are `apart` from the banks."""

    def __init__(
        self,
        shelf: Shelf,
        given: Tensors,
        dtypes: Mapping[str, torch.dtype],
        num_banks: int,
        memory: StageMemory,
        *,
        is_apart: bool,
    ) -> None:
        names = tuple(shelf.slots)
        dtype, device = dtypes[names[0]], given[names[0]].device
        self.banks = [Arena(shelf.slots, dtype, device, memory.bank(number)) for number in range(num_banks)]
        self.apart = (
            Arena(shelf.slots, shelf.dtype, device, memory.optimizer())
            if is_apart or dtype != shelf.dtype
            else None
        )
        if memory.has_master and self.apart is None:
            raise BiremeError(
                "The plan pages weights that are made from a master copy, as bfloat16 ones are, and these "
                f"are of {dtype} and have none. Make the plan anew, for the type that the model trains in."
            )
        self.leaves = [_leaves(bank, shelf.dtype) for bank in self.banks]
        with memory.opened(Item.WEIGHTS):
            copy_by_name({name: given[name] for name in names}, self.banks[0].views)
        if self.apart is not None:
            with memory.opened(Item.OPTIMIZER):
                copy_by_name({name: given[name] for name in names}, self.apart.views)

    def stepped(self, bank: int) -> Tensors:
        """What an optimiser steps where a version is made in a bank."""
        return self.leaves[bank] if self.apart is None else self.apart.views

    def round_into(self, bank: int) -> None:
        """Write the newest weights into a bank, where they are apart from it."""
        if self.apart is not None:
            self.banks[bank].flat.copy_(self.apart.flat)


def _leaves(bank: Arena, gradient_dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a bank as leaves of autograd graphs, with gradients in another dtype if need be."""
    leaves = {}
    for name, view in bank.views.items():
        leaf = leaves[name] = view.detach().requires_grad_()
        if leaf.dtype != gradient_dtype:
            leaf.grad_dtype = gradient_dtype
    return leaves


def copy_by_name(source: Tensors, target: Tensors) -> None:
    """Copy each tensor of `source` over that of its name in `target`."""
    for name, tensor in source.items():
        target[name].copy_(tensor)
