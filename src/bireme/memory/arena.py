"""An arena: flat memory of one dtype on one device, with a view for each of its slots."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.memory.slots import Slots

__all__ = ["Arena"]


class Arena:
    """Memory for all of `slots`; what is in it at first is undefined."""

    __slots__ = ("flat", "slots", "views")

    def __init__(
        self, slots: Slots, dtype: torch.dtype, device: torch.device, memory: ArenaAllocator = PLAIN
    ) -> None:
        self.slots = slots
        self.flat = memory.carve(slots.num_elements, dtype, device)
        self.views: Mapping[str, Tensor] = {
            name: self.flat[slot.begin : slot.end].view(slot.shape) for name, slot in slots.items()
        }
        """Each slot in its shape. Writing to one writes to the arena."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the arena."""
        return self.flat.nbytes
