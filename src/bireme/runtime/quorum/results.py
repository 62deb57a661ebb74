"""Sums of batches on the host, in memory that is used again once nobody needs what lies in it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.sync.quorum.ring import Summed

__all__ = ["Buffers", "RoundSum"]


@dataclass(slots=True, eq=False)
class RoundSum:
    """The sum of a batch as made in one attempt, over the replicas in `parts` if that is noted. Each of
    `num_users` gives it back once.
    """

    flats: Sequence[Tensor]
    attempt: int = -1
    summed: Summed | None = None
    parts: tuple[int, ...] = ()
    num_users: int = 1


MOST_FREE = 2
"""More than a batch needs lie free only where many were kept for another replica."""


class Buffers:
    """Flats on the host like those of a rank's gradients; pinned where these are on an accelerator."""

    def __init__(self, device: torch.device | None) -> None:
        self._is_pinned = device is not None and is_accelerator(device)
        self._free: list[Sequence[Tensor]] = []
        self._lock = threading.Lock()

    def take(self, like: Sequence[Tensor]) -> RoundSum:
        """Memory for a sum of such flats. All calls are for flats alike."""
        with self._lock:
            if self._free:
                return RoundSum(self._free.pop())
        made = [torch.empty(one.shape, dtype=one.dtype, pin_memory=self._is_pinned) for one in like]
        return RoundSum(made)

    def give_back(self, result: RoundSum) -> None:
        """One user less; after the last one the memory is used again, or given back if enough is free."""
        with self._lock:
            result.num_users -= 1
            if not result.num_users and len(self._free) < MOST_FREE:
                self._free.append(result.flats)
