"""Sparse places as loops that numba compiles; `places.py` has the same as operations of torch and numpy."""

import numpy as np
from numpy.typing import NDArray

from bireme.codec.row_loops import BITS_OF_BYTES, COUNTS, HIGHEST_BYTE, PLACES
from bireme.compiled import compiled

__all__ = ["MOST_LOW_BITS", "read_sparse", "write_sparse"]

Bytes = NDArray[np.uint8]

MOST_LOW_BITS = 8
"""Of a place, which are kept in a byte here."""

LOWEST_BITS = np.uint64(0x0101010101010101)
"""The lowest bit of each of eight bytes."""

SPREAD = np.array([sum((byte >> bit & 1) << (8 * bit) for bit in range(8)) for byte in range(256)], np.uint64)
"""The bits of a byte as eight bytes of 0 or 1."""


@compiled
def write_sparse(mask: Bytes, low: int, num_sent: int, out: Bytes) -> None:
    """Write the places of the bits that are set in `mask`, of which there are so many."""
    places, size = np.empty(num_sent + 8, np.uint32), (num_sent + 7) // 8
    _find_set(mask, places)
    lows, row = np.zeros(8 * size, np.uint8), out[low * size :]
    words, lowest = lows.view(np.uint64), np.uint64((1 << low) - 1)
    row[:] = 0
    for number in range(num_sent):
        place = np.uint64(places[number])
        lows[number] = place & lowest
        at = (place >> np.uint64(low)) + np.uint64(number)
        row[at >> np.uint64(3)] |= np.uint8(np.uint64(1) << (at & np.uint64(7)))
    for bit in range(low):
        plane = out[bit * size : (bit + 1) * size]
        for number in range(size):
            bits = (words[number] >> np.uint64(bit)) & LOWEST_BITS
            plane[number] = (bits * BITS_OF_BYTES) >> HIGHEST_BYTE


@compiled
def read_sparse(message: Bytes, low: int, num_sent: int, mask: Bytes) -> None:
    """Set the bits in `mask`, which is all zeros, whose places `write_sparse` has written."""
    places, size = np.empty(num_sent + 8, np.uint32), (num_sent + 7) // 8
    _find_set(message[low * size :], places)
    lows = np.zeros(8 * size, np.uint8)
    words = lows.view(np.uint64)
    for bit in range(low):
        plane = message[bit * size : (bit + 1) * size]
        for number in range(size):
            words[number] |= SPREAD[plane[number]] << np.uint64(bit)
    for number in range(num_sent):
        high = np.uint64(places[number]) - np.uint64(number)
        place = (high << np.uint64(low)) | np.uint64(lows[number])
        if place < np.uint64(8 * mask.size):
            mask[place >> np.uint64(3)] |= np.uint8(np.uint64(1) << (place & np.uint64(7)))


@compiled
def _find_set(mask: Bytes, places: NDArray[np.uint32]) -> None:
    """Write the places of the bits that are set, in order, as `take_set` writes entries."""
    at, number = np.uint64(0), 0
    while number < mask.size and np.int64(at) + 8 <= places.size:
        byte, first = mask[number], np.uint64(8 * number)
        places[at] = first + PLACES[byte, 0]
        places[at + np.uint64(1)] = first + PLACES[byte, 1]
        places[at + np.uint64(2)] = first + PLACES[byte, 2]
        places[at + np.uint64(3)] = first + PLACES[byte, 3]
        if COUNTS[byte] > np.uint64(4):
            places[at + np.uint64(4)] = first + PLACES[byte, 4]
            places[at + np.uint64(5)] = first + PLACES[byte, 5]
            places[at + np.uint64(6)] = first + PLACES[byte, 6]
            places[at + np.uint64(7)] = first + PLACES[byte, 7]
        at += COUNTS[byte]
        number += 1
