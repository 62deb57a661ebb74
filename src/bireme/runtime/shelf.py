"""A shelf: parameters of one stage that lie one after the other in every arena, because they are alike.

They have one optimiser, one dtype to be stepped in and one to compute with.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.memory.slots import Slots

__all__ = ["ALIGNED_ELEMENTS", "ParameterGroup", "parameter_groups_of", "without"]

ALIGNED_ELEMENTS = 16
"""Parameters of other lengths lie last, so that kernels find the beginnings of all others aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroup:
    """The layout of some parameters; `dtype` is what they are stepped and their gradients summed in."""

    slots: Slots
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of one arena in the dtype of the steps."""
        return self.slots.num_elements * self.dtype.itemsize


def parameter_groups_of(
    parameters: Mapping[str, Tensor], alike: Mapping[str, Hashable]
) -> tuple[ParameterGroup, ...]:
    """Lay out parameters: those whose entries in `alike` are equal share a shelf."""
    groups: dict[tuple[Hashable, torch.dtype], list[str]] = {}
    for name, tensor in parameters.items():
        groups.setdefault((alike[name], tensor.dtype), []).append(name)
    return tuple(
        ParameterGroup(Slots({name: parameters[name].shape for name in _ordered(names, parameters)}), dtype)
        for (_, dtype), names in groups.items()
    )


def without(shelves: Sequence[ParameterGroup], names: Collection[str]) -> tuple[ParameterGroup, ...]:
    """The shelves as they are if parameters of these names have no place; empty ones are left out."""
    left = (
        ParameterGroup(
            Slots({name: slot.shape for name, slot in shelf.slots.items() if name not in names}), shelf.dtype
        )
        for shelf in shelves
    )
    return tuple(shelf for shelf in left if len(shelf.slots))


def _ordered(names: Iterable[str], parameters: Mapping[str, Tensor]) -> list[str]:
    return sorted(names, key=lambda name: parameters[name].numel() % ALIGNED_ELEMENTS != 0)
