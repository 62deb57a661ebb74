"""A tier below the device's: slots of one size that chunks are copied to and from."""

from typing import Protocol

import torch
from torch import Tensor

from bireme.devices import is_accelerator, pinned
from bireme.memory.system_memory import copy_bytes, pages

__all__ = ["HostTier", "LowerTier"]


class LowerTier(Protocol):
    """Its slots hold what was written to them last. Threads may use different slots at the same time."""

    def grow(self, num_slots: int) -> None:
        """Have so many slots more."""

    def write(self, slot: int, data: Tensor) -> None:
        """Copy a chunk's bytes into a slot."""

    def read(self, slot: int, into: Tensor) -> None:
        """Copy a slot to a chunk's bytes."""

    def close(self) -> None:
        """Give all back."""


class HostTier:
    """Slots in the host's memory; pinned where an accelerator copies to them."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        self._is_pinned = is_accelerator(device)
        self._slots: list[Tensor] = []

    def grow(self, num_slots: int) -> None:
        """As `LowerTier` says. Memory is taken when a slot is first written to, unless it is pinned."""
        if num_slots:
            num_bytes = num_slots * self._slot_bytes
            flat = pinned(num_bytes) if self._is_pinned else pages(num_bytes)
            self._slots += torch.split(flat, self._slot_bytes)

    def bytes_of(self, slot: int) -> Tensor:
        """The bytes of a slot themselves."""
        return self._slots[slot]

    def write(self, slot: int, data: Tensor) -> None:
        """As `LowerTier` says."""
        copy_bytes(self._slots[slot], data)

    def read(self, slot: int, into: Tensor) -> None:
        """As `LowerTier` says."""
        copy_bytes(into, self._slots[slot])

    def close(self) -> None:
        """The memory goes with its last tensor."""
        self._slots = []
