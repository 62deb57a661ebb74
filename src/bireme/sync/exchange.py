"""A sum of gradients over a group, in slices of bounded size with several on their way at once.

A slice moves whether or not the others do, so a large gradient makes progress over a slow link. The order of
the slices depends on the layout alone, so it is the same on every member whatever gradients it has.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sync.gradients import BatchGradients
from bireme.sync.group import Group, Pending
from bireme.sync.slices import NUM_IN_FLIGHT

__all__ = ["SentBytes", "held_flags", "note_held", "sum_flats", "sum_in_slices"]


@dataclass(slots=True)
class SentBytes:
    """What one rank has sent for sums of gradients: `sent` in truth, `raw` if they had gone as they are. In
    both are the bytes of weights that it made or keeps for replicas that share them: `gathered`.
    """

    raw: int = 0
    sent: int = 0
    gathered: int = 0

    def note(self, size: int, *, raw: int = 0, sent: int = 0) -> None:
        """Count tensors of so many bytes that so many members sum in a ring."""
        share = 2 * (size - 1) / size
        self.raw += round(share * raw)
        self.sent += round(share * sent)


def sum_in_slices(
    group: Group,
    names: Sequence[str],
    gradients: BatchGradients,
    flats: Iterable[Tensor],
    slice_bytes: int,
    sent: SentBytes,
) -> None:
    """Sum `flats`, in which the gradients of `names` lie, over a group, and mark those that any member had.

    A gradient that no member has stays absent; where only some have it, the others count as zeros.
    """
    if group.size == 1 or not names:
        return
    holders = held_flags(names, gradients)
    pending = group.all_reduce(holders)
    before = sent.sent
    sum_flats(group, flats, slice_bytes, sent, before=pending)
    sent.note(group.size, sent=holders.nbytes)
    sent.raw += sent.sent - before
    note_held(gradients, names, holders)


def sum_flats(
    group: Group,
    flats: Iterable[Tensor],
    slice_bytes: int,
    sent: SentBytes,
    *,
    before: Pending | None = None,
) -> None:
    """Sum flat tensors over a group, in place; `before` has been begun there, and is waited for too."""
    under_way: deque[Pending] = deque([] if before is None else [before])
    for piece in _slices(flats, slice_bytes):
        if len(under_way) > NUM_IN_FLIGHT:
            under_way.popleft().wait()
        under_way.append(group.all_reduce(piece))
        sent.note(group.size, sent=piece.nbytes)
    while under_way:
        under_way.popleft().wait()


def held_flags(names: Sequence[str], gradients: BatchGradients) -> Tensor:
    """For each name whether its gradient is there, as 0 or 1; those that are not become zeros."""
    views = gradients.views
    for name in names:
        if name not in gradients.held:
            views[name].zero_()
    holds = [name in gradients.held for name in names]
    return torch.tensor(holds, dtype=torch.int32, device=views[names[0]].device)


def note_held(gradients: BatchGradients, names: Sequence[str], holders: Tensor) -> None:
    """Mark the gradients that any member has, by the sum of all members' flags."""
    gradients.held.update(name for name, num in zip(names, holders.tolist(), strict=True) if num)


def _slices(flats: Iterable[Tensor], slice_bytes: int) -> Iterator[Tensor]:
    for flat in flats:
        if flat.numel():
            yield from torch.split(flat.view(-1), max(slice_bytes // flat.itemsize, 1))
