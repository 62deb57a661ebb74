"""Parameters that stages of several ranks of a replica share: their gradients are added up within it.

That follows the sum over replicas, on copies, in the agent's thread. All ranks of a replica get the committed
sums in the same order, so they meet here in the same order too.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from bireme.sync.exchange import SentBytes, sum_in_slices
from bireme.sync.gradients import BatchGradients
from bireme.sync.group import Group
from bireme.sync.slices import SLICE_BYTES

__all__ = ["TiedSums"]


class TiedSums:
    """The tied parameters of one rank, each with the group of all ranks of the replica that hold it."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = {name: groups[name] for name in sorted(groups)}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def sum(self, gradients: BatchGradients, flats: Sequence[Tensor], held: set[str]) -> BatchGradients:
        """The whole gradients of these parameters, from those in `flats`, which lie as `gradients` do."""
        copies = {name: _copy(gradients, flats, name) for name in self._groups}
        found = BatchGradients(copies, held & copies.keys())
        for name, group in self._groups.items():
            sum_in_slices(group, [name], found, [copies[name]], SLICE_BYTES, SentBytes())
        return found


def _copy(gradients: BatchGradients, flats: Sequence[Tensor], name: str) -> Tensor:
    """The gradient of that name in other flats."""
    view = gradients.views[name]
    storage = view.untyped_storage().data_ptr()
    place = next(
        place for place, flat in enumerate(gradients.flats) if flat.untyped_storage().data_ptr() == storage
    )
    first = view.storage_offset() - gradients.flats[place].storage_offset()
    return flats[place].view(-1)[first : first + view.numel()].clone().view(view.shape)
