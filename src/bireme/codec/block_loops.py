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

__all__ = ["decode_blocks", "encode_blocks", "rotate_blocks"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.signedinteger[Any]]

MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but that of its sign."""

TOGETHER = 2048
"""Values whose codes are packed at once."""

LARGEST = np.float32(1e38)
"""One over the scale of a block of zeros, or of values too small for a scale."""

WHOLE = 8
"""Bits of a code that is a byte: it is written where it belongs."""

LAST_CODES = 7
"""The most codes by which a message is longer than its blocks are, so that they fill its bytes."""


@compiled
def encode_blocks(
    given: Integers,
    width: int,
    bits: int,
    signs: Floats,
    factor: Any,
    offset: Any,
    noise: Floats,
    starts: NDArray[np.int64],
    scales: Floats,
    packed: Bytes,
) -> None:
    """Write the scale of each block of so many values, and their codes of so many bits, packed.

    A scale is the largest magnitude of its block × `factor`, NaN if any value is not finite; what divides is
    that as a bfloat16. A code is value / scale + `offset`, cut to a whole number. With `signs` blocks are
    rotated first, and with `starts` noise is added: for as many blocks as `noise` is half as long, from the
    place that `starts` has for them.
    """
    together = max(1, TOGETHER // width)
    in_noise = max(1, noise.size // 2 // width)
    values, shares = np.empty(together * width, np.float32), np.empty(together, np.float32)
    rotated = np.empty(together * width, np.float32) if signs.size else values
    room = np.zeros(together * width + LAST_CODES, np.uint8)
    for begin in range(0, scales.size, together):
        end = min(begin + together, scales.size)
        count = (end - begin) * width
        codes = packed[begin * width :] if bits == WHOLE else room
        _read(given[begin * width : end * width], values)
        if signs.size:
            rotate_blocks(values[:count], signs, rotated)
        _scale(rotated.view(np.int32), width, factor, scales[begin:end], shares)
        if starts.size:
            for number in range(end - begin):
                at = begin + number
                start = starts[at // in_noise] + at % in_noise * width
                block = slice(number * width, (number + 1) * width)
                _round_by_chance(
                    rotated[block], shares[number], noise[start : start + width], offset, codes[block]
                )
        else:
            _round(rotated, width, shares[: end - begin], offset, codes)
        if end == scales.size:  # what is left of the bytes is zero
            codes[count : count + LAST_CODES] = 0
            count = min(count + LAST_CODES, 8 * (packed.size // bits) - begin * width)
        if bits != WHOLE:
            _move(codes[:count], bits, begin * width, packed, True)


@compiled
def decode_blocks(
    packed: Bytes, width: int, bits: int, signs: Floats, centre: Any, scales: Floats, into: Integers
) -> None:
    """Write (code - `centre`) × scale of each block, rotated in between if there are `signs`."""
    together = max(1, TOGETHER // width)
    values, room = np.empty(together * width, np.float32), np.empty(together * width, np.uint8)
    rotated = np.empty(together * width, np.float32) if signs.size else values
    for begin in range(0, scales.size, together):
        end = min(begin + together, scales.size)
        count = (end - begin) * width
        codes = packed[begin * width :] if bits == WHOLE else room
        if bits != WHOLE:
            _move(codes[:count], bits, begin * width, packed, False)
        for place in range(count):
            values[place] = np.float32(codes[place]) - centre
        if signs.size:
            rotate_blocks(values[:count], signs, rotated)
        _write(rotated, width, scales[begin:end], into[begin * width : end * width])


@compiled_fused
def rotate_blocks(values: Floats, signs: Floats, rotated: Floats) -> None:
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
def _read(given: Integers, values: Floats) -> None:
    """Bits of numbers as numbers."""
    if given.itemsize == 2:
        for place in range(given.size):
            values[place] = np.int32(np.int32(given[place]) << 16).view(np.float32)
    else:
        for place in range(given.size):
            values[place] = np.int32(given[place]).view(np.float32)


@compiled
def _write(values: Floats, width: int, scales: Floats, into: Integers) -> None:
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
def _scale(words: NDArray[np.int32], width: int, factor: Any, scales: Floats, shares: Floats) -> None:
    """Write the scale of each block, whose numbers come as bits, and how many steps one is."""
    for number in range(scales.size):
        found, first = np.int32(0), np.uint64(number * width)
        for place in range(width):
            found = max(found, np.int32(words[first + np.uint64(place)] & MAGNITUDE))
        scale = np.float32(np.int32(found).view(np.float32) * factor)
        scale += scale * np.float32(0)
        scales[number] = scale
        word = np.float32(scale).view(np.uint32)
        near = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
        divisor = np.uint32(near & np.uint32(0xFFFF0000)).view(np.float32)
        share = min(np.float32(1) / divisor, LARGEST) if divisor > 0 else LARGEST
        shares[number] = share if scale == scale else scale


@compiled
def _round(values: Floats, width: int, shares: Floats, offset: Any, codes: Bytes) -> None:
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
def _round_by_chance(block: Floats, share: Any, noise: Floats, offset: Any, codes: Bytes) -> None:
    """The same for one block, with noise added."""
    if share != share:
        codes[:] = 0
    else:
        for place in range(block.size):
            codes[place] = np.uint8(np.int32(block[place] * share + noise[place] + offset))


@compiled
def _move(codes: Bytes, bits: int, first: int, packed: Bytes, packs: bool) -> None:
    """Write codes where `packing.pack_codes` does, or read them there: those of a message from the place
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
