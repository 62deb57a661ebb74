"""The protocol of a codec: from a tensor to bytes and back.

A codec is a pure function of what it is given: it keeps nothing from one call to the next, so the same tensor
and seed give the same bytes. What does not fit into its numbers must stay visible: a NaN or an infinite value
arrives as a NaN, not as a number.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bireme.errors import BiremeError

# Small codes packed into bytes, and masks of one bit an entry.
#
# Codes are packed from far apart: those of 4 bits have the first of the first half and the first of the
# second half in a byte, those of 2 bits the firsts of four quarters. So packing is a few operations on long
# pieces, on any device. 3 bits are packed as 2 and 1.


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes (uint8, flat, below 2**bits, a multiple of 8 of them) into `out`, `bits` for each."""
    if bits == 8:
        out.copy_(codes)
        return
    eighths = codes.view(8, -1)
    into = out.view(bits, -1)
    row = shift = 0
    for width in _pieces(bits):
        piece = eighths if width == bits else (eighths >> shift) & ((1 << width) - 1)
        for place in range(8 // width):
            part = piece[place * width : (place + 1) * width]
            if place == 0:
                into[row : row + width].copy_(part)
            else:
                into[row : row + width].bitwise_or_(part << place * width)
        row += width
        shift += width


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The codes that `pack_codes` has written, flat."""
    if bits == 8:
        return packed
    rows = packed.view(bits, -1)
    codes = torch.empty(8, rows.shape[1], dtype=torch.uint8, device=packed.device)
    row = shift = 0
    for width in _pieces(bits):
        for place in range(8 // width):
            part = (rows[row : row + width] >> place * width) & ((1 << width) - 1)
            into = codes[place * width : (place + 1) * width]
            if shift == 0:
                into.copy_(part)
            else:
                into.bitwise_or_(part << shift)
        row += width
        shift += width
    return codes.view(-1)


def pack_mask(mask: Tensor, out: Tensor) -> None:
    """Write a mask (bool) into `out`, flat with one bit an entry, the first into the lowest; the rest of
    `out` becomes zero.
    """
    flat = mask.view(-1).view(torch.uint8)
    count = -(-flat.numel() // 8)
    if flat.is_cpu:
        out[:count].copy_(torch.from_numpy(np.packbits(flat.numpy(), bitorder="little")))
    else:
        whole = torch.nn.functional.pad(flat, (0, 8 * count - flat.numel())).view(count, 8)
        out[:count].copy_((whole << _places(flat)).sum(1, dtype=torch.uint8))
    out[count:].zero_()


def unpack_mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask that `pack_mask` has written."""
    size = torch.Size(shape)
    if packed.is_cpu:
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=size.numel(), bitorder="little"))
    else:
        bits = ((packed[:, None] >> _places(packed)) & 1).view(-1)[: size.numel()]
    return bits.view(torch.bool).view(size)


def _pieces(bits: int) -> list[int]:
    """How so many bits are made of pieces that fill bytes."""
    return [width for width in (4, 2, 1) if bits & width]


def _places(like: Tensor) -> Tensor:
    """The places of a byte's bits, the lowest first."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


# Random numbers for rounding up or down by chance, so that the mean of what is sent is what was given.
#
# Drawing a number for every value would take longer than all the rest. So there is one table of numbers
# spread evenly over [0, 1) in a random order, and every call begins somewhere else in it.

NOISE_LENGTH = 1 << 17


def noise(count: int, seed: int, device: torch.device) -> Tensor:
    """So many numbers of [0, 1), at most `NOISE_LENGTH`: the same for the same seed. A view; only look."""
    start = noise_start(seed)
    return noise_table(device)[start : start + count]


def noise_start(seed: int) -> int:
    """Where the numbers of a seed begin in the table."""
    return scattered(seed) % NOISE_LENGTH


@lru_cache(maxsize=64)
def noise_table(device: torch.device) -> Tensor:
    """All numbers, twice over."""
    order = torch.randperm(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
    once = (order.float() + 0.5) / NOISE_LENGTH
    return torch.cat([once, once]).to(device)


def scattered(seed: int) -> int:
    """A number that differs in all its bits where seeds differ a little (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
    if tensor.dtype not in _REAL:
        names = ", ".join(str(one).removeprefix("torch.") for one in _REAL)
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


# Values one by one in another type of number, or as they are.


@dataclass(frozen=True, slots=True)
class Cast:
    """Sends each value in `dtype`, or without one as it is."""

    dtype: torch.dtype | None = None

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The bytes of the tensor in the other type."""
        return prod(shape) * (self.dtype or dtype).itemsize

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write the values; nothing is drawn."""
        used = self.most_bytes(tuple(tensor.shape), tensor.dtype)
        if self.dtype is not None:
            check_given(tensor, out, used)
        out[:used].view(self.dtype or tensor.dtype).view(tensor.shape).copy_(tensor)
        return used

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The values in the tensor's own type."""
        sent = self.dtype or dtype
        check_length(message, prod(shape) * sent.itemsize)
        values = message[: prod(shape) * sent.itemsize].view(sent).view(shape)
        return values.to(dtype, copy=True)
