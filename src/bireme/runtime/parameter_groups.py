"""The weights of one parameter group: an arena for each bank, and one for the newest weights where they are
apart. At the end, the bytes of all that training a stage keeps.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.memory.arena import Arena, LentArena, Slots
from bireme.runtime.paging.stage_memory import StageMemory
from bireme.schedule.instruction import Item
from bireme.sync.arrivals import Parts

# A parameter group: parameters of one stage that lie one after the other in every arena, because they are
# alike.
#
# They have one optimizer, one dtype to be stepped in and one to compute with.

ALIGNED_ELEMENTS = 16
"""Parameters of other lengths lie last, so that kernels find the beginnings of all others aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroup:
    """The layout of some parameters; `dtype` is what they are stepped and their gradients summed in."""

    slots: Slots
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of one arena in the dtype of the steps."""
        return self.slots.num_elements * self.dtype.itemsize


def parameter_groups_of(
    parameters: Mapping[str, Tensor],
    alike: Mapping[str, Hashable],
    owners: Mapping[str, int] | None = None,
) -> tuple[ParameterGroup, ...]:
    """Lay out parameters: those whose entries in `alike` are equal share a parameter group. In a group, the
    parameters of each of the `owners` lie together.
    """
    groups: dict[tuple[Hashable, torch.dtype], list[str]] = {}
    for name, tensor in parameters.items():
        groups.setdefault((alike[name], tensor.dtype), []).append(name)

    def order(name: str) -> tuple[int, bool]:
        return (owners or {}).get(name, 0), parameters[name].numel() % ALIGNED_ELEMENTS != 0

    return tuple(
        ParameterGroup(Slots({name: parameters[name].shape for name in sorted(names, key=order)}), dtype)
        for (_, dtype), names in groups.items()
    )


def owners_of(sizes: Mapping[str, int], num_members: int) -> dict[str, int]:
    """The owner of each of these parameters, which have so many elements: the largest first, each to the
    member that has the fewest so far.
    """
    loads = [0] * num_members
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = min(range(num_members), key=loads.__getitem__)
        loads[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}


def without(parameter_groups: Sequence[ParameterGroup], names: Collection[str]) -> tuple[ParameterGroup, ...]:
    """The parameter groups without the parameters of these names; empty groups are left out."""
    shapes = (
        ({name: slot.shape for name, slot in one.slots.items() if name not in names}, one.dtype)
        for one in parameter_groups
    )
    return tuple(ParameterGroup(Slots(own), dtype) for own, dtype in shapes if own)


# The part of a parameter group that one of several replicas owns: a run of its elements, which may begin and
# end in the middle of parameters.
#
# What an optimizer remembers of a parameter group, and the copy of its weights that is stepped, then exist
# for this part alone. A parameter that is cut is stepped as flat pieces, each by its owner. Where an
# optimizer needs parameters whole, as Muon needs matrices, parts begin and end between parameters.


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroupPart:
    """The part of one `member`; `parts` are those of all members.

    `own` lays out the pieces in it, and `pieces` gives the elements of its parameter that each has. Pieces
    are flat; with `is_whole` they are whole parameters in their shapes. `cuts` are the pieces of each
    parameter that all members have, in the members' order.
    """

    parts: Parts
    member: int
    own: ParameterGroup
    pieces: Mapping[str, slice]
    cuts: Mapping[str, tuple[slice, ...]]
    is_whole: bool = False

    @property
    def sizes(self) -> list[list[int]]:
        """How many elements each piece of every member has."""
        return [
            [one.stop - one.start for one in of_all if one.start < one.stop]
            for of_all in zip(*self.cuts.values(), strict=True)
        ]

    def of(self, flat: Tensor) -> Tensor:
        """This part of an arena."""
        return flat[self.parts[self.member] : self.parts[self.member + 1]]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The pieces in an arena of the whole parameter group."""
        part = self.of(flat)
        return {name: part[slot.begin : slot.end].view(slot.shape) for name, slot in self.own.slots.items()}

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """The piece of a tensor of its parameter's shape; of a piece, that itself."""
        is_piece = tensor.shape == self.own.slots[name].shape
        return tensor if is_piece else tensor.reshape(-1)[self.pieces[name]]


