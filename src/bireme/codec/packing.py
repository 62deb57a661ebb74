"""Small codes packed into bytes, and masks of one bit an entry.

Codes lie in rows, one row for each place in a block and one column for each block, and it is rows that are put
together into bytes: the first row into the lowest bits. So packing is a few operations on long rows, on any
device. Codes of 3 bits are packed as 2 and 1.
"""

import torch
from torch import Tensor

from bireme.codec.description import plane_widths

__all__ = ["pack_codes", "pack_mask", "unpack_codes", "unpack_mask"]


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes (uint8, [places, blocks], below 2**bits) into rows of `out` (uint8, [rows, blocks])."""
    row = shift = 0
    for width in plane_widths(bits):
        piece = codes if width == bits else (codes >> shift) & ((1 << width) - 1)
        row += _pack_rows(piece, width, out[row:])
        shift += width


def unpack_codes(rows: Tensor, num_places: int, bits: int) -> Tensor:
    """The codes that `pack_codes` has written, [places, blocks]."""
    row = shift = 0
    codes: Tensor | None = None
    for width in plane_widths(bits):
        num_rows = -(-num_places * width // 8)
        piece = _unpack_rows(rows[row : row + num_rows], num_places, width)
        codes = piece if codes is None else codes | (piece << shift)
        row += num_rows
        shift += width
    assert codes is not None
    return codes


def pack_mask(mask: Tensor, out: Tensor) -> None:
    """Write a mask (bool) into `out`, flat with one bit an entry; `out` may be longer."""
    flat = mask.reshape(-1)
    count = -(-flat.numel() // 8)
    bits = flat.view(torch.uint8)
    if flat.numel() % 8:
        bits = torch.nn.functional.pad(bits, (0, 8 * count - flat.numel()))
    _pack_rows(bits.view(8, count), 1, out[:count].view(1, count))
    out[count:].zero_()


def unpack_mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask that `pack_mask` has written."""
    size = torch.Size(shape)
    count = -(-size.numel() // 8)
    bits = _unpack_rows(packed[:count].view(1, count), 8, 1)
    return bits.reshape(-1)[: size.numel()].view(torch.bool).view(size)


def _pack_rows(codes: Tensor, width: int, out: Tensor) -> int:
    """Put rows of codes of that many bits together; gives how many rows of bytes they take."""
    num_rows = -(-codes.shape[0] * width // 8)
    if width == 8:
        out[:num_rows].copy_(codes)
        return num_rows
    for place in range(8 // width):
        part = codes[place * num_rows : (place + 1) * num_rows]
        into = out[: len(part)]
        if place == 0:
            into.copy_(part)
        else:
            into.bitwise_or_(part << place * width)
    return num_rows


def _unpack_rows(rows: Tensor, num_places: int, width: int) -> Tensor:
    if width == 8:
        return rows
    num_rows = len(rows)
    codes = torch.empty(num_places, rows.shape[1], dtype=torch.uint8, device=rows.device)
    for place in range(8 // width):
        into = codes[place * num_rows : (place + 1) * num_rows]
        part = rows[: len(into)]
        torch.bitwise_and(part >> place * width, (1 << width) - 1, out=into)
    return codes
