"""Who gives memory to arenas: torch's allocator, or a range of addresses that chunks come and go in."""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["PLAIN", "ArenaAllocator"]


class ArenaAllocator(Protocol):
    """Gives flat memory."""

    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for so many elements; what is in it is undefined."""


class _Plain:
    def carve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of torch's allocator."""
        return torch.empty(num_elements, dtype=dtype, device=device)


PLAIN: ArenaAllocator = _Plain()
"""Torch's allocator."""
