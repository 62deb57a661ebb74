"""The largest entries of rows, taken out of a tensor and put back.

On a CPU numpy finds the smallest magnitude that is kept, which takes a part of the time of a sort. On an
accelerator rows are sorted, because everything else would have to wait for it.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["largest_of_rows", "selected", "spread"]

BITS_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose order is that of the magnitudes of numbers of so many bytes."""


def largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    """A mask of exactly `kept` entries of each row, the largest by magnitude; of equal ones the first.

    A NaN is larger than any number.
    """
    sizes = _magnitudes(rows)
    width = rows.shape[1]
    if kept >= width:
        return torch.ones_like(sizes, dtype=torch.bool)
    if not rows.is_cpu:
        order = sizes.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        return torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, order, value=True)
    place = width - kept
    least = torch.from_numpy(np.partition(sizes.numpy(), place, axis=1)[:, place : place + 1])
    mask = sizes >= least
    crowded = (mask.sum(1) > kept).nonzero().view(-1)
    if len(crowded):
        mask[crowded] = _first_of_equal(sizes[crowded], least[crowded], kept)
    return mask


def selected(tensor: Tensor, mask: Tensor, num_kept: int) -> Tensor:
    """The entries of a mask, which has so many, in the order of the tensor."""
    if tensor.is_cpu:
        return tensor.masked_select(mask)
    return tensor.reshape(-1)[_places(mask, num_kept)]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The values at the entries of the mask, in order, and zeros elsewhere."""
    whole = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    if whole.is_cpu:
        return whole.masked_scatter_(mask, values)
    whole.view(-1)[_places(mask, values.numel())] = values
    return whole


def _magnitudes(rows: Tensor) -> Tensor:
    """Integers that are ordered as the magnitudes are."""
    integers = BITS_OF[rows.dtype.itemsize]
    return rows.contiguous().view(integers) & torch.iinfo(integers).max


def _first_of_equal(sizes: Tensor, least: Tensor, kept: int) -> Tensor:
    """The mask of rows in which more entries are as large as the least than there is room for."""
    larger, equal = sizes > least, sizes == least
    room = kept - larger.sum(1, keepdim=True)
    return larger | (equal & (equal.cumsum(1) <= room))


def _places(mask: Tensor, num_kept: int) -> Tensor:
    """Where a mask is true. Sorted, as the number of them is known and a count would be waited for."""
    return mask.view(-1).to(torch.uint8).sort(descending=True, stable=True).indices[:num_kept]