def part_of(
    parameter_group: ParameterGroup,
    member: int,
    num_members: int,
    owners: Mapping[str, int] | None = None,
) -> ParameterGroupPart:
    """The part of a member: as many elements as the others', to a few. With `owners` it has the parameters
    that it owns, which lie together.
    """
    slots = parameter_group.slots
    if owners is None:
        ideal = (place * slots.num_elements // num_members for place in range(1, num_members))
        parts = (0, *(_aligned(slots, place) for place in ideal), slots.num_elements)
    else:
        loads = [0] * num_members
        for name, slot in slots.items():
            loads[owners[name]] += slot.end - slot.begin
        parts = (0, *accumulate(loads))
    cuts = {
        name: tuple(_within(slot.begin, slot.end, begin, end) for begin, end in pairwise(parts))
        for name, slot in slots.items()
    }
    of_member = {name: of_all[member] for name, of_all in cuts.items()}
    pieces = {name: piece for name, piece in of_member.items() if piece.start < piece.stop}
    shapes: dict[str, tuple[int, ...]] = {name: slots[name].shape for name in pieces}
    if owners is None:
        shapes = {name: (piece.stop - piece.start,) for name, piece in pieces.items()}
    own = ParameterGroup(Slots(shapes), parameter_group.dtype)
    return ParameterGroupPart(parts, member, own, pieces, cuts, owners is not None)


def _within(begin: int, end: int, first: int, last: int) -> slice:
    """The elements from the first up to the last of a parameter that lies from begin to end."""
    start = max(begin, first)
    return slice(start - begin, max(min(end, last), start) - begin)


def _aligned(slots: Slots, place: int) -> int:
    """The nearest place at which a kernel that goes through the parameter would begin a vector too."""
    slot = next((slot for _, slot in slots.items() if slot.begin <= place < slot.end), None)
    if slot is None:
        return 0  # there are no elements
    vectors = (place - slot.begin + ALIGNED_ELEMENTS // 2) // ALIGNED_ELEMENTS
    return min(slot.begin + vectors * ALIGNED_ELEMENTS, slot.end)


Tensors = Mapping[str, Tensor]


class ParameterGroupWeights:
    """The arenas of one parameter group: its banks, and the newest weights where they are `apart` from the
    banks.

    With a `part` only that is stepped here, and only that is kept apart. With `keeps_part` there is no more
    of the banks either, but while one is taken. Without a part, `averaged` may be the one that is averaged
    with other replicas from here. Frozen weights, whose `item` says so, have one bank and never a gradient.
    """

    def __init__(
        self,
        parameter_group: ParameterGroup,
        given: Tensors,
        dtypes: Mapping[str, torch.dtype],
        num_banks: int,
        memory: StageMemory,
        *,
        is_apart: bool,
        part: ParameterGroupPart | None = None,
        keeps_part: bool = False,
        averaged: ParameterGroupPart | None = None,
        item: Item = Item.WEIGHTS,
    ) -> None:
        self.part = part
        self.averaged = averaged
        self.keeps_part = keeps_part
        self.memory = memory
        """Where all this lies."""
        slots, names = parameter_group.slots, tuple(parameter_group.slots)
        dtype, device = dtypes[names[0]], given[names[0]].device
        allocators = [memory.allocator(item, number) for number in range(num_banks)]
        self.banks: Sequence[Arena] = (
            [LentArena(slots, dtype, device) for _ in allocators]
            if keeps_part
            else [Arena(slots, dtype, device, allocator) for allocator in allocators]
        )
        self.apart = (
            Arena(
                (part.own if part else parameter_group).slots,
                parameter_group.dtype,
                device,
                memory.allocator(Item.OPTIMIZER),
            )
            if is_apart or dtype != parameter_group.dtype
            else None
        )
        if memory.has_master and self.apart is None and item is Item.WEIGHTS:
            raise BiremeError(
                "The plan offloads weights that are made from a master copy, as bfloat16 ones are, and these "
                f"are of {dtype} and have none. Make a new plan, for the type that the model trains in."
            )
        self.leaves: list[Tensors] = (
            [_leaves(bank, parameter_group.dtype) for bank in self.banks]
            if item is Item.WEIGHTS
            else [bank.views for bank in self.banks]
        )
        self.own: list[Tensor] = [bank.flat for bank in self.banks]
        """What is stepped here of each bank: all of it, or this replica's part."""
        self.own_views: list[Tensors] = self.leaves
        """The same by name: parameters, or this replica's pieces of them."""
        if part is not None and keeps_part:
            parts = [Arena(part.own.slots, dtype, device, allocator) for allocator in allocators]
            self.own, self.own_views = [one.flat for one in parts], [one.views for one in parts]
        elif part is not None:
            self.own_views = [part.views(flat) for flat in self.own]
            self.own = [part.of(flat) for flat in self.own]
        with memory.opened(item):
            self.put(0, given)
        if self.apart is not None:
            with memory.opened(Item.OPTIMIZER):
                self.put_apart(given)

    def stepped(self, bank: int) -> Tensors:
        """What an optimizer steps where a version is made in a bank."""
        return self.own_views[bank] if self.apart is None else self.apart.views

    def held(self, bank: int, *, is_newest: bool) -> tuple[Tensors, bool]:
        """What there is here of the version in a bank, of which the newest may be apart, and whether that is
        all of it; not copies.
        """
        if is_newest and self.apart is not None:
            return self.apart.views, self.part is None
        return (self.own_views if self.keeps_part else self.leaves)[bank], not self.keeps_part

    def put(self, bank: int, weights: Tensors) -> None:
        """Take over copies of weights into a bank, or of what there is of it here: whole ones, or this
        replica's pieces of them; others may be missing if replicas own parts.
        """
        part = self.part
        for name, view in self.banks[bank].views.items():
            given = weights[name] if part is None else weights.get(name)
            if given is None:
                continue
            if part is None or (not self.keeps_part and given.shape == view.shape):
                view.copy_(given)
            elif name in part.pieces:
                self.own_views[bank][name].copy_(part.piece(name, given))

    def lent(self, bank: int) -> LentArena:
        """All of a bank of which only a part is kept: there is memory for the rest from its `take` on."""
        arena = self.banks[bank]
        assert isinstance(arena, LentArena), "only what is not kept is taken"
        return arena

    def to_gather(self, bank: int, *, trains: bool) -> Tensor:
        """All of a bank, to be filled with the others' parts, with this replica's part in it, which is on the
        device if this `trains`.
        """
        arena, own = self.banks[bank], self.own[bank]
        if not isinstance(arena, LentArena) or self.part is None:
            return arena.flat
        self.part.of(arena.unversioned).copy_(own if trains else self.memory.read(own))
        return arena.unversioned

    def newest_part(self, bank: int) -> Tensor:
        """This replica's part of the newest weights, which are in that bank or apart."""
        return self.own[bank] if self.apart is None else self.apart.flat

    def to_average(self, bank: int) -> tuple[Slots, Tensor]:
        """What is averaged from here of the newest weights, in that bank or apart, after its layout."""
        part, newest = self.part or self.averaged, self.newest_part(bank)
        if part is None:
            return self.banks[bank].slots, newest
        return part.own.slots, newest if self.part is not None else part.of(newest)

    @property
    def num_bank_bytes(self) -> int:
        """The bytes of the banks that are there for good."""
        kept = self.own if self.keeps_part else [bank.flat for bank in self.banks]
        return sum(flat.nbytes for flat in kept)

    def round_into(self, bank: int) -> None:
        """Write the newest weights into a bank, where they are apart from it."""
        if self.apart is not None:
            self.own[bank].copy_(self.apart.flat)

    def round_anywhere(self, bank: int) -> None:
        """The same, whichever tiers have them."""
        if self.apart is not None:
            own, newest = self.own[bank], self.memory.read(self.apart.flat)
            self.memory.put_back(own, self.memory.read(own).copy_(newest))

    def begin(self, bank: int, newest: int, *, skips: bool) -> None:
        """Let what is stepped here of a bank be ready for a step of the newest weights; if that is skipped,
        let it be these.
        """
        if self.apart is None and bank != newest:
            self.own[bank].copy_(self.own[newest])
        elif skips:
            self.round_into(bank)  # for the bank of the newest may be on another tier

    def put_apart(self, weights: Tensors) -> None:
        """Take over copies of weights where the newest ones are apart."""
        for name, view in self.apart.views.items() if self.apart is not None else ():
            view.copy_(weights[name] if self.part is None else self.part.piece(name, weights[name]))


def _leaves(bank: Arena, gradient_dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a bank as leaves of autograd graphs, with gradients in another dtype if need be."""
    leaves = {}
    for name, view in bank.views.items():
        leaf = leaves[name] = view.detach().requires_grad_()
        if leaf.dtype != gradient_dtype:
            leaf.grad_dtype = gradient_dtype
    return leaves


def bank_dtype_of(tensor: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """What a parameter is computed with: in a dtype that was asked for, or in its own."""
    return asked if asked is not None and tensor.is_floating_point() else tensor.dtype


def step_dtype_of(bank_dtype: torch.dtype) -> torch.dtype:
    """What a parameter is stepped in: 32 bits at least."""
    return torch.float32 if bank_dtype.itemsize < torch.float32.itemsize else bank_dtype


# What training a stage keeps, in bytes.
#
# Bytes for each trainable parameter, with Adam, which also counts its steps in 4 bytes for each tensor:
#
#                 float32 banks                        bfloat16 banks
#     rule        banks  W  Adam  gradient  all        banks  W  Adam  gradient  all
#     synchronous   4    -   8       4       16          2    4   8       4       18
#     delayed       8    -   8       4       20          4    4   8       4       20
#     fresh         8    4   8       4       24          4    4   8       4       20
#
# W is the newest weights where they are kept apart from the banks: as float32 master weights of bfloat16
# banks, and under the FRESH rule, whose banks hold trial versions. There is a gradient for each batch whose
# gradients are under way on the stage at once, and under the FRESH rule with replicas one more, for their
# sum. Trial steps take the copies of one chunk besides, and the norm of the gradients 20 bytes for each 2^18
# elements of a parameter. Of w replicas that share an optimizer each has 1/w of W and of Adam's.


@dataclass(frozen=True, slots=True)
class BankMemory:
    """What training a stage keeps besides activations and buffers.

    `apart` is W where it is kept apart from the banks, `gradient` the sums of gradients, `workspace` the
    copies that trial steps are made with and what the norm of the gradients takes.
    """

    banks_bytes: int
    frozen_bytes: int
    apart_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        weights = self.banks_bytes + self.frozen_bytes + self.apart_bytes
        return weights + self.optimizer_bytes + self.gradient_bytes + self.workspace_bytes
