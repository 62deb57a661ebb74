"""Rounding of blocks as loops that numba compiles; `blocks.py` has the same as operations of torch.

Each step rounds as torch's does, so codes are the same bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled

__all__ = ["largest_of_blocks", "round_blocks"]

Floats = NDArray[np.float32]

MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but that of its sign."""


@compiled
def largest_of_blocks(blocks: NDArray[np.int32], largest: NDArray[np.int32]) -> None:
    """Write the largest magnitude of each block; both are the bits of float32, in which a NaN is largest."""
    width = blocks.shape[1]
    for number in range(len(blocks)):
        block, found = blocks[number], np.int32(0)
        for place in range(width):
            found = max(found, np.int32(block[place] & MAGNITUDE))
        largest[number] = found


@compiled
def round_blocks(blocks: Floats, shares: Floats, offset: Any, codes: NDArray[np.uint8]) -> None:
    """Write entry × share of its block + offset, cut to a whole number, for each entry."""
    width = blocks.shape[1]
    for number in range(len(blocks)):
        share, block, into = shares[number], blocks[number], codes[number]
        for place in range(width):
            into[place] = np.uint8(np.int32(block[place] * share + offset))
