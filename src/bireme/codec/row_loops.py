"""Loops over the largest entries of rows, and over the entries of masks, that numba compiles.

`selection.py` says what they promise. A row stays in the innermost cache while all is done with it. Its
threshold is found by counting: to count how many entries are at least so large takes an instruction or two
for many of them, so that a handful of good guesses costs less than to sort out the largest.

Kinds of integers are written out where the compiler would not see that narrow or unsigned ones do, and loops
begin at 0: it then takes many entries at a time, and asks of no place whether it counts from the end.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled

__all__ = ["put_set", "take_largest_of_rows", "take_set"]

Integers = NDArray[np.signedinteger[Any]]
Bytes = NDArray[np.uint8]

BITS_OF_BYTES = np.uint64(0x0102040810204080)
"""Eight bytes of 0 or 1, taken as one number, times this have them as the bits of the highest byte."""
HIGHEST_BYTE = np.uint64(56)

SET = [[place for place in range(8) if byte >> place & 1] for byte in range(256)]
PLACES = np.array([places + [0] * (8 - len(places)) for places in SET], np.uint64)
COUNTS = np.array([len(places) for places in SET], np.uint64)
"""Where the bits of a byte are set, and how many are."""

STRETCH = 64
"""Entries of which it is first asked whether the last one wanted is among them."""

MANY = 3
"""Where more than one in so many is taken, each entry is written: `take_set` would guess wrong too often."""

COUNTED = 1 << 14
"""Entries that are counted in integers of their own kind, which are as many at a time as the entries are."""

MOST_INTERPOLATED = 10
"""Guesses by interpolation; after that the range is halved, so that no row takes long."""


@compiled
def take_largest_of_rows(given: Integers, most: Any, kept: int, packed: Bytes, taken: Integers) -> None:
    """Write the `kept` largest entries of each row into `taken`, in order, and into `packed` which they are.

    Entries are the bits of numbers of 2 or 4 bytes, and `most` has all bits but that of the sign. A row has
    more than `kept` of them, and a multiple of 8. `taken` has room for 8 more than are taken.
    """
    num_rows, width = given.shape
    kind = given.dtype.type
    sizes, chosen = np.empty(width, given.dtype), np.empty(width, np.uint8)
    guess = np.empty(1, given.dtype)
    words, row_bytes = chosen.view(np.uint64), width // 8
    reach = 0
    for number in range(num_rows):
        row, largest = given[number], kind(0)
        for place in range(width):
            size = kind(row[place] & most)
            largest = max(largest, size)
            sizes[place] = size
        reach = int(largest) - _choose(sizes, kept, int(largest), reach, guess, chosen)
        mask = packed[number * row_bytes : (number + 1) * row_bytes]
        for place in range(row_bytes):
            mask[place] = (words[place] * BITS_OF_BYTES) >> HIGHEST_BYTE
        if MANY * kept > width:
            _append(row, chosen, taken[number * kept :])
        else:
            take_set(row, mask, taken[number * kept :])


@compiled
def _append(row: Integers, chosen: Bytes, taken: Integers) -> None:
    """Write the entries that are marked into `taken`, which has room for one more: each is written, and
    written over if it is not to be taken.
    """
    at = np.uint64(0)
    for place in range(row.size):
        taken[at] = row[place]
        at += np.uint64(chosen[place])


@compiled
def take_set(given: Integers, mask: Bytes, taken: Integers) -> None:
    """Write the entries whose bit is set into `taken`, in order; it has room for 8 more.

    Four are written at a time, of which those that are not to be taken are written over: a branch for each
    entry would be guessed wrong.
    """
    at, number = np.uint64(0), 0
    while number < mask.size and np.int64(at) + 8 <= taken.size:
        byte, first = mask[number], np.uint64(8 * number)
        taken[at] = given[first + PLACES[byte, 0]]
        taken[at + np.uint64(1)] = given[first + PLACES[byte, 1]]
        taken[at + np.uint64(2)] = given[first + PLACES[byte, 2]]
        taken[at + np.uint64(3)] = given[first + PLACES[byte, 3]]
        if COUNTS[byte] > np.uint64(4):
            taken[at + np.uint64(4)] = given[first + PLACES[byte, 4]]
            taken[at + np.uint64(5)] = given[first + PLACES[byte, 5]]
            taken[at + np.uint64(6)] = given[first + PLACES[byte, 6]]
            taken[at + np.uint64(7)] = given[first + PLACES[byte, 7]]
        at += COUNTS[byte]
        number += 1


@compiled
def put_set(given: Integers, mask: Bytes, into: Integers) -> None:
    """Write the entries given where the bit is set, in order, and zeros elsewhere."""
    at, number = np.uint64(0), 0
    while 8 * number + 8 <= into.size and np.int64(at) + 8 <= given.size:
        byte, first = np.uint64(mask[number]), np.uint64(8 * number)
        for place in range(8):
            is_set = (byte >> np.uint64(place)) & np.uint64(1)
            into[first + np.uint64(place)] = given[at] * np.int32(is_set)
            at += is_set
        number += 1
    for place in range(8 * number, into.size):
        is_set = (mask[place >> 3] >> (place & 7)) & 1
        into[place] = given[at] if is_set and np.int64(at) < given.size else 0
        at += np.uint64(is_set)


@compiled
def _choose(sizes: Integers, kept: int, largest: int, reach: int, guess: Integers, chosen: Bytes) -> int:
    """Mark the `kept` largest entries of a row, of equal ones the first; gives the size of the least of them.

    `reach` is how far that was below the largest in the row before, which is where the search begins. It goes
    on by steps, the first as long as the count is off, the next ones longer, until it has a size on either
    side, and then between them.
    """
    width = sizes.size
    low, num_low = 0, width  # so many entries are at least so large: more than wanted
    high, num_high = largest + 1, 0  # fewer than wanted
    reach = reach or (largest >> 6) + 1
    middle, step, num_guesses = max(largest - reach, 1), 0, 0
    while high - low > 1:
        guess[0] = middle - 1
        found = _num_above(sizes, guess[0])
        if found == kept:
            low, num_high = middle, kept
            break
        if found > kept:
            low, num_low = middle, found
        else:
            high, num_high = middle, found
        num_guesses += 1
        # Of normal numbers that would be about half of `reach` if the count is off by `kept`; it goes a third
        # further, so that what is wanted lies between.
        step = step or 2 * abs(found - kept) * reach // (3 * kept) + 1
        if low == 0:
            middle, step = max(middle - step, 1), 2 * step
        elif high > largest:
            middle, step = min(middle + step, largest), 2 * step
        else:
            share = (kept - num_high) / (num_low - num_high) if num_guesses < MOST_INTERPOLATED else 0.5
            middle = min(max(high - int((high - low) * share), low + 1), high - 1)
    guess[0] = low
    least = guess[0]
    end = _end_of_equal(sizes, least, kept - num_high) if num_high < kept else width
    front, back, of_back = sizes[:end], sizes[end:], chosen[end:]
    for place in range(front.size):
        chosen[place] = front[place] >= least
    for place in range(back.size):
        of_back[place] = back[place] > least
    return low


@compiled
def _num_above(sizes: Integers, below: Any) -> int:
    """How many are larger: a comparison that processors have, and one less instruction than `>=`."""
    kind, found = sizes.dtype.type, 0
    for begin in range(0, sizes.size, COUNTED):
        part, here = sizes[begin : begin + COUNTED], kind(0)
        for place in range(part.size):
            here = kind(here + kind(part[place] > below))
        found += int(here)
    return found


@compiled
def _end_of_equal(sizes: Integers, least: Any, wanted: int) -> int:
    """The place after so many entries of that size."""
    place, kind = 0, sizes.dtype.type
    while wanted > 0:
        stretch, here = sizes[place : place + STRETCH], kind(0)
        for one in range(stretch.size):
            here = kind(here + kind(stretch[one] == least))
        if here >= wanted:
            break
        wanted -= int(here)
        place += STRETCH
    while wanted > 0:
        wanted -= sizes[place] == least
        place += 1
    return place
