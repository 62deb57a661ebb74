"""A range of addresses in chunks: tensors lie in it for good, and memory beneath a chunk comes and goes.

So views, leaves of autograd and what it has saved of them stay valid while a chunk is elsewhere. Who reads
one that is not there must wait until it is.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ALIGNED", "AddressRange", "ChunkMemory"]

ALIGNED = 64
"""Pieces begin at multiples of so many bytes, as in torch's allocator."""


class ChunkMemory(Protocol):
    """The slots of a device, each of which can be mapped beneath any chunk of any range."""

    slot_bytes: int

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """The bytes of a new range: chunks with nothing beneath them, and memory for more bytes after them.

        The memory of the latter takes room only where it is written to.
        """

    def map(self, chunk: Tensor, slot: int) -> None:
        """Let the bytes of a chunk be those of a slot."""

    def unmap(self, chunk: Tensor) -> None:
        """Let nothing be beneath a chunk."""


class AddressRange:
    """The addresses of one item, from which arenas are carved one after the other.

    What the chunks have no room for lies after them, and stays on the device.
    """

    def __init__(self, memory: ChunkMemory, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = memory.slot_bytes
        paged_bytes = num_chunks * memory.slot_bytes
        self.bytes = memory.reserve(num_chunks, more_bytes=paged_bytes)
        self.paged_bytes = paged_bytes
        self.used_bytes = self._apart_bytes = 0

    @property
    def beyond_bytes(self) -> int:
        """The bytes in use that the chunks had no room for, in the range or apart from it."""
        return max(0, self.used_bytes - self.paged_bytes) + self._apart_bytes

    def chunk(self, number: int) -> Tensor:
        """The bytes of a chunk."""
        return self.bytes[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def has_room(self, num_bytes: int) -> bool:
        """Whether the chunks have room for a piece of so many bytes."""
        return -(-self.used_bytes // ALIGNED) * ALIGNED + num_bytes <= self.paged_bytes

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next piece, or memory of torch's allocator where none is left."""
        begin = -(-self.used_bytes // ALIGNED) * ALIGNED
        end = begin + num_elements * dtype.itemsize
        if end > self.bytes.numel():
            self._apart_bytes += num_elements * dtype.itemsize
            return torch.empty(num_elements, dtype=dtype, device=device)
        self.used_bytes = end
        return self.bytes[begin:end].view(dtype)

    def clear(self) -> None:
        """All pieces are given back."""
        self.used_bytes = self._apart_bytes = 0
