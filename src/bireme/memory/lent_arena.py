"""An arena whose memory is there for a while only: its views stay what they are, but not what is in them.

On a processor it lies in pages of its own, which the system takes back; torch's allocator would keep most of
what it is given back. On an accelerator that allocator gives the memory again each time. Tensors that share
the arena's storage, as autograd's saved ones do, find it wherever it is.
"""

import mmap

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.memory.slots import Slots

__all__ = ["LentArena"]


class LentArena(Arena):
    """Begins without memory."""

    __slots__ = ("_pages", "unversioned")

    def __init__(self, slots: Slots, dtype: torch.dtype, device: torch.device) -> None:
        self._pages = _Pages() if device.type == "cpu" else None
        memory: ArenaAllocator = self._pages or PLAIN
        super().__init__(slots, dtype, device, memory)
        self.unversioned: Tensor = self.flat.data
        """The arena as a tensor that autograd does not know: what is written to it is no change of leaves
        that graphs have saved."""
        self.let_go()

    def take(self) -> None:
        """Have memory, if there is none; what is in it is undefined then."""
        storage = self.flat.untyped_storage()
        if self._pages is None and storage.nbytes() != self.flat.nbytes:
            storage.resize_(self.flat.nbytes)

    def let_go(self) -> None:
        """Give the memory back. What views have is undefined until it is taken again."""
        if self._pages is None:
            self.flat.untyped_storage().resize_(0)
        else:
            self._pages.give_back()

    def let_go_of_pages(self) -> None:
        """The same from any thread, where that can be: an accelerator's allocator takes memory back in the
        order of the stream that it gave it to.
        """
        if self._pages is not None:
            self._pages.give_back()


class _Pages:
    """Pages that the system gives when they are written to."""

    def __init__(self) -> None:
        self._mapped: mmap.mmap | None = None

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for so many elements."""
        if not num_elements:
            return torch.empty(0, dtype=dtype, device=device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapped = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
        return torch.frombuffer(self._mapped, dtype=dtype)

    def give_back(self) -> None:
        """Let the system have them until they are written to again."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)
