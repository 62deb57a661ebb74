"""Small codes packed into bytes, and masks of one bit an entry.

Codes are packed from far apart: those of 4 bits have the first of the first half and the first of the second
half in a byte, those of 2 bits the firsts of four quarters. So packing is a few operations on long pieces, on
any device. 3 bits are packed as 2 and 1.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack_codes", "pack_mask", "unpack_codes", "unpack_mask"]


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
