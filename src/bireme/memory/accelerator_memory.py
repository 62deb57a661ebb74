"""Addresses and memory of a CUDA device, reserved apart and mapped by hand: the driver's calls, with an
account.

What was made is given back in the end, in the order that the driver wants: memory is unmapped and released,
then addresses are freed. Torch is not asked for anything here but the device's number.
"""

import ctypes
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bireme.devices import synchronize
from bireme.errors import BiremeError

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
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


class AcceleratorMemory:
    """Pieces of a device's memory by their handles, and where each is mapped."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        try:
            self._driver = driver or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BiremeError(
                f"Memory of {device} cannot be offloaded: there is no CUDA driver here ({error}). Leave "
                "memory.device out."
            ) from error
        if driver is None:
            torch.empty(0, device=device)  # so that the driver has a context
        index = device.index
        if index is None:
            index = 0 if driver is not None else torch.accelerator.current_device_index()
        self._device = device
        self._where = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._where)
        self._mapped: dict[int, int] = {}
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), self._about(), 0)
        self.page_bytes = granularity.value
        """What sizes of memory and of mapped ranges are multiples of."""

    def create(self, num_bytes: int) -> int:
        """Memory of `num_bytes`, by its handle."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), num_bytes, self._about(), 0)
        return handle.value

    def release(self, handles: Iterable[int]) -> None:
        """Give memory back, as soon as it is mapped nowhere."""
        for handle in handles:
            self._call("cuMemRelease", ctypes.c_uint64(handle))

    def reserve(self, num_bytes: int) -> int:
        """The address of a range that nothing is mapped to yet."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Give addresses back, with what is mapped there; nobody may use them any more."""
        for begin in [one for one in self._mapped if address <= one < address + num_bytes]:
            self.unmap(begin)
        self._call("cuMemAddressFree", ctypes.c_uint64(address), num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Let memory be beneath an address, where the device may read and write it."""
        at = ctypes.c_uint64(address)
        self._call("cuMemMap", at, num_bytes, 0, ctypes.c_uint64(handle), 0)
        self._mapped[address] = num_bytes
        access = _Access(self._where, _READ_AND_WRITE)
        self._call("cuMemSetAccess", at, num_bytes, ctypes.byref(access), 1)

    def unmap(self, address: int) -> None:
        """Let nothing be beneath an address that memory was mapped to."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), self._mapped.pop(address))

    def _about(self) -> Any:
        return ctypes.byref(self._properties)

    def _call(self, name: str, *given: Any) -> None:
        # The driver's sizes, offsets and flags are of 64 bits, its counts and choices of 32.
        words = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in given]
        status = getattr(self._driver, name)(*words)
        if status:
            raise BiremeError(
                f"Memory of {self._device} cannot be offloaded: {name} gives the error {status}. Lower "
                "memory.device, or leave it out."
            )


# A budget of a CUDA device's memory, cut into slots that are mapped beneath chunks.
#
# Torch's allocator does not offer that, so the driver is asked. What is mapped is used by streams, so a chunk
# is unmapped only when the calling thread's stream has done what it was asked for, and all is given back when
# nobody uses the slots or the ranges any more.


class AcceleratorChunks:
    """`num_slots` slots of `slot_bytes` each."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self._memory = AcceleratorMemory(device)
        self._device = device
        if slot_bytes % self._memory.page_bytes:
            raise BiremeError(
                f"Chunks of {slot_bytes} bytes cannot be offloaded on {device}: a chunk must be a multiple "
                f"of {self._memory.page_bytes} bytes there. Leave the size of chunks out, or offload "
                "larger stages."
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

    def unmap(self, chunks: Tensor) -> None:
        """As `ChunkMemory` says, once the current stream has done what it was asked for."""
        torch.accelerator.current_stream(self._device).synchronize()
        for begin in range(0, chunks.nbytes, self.slot_bytes):
            self._memory.unmap(chunks.data_ptr() + begin)


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
