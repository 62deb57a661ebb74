"""What CUDA's caching allocator says of a while, to hold beside the trace of the same while.

The one file that reads the allocator's history, which torch offers under private names. On other devices
there is nothing to read.
"""

from types import TracebackType

import torch

from bireme.profile.behaviour import Allocator

__all__ = ["AllocatorWatch"]


class AllocatorWatch:
    """Watches the allocator of a device inside its `with` block; `found` is None where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.found: Allocator | None = None
        self._device = device

    def __enter__(self) -> "AllocatorWatch":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            torch.cuda.memory._record_memory_history(stacks="python")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._device.type != "cuda":
            return
        history = torch.cuda.memory._snapshot(self._device)["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        self.found = Allocator(
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            num_allocations=sum(entry["action"] == "alloc" for entries in history for entry in entries),
        )
