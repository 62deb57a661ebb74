"""The protocol of a codec: from a tensor to bytes and back.

A codec is a pure function of what it is given: it keeps nothing from one call to the next, so the same tensor
and seed give the same bytes. What does not fit into its numbers must stay visible: a NaN or an infinite value
arrives as a NaN, not as a number.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Codec", "Masking"]


class Codec(Protocol):
    """Makes messages of tensors of real numbers.

    `encode` and `decode` wait for no accelerator: on one they only queue work.
    """

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The most bytes that a tensor of that shape and type takes; its messages may be shorter."""
        ...

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write the tensor into `out`; gives how many bytes it takes.

        `out` is a flat, contiguous uint8 tensor on the same device with at least `most_bytes` entries that
        begins at a multiple of 8 bytes. A codec that draws takes its random numbers from `seed`.
        """
        ...

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor from what `encode` has written; `message` begins at a multiple of 8 bytes."""
        ...


@runtime_checkable
class Masking(Codec, Protocol):
    """A codec that sends some entries only. The gradient is then that of the tensor without the others:
    `back` sends it for the same entries, and both ends know which.
    """

    def mask_of(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which entries a message holds: one bit an entry, which may be a view of the message."""
        ...

    def back(self, mask: Tensor) -> Codec:
        """The codec of the gradient, for a mask from `mask_of`."""
        ...
