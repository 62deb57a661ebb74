"""A budget of a CUDA device's memory, cut into slots that are mapped beneath chunks.

Torch's allocator does not offer that, so the driver is asked. What is mapped is used by streams, so a chunk
is unmapped only when the calling thread's stream has done what it was asked for, and all is given back when
nobody uses the slots or the ranges any more.
"""

import weakref

import torch
from torch import Tensor

from bireme.devices import synchronize
from bireme.errors import BiremeError
from bireme.memory.accelerator_memory import AcceleratorMemory

__all__ = ["AcceleratorChunks"]


class AcceleratorChunks:
    """So many slots of so many bytes each."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self._memory = AcceleratorMemory(device)
        self._device = device
        if slot_bytes % self._memory.page_bytes:
            raise BiremeError(
                f"Chunks of {slot_bytes} bytes cannot be paged on {device}: a chunk must be a multiple of "
                f"{self._memory.page_bytes} bytes there. Leave the size of chunks out, or page larger stages."
            )
        self.slot_bytes = slot_bytes
        self._slots: list[int] = []
        weakref.finalize(self, self._memory.release, self._slots).atexit = False
        for _ in range(num_slots):
            self._slots.append(self._memory.create(slot_bytes))

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """As `ChunkMemory` says; but of the bytes after the chunks only a page, which is there at once."""
        memory = self._memory
        more = min(memory.page_bytes, more_bytes)
        paged = num_chunks * self.slot_bytes
        address = memory.reserve(paged + more)
        if more:
            beyond = memory.create(more)
            memory.map(address + paged, more, beyond)
            memory.release((beyond,))  # it is there as long as it is mapped
        # Torch asks what is at an address that it is to look at.
        memory.map(address, self.slot_bytes, self._slots[0])
        found = torch.as_tensor(_Range(memory, address, paged + more, self._device), device=self._device)
        memory.unmap(address)
        return found

    def map(self, chunk: Tensor, slot: int) -> None:
        """As `ChunkMemory` says."""
        self._memory.map(chunk.data_ptr(), self.slot_bytes, self._slots[slot])

    def unmap(self, chunk: Tensor) -> None:
        """As `ChunkMemory` says, once the current stream has done what it was asked for."""
        torch.accelerator.current_stream(self._device).synchronize()
        self._memory.unmap(chunk.data_ptr())


class _Range:
    """Addresses as torch takes them over; they are given back with the last tensor that looks at them."""

    def __init__(self, memory: AcceleratorMemory, address: int, num_bytes: int, device: torch.device) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        weakref.finalize(self, _give_back, memory, address, num_bytes, device).atexit = False


def _give_back(memory: AcceleratorMemory, address: int, num_bytes: int, device: torch.device) -> None:
    synchronize(device)  # the device may still work on what is mapped there
    memory.free(address, num_bytes)
