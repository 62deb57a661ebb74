"""The largest entries of a tensor, by a threshold that is found once and kept for some steps.

Dynamic communication thresholding for gradients (Gupta et al. 2021, arXiv 2010.08899): the exact threshold
for the asked share is found at the first step of a life span and kept until its end; what is not sent stays
with the caller, who adds it to the next gradient.

A message: how many entries each block of 65,536 sends, their values as they are, and where they are, as two
bytes each or, where that is shorter, as one bit for each entry of the tensor. A tensor with an entry that is
not finite is a message of its own kind, and arrives as NaN everywhere, so that nobody keeps it unseen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.codec.sum_words import SUM_DENSITY_SLACK

__all__ = ["Threshold", "new_memory"]

BLOCK_BITS = 16
BLOCK_ENTRIES = 1 << BLOCK_BITS

NOT_FINITE = -1
"""Where the count of the first block would be."""

COUNT_BYTES = 4
BIT_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def new_memory() -> Tensor:
    """What a tensor's threshold is remembered by: the threshold, and how many steps it has served."""
    return torch.zeros(2, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Sends the largest `share` of the entries, at least one; a threshold lives `life` steps.

    Where an old threshold would send `SUM_DENSITY_SLACK` times more or fewer entries than asked for, it is
    renewed before its time.
    """

    share: float
    life: int = 1

    def most_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The most bytes that a message of such a tensor has."""
        num_entries = math.prod(shape)
        most = self._most_sent(num_entries)
        return (
            COUNT_BYTES * _num_blocks(num_entries) + most * dtype.itemsize + _place_bytes(most, num_entries)
        )

    def encode(self, tensor: Tensor, out: Tensor, memory: Tensor | None = None) -> int:
        """Write the message of a tensor into `out`, bytes on its device; gives how many they are.

        `memory` is the tensor's, and is changed; without one the threshold is found again.
        """
        flat = tensor.reshape(-1)
        num_entries = flat.numel()
        counts_end = COUNT_BYTES * _num_blocks(num_entries)
        sizes = flat.abs()
        if num_entries and not math.isfinite(float(sizes.amax())):
            out[:counts_end].view(torch.int32).fill_(NOT_FINITE)
            return counts_end
        places = self._chosen(sizes, new_memory() if memory is None else memory)
        counts = torch.bincount(places >> BLOCK_BITS, minlength=_num_blocks(num_entries))
        _put(out[:counts_end], counts.to(torch.int32))
        values_end = counts_end + places.numel() * flat.itemsize
        _put(out[counts_end:values_end], flat[places])
        end = values_end + _place_bytes(places.numel(), num_entries)
        _put(out[values_end:end], _packed(places, num_entries))
        return end

    def decode(
        self, message: Tensor, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """The tensor of a message, zero where nothing was sent; in `out` if that is given: a contiguous
        tensor of that shape and type.
        """
        num_entries = math.prod(shape)
        whole = torch.empty(num_entries, dtype=dtype, device=message.device) if out is None else out.view(-1)
        whole.zero_()
        counts_end = COUNT_BYTES * _num_blocks(num_entries)
        counts = _as(message[:counts_end], torch.int32).long()
        if num_entries and int(counts[0]) == NOT_FINITE:
            return whole.fill_(math.nan).view(tuple(shape))
        num_sent = int(counts.sum())
        values_end = counts_end + num_sent * dtype.itemsize
        end = values_end + _place_bytes(num_sent, num_entries)
        places = _unpacked(message[values_end:end], counts, num_sent, num_entries)
        whole[places] = _as(message[counts_end:values_end], dtype)
        return whole.view(tuple(shape))

    def _chosen(self, sizes: Tensor, memory: Tensor) -> Tensor:
        """The places of the entries to send, in their order; `memory` ages by a step."""
        num_entries, wanted = sizes.numel(), self._wanted(sizes.numel())
        threshold, age = memory.tolist()
        places = sizes.new_empty(0, dtype=torch.int64)
        if age:
            places = _at_least(sizes, threshold)
            is_far = (
                places.numel() > SUM_DENSITY_SLACK * wanted or SUM_DENSITY_SLACK * places.numel() < wanted
            )
            age = 0 if is_far else age
        if not age:
            threshold = float(torch.topk(sizes, wanted, sorted=False).values.amin()) if num_entries else 0.0
            # Of many entries of one size, as many as may be sent; the others wait for their turn.
            places = _at_least(sizes, threshold)[: self._most_sent(num_entries)]
        memory[0], memory[1] = threshold, (age + 1) % self.life
        return places

    def _wanted(self, num_entries: int) -> int:
        return min(max(1, int(num_entries * self.share)), num_entries)

    def _most_sent(self, num_entries: int) -> int:
        return min(SUM_DENSITY_SLACK * self._wanted(num_entries), num_entries)


def _at_least(sizes: Tensor, threshold: float) -> Tensor:
    """The places of entries from a threshold on; never those of zeros."""
    return ((sizes >= threshold) & (sizes > 0)).nonzero().view(-1)


def _num_blocks(num_entries: int) -> int:
    return -(-num_entries // BLOCK_ENTRIES)


def _mask_bytes(num_entries: int) -> int:
    return -(-num_entries // 8)


def _place_bytes(num_sent: int, num_entries: int) -> int:
    """What the places of so many entries take."""
    return min(2 * num_sent, _mask_bytes(num_entries))


def _put(out: Tensor, values: Tensor) -> None:
    """Write values into bytes, which need not be aligned."""
    out.copy_(values.contiguous().view(torch.uint8))


def _as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied, because they need not be aligned."""
    return message.clone().view(dtype)


def _packed(places: Tensor, num_entries: int) -> Tensor:
    """Places as bytes: each within its block, or one bit for each entry of the tensor."""
    if 2 * places.numel() <= _mask_bytes(num_entries):
        return (places & (BLOCK_ENTRIES - 1)).to(torch.uint16).view(torch.uint8)
    bits = torch.zeros(8 * _mask_bytes(num_entries), dtype=torch.uint8, device=places.device)
    bits[places] = 1
    weights = torch.tensor(BIT_WEIGHTS, dtype=torch.uint8, device=places.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, counts: Tensor, num_sent: int, num_entries: int) -> Tensor:
    if 2 * num_sent <= _mask_bytes(num_entries):
        blocks = torch.arange(counts.numel(), device=packed.device).repeat_interleave(counts)
        return (blocks << BLOCK_BITS) + _as(packed, torch.uint16).long()
    weights = torch.tensor(BIT_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return (packed.view(-1, 1) & weights).view(-1).nonzero().view(-1)
