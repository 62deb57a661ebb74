"""The largest entries of every row, and which these are: dynamic communication thresholding
(Gupta et al., "Training Recommender Systems at Scale", KDD 2021) for what crosses a boundary of a pipeline.

The next stage works on the tensor with zeros in all other entries. The exact gradient of that is zero there
too, so the gradient is sent for the same entries, without their places (`KeptEntries`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bireme.codec.blocks import BlockCodec
from bireme.codec.codec import Cast, Codec, check_given, check_length, pack_mask, unpack_mask
from bireme.codec.description import (
    kept_block,
    kept_bytes,
    kept_of_row,
    low_bits,
    mask_bytes,
    num_kept,
    place_bytes,
)
from bireme.compiled import pays_off

# The largest entries of rows, taken out of a tensor and put back.
#
# On a CPU loops do it that numba compiles (`loops.py`). Where that is not installed, or not worth its
# import, numpy finds the same: its selection, its search for what is true and its gathering take a tenth to a
# fifth of the time of torch's (`benchmarks/codec_speed.py`). On an accelerator rows are sorted, because all
# else would have to wait for it.

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose order is that of the magnitudes of numbers of so many bytes."""

_SPARE = 8
"""Entries that loops may write past the last one that is taken."""

PART_VALUES = 1 << 16
"""Values that numpy works on at a time: what fits into a cache."""


def largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    """A mask of exactly `kept` entries of each row, the largest by magnitude; of equal ones the first.

    A NaN is larger than any number.
    """
    mask = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    if kept >= rows.shape[1]:
        return mask.fill_(value=True)
    if not rows.is_cpu:
        order = as_magnitudes(rows).sort(dim=1, descending=True, stable=True).indices[:, :kept]
        return mask.fill_(value=False).scatter_(1, order, value=True)
    whole = mask.numpy()
    for begin, chosen in _chosen(rows.contiguous().view(_INTEGERS[rows.dtype.itemsize]).numpy(), kept):
        whole[begin : begin + len(chosen)] = chosen
    return mask


def _take_largest(rows: Tensor, kept: int, packed: Tensor) -> Tensor:
    """The entries that `largest_of_rows` has in its mask, in order; the mask goes into `packed`, one bit an
    entry.
    """
    if not rows.is_cpu or kept >= rows.shape[1] or rows.shape[1] % 8:
        mask = largest_of_rows(rows, kept)
        pack_mask(mask, packed)
        return selected(rows, mask, len(rows) * kept)
    given = rows.contiguous().view(_INTEGERS[rows.dtype.itemsize]).numpy()
    found = torch.empty(len(rows) * kept + _SPARE, dtype=rows.dtype)
    taken, into = found.view(_INTEGERS[rows.dtype.itemsize]).numpy(), packed.numpy()
    row_bytes = rows.shape[1] // 8
    into[len(rows) * row_bytes :] = 0
    loops = _loops(rows)
    if loops is not None and rows.dtype.itemsize < 8:
        loops.take_largest_of_rows(given, given.dtype.type(np.iinfo(given.dtype).max), kept, into, taken)
        return found[:-_SPARE]
    for begin, chosen in _chosen(given, kept):
        end = begin + len(chosen)
        into[begin * row_bytes : end * row_bytes] = np.packbits(chosen, bitorder="little")
        _take(given[begin:end].reshape(-1), np.flatnonzero(chosen), taken[begin * kept : end * kept])
    return found[:-_SPARE]


