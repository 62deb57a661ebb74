"""How large a chunk is: the size that wastes least of the slots that a rank's items fill.

The last chunk of an item fills its slot only in part. Small chunks waste little, but every one is an
instruction and a copy; so of the sizes that waste hardly more than the best, the largest is taken.
"""

import math
from collections.abc import Mapping

from bireme.errors import BiremeError

__all__ = ["best_chunk_bytes", "num_chunks"]

ALIGNED = 64
"""Chunks are a multiple of so many bytes, which suits every type of number and every disk."""
MOST_CHUNKS = 512
"""That a rank's items are cut into, each counted once; with more a program gets long."""
TRIED = 64
"""Into how many chunks an item is cut for a size to try."""
MORE_WASTE = 0.01
"""The share of all bytes that a larger chunk may waste more than the best."""


def num_chunks(num_bytes: float, chunk_bytes: int) -> int:
    """How many chunks so many bytes fill."""
    return math.ceil(num_bytes / chunk_bytes)


def best_chunk_bytes(items: Mapping[float, int]) -> int:
    """The chunk size for items of so many bytes, each with how many there are at once."""
    sizes = {num_bytes: count for num_bytes, count in items.items() if num_bytes > 0 and count > 0}
    if not sizes:
        raise BiremeError(
            "Nothing can be paged: weights, gradients, optimiser and activations have no bytes."
        )
    tried = sorted({_aligned(num_bytes / parts) for num_bytes in sizes for parts in range(1, TRIED + 1)})
    few = [size for size in tried if sum(num_chunks(one, size) for one in sizes) <= MOST_CHUNKS] or tried[-1:]
    whole = sum(num_bytes * count for num_bytes, count in sizes.items())
    waste = {size: _waste(sizes, size) for size in few}
    allowed = min(waste.values()) + MORE_WASTE * whole
    return max(size for size in few if waste[size] <= allowed)


def _waste(sizes: Mapping[float, int], chunk_bytes: int) -> float:
    return sum(
        (num_chunks(num_bytes, chunk_bytes) * chunk_bytes - num_bytes) * count
        for num_bytes, count in sizes.items()
    )


def _aligned(num_bytes: float) -> int:
    return max(math.ceil(num_bytes / ALIGNED), 1) * ALIGNED
