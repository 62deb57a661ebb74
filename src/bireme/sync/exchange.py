"""A sum of gradients over a group, in slices of bounded size with several on their way at once.

A slice moves whether or not the others do, so a large gradient makes progress over a slow link. The order of
the slices depends on the layout alone, so it is the same on every member whatever gradients it has.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bireme.sync.gradients import BatchGradients
from bireme.sync.group import Group, Pending

__all__ = ["SLICE_BYTES", "sum_in_slices"]

SLICE_BYTES = 25 * 2**20

NUM_IN_FLIGHT = 3
"""How many slices may be on their way at once."""


def sum_in_slices(
    group: Group, names: Sequence[str], gradients: BatchGradients, flats: Iterable[Tensor], slice_bytes: int
) -> None:
    """Sum `flats`, in which the gradients of `names` lie, over a group, and mark those that any member had.

    A gradient that no member has stays absent; where only some have it, the others count as zeros.
    """
    if group.size == 1 or not names:
        return
    views = gradients.views
    for name in names:
        if name not in gradients.held:
            views[name].zero_()
    holds = [name in gradients.held for name in names]
    holders = torch.tensor(holds, dtype=torch.int32, device=views[names[0]].device)
    under_way: deque[Pending] = deque([group.all_reduce(holders)])
    for piece in _slices(flats, slice_bytes):
        if len(under_way) > NUM_IN_FLIGHT:
            under_way.popleft().wait()
        under_way.append(group.all_reduce(piece))
    while under_way:
        under_way.popleft().wait()
    gradients.held.update(name for name, num in zip(names, holders.tolist(), strict=True) if num)


def _slices(flats: Iterable[Tensor], slice_bytes: int) -> Iterator[Tensor]:
    for flat in flats:
        if flat.numel():
            yield from torch.split(flat.view(-1), max(slice_bytes // flat.itemsize, 1))
