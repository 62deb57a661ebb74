"""Slots of a processor that show who reads what is not there, on any machine: it reads as NaN."""

import ctypes
import os

import torch
from torch import Tensor

from bireme.memory.system_memory import HostChunks, map_file, shared_file

__all__ = ["POISON", "PoisonedChunks", "poisoned"]

POISON = 0xFF
"""In every byte: NaN in each type of floating-point number, -1 in integers."""


class PoisonedChunks(HostChunks):
    """A chunk without a slot is poisoned, and so is a chunk whose copy has not come, while it `poisons`."""

    poisons = True

    def map(self, chunk: Tensor, slot: int) -> None:
        super().map(chunk, slot)
        if self.poisons:
            ctypes.memset(chunk.data_ptr(), POISON, chunk.nbytes)

    def unmap(self, chunks: Tensor) -> None:
        super().unmap(chunks)
        if self.poisons:
            file = shared_file(chunks.nbytes)
            map_file(chunks.data_ptr(), chunks.nbytes, file, 0)
            os.close(file)
            ctypes.memset(chunks.data_ptr(), POISON, chunks.nbytes)


def poisoned(_device: torch.device, num_slots: int, slot_bytes: int) -> PoisonedChunks:
    """Such slots, as `PagingSettings` wants them."""
    return PoisonedChunks(num_slots, slot_bytes)
