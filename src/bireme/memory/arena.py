"""An arena: flat memory of one dtype on one device, with a view for each of its slots."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

# Places for named tensors in flat memory, counted in elements.
#
# Weights, gradient sums and an optimizer's state of the same parameters share one layout, so a range of one
# kind is the same range of every other. Slots follow each other without gaps: memory is exactly what it
# holds.


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one tensor lies, from `begin` up to `end`."""

    shape: tuple[int, ...]
    begin: int
    end: int


class Slots(dict[str, _Slot]):
    """The layout of tensors of these shapes: their slots by name, in the order in which they lie."""

    __slots__ = ("num_elements",)

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + prod(shape)
            self[name] = _Slot(tuple(shape), begin, end)
        self.num_elements = end
        """How many elements all slots have."""


# Who gives memory to arenas: torch's allocator, or a range of addresses that chunks come and go in.


class ArenaAllocator(Protocol):
    """Gives flat memory."""

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for `num_elements`; its content is undefined."""


class _Plain:
    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=device)


PLAIN: ArenaAllocator = _Plain()
"""Torch's allocator."""


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


# An arena whose memory is there for a while only: its views stay what they are, but not what is in them.
#
# On a processor it lies in pages of its own, which the system takes back; torch's allocator would keep most
# of what it is given back. On an accelerator that allocator gives the memory again each time. Tensors that
# share the arena's storage, as autograd's saved ones do, find it wherever it is.


class LentArena(Arena):
    """Begins without memory."""

    __slots__ = ("_mapped", "unversioned")

    def __init__(self, slots: Slots, dtype: torch.dtype, device: torch.device) -> None:
        self._mapped: mmap.mmap | None = None
        """Pages that the system gives when they are written to; None on an accelerator."""
        super().__init__(slots, dtype, device, self)
        self.unversioned: Tensor = self.flat.data
        """The arena as a tensor that autograd does not know: what is written to it is no change of leaves
        that graphs have saved."""
        self.let_go()

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Its memory."""
        if device.type != "cpu" or not num_elements:
            return PLAIN.carve(num_elements, dtype, device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapped = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
        return torch.frombuffer(self._mapped, dtype=dtype)

    def take(self) -> None:
        """Have memory, if there is none; what is in it is undefined then."""
        storage = self.flat.untyped_storage()
        if self._mapped is None and storage.nbytes() != self.flat.nbytes:
            storage.resize_(self.flat.nbytes)

    def let_go(self) -> None:
        """Give the memory back. What views have is undefined until it is taken again."""
        self.let_go_of_pages()
        if self._mapped is None:
            self.flat.untyped_storage().resize_(0)

    def let_go_of_pages(self) -> None:
        """The same from any thread, where that can be: an accelerator's allocator takes memory back in the
        order of the stream that it gave it to.
        """
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)
