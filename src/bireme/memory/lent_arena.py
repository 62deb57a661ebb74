"""An arena whose memory is there for a while only: its views stay what they are, but not what is in them.

Torch's allocator gives the memory again each time. Tensors that share the arena's storage, as autograd's
saved ones do, find it at its new place.
"""

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.memory.slots import Slots

__all__ = ["LentArena"]


class LentArena(Arena):
    """Begins without memory."""

    __slots__ = ("unversioned",)

    def __init__(self, slots: Slots, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots, dtype, device)
        self.unversioned: Tensor = self.flat.data
        """The arena as a tensor that autograd does not know: what is written to it is no change of leaves
        that graphs have saved."""
        self.let_go()

    def take(self) -> None:
        """Have memory, if there is none; what is in it is undefined then."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self.flat.nbytes:
            storage.resize_(self.flat.nbytes)

    def let_go(self) -> None:
        """Give the memory back. No view may be read or written until it is taken again."""
        self.flat.untyped_storage().resize_(0)
