"""The largest entries of every row, and which these are: dynamic communication thresholding
(Gupta et al., "Training Recommender Systems at Scale", KDD 2021) for what crosses a border of a pipeline.

The next stage works on the tensor with zeros in all other entries. The exact gradient of that is zero there
too, so the gradient is sent for the same entries, without their places (`KeptEntries`).
"""

from math import prod

import torch
from torch import Tensor

from bireme.codec.blocks import BlockCodec
from bireme.codec.cast import Cast
from bireme.codec.codec import Codec, check_given, check_length
from bireme.codec.description import (
    kept_block,
    kept_bytes,
    kept_of_row,
    mask_bytes,
    num_kept,
    place_bytes,
)
from bireme.codec.packing import unpack_mask
from bireme.codec.places import read_places, write_places
from bireme.codec.selection import selected, spread, take_largest

__all__ = ["Keep", "KeptEntries"]


class Keep:
    """Sends the share `share` of every row (last axis) that is largest by magnitude, exactly so many a row.

    Of equal entries the first are kept. Values have `bits` (4 or 8) and a scale a row, which rows share where
    few are kept; or none: the tensor's own type. A NaN counts as larger than any number.
    """

    def __init__(self, share: float, bits: int | None = None) -> None:
        self._share = share
        self._bits = bits

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what a tensor of that shape and type takes."""
        return self._place_bytes(shape) + _values_bytes(self._share, self._bits, shape, dtype)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write places and values; nothing is drawn."""
        shape = tuple(tensor.shape)
        check_given(tensor, out, self.most_bytes(shape, tensor.dtype))
        rows = tensor.detach().reshape(-1, _width(shape))
        kept, begin = kept_of_row(rows.shape[1], self._share), self._place_bytes(shape)
        if begin == mask_bytes(rows.numel()):
            values = take_largest(rows, kept, out[:begin])
        else:
            mask = torch.empty(mask_bytes(rows.numel()), dtype=torch.uint8, device=rows.device)
            values = take_largest(rows, kept, mask)
            write_places(mask, rows.numel(), values.numel(), out[:begin])
        return begin + _codec(self._bits, kept).encode(values, out[begin:], seed=seed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, with zeros where nothing was kept."""
        return self.back(self.mask_of(message, shape)).decode(
            message[self._place_bytes(shape) :], shape, dtype
        )

    def mask_of(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which entries a message holds: one bit an entry."""
        check_length(message, self._place_bytes(shape))
        return read_places(message, prod(shape), num_kept(prod(shape), _width(shape), self._share))

    def _place_bytes(self, shape: tuple[int, ...]) -> int:
        return place_bytes(prod(shape), num_kept(prod(shape), _width(shape), self._share))

    def back(self, mask: Tensor) -> "KeptEntries":
        """The codec of the gradient of a tensor that was sent with this mask."""
        return KeptEntries(mask, self._share, self._bits)


class KeptEntries:
    """Sends the entries of a mask that both ends know; the others arrive as zeros.

    `mask` is of bools, or of bits as in the message of `Keep`; `share` and `bits` are those of `Keep`.
    """

    def __init__(self, mask: Tensor, share: float, bits: int | None = None) -> None:
        self._mask = mask
        self._share = share
        self._bits = bits

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what the gradient of a tensor of that shape takes."""
        return _values_bytes(self._share, self._bits, shape, dtype)

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

    def _as_bools(self, shape: tuple[int, ...]) -> Tensor:
        return self._mask.view(shape) if self._mask.dtype is torch.bool else unpack_mask(self._mask, shape)

    def _num_kept(self, shape: tuple[int, ...]) -> int:
        return num_kept(prod(shape), _width(shape), self._share)

    def _codec(self, shape: tuple[int, ...]) -> Codec:
        return _codec(self._bits, kept_of_row(_width(shape), self._share))


def _codec(bits: int | None, kept: int) -> Codec:
    """Of the values that are kept, so many a row."""
    return Cast() if bits is None else BlockCodec(bits, block=kept_block(kept))


def _width(shape: tuple[int, ...]) -> int:
    """The entries of a row."""
    return shape[-1] if shape else 1


def _values_bytes(share: float, bits: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return kept_bytes(prod(shape), _width(shape), share, bits, dtype.itemsize)
