"""The largest entries of rows, taken out of a tensor and put back.

On a CPU loops do it that numba compiles (`row_loops`). Where that is not installed, or not worth its import,
numpy finds the same: its selection, its search for what is true and its gathering take a tenth to a fifth of
the time of torch's (`benchmarks/codec_speed.py`). On an accelerator rows are sorted, because all else would
have to wait for it.
"""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bireme.codec.packing import pack_mask
from bireme.compiled import pays_off

__all__ = ["as_magnitudes", "largest_of_rows", "places_first", "selected", "spread", "take_largest"]

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose order is that of the magnitudes of numbers of so many bytes."""

SPARE = 8
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
    for begin, chosen in _chosen(rows.contiguous().view(INTEGERS[rows.dtype.itemsize]).numpy(), kept):
        whole[begin : begin + len(chosen)] = chosen
    return mask


def take_largest(rows: Tensor, kept: int, packed: Tensor) -> Tensor:
    """The entries that `largest_of_rows` has in its mask, in order; the mask goes into `packed`, one bit an
    entry.
    """
    if not rows.is_cpu or kept >= rows.shape[1] or rows.shape[1] % 8:
        mask = largest_of_rows(rows, kept)
        pack_mask(mask, packed)
        return selected(rows, mask, len(rows) * kept)
    given = rows.contiguous().view(INTEGERS[rows.dtype.itemsize]).numpy()
    found = torch.empty(len(rows) * kept + SPARE, dtype=rows.dtype)
    taken, into = found.view(INTEGERS[rows.dtype.itemsize]).numpy(), packed.numpy()
    row_bytes = rows.shape[1] // 8
    into[len(rows) * row_bytes :] = 0
    loops = _loops(rows)
    if loops is not None and rows.dtype.itemsize < 8:
        loops.take_largest_of_rows(given, given.dtype.type(np.iinfo(given.dtype).max), kept, into, taken)
        return found[:-SPARE]
    for begin, chosen in _chosen(given, kept):
        end = begin + len(chosen)
        into[begin * row_bytes : end * row_bytes] = np.packbits(chosen, bitorder="little")
        _take(given[begin:end].reshape(-1), np.flatnonzero(chosen), taken[begin * kept : end * kept])
    return found[:-SPARE]


def selected(tensor: Tensor, mask: Tensor, num_kept: int) -> Tensor:
    """The entries of a mask, which has so many, in the order of the tensor."""
    flat = tensor.reshape(-1)
    if not flat.is_cpu:
        return flat.take(places_first(mask, num_kept))
    found = torch.empty(num_kept + SPARE, dtype=flat.dtype)
    integers = INTEGERS[flat.dtype.itemsize]
    given, taken = flat.view(integers).numpy(), found.view(integers).numpy()
    loops = _loops(flat)
    if loops is not None:
        loops.take_set(given, _bits(mask), taken)
        return found[:-SPARE]
    for part, places, at in _places(mask):
        _take(given[part], places, taken[at])
    return found[:-SPARE]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The values at the entries of the mask, in order, and zeros elsewhere."""
    loops = _loops(mask)
    made = torch.zeros if loops is None else torch.empty
    whole = made(mask.shape, dtype=values.dtype, device=values.device)
    if not whole.is_cpu:
        whole.view(-1).put_(places_first(mask, values.numel()), values)
        return whole
    integers = INTEGERS[values.dtype.itemsize]
    put, given = whole.view(-1).view(integers).numpy(), values.view(integers).numpy()
    if loops is not None:
        loops.put_set(given, _bits(mask), put)
        return whole
    for part, places, at in _places(mask):
        put[part][places] = given[at]
    return whole


def _bits(mask: Tensor) -> np.ndarray:
    """A mask as one bit an entry."""
    return np.packbits(mask.view(-1).numpy(), bitorder="little")


def _loops(tensor: Tensor) -> ModuleType | None:
    """The compiled loops, where they are faster."""
    if not tensor.is_cpu or not pays_off(tensor.numel()):
        return None
    from bireme.codec import row_loops  # imports numba

    return row_loops


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
    integers = INTEGERS[values.dtype.itemsize]
    return values.contiguous().view(integers) & torch.iinfo(integers).max
