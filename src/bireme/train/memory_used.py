"""How much memory a process has had at most: all of it on a CPU, that of tensors on an accelerator.

On a CPU it is the most that was resident at a time, as the operating system counts it: the interpreter and
its libraries, tensors, and what the C library keeps of memory that was given back. Looking costs nothing, so
no thread has to.
"""

import gc
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bireme.devices import allocated_bytes, is_accelerator, peak_bytes, reset_peak
from bireme.memory.system_memory import give_back_heap

__all__ = ["MemoryUsed", "resident_bytes", "settled_bytes"]

STATUS = Path("/proc/self/status")


class MemoryUsed:
    """Of an accelerator it counts what is in use beyond what was when the block began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> Self:
        if is_accelerator(self._device):
            reset_peak(self._device)
            self._before = allocated_bytes(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to end."""

    def peak_bytes(self) -> int:
        """The most there has been so far."""
        if is_accelerator(self._device):
            return peak_bytes(self._device) - self._before
        return resident_bytes()


def resident_bytes() -> int:
    """The most of this process that was resident at a time."""
    return _bytes("VmHWM")


def settled_bytes() -> int:
    """What of this process is resident now, without memory that was given back and that the C library keeps;
    where nobody can tell, the most there was.
    """
    gc.collect()
    give_back_heap()
    return _bytes("VmRSS")


def _bytes(what: str) -> int:
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))
    except (OSError, StopIteration):  # not Linux; what it says in bytes others say in kilobytes
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
