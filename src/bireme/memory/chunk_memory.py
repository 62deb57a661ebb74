"""The memory beneath the chunks of a device, whatever the device is."""

import torch

from bireme.devices import is_accelerator
from bireme.memory.address_range import ChunkMemory
from bireme.memory.system_memory import PAGE_BYTES

__all__ = ["chunk_memory", "page_bytes"]


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
        from bireme.memory.accelerator_chunks import AcceleratorChunks

        return AcceleratorChunks(num_slots, slot_bytes, device)
    from bireme.memory.host_chunks import HostChunks

    return HostChunks(num_slots, slot_bytes, poisons=poisons)
