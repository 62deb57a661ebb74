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

__all__ = ["NUM_IN_FLIGHT", "SLICE_BYTES", "SentBytes", "agree_on_held", "sum_flats", "sum_in_slices"]

SLICE_BYTES = 25 * 2**20

NUM_IN_FLIGHT = 3
"""How many slices may be on their way at once."""


@dataclass(slots=True)
class SentBytes:
    """What one rank has sent for sums of gradients: `sent` in truth, `raw` if they had gone as they are."""

    raw: int = 0
    sent: int = 0

    @staticmethod
    def share(size: int) -> float:
        """How many times a tensor each of so many members sends while all are summed in a ring."""
        return 2 * (size - 1) / size


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
    holders = _zeros_where_absent(names, gradients)
    pending = group.all_reduce(holders)
    sum_flats(group, flats, slice_bytes, sent, before=pending)
    _mark(gradients, names, holders)


def agree_on_held(group: Group, names: Sequence[str], gradients: BatchGradients) -> None:
    """Mark the gradients that any member has; where it has none, it has zeros."""
    holders = _zeros_where_absent(names, gradients)
    group.all_reduce(holders).wait()
    _mark(gradients, names, holders)


def sum_flats(
    group: Group,
    flats: Iterable[Tensor],
    slice_bytes: int,
    sent: SentBytes,
    *,
    is_raw: bool = True,
    before: Pending | None = None,
) -> None:
    """Sum flat tensors over a group, in place; `before` has been begun there, and is waited for too."""
    under_way: deque[Pending] = deque([] if before is None else [before])
    for piece in _slices(flats, slice_bytes):
        if len(under_way) > NUM_IN_FLIGHT:
            under_way.popleft().wait()
        under_way.append(group.all_reduce(piece))
        num_bytes = round(sent.share(group.size) * piece.nbytes)
        sent.sent += num_bytes
        sent.raw += num_bytes if is_raw else 0
    while under_way:
        under_way.popleft().wait()


def _zeros_where_absent(names: Sequence[str], gradients: BatchGradients) -> Tensor:
    """For each name whether its gradient is there; those that are not become zeros."""
    views = gradients.views
    for name in names:
        if name not in gradients.held:
            views[name].zero_()
    holds = [name in gradients.held for name in names]
    return torch.tensor(holds, dtype=torch.int32, device=views[names[0]].device)


def _mark(gradients: BatchGradients, names: Sequence[str], holders: Tensor) -> None:
    gradients.held.update(name for name, num in zip(names, holders.tolist(), strict=True) if num)


def _slices(flats: Iterable[Tensor], slice_bytes: int) -> Iterator[Tensor]:
    for flat in flats:
        if flat.numel():
            yield from torch.split(flat.view(-1), max(slice_bytes // flat.itemsize, 1))
