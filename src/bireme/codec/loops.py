"""Blocks of values as loops that numba compiles; `blocks.py` has the same as operations of torch.

A block is read in the type that it comes in, rotated, rounded and packed, all while it is in the innermost
cache; on the way back it is unpacked, rotated and scaled. Each step rounds as torch's does, so messages and
what comes of them are the same bits.

Bits of float32 come as int32, of bfloat16 as int16, and all arrays are flat: a view of a row would cost more
than what is done with it. Places are unsigned where the compiler would otherwise ask whether they count from
the end.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.codec.description import BLOCK
from bireme.compiled import compiled, compiled_fused

# Loops over the largest entries of rows, and over the entries of masks, that numba compiles.
#
# `topk.py` has the same as operations of torch. A row stays in the innermost cache. Its threshold is found by
# counting: a handful of good guesses costs less than to sort out the largest.
#
# Kinds of integers are written out where the compiler would not see that narrow or unsigned ones do, and
# loops begin at 0: it then takes many entries at a time, and asks of no place whether it counts from the end.

Integers = NDArray[np.signedinteger[Any]]
Bytes = NDArray[np.uint8]

_BITS_OF_BYTES = np.uint64(0x0102040810204080)
"""Eight bytes of 0 or 1, taken as one number, times this have them as the bits of the highest byte."""
_HIGHEST_BYTE = np.uint64(56)

_SET = [[place for place in range(8) if byte >> place & 1] for byte in range(256)]
PLACES = np.array([places + [0] * (8 - len(places)) for places in _SET], np.uint64)
_COUNTS = np.array([len(places) for places in _SET], np.uint64)
"""Where the bits of a byte are set, and how many are."""

_STRETCH = 64
"""Entries of which it is first asked whether the last one wanted is among them."""

_MANY = 3
"""Where more than one in so many is taken, each entry is written: `take_set` would guess wrong too often."""

_COUNTED = 1 << 14
"""Entries that are counted in integers of their own kind, which are as many at a time as the entries are."""

_MOST_INTERPOLATED = 10
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
            mask[place] = (words[place] * _BITS_OF_BYTES) >> _HIGHEST_BYTE
        if _MANY * kept > width:
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
        if _COUNTS[byte] > np.uint64(4):
            taken[at + np.uint64(4)] = given[first + PLACES[byte, 4]]
            taken[at + np.uint64(5)] = given[first + PLACES[byte, 5]]
            taken[at + np.uint64(6)] = given[first + PLACES[byte, 6]]
            taken[at + np.uint64(7)] = given[first + PLACES[byte, 7]]
        at += _COUNTS[byte]
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
            share = (kept - num_high) / (num_low - num_high) if num_guesses < _MOST_INTERPOLATED else 0.5
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
    for begin in range(0, sizes.size, _COUNTED):
        part, here = sizes[begin : begin + _COUNTED], kind(0)
        for place in range(part.size):
            here = kind(here + kind(part[place] > below))
        found += int(here)
    return found


@compiled
def _end_of_equal(sizes: Integers, least: Any, wanted: int) -> int:
    """The place after so many entries of that size."""
    place, kind = 0, sizes.dtype.type
    while wanted > 0:
        stretch, here = sizes[place : place + _STRETCH], kind(0)
        for one in range(stretch.size):
            here = kind(here + kind(stretch[one] == least))
        if here >= wanted:
            break
        wanted -= int(here)
        place += _STRETCH
    while wanted > 0:
        wanted -= sizes[place] == least
        place += 1
    return place


# Sparse places as loops that numba compiles; `topk.py` has the same as operations of torch and numpy.

MOST_LOW_BITS = 8
"""Of a place, which are kept in a byte here."""

_LOWEST_BITS = np.uint64(0x0101010101010101)
"""The lowest bit of each of eight bytes."""

_SPREAD = np.array(
    [sum((byte >> bit & 1) << (8 * bit) for bit in range(8)) for byte in range(256)], np.uint64
)
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
            bits = (words[number] >> np.uint64(bit)) & _LOWEST_BITS
            plane[number] = (bits * _BITS_OF_BYTES) >> _HIGHEST_BYTE


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
            words[number] |= _SPREAD[plane[number]] << np.uint64(bit)
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
        if _COUNTS[byte] > np.uint64(4):
            places[at + np.uint64(4)] = first + PLACES[byte, 4]
            places[at + np.uint64(5)] = first + PLACES[byte, 5]
            places[at + np.uint64(6)] = first + PLACES[byte, 6]
            places[at + np.uint64(7)] = first + PLACES[byte, 7]
        at += _COUNTS[byte]
        number += 1


_Floats = NDArray[np.float32]

_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but that of its sign."""

_TOGETHER = 2048
"""Values whose codes are packed at once."""

LARGEST = np.float32(1e38)
"""One over the scale of a block of zeros, or of values too small for a scale."""

_WHOLE = 8
"""Bits of a code that is a byte: it is written where it belongs."""

