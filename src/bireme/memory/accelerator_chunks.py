"""A budget of a CUDA device's memory, cut into slots that are mapped beneath chunks.

The driver can reserve addresses and memory apart and map one beneath the other, which torch's allocator does
not offer. What is mapped is used by streams, so a chunk is unmapped only when the calling thread's stream has
done what it was asked for.
"""

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError

__all__ = ["AcceleratorChunks"]

PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; what is not named here is zero."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class AcceleratorChunks:
    """So many slots of so many bytes each."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BiremeError(
                f"Memory of {device} cannot be paged: there is no CUDA driver here ({error}). Leave "
                "memory.device out."
            ) from error
        torch.empty(0, device=device)  # so that the driver has a context
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = device
        self._where = _Location(ON_DEVICE, index)
        self._properties = _Properties(type=PINNED, location=self._where)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), self._about(), 0)
        self._page_bytes = granularity.value
        if slot_bytes % self._page_bytes:
            raise BiremeError(
                f"Chunks of {slot_bytes} bytes cannot be paged on {device}: a chunk must be a multiple of "
                f"{self._page_bytes} bytes there. Leave the size of chunks out, or page larger stages."
            )
        self.slot_bytes = slot_bytes
        self._slots = [self._created(slot_bytes) for _ in range(num_slots)]

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """As `ChunkMemory` says; but of the bytes after the chunks only a page, which is there at once."""
        more = min(self._page_bytes, more_bytes)
        paged = num_chunks * self.slot_bytes
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), paged + more, 0, 0, 0)
        if more:
            self._map(address.value + paged, more, self._created(more))
        # Torch asks what is at an address that it is to look at.
        self._map(address.value, self.slot_bytes, self._slots[0])
        found = torch.as_tensor(_Range(self._driver, address.value, paged + more), device=self._device)
        self.unmap(found[: self.slot_bytes])
        return found

    def map(self, chunk: Tensor, slot: int) -> None:
        """As `ChunkMemory` says."""
        self._map(chunk.data_ptr(), self.slot_bytes, self._slots[slot])

    def unmap(self, chunk: Tensor) -> None:
        """As `ChunkMemory` says, once the current stream has done what it was asked for."""
        torch.accelerator.current_stream(self._device).synchronize()
        self._call("cuMemUnmap", ctypes.c_uint64(chunk.data_ptr()), self.slot_bytes)

    def _created(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), num_bytes, self._about(), 0)
        return handle.value

    def _map(self, address: int, num_bytes: int, handle: int) -> None:
        at = ctypes.c_uint64(address)
        self._call("cuMemMap", at, num_bytes, 0, ctypes.c_uint64(handle), 0)
        access = _Access(self._where, READ_AND_WRITE)
        self._call("cuMemSetAccess", at, num_bytes, ctypes.byref(access), 1)

    def _about(self) -> Any:
        return ctypes.byref(self._properties)

    def _call(self, name: str, *given: Any) -> None:
        # The driver's sizes, offsets and flags are of 64 bits, its counts and choices of 32.
        words = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in given]
        status = getattr(self._driver, name)(*words)
        if status:
            raise BiremeError(
                f"Memory of {self._device} cannot be paged: {name} gives the error {status}. Lower "
                "memory.device, or leave it out."
            )


class _Range:
    """Addresses as torch takes them over; they are given back with the last tensor that looks at them."""

    def __init__(self, driver: ctypes.CDLL, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        free = driver.cuMemAddressFree
        weakref.finalize(self, free, ctypes.c_uint64(address), ctypes.c_uint64(num_bytes)).atexit = False
