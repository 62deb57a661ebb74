"""Values one by one in another type of number, or as they are."""

from math import prod

import torch
from torch import Tensor

from bireme.codec.codec import check_given, check_length

__all__ = ["Cast"]


class Cast:
    """Sends each value in `dtype`, or without one as it is."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The bytes of the tensor in the other type."""
        return prod(shape) * (self._dtype or dtype).itemsize

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write the values; nothing is drawn."""
        used = self.most_bytes(tuple(tensor.shape), tensor.dtype)
        if self._dtype is not None:
            check_given(tensor, out, used)
        out[:used].view(self._dtype or tensor.dtype).view(tensor.shape).copy_(tensor)
        return used

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The values in the tensor's own type."""
        sent = self._dtype or dtype
        check_length(message, prod(shape) * sent.itemsize)
        values = message[: prod(shape) * sent.itemsize].view(sent).view(shape)
        return values.to(dtype, copy=True)
