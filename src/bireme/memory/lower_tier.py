"""A tier below the device's: slots of one size that chunks are copied to and from."""

import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

from bireme.devices import is_accelerator, pinned
from bireme.memory.system_memory import copy_bytes, map_file, more_of_file, shared_file, whole_pages

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
    """Slots in the host's memory; pinned where an accelerator copies to them.

    Where the device is a processor they are a file in memory, so that they can be mapped beneath chunks.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        self._file = None if is_accelerator(device) else shared_file(0)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file).atexit = False
        self._file_bytes = 0
        self._slots: list[Tensor] = []
        self._places: list[int] = []
        """Where each slot begins in the file."""

    def grow(self, num_slots: int) -> None:
        """As `LowerTier` says. Memory is taken when a slot is first written to, unless it is pinned."""
        if not num_slots:
            return
        num_bytes = num_slots * self._slot_bytes
        if self._file is None:
            flat = pinned(num_bytes)
        else:
            flat = more_of_file(self._file, self._file_bytes, num_bytes)
            self._places += range(self._file_bytes, self._file_bytes + num_bytes, self._slot_bytes)
            self._file_bytes += whole_pages(num_bytes)
        self._slots += torch.split(flat, self._slot_bytes)

    def map_beneath(self, chunk: Tensor, slot: int) -> None:
        """Let the bytes of a chunk of a processor's be those of a slot: nothing is copied."""
        assert self._file is not None, "the slots of an accelerator's host are no file"
        map_file(chunk.data_ptr(), self._slot_bytes, self._file, self._places[slot])

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
