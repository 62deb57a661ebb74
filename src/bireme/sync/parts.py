"""Flat tensors cut into parts, each owned by one member of a group: sums that only the owner of a part gets.

What is added up is added in the members' order, so it does not depend on who owns it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bireme.sync.exchange import NUM_IN_FLIGHT, SentBytes, held_flags, note_held
from bireme.sync.gradients import BatchGradients, Parts
from bireme.sync.group import Pending, SharingGroup

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

    Mark the gradients that any member had. What a member holds of other parts is of no use afterwards.
    """
    if not names:
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
    """A piece of every member's part on its way to its owner; `taken` are the members' own, one by one."""

    own: Tensor
    given: Tensor
    taken: Tensor
    size: int
    pending: Pending

    def add_up(self) -> None:
        """Wait for them, and put their sum where the owner's own was."""
        self.pending.wait()
        if not len(self.own):
            return
        first, *others = self.taken.view(self.size, -1)
        self.own.copy_(first)
        for other in others:
            self.own.add_(other)


def _begin(group: SharingGroup, pieces: Sequence[Tensor], sent: SentBytes) -> _Round:
    own, given = pieces[group.rank], torch.cat([*pieces])
    taken = given.new_empty(group.size * len(own))
    sent.sent += (len(given) - len(own)) * given.itemsize
    pending = group.exchange(given, [*map(len, pieces)], taken, [len(own)] * group.size)
    return _Round(own, given, taken, group.size, pending)
