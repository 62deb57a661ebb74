"""Which entries a message holds: a mask of one bit an entry, or, where few are sent, fewer bits.

Of places in their order the lowest bits are sent as they are, bit by bit of all of them. What is left of the
i-th place, plus i, grows from place to place: it says which bit of a row of bits is set (Elias 1974, Fano
1971). For a share p of the entries and l low bits that takes p (l + 1) + 2^-l bits an entry, a tenth more
than the least there can be. How many bytes it takes follows from both numbers alone, and on an accelerator
nothing is waited for.
"""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bireme.codec.description import low_bits, mask_bytes, place_bytes
from bireme.codec.packing import pack_mask, unpack_mask
from bireme.codec.selection import places_first
from bireme.compiled import pays_off

__all__ = ["read_places", "write_places"]


def write_places(mask: Tensor, count: int, num_sent: int, out: Tensor) -> None:
    """Write which of `count` entries a mask has, one bit an entry, of which `num_sent` are set."""
    low = low_bits(count, num_sent)
    if low is None:
        out.copy_(mask)
    elif (loops := _place_loops(mask, count, low)) is not None:
        loops.write_sparse(mask.numpy(), low, num_sent, out.numpy())
    else:
        places = _set_places(unpack_mask(mask, (count,)), num_sent)
        size = -(-num_sent // 8)
        for bit in range(low):
            pack_mask(((places >> bit) & 1).bool(), out[bit * size : (bit + 1) * size])
        row = torch.zeros(num_sent + (count >> low) + 1, dtype=torch.bool, device=out.device)
        row[(places >> low) + _numbers(num_sent, out)] = True
        pack_mask(row, out[low * size :])


def read_places(message: Tensor, count: int, num_sent: int) -> Tensor:
    """The mask, one bit an entry; `message` begins with what `write_places` has written."""
    low = low_bits(count, num_sent)
    if low is None:
        return message[: mask_bytes(count)]
    message = message[: place_bytes(count, num_sent)]
    bits = torch.zeros(mask_bytes(count), dtype=torch.uint8, device=message.device)
    if (loops := _place_loops(message, count, low)) is not None:
        loops.read_sparse(message.numpy(), low, num_sent, bits.numpy())
        return bits
    size = -(-num_sent // 8)
    row = unpack_mask(message[low * size :], (num_sent + (count >> low) + 1,))
    places = (_set_places(row, num_sent) - _numbers(num_sent, message)) << low
    for bit in range(low):
        places |= unpack_mask(message[bit * size : (bit + 1) * size], (num_sent,)).long() << bit
    mask = torch.zeros(count, dtype=torch.bool, device=message.device)
    mask[places] = True
    pack_mask(mask, bits)
    return bits


def _place_loops(tensor: Tensor, count: int, low: int) -> ModuleType | None:
    """The compiled loops, where they are faster."""
    if not tensor.is_cpu or not pays_off(count):
        return None
    from bireme.codec import place_loops  # imports numba

    return place_loops if low <= place_loops.MOST_LOW_BITS and count < 1 << 32 else None


def _set_places(mask: Tensor, num_set: int) -> Tensor:
    if mask.is_cpu:
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return places_first(mask, num_set)


def _numbers(num: int, like: Tensor) -> Tensor:
    return torch.arange(num, device=like.device)
