"""How fast chunks travel on this machine: between a device and the host, and to a disk and back."""

import mmap
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bireme.devices import is_accelerator, synchronize
from bireme.errors import BiremeError
from bireme.memory.disk_tier import HostTier, make_direct
from bireme.memory.system_memory import chunk_memory
from bireme.runtime.paging.chunk_store import CopyJob, ThreadMover

_COPY_BYTES = 32 * 2**20
_NUM_COPIES = 5
_CHUNK_BYTES = 2**16
_NUM_SMALL = 99
_BLOCK_BYTES = 4 * 2**20
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 64
_DISK_S = 0.5
"""For each direction, about."""
_USABLE = 0.9
"""The share of the free disk space that paging may fill."""


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """How fast chunks go between a device and its host, the slower way. On a processor, `copy_s` is what each
    copy takes besides its bytes, and `chunk_s` what mapping a slot beneath a chunk takes, or unmapping it.
    """

    bytes_per_s: float
    copy_s: float = 0.0
    chunk_s: float = 0.0


def measured_host_speed(device: torch.device) -> HostSpeed:
    """An accelerator copies from and to pinned memory. In a processor's memory a slot is mapped before the
    copy, or unmapped after it, as chunks are.
    """
    if is_accelerator(device):
        below = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        above = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
        rates = (_copied_bytes_per_s(*both, device) for both in ((above, below), (below, above)))
        return HostSpeed(min(rates))
    large = _Laps(device, _COPY_BYTES, _NUM_COPIES)
    bytes_per_s = _COPY_BYTES / max(min(large.up_s), min(large.down_s))  # others only make it slower
    small = _Laps(device, _CHUNK_BYTES, _NUM_SMALL)
    copied_s = max(median(small.up_s), median(small.down_s))
    return HostSpeed(bytes_per_s, max(copied_s - _CHUNK_BYTES / bytes_per_s, 0.0), median(small.mapped_s) / 2)


class _Laps:
    """Seconds of copies of chunks of one size on a processor, each way, and of mapping with unmapping."""

    def __init__(self, device: torch.device, num_bytes: int, num_copies: int) -> None:
        memory, host, mover = (
            chunk_memory(device, 1, num_bytes),
            HostTier(num_bytes, device),
            ThreadMover(device),
        )
        host.grow(1)
        place = memory.reserve(1, 0)[:num_bytes]

        def fetch() -> None:
            memory.map(place, 0)
            host.read(0, place)

        def evict() -> None:
            host.write(0, place)
            memory.unmap(place)

        self.up_s: list[float] = []
        self.down_s: list[float] = []
        self.mapped_s: list[float] = []
        for _ in range(num_copies):
            for copy, seconds in ((fetch, self.up_s), (evict, self.down_s)):
                begin_s = perf_counter()
                job = CopyJob((0, copy is fetch), num_bytes, copy, is_quick=True)
                mover.post(job)
                mover.wait(job)
                seconds.append(perf_counter() - begin_s)
            begin_s = perf_counter()
            memory.map(place, 0)
            memory.unmap(place)
            self.mapped_s.append(perf_counter() - begin_s)


def _copied_bytes_per_s(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    seconds = []
    for _ in range(_NUM_COPIES):
        begin_s = perf_counter()
        to.copy_(source)
        synchronize(device)
        seconds.append(perf_counter() - begin_s)
    return _COPY_BYTES / min(seconds)


def check_disk_folder(folder: Path, name: str) -> None:
    """Refuse what is no folder that can be written to; `name` is the key that names it."""
    if not folder.is_dir():
        raise BiremeError(f"{name} is {folder}, which is not a folder. Make it, or name another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BiremeError(f"{name} is {folder}, which cannot be written to. Name another folder.")


def free_disk_bytes(folder: Path) -> int:
    """What paging may fill of the disk that a folder is on."""
    space = os.statvfs(folder)
    return int(space.f_bavail * space.f_frsize * _USABLE)


def measured_disk_bytes_per_s(folder: Path) -> float:
    """The slower of writing and reading blocks in a folder, past the system's cache where that can be.

    The file has no name and is gone whatever happens.
    """
    block = mmap.mmap(-1, _BLOCK_BYTES)  # at the begin of a page, as direct files want it
    block.write(os.urandom(2**16) * (_BLOCK_BYTES // 2**16))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            number = file.fileno()
            make_direct(number)
            begin_s = perf_counter()
            count = 0
            while count < _FEWEST_BLOCKS or (count < _MOST_BLOCKS and perf_counter() - begin_s < _DISK_S):
                os.pwrite(number, block, count * _BLOCK_BYTES)
                count += 1
            os.fsync(number)
            written_s = perf_counter() - begin_s
            with suppress(OSError, AttributeError):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            begin_s = perf_counter()
            for place in range(count):
                os.preadv(number, [block], place * _BLOCK_BYTES)
            read_s = perf_counter() - begin_s
    except OSError as error:
        raise BiremeError(f"The disk of {folder} cannot be measured: {error.strerror or error}.") from error
    return count * _BLOCK_BYTES / max(written_s, read_s)
