"""The part of a shelf that one of several replicas owns: a run of its elements, which may begin and end in
the middle of parameters.

What an optimiser remembers of a shelf, and the copy of its weights that is stepped, then exist for this part
alone. A parameter that is cut is stepped as flat pieces, each by its owner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bireme.memory.slots import Slots
from bireme.runtime.shelf import ALIGNED_ELEMENTS, ParameterGroup
from bireme.sync.gradients import Parts

__all__ = ["ParameterGroupPart", "part_of"]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroupPart:
    """The part of one `member`; `parts` are those of all members.

    `own` lays out the pieces in it, which are flat, and `pieces` says where in its parameter each lies.
    """

    parts: Parts
    member: int
    own: ParameterGroup
    pieces: Mapping[str, slice]

    def of(self, flat: Tensor) -> Tensor:
        """This part of an arena."""
        return flat[self.parts[self.member] : self.parts[self.member + 1]]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The pieces in an arena of the whole shelf."""
        part = self.of(flat)
        return {name: part[slot.begin : slot.end] for name, slot in self.own.slots.items()}

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """The piece of a tensor of its parameter's shape; of a piece, that itself."""
        is_piece = tensor.shape == self.own.slots[name].shape
        return tensor if is_piece else tensor.reshape(-1)[self.pieces[name]]


def part_of(shelf: ParameterGroup, member: int, num_members: int) -> ParameterGroupPart:
    """The part of a member: as many elements as the others', to a few."""
    num_elements = shelf.slots.num_elements
    ideal = (place * num_elements // num_members for place in range(1, num_members))
    parts = (0, *(_aligned(shelf.slots, place) for place in ideal), num_elements)
    begin, end = parts[member], parts[member + 1]
    pieces = {
        name: slice(max(slot.begin, begin) - slot.begin, min(slot.end, end) - slot.begin)
        for name, slot in shelf.slots.items()
        if max(slot.begin, begin) < min(slot.end, end)
    }
    own = Slots({name: (piece.stop - piece.start,) for name, piece in pieces.items()})
    return ParameterGroupPart(parts, member, ParameterGroup(own, shelf.dtype), pieces)


def _aligned(slots: Slots, place: int) -> int:
    """The nearest place at which a kernel that goes through the parameter would begin a vector too."""
    slot = next((slot for _, slot in slots.items() if slot.begin <= place < slot.end), None)
    if slot is None:
        return 0  # there are no elements
    vectors = (place - slot.begin + ALIGNED_ELEMENTS // 2) // ALIGNED_ELEMENTS
    return min(slot.begin + vectors * ALIGNED_ELEMENTS, slot.end)
