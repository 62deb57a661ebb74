"""The memory beneath the chunks of a device, whatever the device is."""

import os
import weakref

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.system_memory import (
    PAGE_BYTES,
    ChunkMemory,
    check_can_map,
    fill_bytes,
    map_file,
    map_nothing,
    reserve,
    shared_file,
    tensor_at,
    whole_pages,
)

# A budget of ordinary memory, cut into slots that are mapped beneath chunks: the device tier on a CPU.
#
# The slots are a file in memory. With `poisons` a chunk that is not there reads as NaN, and so does one whose
# copy has not come; for tests. Otherwise nothing is beneath it, and who reads it ends by a signal.

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


def page_bytes(device: torch.device) -> int:
    """What the size of a chunk must be a multiple of to be mapped on a device of this machine."""
    if not is_accelerator(device):
        return PAGE_BYTES
    from bireme.memory.accelerator_memory import AcceleratorMemory

    return AcceleratorMemory(device).page_bytes


def chunk_memory(
    device: torch.device, num_slots: int, slot_bytes: int, *, poisons: bool = False
) -> ChunkMemory:
    """So many slots on a device; `poisons` is as for `HostChunks`."""
    if is_accelerator(device):
        from bireme.memory.accelerator_memory import AcceleratorChunks

        return AcceleratorChunks(num_slots, slot_bytes, device)

    return HostChunks(num_slots, slot_bytes, poisons=poisons)
