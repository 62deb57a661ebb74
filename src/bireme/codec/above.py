"""The largest entries of a whole tensor, by a threshold that is found once and lives for some batches.

Dynamic communication thresholding (Gupta et al. 2021, arXiv 2010.08899) as it was published for activations:
the message says which entries it holds, so only the sender knows a threshold, and the gradient goes back for
the same entries. A message is as long as its entries are many, up to a bound that follows from the shape.

On an accelerator, where a count would be waited for, a message is always as long as its bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from bireme.codec.blocks import BlockCodec
from bireme.codec.codec import check_given, check_length, pack_mask, unpack_mask
from bireme.codec.description import BLOCK, DENSITY_SLACK, blocks_bytes, mask_bytes, most_above
from bireme.codec.sum_description import SUM_DENSITY_SLACK
from bireme.codec.topk import OfMask, as_magnitudes, largest_of_rows, places_first, selected, spread

# The largest entries of a tensor, by a threshold that is found once and kept for some steps.
#
# Dynamic communication thresholding for gradients (Gupta et al. 2021, arXiv 2010.08899): the exact threshold
# for the asked share is found at the first step of a life span and kept until its end; what is not sent stays
# with the caller, who adds it to the next gradient.
#
# A message: how many entries each block of 65,536 sends, their values as they are, and where they are, as two
# bytes each or, where that is shorter, as one bit for each entry of the tensor. A tensor with an entry that
# is not finite is a message of its own kind, and arrives as NaN everywhere, so that nobody keeps it unseen.

_BLOCK_BITS = 16
_BLOCK_ENTRIES = 1 << _BLOCK_BITS

_NOT_FINITE = -1
"""Where the count of the first block would be."""

_COUNT_BYTES = 4


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
            _COUNT_BYTES * _num_blocks(num_entries) + most * dtype.itemsize + _place_bytes(most, num_entries)
        )

    def encode(self, tensor: Tensor, out: Tensor, memory: Tensor | None = None) -> int:
        """Write the message of a tensor into `out`, bytes on its device; gives how many they are.

        `memory` is the tensor's, and is changed; without one the threshold is found again.
        """
        flat = tensor.reshape(-1)
        num_entries = flat.numel()
        counts_end = _COUNT_BYTES * _num_blocks(num_entries)
        sizes = flat.abs()
        if num_entries and not math.isfinite(float(sizes.amax())):
            out[:counts_end].view(torch.int32).fill_(_NOT_FINITE)
            return counts_end
        places = self._chosen(sizes, new_memory() if memory is None else memory)
        counts = torch.bincount(places >> _BLOCK_BITS, minlength=_num_blocks(num_entries))
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
        counts_end = _COUNT_BYTES * _num_blocks(num_entries)
        counts = _as(message[:counts_end], torch.int32).long()
        if num_entries and int(counts[0]) == _NOT_FINITE:
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
    return -(-num_entries // _BLOCK_ENTRIES)


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
        return (places & (_BLOCK_ENTRIES - 1)).to(torch.uint16).view(torch.uint8)
    mask = torch.zeros(num_entries, dtype=torch.bool, device=places.device)
    mask[places] = True
    packed = torch.empty(_mask_bytes(num_entries), dtype=torch.uint8, device=places.device)
    pack_mask(mask, packed)
    return packed


def _unpacked(packed: Tensor, counts: Tensor, num_sent: int, num_entries: int) -> Tensor:
    if 2 * num_sent <= _mask_bytes(num_entries):
        blocks = torch.arange(counts.numel(), device=packed.device).repeat_interleave(counts)
        return (blocks << _BLOCK_BITS) + _as(packed, torch.uint16).long()
    return unpack_mask(packed, (num_entries,)).nonzero().view(-1)


_MOST_SPANS = 16
"""Life spans whose thresholds are remembered: of more batches than are ever under way at once."""


_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class TopKAbove:
    """Sends the entries from a threshold on, in `bits` (4 or 8) and blocks of 32 that share a scale.

    `encode` takes the threshold, or finds that for the share `share` of the entries. Where an old one would
    send `DENSITY_SLACK` times more or fewer than asked for, that message gets one of its own.
    """

    share: float
    bits: int
    life: int = 1

    @property
    def word(self) -> str:
        """What thresholds are for: others have others."""
        return f"topk:{self.share:g}:{self.bits}:{self.life}"

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The most that a tensor of that shape takes."""
        return mask_bytes(prod(shape)) + self.back(torch.empty(0)).most_bytes(shape, dtype)

    def threshold_of(self, tensor: Tensor) -> Tensor:
        """The size of the least entry that is sent if exactly the share is; the bits of it, as an integer."""
        sizes = as_magnitudes(tensor.detach().reshape(-1))
        wanted = self._wanted(sizes.numel())
        if not sizes.is_cpu:
            return sizes.topk(wanted).values[-1].long()
        place = sizes.numel() - wanted
        return torch.tensor(int(np.partition(sizes.numpy(), place)[place]))

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0, threshold: Tensor | None = None) -> int:
        """Write the mask and the values; nothing is drawn."""
        check_given(tensor, out, self.most_bytes(tuple(tensor.shape), tensor.dtype))
        flat = tensor.detach().reshape(-1)
        mask = self._chosen(flat, self.threshold_of(flat) if threshold is None else threshold)
        begin = mask_bytes(flat.numel())
        pack_mask(mask, out[:begin])
        return begin + self.back(mask).encode(flat, out[begin:], seed=seed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, with zeros where nothing was sent."""
        mask = self.mask_of(message, shape)
        return self.back(mask).decode(message[mask.numel() :], shape, dtype)

    def mask_of(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which entries a message holds, as it says it: one bit an entry."""
        check_length(message, mask_bytes(prod(shape)))
        return message[: mask_bytes(prod(shape))]

    def back(self, mask: Tensor) -> "_KeptAbove":
        """The codec of the gradient of a tensor that was sent with this mask."""
        return _KeptAbove(mask, self.share, self.bits)

    def _wanted(self, num_entries: int) -> int:
        return max(1, round(self.share * num_entries))

    def _chosen(self, flat: Tensor, threshold: Tensor) -> Tensor:
        sizes, wanted = as_magnitudes(flat), self._wanted(flat.numel())
        if not sizes.is_cpu:
            num_above = (sizes >= threshold).sum()
            is_near = (num_above <= DENSITY_SLACK * wanted) & (DENSITY_SLACK * num_above >= wanted)
            order = sizes.sort(descending=True, stable=True).indices
            are_sent = torch.arange(len(order), device=flat.device) < torch.where(is_near, num_above, wanted)
            return torch.empty_like(sizes, dtype=torch.bool).scatter_(0, order, are_sent)
        chosen = sizes.numpy() >= int(threshold)
        num_chosen = int(np.count_nonzero(chosen))
        if num_chosen > DENSITY_SLACK * wanted or DENSITY_SLACK * num_chosen < wanted:
            return largest_of_rows(flat.view(1, -1), wanted).view(-1)
        return torch.from_numpy(chosen)


class _KeptAbove(OfMask):
    """Sends the entries of a mask of `TopKAbove`."""

    bits: int

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return blocks_bytes(most_above(prod(shape), self.share), self.bits)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        flat = tensor.detach().reshape(-1)
        mask = self._as_bools((flat.numel(),))
        if flat.is_cpu:
            values = selected(flat, mask, int(np.count_nonzero(mask.numpy())))
        else:
            places = places_first(mask, most_above(flat.numel(), self.share))
            values = torch.where(mask.take(places), flat.take(places), 0)
        return BlockCodec(self.bits).encode(values, out, seed=seed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        mask = self._as_bools(shape)
        # How many blocks there are follows from the bytes: a scale and the codes of each, and a little to
        # align the codes.
        num_blocks = message.numel() // (_SCALE_BYTES + self.bits * BLOCK // 8)
        num_sent = min(num_blocks * BLOCK, mask.numel())
        values = BlockCodec(self.bits).decode(message, (num_sent,), dtype)
        if mask.is_cpu:
            num_set = int(np.count_nonzero(mask.numpy()))
            check_length(message, blocks_bytes(num_set, self.bits))
            return spread(values[:num_set], mask)
        places = places_first(mask.view(-1), num_sent)
        whole = torch.zeros(shape, dtype=dtype, device=message.device)
        whole.view(-1).put_(places, torch.where(mask.take(places), values, 0))
        return whole


class Thresholds:
    """What one sender remembers: the thresholds of its tensors, by their names and life spans.

    The first message of a life span finds its threshold. Spans begin with batches whose number they divide,
    so what a batch uses depends on no message of a later one: a run can be stopped after any batch.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], dict[int, Tensor]] = {}

    def of(self, name: str, codec: TopKAbove, batch: int, tensor: Tensor) -> Tensor:
        """The threshold for a tensor of that name in a batch."""
        spans = self._kept.setdefault((name, codec.word), {})
        span = batch // codec.life
        if span not in spans:
            spans[span] = codec.threshold_of(tensor)
            for old in [one for one in spans if one <= span - _MOST_SPANS]:
                del spans[old]
        return spans[span]

    def after(self, num_batches: int) -> dict[str, Tensor]:
        """Those that the next batch takes from earlier ones, as `NAME/CODEC`."""
        found = {}
        for (name, word), spans in self._kept.items():
            span, age = divmod(num_batches, int(word.rpartition(":")[2]))
            if age and span in spans:
                found[f"{name}/{word}"] = spans[span]
        return found

    def load(self, found: dict[str, Tensor], num_batches: int) -> None:
        """Go on with what `after` gave."""
        self._kept.clear()
        for key, threshold in found.items():
            name, _, word = key.rpartition("/")
            self._kept[name, word] = {num_batches // int(word.rpartition(":")[2]): threshold}