def selected(tensor: Tensor, mask: Tensor, num_kept: int) -> Tensor:
    """The entries of a mask, which has so many, in the order of the tensor."""
    flat = tensor.reshape(-1)
    if not flat.is_cpu:
        return flat.take(places_first(mask, num_kept))
    found = torch.empty(num_kept + _SPARE, dtype=flat.dtype)
    integers = _INTEGERS[flat.dtype.itemsize]
    given, taken = flat.view(integers).numpy(), found.view(integers).numpy()
    loops = _loops(flat)
    if loops is not None:
        loops.take_set(given, _bits(mask), taken)
        return found[:-_SPARE]
    for part, places, at in _places(mask):
        _take(given[part], places, taken[at])
    return found[:-_SPARE]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The values at the entries of the mask, in order, and zeros elsewhere."""
    loops = _loops(mask)
    made = torch.zeros if loops is None else torch.empty
    whole = made(mask.shape, dtype=values.dtype, device=values.device)
    if not whole.is_cpu:
        whole.view(-1).put_(places_first(mask, values.numel()), values)
        return whole
    integers = _INTEGERS[values.dtype.itemsize]
    put, given = whole.view(-1).view(integers).numpy(), values.view(integers).numpy()
    if loops is not None:
        loops.put_set(given, _bits(mask), put)
        return whole
    for part, places, at in _places(mask):
        put[part][places] = given[at]
    return whole


def _bits(mask: Tensor) -> np.ndarray:
    return np.packbits(mask.view(-1).numpy(), bitorder="little")


def _loops(tensor: Tensor) -> ModuleType | None:
    """The compiled loops, where they are faster."""
    if not tensor.is_cpu or not pays_off(tensor.numel()):
        return None
    from bireme.codec import loops

    return loops


def _chosen(bits: np.ndarray, kept: int) -> Iterator[tuple[int, np.ndarray]]:
    """Which entries are kept, some rows at a time: the first row, and a mask that the next ones overwrite."""
    width = bits.shape[1]
    step, place, most = max(1, PART_VALUES // width), width - kept, np.iinfo(bits.dtype).max
    # One piece of memory for what is in between: to ask for it again takes longer than to fill it.
    room = np.empty((2, min(step, len(bits)), width), bits.dtype)
    masks = np.empty(room.shape[1:], np.bool_)
    for begin in range(0, len(bits), step):
        part = bits[begin : begin + step]
        sizes, ordered, chosen = room[0, : len(part)], room[1, : len(part)], masks[: len(part)]
        np.bitwise_and(part, most, out=sizes)
        np.copyto(ordered, sizes)
        ordered.partition(place, axis=1)
        least = ordered[:, place : place + 1]
        np.greater_equal(sizes, least, out=chosen)
        if np.count_nonzero(chosen) > kept * len(chosen):
            _drop_last_of_equal(chosen, sizes, least, kept)
        yield begin, chosen


def _take(given: np.ndarray, places: np.ndarray, into: np.ndarray) -> None:
    # What is taken lies within: numpy need not look, which would take a copy.
    np.take(given, places, out=into, mode="clip")


def _drop_last_of_equal(chosen: np.ndarray, sizes: np.ndarray, least: np.ndarray, kept: int) -> None:
    """Leave of the entries that are as large as the least of their row the first ones, for `kept` in all."""
    crowded = np.flatnonzero(chosen.sum(1) > kept)
    equal = sizes[crowded] == least[crowded]
    room = kept - (sizes[crowded] > least[crowded]).sum(1, keepdims=True)
    chosen[crowded] &= ~equal | (equal.cumsum(1) <= room)


def _places(mask: Tensor) -> Iterator[tuple[slice, np.ndarray, slice]]:
    """Where a mask is true, part by part: the part, the places within it, and which of all these they are."""
    flat, found = mask.view(-1).numpy(), 0
    for begin in range(0, len(flat), PART_VALUES):
        part = slice(begin, begin + PART_VALUES)
        places = np.flatnonzero(flat[part])
        yield part, places, slice(found, found + len(places))
        found += len(places)


def places_first(mask: Tensor, num_kept: int) -> Tensor:
    """Where a mask is true, in order, and after that where it is not: so many places in all. To count them
    would be to wait.
    """
    return mask.view(-1).to(torch.uint8).sort(descending=True, stable=True).indices[:num_kept]


def as_magnitudes(values: Tensor) -> Tensor:
    """Integers in the order of the magnitudes of numbers; those of NaNs are the largest."""
    integers = _INTEGERS[values.dtype.itemsize]
    return values.contiguous().view(integers) & torch.iinfo(integers).max


# Which entries a message holds: a mask of one bit an entry, or, where few are sent, fewer bits.
#
# Of places in their order the lowest bits are sent as they are, bit by bit of all of them. What is left of
# the i-th place, plus i, grows from place to place: it says which bit of a row of bits is set (Elias 1974,
# Fano 1971). For a share p of the entries and l low bits that takes p (l + 1) + 2^-l bits an entry, a tenth
# more than the least there can be. How many bytes it takes follows from both numbers alone, and on an
# accelerator nothing is waited for.


def write_places(mask: Tensor, count: int, num_sent: int, out: Tensor) -> None:
    """Write which of `count` entries a mask has, one bit an entry, of which `num_sent` are set."""
    low = low_bits(count, num_sent)
    if low is None:
        out.copy_(mask)
    elif (loops := _place_loops(mask, count, low)) is not None:
        loops.write_sparse(mask.numpy(), low, num_sent, out.numpy())
    else:
        places = _set_places(unpack_mask(mask, (count,)), num_sent)
        size = -(-num_sent // 8)
        for bit in range(low):
            pack_mask(((places >> bit) & 1).bool(), out[bit * size : (bit + 1) * size])
        row = torch.zeros(num_sent + (count >> low) + 1, dtype=torch.bool, device=out.device)
        row[(places >> low) + _numbers(num_sent, out)] = True
        pack_mask(row, out[low * size :])


def read_places(message: Tensor, count: int, num_sent: int) -> Tensor:
    """The mask, one bit an entry; `message` begins with what `write_places` has written."""
    low = low_bits(count, num_sent)
    if low is None:
        return message[: mask_bytes(count)]
    message = message[: place_bytes(count, num_sent)]
    bits = torch.zeros(mask_bytes(count), dtype=torch.uint8, device=message.device)
    if (loops := _place_loops(message, count, low)) is not None:
        loops.read_sparse(message.numpy(), low, num_sent, bits.numpy())
        return bits
    size = -(-num_sent // 8)
    row = unpack_mask(message[low * size :], (num_sent + (count >> low) + 1,))
    places = (_set_places(row, num_sent) - _numbers(num_sent, message)) << low
    for bit in range(low):
        places |= unpack_mask(message[bit * size : (bit + 1) * size], (num_sent,)).long() << bit
    mask = torch.zeros(count, dtype=torch.bool, device=message.device)
    mask[places] = True
    pack_mask(mask, bits)
    return bits


def _place_loops(tensor: Tensor, count: int, low: int) -> ModuleType | None:
    """The compiled loops, where they are faster."""
    if not tensor.is_cpu or not pays_off(count):
        return None
    from bireme.codec import loops

    return loops if low <= loops.MOST_LOW_BITS and count < 1 << 32 else None


def _set_places(mask: Tensor, num_set: int) -> Tensor:
    if mask.is_cpu:
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return places_first(mask, num_set)


def _numbers(num: int, like: Tensor) -> Tensor:
    return torch.arange(num, device=like.device)


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends the share `share` of every row (last axis) that is largest by magnitude, exactly so many a row.

    Of equal entries the first are kept. Values have `bits` (4 or 8) and a scale a row, which rows share where
    few are kept; or none: the tensor's own type. A NaN counts as larger than any number.
    """

    share: float
    bits: int | None = None

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what a tensor of that shape and type takes."""
        return self._place_bytes(shape) + _values_bytes(self.share, self.bits, shape, dtype)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write places and values; nothing is drawn."""
        shape = tuple(tensor.shape)
        check_given(tensor, out, self.most_bytes(shape, tensor.dtype))
        rows = tensor.detach().reshape(-1, _width(shape))
        kept, begin = kept_of_row(rows.shape[1], self.share), self._place_bytes(shape)
        if begin == mask_bytes(rows.numel()):
            values = _take_largest(rows, kept, out[:begin])
        else:
            mask = torch.empty(mask_bytes(rows.numel()), dtype=torch.uint8, device=rows.device)
            values = _take_largest(rows, kept, mask)
            write_places(mask, rows.numel(), values.numel(), out[:begin])
        return begin + _codec(self.bits, kept).encode(values, out[begin:], seed=seed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, with zeros where nothing was kept."""
        return self.back(self.mask_of(message, shape)).decode(
            message[self._place_bytes(shape) :], shape, dtype
        )

    def mask_of(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which entries a message holds: one bit an entry."""
        check_length(message, self._place_bytes(shape))
        return read_places(message, prod(shape), num_kept(prod(shape), _width(shape), self.share))

    def _place_bytes(self, shape: tuple[int, ...]) -> int:
        return place_bytes(prod(shape), num_kept(prod(shape), _width(shape), self.share))

    def back(self, mask: Tensor) -> "KeptEntries":
        """The codec of the gradient of a tensor that was sent with this mask."""
        return KeptEntries(mask, self.share, self.bits)


@dataclass(frozen=True, slots=True, eq=False)
class OfMask:
    """A codec of the entries of a mask that both ends know; the others arrive as zeros.

    `mask` is of bools, or of bits as in a message; `share` and `bits` are those of the codec that made it.
    """

    mask: Tensor
    share: float
    bits: int | None

    def _as_bools(self, shape: tuple[int, ...]) -> Tensor:
        return self.mask.view(shape) if self.mask.dtype is torch.bool else unpack_mask(self.mask, shape)


class KeptEntries(OfMask):
    """Sends the entries of a mask of `TopK`."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what the gradient of a tensor of that shape takes."""
        return _values_bytes(self.share, self.bits, shape, dtype)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write the values of the entries."""
        shape = tuple(tensor.shape)
        check_given(tensor, out, self.most_bytes(shape, tensor.dtype))
        mask = self._as_bools(shape)
        values = selected(tensor.detach(), mask, self._num_kept(shape))
        return self._codec(shape).encode(values, out, seed=seed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, with zeros outside the mask."""
        mask = self._as_bools(shape)
        values = self._codec(shape).decode(message, (self._num_kept(shape),), dtype)
        return spread(values, mask)

    def _num_kept(self, shape: tuple[int, ...]) -> int:
        return num_kept(prod(shape), _width(shape), self.share)

    def _codec(self, shape: tuple[int, ...]) -> Codec:
        return _codec(self.bits, kept_of_row(_width(shape), self.share))


def _codec(bits: int | None, kept: int) -> Codec:
    """Of the values that are kept, so many a row."""
    return Cast() if bits is None else BlockCodec(bits, block=kept_block(kept))


def _width(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _values_bytes(share: float, bits: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return kept_bytes(prod(shape), _width(shape), share, bits, dtype.itemsize)
