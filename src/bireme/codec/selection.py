"""The largest entries of rows, taken out of a tensor and put back.

On a CPU numpy does it: its selection, its search for what is true and its gathering take a tenth to a fifth
of the time of torch's (`benchmarks/codec_speed.py`). On an accelerator rows are sorted, because all else
would have to wait for it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_magnitudes", "largest_of_rows", "places_first", "selected", "spread"]

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose order is that of the magnitudes of numbers of so many bytes."""

PART_VALUES = 1 << 16
"""Values that are worked on at a time on a CPU: what fits into a cache."""


def largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    """A mask of exactly `kept` entries of each row, the largest by magnitude; of equal ones the first.

    A NaN is larger than any number.
    """
    mask = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    if kept >= rows.shape[1]:
        return mask.fill_(value=True)
    integers = INTEGERS[rows.dtype.itemsize]
    most = torch.iinfo(integers).max
    bits = rows.contiguous().view(integers)
    if not rows.is_cpu:
        order = (bits & most).sort(dim=1, descending=True, stable=True).indices[:, :kept]
        return mask.fill_(value=False).scatter_(1, order, value=True)
    step = max(1, PART_VALUES // rows.shape[1])
    place = rows.shape[1] - kept
    for part, into in zip(torch.split(bits, step), torch.split(mask, step), strict=True):
        sizes = np.bitwise_and(part.numpy(), most)
        least = np.partition(sizes, place, axis=1)[:, place : place + 1]
        chosen = into.numpy()
        np.greater_equal(sizes, least, out=chosen)
        if np.count_nonzero(chosen) > kept * len(chosen):
            _drop_last_of_equal(chosen, sizes, least, kept)
    return mask


def selected(tensor: Tensor, mask: Tensor, num_kept: int) -> Tensor:
    """The entries of a mask, which has so many, in the order of the tensor."""
    flat = tensor.reshape(-1)
    if not flat.is_cpu:
        return flat.take(places_first(mask, num_kept))
    found = torch.empty(num_kept, dtype=flat.dtype)
    integers = INTEGERS[flat.dtype.itemsize]
    given, taken = flat.view(integers).numpy(), found.view(integers).numpy()
    for part, places, at in _places(mask):
        # What is taken lies within: numpy need not look, which would take a copy.
        np.take(given[part], places, out=taken[at], mode="clip")
    return found


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The values at the entries of the mask, in order, and zeros elsewhere."""
    whole = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    if not whole.is_cpu:
        whole.view(-1).put_(places_first(mask, values.numel()), values)
        return whole
    integers = INTEGERS[values.dtype.itemsize]
    put, given = whole.view(-1).view(integers).numpy(), values.view(integers).numpy()
    for part, places, at in _places(mask):
        put[part][places] = given[at]
    return whole


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
