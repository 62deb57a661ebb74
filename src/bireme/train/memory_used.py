"""How much memory a process takes for its work, as the C library or the device's allocator counts it.

On a CPU tensors come from the C library's heap, which can tell how much of it is in use. That is looked at
many times a second; what lives for less may be missed. To tell takes the longer the more pieces are free in
the heap, and holds up who wants memory meanwhile, so it is asked the less often.
"""

import ctypes
import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Self

import torch

from bireme.devices import allocated_bytes, is_accelerator, peak_bytes, reset_peak

__all__ = ["MemoryUsed"]

PERIOD_S = 0.002
LOOKING = 0.01
"""The most of the time that goes into looking."""


class MemoryUsed:
    """Counts what is in use beyond what was when the block began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._heap = None if is_accelerator(device) else _heap_in_use()
        self._before = 0
        self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bireme-memory", daemon=True)

    def __enter__(self) -> Self:
        if is_accelerator(self._device):
            reset_peak(self._device)
            self._before = allocated_bytes(self._device)
        elif self._heap is not None:
            self._before = self._heap()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def peak_bytes(self) -> int | None:
        """The most there has been so far; None where nobody counts it."""
        if is_accelerator(self._device):
            return peak_bytes(self._device) - self._before
        return None if self._heap is None else max(0, self._peak - self._before)

    def _look(self) -> None:
        assert self._heap is not None
        pause_s = PERIOD_S
        while not self._is_over.wait(pause_s):
            begin_s = perf_counter()
            self._peak = max(self._peak, self._heap())
            pause_s = max(PERIOD_S, (perf_counter() - begin_s) / LOOKING)


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap_in_use() -> Callable[[], int] | None:
    """Tells the bytes in use of the C library's heap; None where it cannot."""
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another C library, or a glibc older than 2.33
        return None
    tell.restype = _Mallinfo

    def in_use() -> int:
        found = tell()
        return int(found.uordblks) + int(found.hblkhd)

    return in_use
