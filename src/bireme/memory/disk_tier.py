"""The tier of a disk: one file of slots, which has no name and so is gone whatever ends the process.

All its room is taken before training, so a disk that is full says so then. It is written and read directly,
past the system's cache, where the file system can.
"""

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bireme.devices import is_accelerator, pinned
from bireme.errors import BiremeError
from bireme.memory.system_memory import bytes_at, copy_bytes, map_file, more_of_file, shared_file, whole_pages

# A tier below the device's: slots of one size that chunks are copied to and from, and that hold what was
# written to them last. Threads may use different slots at the same time.


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
        """Add slots. Memory is taken when one is first written to, unless it is pinned."""
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
        """Copy a chunk's bytes into a slot."""
        copy_bytes(self._slots[slot], data)

    def read(self, slot: int, into: Tensor) -> None:
        """Copy a slot to a chunk's bytes."""
        copy_bytes(into, self._slots[slot])


_NO_RESERVING = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def make_direct(file: int, *, is_on: bool = True) -> bool:
    """Ask for copies past the system's cache, or no longer. Returns whether the file system makes them."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # there is none on Windows

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return is_on


class DiskTier:
    """Slots in a file of `folder`."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        self._folder, self._slot_bytes, self._num_slots = folder, slot_bytes, 0
        self._here = threading.local()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open until `close`)
        except OSError as error:
            raise BiremeError(
                f"Nothing can be offloaded to {folder}: {error.strerror}. Set memory.disk to a folder on a "
                "disk that can be written to."
            ) from error
        self._is_direct = make_direct(self._file.fileno())

    def grow(self, num_slots: int) -> None:
        """Add slots."""
        begin, more = self._num_slots * self._slot_bytes, num_slots * self._slot_bytes
        try:
            if more:
                self._reserve(begin, more)
        except OSError as error:
            raise BiremeError(
                f"{self._folder} has no room for {begin + more} bytes of offloaded memory: {error.strerror}. "
                "Make room there, set memory.disk to another disk, or offload less with a larger memory.host."
            ) from error
        self._num_slots += num_slots

    def write(self, slot: int, data: Tensor) -> None:
        """Copy a chunk's bytes into a slot."""
        given = data
        if not data.is_cpu:
            given = self._staging()
            copy_bytes(given, data)
            torch.accelerator.current_stream(data.device).synchronize()
        self._move(os.pwritev, "written", given, slot * self._slot_bytes)

    def read(self, slot: int, into: Tensor) -> None:
        """Copy a slot to a chunk's bytes."""
        target = into if into.is_cpu else self._staging()
        self._move(os.preadv, "read", target, slot * self._slot_bytes)
        if not into.is_cpu:
            copy_bytes(into, target)

    def flush(self) -> None:
        """Have the disk hold all that was written, and the system's cache nothing of it."""
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the file's room back."""
        self._file.close()

    def _reserve(self, begin: int, more: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), begin, more)
        except (AttributeError, OSError) as error:  # macOS has no such function
            if isinstance(error, OSError) and error.errno not in _NO_RESERVING:
                raise
            os.ftruncate(self._file.fileno(), begin + more)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], what: str, memory: Tensor, begin: int
    ) -> None:
        view, done = bytes_at(memory), 0
        try:
            while done < len(view):
                try:
                    moved = call(self._file.fileno(), [view[done:]], begin + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._is_direct:
                        raise
                    # The file system takes the flag and yet makes no direct copies, or none from where the
                    # last one ended: go on through the system's cache.
                    self._is_direct = make_direct(self._file.fileno(), is_on=False)
                else:
                    if not moved:
                        raise OSError(errno.EIO, "the file is shorter than it was")
                    done += moved
        except OSError as error:
            raise BiremeError(
                f"Offloaded memory in {self._folder} cannot be {what}: {error.strerror}. Training cannot "
                "continue from here; resume it from its last checkpoint, with memory.disk on a working disk."
            ) from error
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), begin, len(view), os.POSIX_FADV_DONTNEED)

    def _staging(self) -> Tensor:
        """Memory of this thread that both the disk and an accelerator reach."""
        found: Tensor | None = getattr(self._here, "staging", None)
        if found is None:
            found = self._here.staging = pinned(self._slot_bytes)
        return found
