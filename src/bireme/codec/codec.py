"""The protocol of a codec: from a tensor to bytes and back.

A codec is a pure function of what it is given: it keeps nothing from one call to the next, so the same tensor
and seed give the same bytes. What does not fit into its numbers must stay visible: a NaN or an infinite value
arrives as a NaN, not as a number.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bireme.errors import BiremeError

__all__ = ["REAL", "Codec", "Masking", "check_given", "check_length"]

REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The numbers that codecs are for."""


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


def check_given(tensor: Tensor, out: Tensor, most_bytes: int) -> None:
    """Refuse to encode what are no real numbers, or with too little room for the message."""
    if tensor.dtype not in REAL:
        names = ", ".join(str(one).removeprefix("torch.") for one in REAL)
        raise BiremeError(
            f"A codec is for real numbers ({names}), and the tensor has {tensor.dtype}. Send it as it is, "
            "without a codec."
        )
    check_length(out, most_bytes)


def check_length(message: Tensor, num_bytes: int) -> None:
    """Refuse a message that is shorter than the tensor takes."""
    if message.numel() < num_bytes:
        raise BiremeError(
            f"The tensor takes {num_bytes} bytes, and the message has {message.numel()}. Give encode() room "
            "for most_bytes(), and decode() all that was written."
        )
