"""A budget of ordinary memory, cut into slots that are mapped beneath chunks: the device tier on a CPU.

The slots are a file in memory. With `poisons` a chunk that is not there reads as NaN, and so does one whose
copy has not come; for tests. Otherwise nothing is beneath it, and who reads it ends by a signal.
"""

import os
import weakref

from torch import Tensor

from bireme.errors import BiremeError
from bireme.memory.system_memory import (
    PAGE_BYTES,
    check_can_map,
    fill_bytes,
    map_file,
    map_nothing,
    reserve,
    shared_file,
    tensor_at,
    whole_pages,
)

__all__ = ["HostChunks"]

POISON = 0xFF
"""In every byte: NaN in each type of floating-point number, -1 in integers."""


class HostChunks:
    """So many slots of so many bytes each."""

    def __init__(self, num_slots: int, slot_bytes: int, *, poisons: bool = False) -> None:
        check_can_map()
        if slot_bytes % PAGE_BYTES:
            raise BiremeError(
                f"Chunks of {slot_bytes} bytes cannot be paged here: a chunk must be a multiple of "
                f"{PAGE_BYTES} bytes, the page of memory of this machine. Leave the size of chunks out, or "
                "page larger stages."
            )
        self.slot_bytes = slot_bytes
        self._poison = num_slots * slot_bytes if poisons else None
        self._file = shared_file((num_slots + poisons) * slot_bytes)
        weakref.finalize(self, os.close, self._file).atexit = False
        if poisons:
            os.pwrite(self._file, bytes([POISON]) * slot_bytes, num_slots * slot_bytes)

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """As `ChunkMemory` says."""
        paged, more = num_chunks * self.slot_bytes, whole_pages(more_bytes)
        address = reserve(paged + more)
        found = tensor_at(address, paged + more)
        if more:
            beyond = shared_file(more)
            map_file(address + paged, more, beyond, 0, populates=False)
            os.close(beyond)
        for chunk in range(num_chunks):
            self.unmap(found[chunk * self.slot_bytes : (chunk + 1) * self.slot_bytes])
        return found

    def map(self, chunk: Tensor, slot: int) -> None:
        """As `ChunkMemory` says."""
        map_file(chunk.data_ptr(), self.slot_bytes, self._file, slot * self.slot_bytes)
        if self._poison is not None:
            fill_bytes(chunk, POISON)

    def unmap(self, chunk: Tensor) -> None:
        """As `ChunkMemory` says."""
        if self._poison is None:
            map_nothing(chunk.data_ptr(), self.slot_bytes)
        else:
            map_file(chunk.data_ptr(), self.slot_bytes, self._file, self._poison, is_shared=False)
