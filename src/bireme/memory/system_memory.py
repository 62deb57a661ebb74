"""Memory of the operating system by its address: mapped, unmapped, copied.

Python's own `mmap` cannot map memory to a given address, which is what lets a tensor stay where it is while
the memory beneath it comes and goes.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from bireme.bounds import bytes_text
from bireme.devices import is_accelerator
from bireme.errors import BiremeError

# A range of addresses in chunks: tensors lie in it for good, and memory beneath a chunk comes and goes.
#
# So views, leaves of autograd and what it has saved of them stay valid while a chunk is elsewhere. Who reads
# one that is not there must wait until it is.

ALIGNED = 64
"""Pieces begin at multiples of this number of bytes, as in torch's allocator."""


class ChunkMemory(Protocol):
    """The slots of a device, each of which can be mapped beneath any chunk of any range."""

    slot_bytes: int

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """The bytes of a new range: chunks with nothing beneath them, and memory for more bytes after them.

        The memory of the latter takes room only where it is written to.
        """

    def map(self, chunk: Tensor, slot: int) -> None:
        """Let the bytes of a chunk be those of a slot."""

    def unmap(self, chunks: Tensor) -> None:
        """Let nothing be beneath a chunk, or beneath several that lie together."""


class AddressRange:
    """The addresses of one item, from which arenas are carved one after the other.

    What the chunks have no room for lies after them, and stays on the device.
    """

    def __init__(self, memory: ChunkMemory, num_chunks: int) -> None:
        self.chunk_bytes = memory.slot_bytes
        self.paged_bytes = num_chunks * memory.slot_bytes
        self.bytes = memory.reserve(num_chunks, more_bytes=self.paged_bytes)
        self._chunks = torch.split(self.bytes[: self.paged_bytes], memory.slot_bytes)
        self._of_dtype: dict[torch.dtype, Tensor] = {}
        self.used_bytes = self._apart_bytes = 0

    @property
    def beyond_bytes(self) -> int:
        """The bytes in use that the chunks had no room for, in the range or apart from it."""
        return max(0, self.used_bytes - self.paged_bytes) + self._apart_bytes

    def chunk(self, number: int) -> Tensor:
        """The bytes of a chunk."""
        return self._chunks[number]

    def of_dtype(self, dtype: torch.dtype) -> Tensor:
        """All bytes of the range as numbers of a type."""
        found = self._of_dtype.get(dtype)
        if found is None:
            found = self._of_dtype[dtype] = self.bytes.view(dtype)
        return found

    def room(self, num_bytes: int, most: int | None = None) -> int | None:
        """Where the next piece of `num_bytes` begins; None if it is empty, or ends after the chunks or after
        `most` bytes.
        """
        begin = -(-self.used_bytes // ALIGNED) * ALIGNED
        end = begin + num_bytes
        if not num_bytes or end > (most or self.paged_bytes):
            return None
        self.used_bytes = end
        return begin

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next piece, or memory of torch's allocator where none is left."""
        num_bytes = num_elements * dtype.itemsize
        begin = self.room(num_bytes, self.bytes.numel())
        if begin is None:
            self._apart_bytes += num_bytes
            return torch.empty(num_elements, dtype=dtype, device=device)
        return self.bytes[begin : begin + num_bytes].view(dtype)

    def clear(self) -> None:
        """All pieces are given back."""
        self.used_bytes = self._apart_bytes = 0


PAGE_BYTES = mmap.PAGESIZE

_FIXED = 0x10
"""MAP_FIXED, which Python has no name for; it is the same on Linux and macOS."""
_NO_ACCESS = 0
_NOTHING = (
    getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_NORESERVE", 0)
)
_SHARED_NOW = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0) | _FIXED
"""Flags of addresses with nothing beneath, and of memory that is there at once."""
_MOVED = 1 | 2 | 4
"""MREMAP_MAYMOVE, MREMAP_FIXED and MREMAP_DONTUNMAP."""
_FLUSHED_SINGLY = 33
"""Linux flushes the addresses of at most this number of pages one by one, and of more pages all at once."""
_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 16 * 2**20
"""M_MMAP_THRESHOLD of glibc, and what it is set to: with less, steps take longer, for memory that is new to a
process has to be cleared.
"""
_FAILED = ctypes.c_void_p(-1).value