LAST_CODES = 7
"""The most codes by which a message is longer than its blocks are, so that they fill its bytes."""


@compiled
def encode_blocks(
    given: Integers,
    width: int,
    bits: int,
    signs: _Floats,
    factor: Any,
    offset: Any,
    noise: _Floats,
    starts: NDArray[np.int64],
    scales: _Floats,
    packed: Bytes,
) -> None:
    """Write the scale of each block of so many values, and their codes of so many bits, packed.

    A scale is the largest magnitude of its block × `factor`, NaN if any value is not finite; what divides is
    that as a bfloat16. A code is value / scale + `offset`, cut to a whole number. With `signs` blocks are
    rotated first, and with `starts` noise is added: for as many blocks as `noise` is half as long, from the
    place that `starts` has for them.
    """
    together = max(1, _TOGETHER // width)
    in_noise = max(1, noise.size // 2 // width)
    values, shares = np.empty(together * width, np.float32), np.empty(together, np.float32)
    rotated = np.empty(together * width, np.float32) if signs.size else values
    room = np.zeros(together * width + LAST_CODES, np.uint8)
    for begin in range(0, scales.size, together):
        end = min(begin + together, scales.size)
        count = (end - begin) * width
        codes = packed[begin * width :] if bits == _WHOLE else room
        _read(given[begin * width : end * width], values)
        if signs.size:
            rotate_blocks(values[:count], signs, rotated)
        _scale(rotated.view(np.int32), width, factor, scales[begin:end], shares)
        if starts.size:
            _round_by_chance(
                rotated, width, shares[: end - begin], noise, starts, in_noise, begin, offset, codes
            )
        else:
            _round(rotated, width, shares[: end - begin], offset, codes)
        if end == scales.size:  # what is left of the bytes is zero
            codes[count : count + LAST_CODES] = 0
            count = min(count + LAST_CODES, 8 * (packed.size // bits) - begin * width)
        if bits != _WHOLE:
            _move(codes[:count], bits, begin * width, packed, True)


@compiled
def decode_blocks(
    packed: Bytes, width: int, bits: int, signs: _Floats, centre: Any, scales: _Floats, into: Integers
) -> None:
    """Write (code - `centre`) × scale of each block, rotated in between if there are `signs`."""
    together = max(1, _TOGETHER // width)
    values, room = np.empty(together * width, np.float32), np.empty(together * width, np.uint8)
    rotated = np.empty(together * width, np.float32) if signs.size else values
    for begin in range(0, scales.size, together):
        end = min(begin + together, scales.size)
        count = (end - begin) * width
        codes = packed[begin * width :] if bits == _WHOLE else room
        if bits != _WHOLE:
            _move(codes[:count], bits, begin * width, packed, False)
        for place in range(count):
            values[place] = np.float32(codes[place]) - centre
        if signs.size:
            rotate_blocks(values[:count], signs, rotated)
        _write(rotated, width, scales[begin:end], into[begin * width : end * width])


@compiled_fused
def rotate_blocks(values: _Floats, signs: _Floats, rotated: _Floats) -> None:
    """Multiply each 32 values by the matrix of `signs`, ones and minus ones, row after row.

    That is the order in which torch's product of matrices adds, so the last bit is the same: products with
    ones are exact, whether sums are rounded with them or after.
    """
    for begin in range(0, values.size, BLOCK):
        block = np.uint64(begin)
        for place in range(BLOCK):
            rotated[block + np.uint64(place)] = 0
        for first in range(0, BLOCK, 8):
            at = block + np.uint64(first)
            a, b, c = values[at], values[at + np.uint64(1)], values[at + np.uint64(2)]
            d, e, f = values[at + np.uint64(3)], values[at + np.uint64(4)], values[at + np.uint64(5)]
            g, h, rows = values[at + np.uint64(6)], values[at + np.uint64(7)], np.uint64(first * BLOCK)
            for place in range(BLOCK):
                at = rows + np.uint64(place)
                whole = rotated[block + np.uint64(place)] + a * signs[at]
                whole += b * signs[at + np.uint64(BLOCK)]
                whole += c * signs[at + np.uint64(2 * BLOCK)]
                whole += d * signs[at + np.uint64(3 * BLOCK)]
                whole += e * signs[at + np.uint64(4 * BLOCK)]
                whole += f * signs[at + np.uint64(5 * BLOCK)]
                whole += g * signs[at + np.uint64(6 * BLOCK)]
                whole += h * signs[at + np.uint64(7 * BLOCK)]
                rotated[block + np.uint64(place)] = whole


@compiled
def _read(given: Integers, values: _Floats) -> None:
    """Bits of numbers as numbers."""
    if given.itemsize == 2:
        for place in range(given.size):
            values[place] = np.int32(np.int32(given[place]) << 16).view(np.float32)
    else:
        for place in range(given.size):
            values[place] = np.int32(given[place]).view(np.float32)


@compiled
def _write(values: _Floats, width: int, scales: _Floats, into: Integers) -> None:
    """Numbers × the scale of their block as bits; of a bfloat16 the nearest, of two the even one."""
    for number in range(scales.size):
        scale, first = scales[number], np.uint64(number * width)
        if into.itemsize == 2:
            for place in range(width):
                at = first + np.uint64(place)
                word = np.float32(values[at] * scale).view(np.uint32)
                odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
                near = np.uint32(np.uint32(word + np.uint32(0x7FFF)) + odd)
                into[at] = np.int16(np.uint32(near >> np.uint32(16)))
        else:
            for place in range(width):
                at = first + np.uint64(place)
                into[at] = np.float32(values[at] * scale).view(np.int32)


@compiled
def _scale(words: NDArray[np.int32], width: int, factor: Any, scales: _Floats, shares: _Floats) -> None:
    """Write the scale of each block, whose numbers come as bits, and how many steps one is."""
    for number in range(scales.size):
        found, first = np.int32(0), np.uint64(number * width)
        for place in range(width):
            found = max(found, np.int32(words[first + np.uint64(place)] & _MAGNITUDE))
        scale = np.float32(np.int32(found).view(np.float32) * factor)
        scale += scale * np.float32(0)
        scales[number] = scale
        word = np.float32(scale).view(np.uint32)
        near = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
        divisor = np.uint32(near & np.uint32(0xFFFF0000)).view(np.float32)
        share = min(np.float32(1) / divisor, LARGEST) if divisor > 0 else LARGEST
        shares[number] = share if scale == scale else scale


@compiled
def _round(values: _Floats, width: int, shares: _Floats, offset: Any, codes: Bytes) -> None:
    """The codes of blocks; those of one whose scale is NaN are zero."""
    for number in range(shares.size):
        share, first = shares[number], np.uint64(number * width)
        if share != share:
            codes[number * width : (number + 1) * width] = 0
        else:
            for place in range(width):
                at = first + np.uint64(place)
                codes[at] = np.uint8(np.int32(values[at] * share + offset))


@compiled
def _round_by_chance(
    values: _Floats,
    width: int,
    shares: _Floats,
    noise: _Floats,
    starts: NDArray[np.int64],
    in_noise: int,
    begin: int,
    offset: Any,
    codes: Bytes,
) -> None:
    """The same for the blocks from the number `begin` on, with noise added."""
    for number in range(shares.size):
        share, first, at = shares[number], np.uint64(number * width), begin + number
        start = np.uint64(starts[at // in_noise] + at % in_noise * width)
        if share != share:
            codes[number * width : (number + 1) * width] = 0
        else:
            for place in range(width):
                at_place = first + np.uint64(place)
                value = values[at_place] * share + noise[start + np.uint64(place)]
                codes[at_place] = np.uint8(np.int32(value + offset))


@compiled
def _move(codes: Bytes, bits: int, first: int, packed: Bytes, packs: bool) -> None:
    """Write codes where `codec.pack_codes` does, or read them there: those of a message from the place
    `first` on.
    """
    eighth = packed.size // bits
    begin = 0
    while begin < codes.size:
        number, at = (first + begin) // eighth, (first + begin) % eighth
        end = min(begin + eighth - at, codes.size)
        row = shift = 0
        for width in (8, 4, 2, 1):
            if bits & width:
                place, mask = number // width * width, (1 << width) - 1
                there = (row + number % width) * eighth + at
                piece = packed[there : there + end - begin]
                if packs:
                    _put_piece(codes[begin:end], shift, mask, place, piece)
                else:
                    _take_piece(piece, place, mask, shift, codes[begin:end])
                row += width
                shift += width
        begin = end


@compiled
def _put_piece(codes: Bytes, shift: int, mask: int, place: int, into: Bytes) -> None:
    """Write some bits of each code, from `shift` on, to where bytes have room for them, from `place` on."""
    # The compiler shifts many bytes at once only if it knows by how far: so to multiply shifts them.
    up, times = np.int32(256 >> shift), np.int32(1 << place)
    if place == 0:
        for one in range(codes.size):
            into[one] = np.uint8((np.int32(np.int32(codes[one]) * up) >> 8) & mask)
    elif shift == 0:
        for one in range(codes.size):
            into[one] |= np.uint8(np.int32(codes[one] & mask) * times)
    else:
        for one in range(codes.size):
            piece = np.int32((np.int32(np.int32(codes[one]) * up) >> 8) & mask)
            into[one] |= np.uint8(np.int32(piece * times))


@compiled
def _take_piece(packed: Bytes, place: int, mask: int, shift: int, codes: Bytes) -> None:
    """The opposite of `_put_piece`."""
    up, times = np.int32(256 >> place), np.int32(1 << shift)
    if shift == 0:
        for one in range(codes.size):
            codes[one] = np.uint8((np.int32(np.int32(packed[one]) * up) >> 8) & mask)
    else:
        for one in range(codes.size):
            piece = np.int32((np.int32(np.int32(packed[one]) * up) >> 8) & mask)
            codes[one] |= np.uint8(np.int32(piece * times))
