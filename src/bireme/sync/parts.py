"""Flat tensors cut into parts, each owned by one member of a group: sums that only the owner of a part gets.

What is added up is added in the members' order, so it does not depend on who owns it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bireme.sync.exchange import SentBytes, held_flags, note_held
from bireme.sync.gradients import BatchGradients, Parts
from bireme.sync.group import Pending, SharingGroup
from bireme.sync.slices import NUM_IN_FLIGHT

__all__ = ["pieces_of", "rounds_of", "sum_parts"]


def pieces_of(flat: Tensor, parts: Parts, begin: int, most: int) -> list[Tensor]:
    """Of every part, its elements from the one of that number on, `most` of them or as many as it has."""
    found = []
    for first, end in pairwise(parts):
        start = min(first + begin, end)
        found.append(flat[start : min(start + most, end)])
    return found


def rounds_of(parts: Parts, most: int) -> range:
    """Where in their parts the members begin each round, if these are of so many elements."""
    return range(0, max(end - first for first, end in pairwise(parts)), most)


def sum_parts(
    group: SharingGroup, names: Sequence[str], gradients: BatchGradients, slice_bytes: int, sent: SentBytes
) -> None:
    """Sum the flats of some gradients, in which those of `names` lie, each part where its owner is.

    Mark the gradients that any member had. What a member holds of other parts is of no use afterwards. The
    memory that this takes is counted in `part_sum_bytes`.
    """
    if not names or group.size == 1:
        return
    flags = held_flags(names, gradients)
    pending = group.all_reduce(flags)
    before = sent.sent
    sent.note(group.size, sent=flags.nbytes)
    under_way: deque[_Round] = deque()
    for flat, parts in zip(gradients.flats, gradients.parts, strict=True):
        most = max(slice_bytes // flat.itemsize // group.size, 1)
        for begin in rounds_of(parts, most):
            if len(under_way) > NUM_IN_FLIGHT:
                under_way.popleft().add_up()
            under_way.append(_begin(group, pieces_of(flat, parts, begin, most), sent))
    while under_way:
        under_way.popleft().add_up()
    sent.raw += sent.sent - before
    pending.wait()
    note_held(gradients, names, flags)


@dataclass(frozen=True, slots=True)
class _Round:
    """A piece of every member's part on its way to its owner, which is `member` of its `own`; `given` goes
    to the others, and `taken` are the others' own, one by one.
    """

    own: Tensor
    given: Tensor
    taken: Tensor
    member: int
    num_others: int
    pending: Pending

    def add_up(self) -> None:
        """Wait for them, and put their sum where the owner's own was."""
        self.pending.wait()
        if not len(self.own):
            return
        in_order = [*self.taken.view(self.num_others, -1)]
        in_order.insert(self.member, self.own)
        total, *others = in_order
        for other in others:
            total.add_(other)
        if total is not self.own:
            self.own.copy_(total)


def _begin(group: SharingGroup, pieces: Sequence[Tensor], sent: SentBytes) -> _Round:
    own = pieces[group.rank]
    others = [piece for member, piece in enumerate(pieces) if member != group.rank]
    given = others[0] if len(others) == 1 else torch.cat(others)
    taken = own.new_empty(len(others) * len(own))
    lengths, taken_lengths = [*map(len, pieces)], [len(own)] * group.size
    lengths[group.rank] = taken_lengths[group.rank] = 0
    sent.sent += given.nbytes
    pending = group.exchange(given, lengths, taken, taken_lengths)
    return _Round(own, given, taken, group.rank, len(others), pending)