def check_can_map() -> None:
    """Refuse a system that does not map memory to given addresses, as Windows does not in this way."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        raise BiremeError(
            "Memory cannot be offloaded on this system, which maps none to given addresses. Leave "
            "memory.device out, or train on Linux or macOS."
        )


def give_back_heap() -> None:
    """Have the C library give freed memory back to the system, if it can; without this it keeps most."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:  # glibc alone has it
        trim(0)


def give_back_large_blocks() -> None:
    """Have the C library give back to the system each large block as soon as it is freed, where it can.

    It learns from blocks that are freed, and then keeps those of up to 32 MiB for others that may never fit.
    """
    option = getattr(_libc(), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def reserve(num_bytes: int) -> int:
    """The address of a range that nothing is mapped to yet."""
    return _mapped(None, num_bytes, _NO_ACCESS, _NOTHING, -1, 0)


def map_nothing(address: int, num_bytes: int) -> None:
    """Take away what is mapped there; the addresses stay reserved, and using them kills the process."""
    _mapped(address, num_bytes, _NO_ACCESS, _NOTHING | _FIXED, -1, 0)


def map_file(address: int, num_bytes: int, file: int, begin: int, *, populates: bool = True) -> None:
    """Map a part of a file there. With `populates` all its memory is there at once, rather than page by page
    at the first use.
    """
    flags = _SHARED_NOW if populates else mmap.MAP_SHARED | _FIXED
    _mapped(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, begin)


def move_mapping(address: int, num_bytes: int, into: int) -> bool:
    """Move what is mapped at an address to another one, with the pages that are there. The old addresses stay
    reserved, so no other mapping comes there. Returns False if that would take longer than to make a mapping
    and to take it away, as for few pages, or if this system cannot.
    """
    if num_bytes <= _FLUSHED_SINGLY * PAGE_BYTES or not _can_move():
        return False
    if _libc().mremap(address, num_bytes, num_bytes, _MOVED, into) == into:
        return True
    map_nothing(into, num_bytes)
    return False


@cache
def _can_move() -> bool:
    """Whether mappings of files can be moved, as on Linux from 5.13 on. From 5.7 to 5.12 the call fails and
    leaves the new addresses free: another mapping could come there, and the next call would remove it.
    """
    if not hasattr(_libc(), "mremap"):
        return False
    file, address = shared_file(PAGE_BYTES), reserve(2 * PAGE_BYTES)
    map_file(address, PAGE_BYTES, file, 0)
    os.close(file)
    into = address + PAGE_BYTES
    can = bool(_libc().mremap(address, PAGE_BYTES, PAGE_BYTES, _MOVED, into) == into)
    _libc().munmap(address, (1 + can) * PAGE_BYTES)
    return can


def shared_file(num_bytes: int) -> int:
    """A file in memory of `num_bytes`, without a name. It is gone when it is closed and unmapped."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("bireme", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, num_bytes)
    return file


def tensor_at(address: int, num_bytes: int) -> Tensor:
    """The bytes of a reserved range as a tensor. The range is given back when no tensor looks at it."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, num_bytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def pages(num_bytes: int) -> Tensor:
    """Memory that begins with a page, as disks want it that are written to directly. It takes room where it
    is written to.
    """
    file = shared_file(0)
    found = more_of_file(file, 0, num_bytes)
    os.close(file)  # the mapping keeps it
    return found


def whole_pages(num_bytes: int) -> int:
    """The bytes of the pages that `num_bytes` fill."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def more_of_file(file: int, begin: int, num_bytes: int) -> Tensor:
    """Memory that a file is made longer by, from its end `begin` on, where a page begins."""
    whole = whole_pages(num_bytes)
    os.ftruncate(file, begin + whole)
    address = reserve(whole)
    map_file(address, whole, file, begin, populates=False)
    return tensor_at(address, whole)[:num_bytes]


def copy_bytes(into: Tensor, data: Tensor) -> None:
    """Copy bytes between tensors of equal length: on the host by the calling thread alone, which lets others
    go on; else in the current stream. To autograd nothing is written.
    """
    if into.is_cpu and data.is_cpu:
        # Torch would share the work out over threads that others compute with.
        ctypes.memmove(into.data_ptr(), data.data_ptr(), into.nbytes)
    else:
        into.data.copy_(data, non_blocking=True)


def copy_memory(into: Tensor, begin: int, memory: torch.UntypedStorage) -> None:
    """Copy memory to the bytes from `begin` on, as `copy_bytes` does."""
    if into.is_cpu:
        ctypes.memmove(into.data_ptr() + begin, memory.data_ptr(), memory.nbytes())
    else:
        data = torch.empty(0, dtype=torch.uint8, device=into.device).set_(memory)
        copy_bytes(into[begin : begin + memory.nbytes()], data)


def bytes_at(memory: Tensor) -> memoryview:
    """The bytes of host memory as files read and write them."""
    return memoryview((ctypes.c_uint8 * memory.nbytes).from_address(memory.data_ptr())).cast("B")


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    if hasattr(found, "mremap"):
        found.mremap.restype = ctypes.c_void_p
        found.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
    return found


def _mapped(address: int | None, num_bytes: int, access: int, flags: int, file: int, begin: int) -> int:
    found = _libc().mmap(address, num_bytes, access, flags, file, begin)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise BiremeError(
            f"{bytes_text(num_bytes)} of memory cannot be mapped for offloading: {os.strerror(number)}. "
            "Lower memory.device or memory.host, or raise the limit of this process."
        )
    return int(found)


# A budget of ordinary memory, cut into slots that are mapped beneath chunks: the device tier on a CPU.
#
# The slots are a file in memory. A slot that has left a chunk stays mapped at an address of its own, because
# a mapping is moved faster than it is made. Reading a chunk without a slot kills the process.


class HostChunks:
    """`num_slots` slots of `slot_bytes` each."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        check_can_map()
        if slot_bytes % PAGE_BYTES:
            raise BiremeError(
                f"Chunks of {slot_bytes} bytes cannot be offloaded here: a chunk must be a multiple of "
                f"{PAGE_BYTES} bytes, the page of memory of this machine. Leave the size of chunks out, or "
                "offload larger stages."
            )
        self.slot_bytes = slot_bytes
        self._file = shared_file(num_slots * slot_bytes)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._own = tensor_at(reserve(num_slots * slot_bytes), num_slots * slot_bytes)
        """The own addresses of all slots."""
        self._kept: set[int] = set()
        """The slots that are mapped at their own addresses."""
        self._beneath: dict[int, int] = {}
        """The slots that are mapped beneath chunks, by the addresses of the chunks."""

    def reserve(self, num_chunks: int, more_bytes: int) -> Tensor:
        """As `ChunkMemory` says."""
        paged, more = num_chunks * self.slot_bytes, whole_pages(more_bytes)
        address = reserve(paged + more)
        found = tensor_at(address, paged + more)
        if more:
            beyond = shared_file(more)
            map_file(address + paged, more, beyond, 0, populates=False)
            os.close(beyond)
        self.unmap(found[:paged])
        return found

    def map(self, chunk: Tensor, slot: int) -> None:
        """As `ChunkMemory` says."""
        address, size, begin = chunk.data_ptr(), self.slot_bytes, slot * self.slot_bytes
        if slot not in self._kept or not move_mapping(self._own.data_ptr() + begin, size, address):
            map_file(address, size, self._file, begin)
        self._kept.discard(slot)
        self._beneath[address] = slot

    def unmap(self, chunks: Tensor) -> None:
        """As `ChunkMemory` says."""
        first, size, own = chunks.data_ptr(), self.slot_bytes, self._own.data_ptr()
        for address in range(first, first + chunks.nbytes, size):
            slot = self._beneath.pop(address, None)
            if slot is not None and move_mapping(address, size, own + slot * size):
                self._kept.add(slot)
        map_nothing(first, chunks.nbytes)


# The memory beneath the chunks of a device, whatever the device is.


def page_bytes(device: torch.device) -> int:
    """What the size of a chunk must be a multiple of to be mapped on a device of this machine."""
    if not is_accelerator(device):
        return PAGE_BYTES
    from bireme.memory.accelerator_memory import AcceleratorMemory

    return AcceleratorMemory(device).page_bytes


def chunk_memory(device: torch.device, num_slots: int, slot_bytes: int) -> ChunkMemory:
    """`num_slots` slots on a device."""
    if is_accelerator(device):
        from bireme.memory.accelerator_memory import AcceleratorChunks

        return AcceleratorChunks(num_slots, slot_bytes, device)

    return HostChunks(num_slots, slot_bytes)
