"""A sum of gradients over a group, in slices of bounded size with several on their way at once.

A slice moves whether or not the others do, so a large gradient makes progress over a slow link. The order of
the slices depends on the layout alone, so it is the same on every member whatever gradients it has.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bireme.codec.lowrank import Components
from bireme.sync.arrivals import Arrivals, Bucket, FlatPlace, Parts, pieces_of, rounds_of
from bireme.sync.group import Group, Pending, add_in_order
from bireme.sync.slices import DENSE_SLICE_BYTES, NUM_IN_FLIGHT

# Norms of many tensors in a few calls, with one look at the device.

_PIECE_ELEMENTS = 2**18

_BYTES_OF_A_PIECE = 4 + 8 + 8
"""What one piece's norm takes until all are added up: in float32, in float64, and among the others."""


PieceNorms = Sequence[Tensor]
"""The norms of pieces of tensors, from which the norm of all is made."""


def squared_norm(tensors: Collection[Tensor]) -> float:
    """The sum of the squares of all elements. It is NaN or infinite if one of them is not finite."""
    return _norms(tensors)[1]


def piece_norms(tensors: Collection[Tensor]) -> PieceNorms:
    """The norms of some tensors' pieces, for `squared_norm_of`, which may be asked when they are gone."""
    return _norms(tensors)[0]


def squared_norm_of(norms: Iterable[PieceNorms]) -> float:
    """What `squared_norm` gives of all the tensors together."""
    return _sum_of_squares([norm for some in norms for norm in some])


def are_finite(tensors: Collection[Tensor]) -> bool:
    """Whether no element is infinite or NaN."""
    return math.isfinite(squared_norm(tensors))


def norm_workspace_bytes(num_elements: Iterable[int]) -> int:
    """What the norm of float32 tensors of these lengths takes while it is computed."""
    return _BYTES_OF_A_PIECE * sum(max(-(-one // _PIECE_ELEMENTS), 1) for one in num_elements)


def _norms(tensors: Collection[Tensor]) -> tuple[PieceNorms, float]:
    """The norms of some tensors' pieces, and the sum of their squares."""
    real = [piece for one in tensors for piece in _pieces(one)]
    found: PieceNorms = torch._foreach_norm(real) if real else ()
    total = _sum_of_squares(found)
    if not math.isfinite(total):  # the squares may only have been too large for the tensors' own dtype
        found = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in real]
        total = _sum_of_squares(found)
    return found, total


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor as real numbers, in pieces whose squares add up well in 32 bits."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (real,) if real.numel() <= _PIECE_ELEMENTS else torch.split(real.reshape(-1), _PIECE_ELEMENTS)


def _sum_of_squares(norms: Sequence[Tensor]) -> float:
    if not norms:
        return 0.0
    return float(torch.stack([norm.double() for norm in norms]).square().sum())


# A batch's gradients on one rank, as they are summed: flat memory for most, tensors by name for the rest.


class FactorStream(Protocol):
    """One member's gradient of a weight in one batch, as two factors; see `PrincipalStream`."""

    @property
    def num_pairs(self) -> int:
        """The pairs that it was fed."""

    @property
    def rank(self) -> int:
        """The number of components that are kept."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the gradient as a matrix."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the gradient."""


@dataclass(frozen=True, slots=True)
class BatchGradients:
    """What is summed in place when a batch ends.

    `views` are the gradients by name, and `held` those that there are; nothing is said of what the others
    hold. `flats` are the arenas that replicas sum, the same ones in the same order on each. `norms` are
    those of the gradients where they were taken before; then nothing is summed, and no view is looked at.
    `streams` are the gradients that are kept as principal components, and `components` what those of all
    replicas come to. Where replicas share the optimizer, `parts` are those of each of `flats`, `cuts` the
    pieces of each gradient there that all replicas own, and `owned` the piece that this replica owns and
    sums, which lies in `owned_flats`. With `arrivals` the backward may still run, and adds to `held`; its
    buckets have the gradients that lie in `flats`.
    """

    views: Mapping[str, Tensor]
    held: set[str]
    flats: Sequence[Tensor] = ()
    norms: Sequence[PieceNorms] = ()
    streams: Mapping[str, FactorStream] = field(default_factory=dict)
    components: dict[str, Components] = field(default_factory=dict)
    parts: Sequence[Parts] = ()
    cuts: Mapping[str, Sequence[slice]] = field(default_factory=dict)
    owned: Mapping[str, Tensor] = field(default_factory=dict)
    owned_flats: Sequence[Tensor] = ()
    arrivals: Arrivals | None = None


@dataclass(frozen=True, slots=True)
class FlatViews:
    """Where tensors lie in flats, by name."""

    slots: Mapping[str, FlatPlace]

    @classmethod
    def of(cls, views: Mapping[str, Tensor], flats: Sequence[Tensor]) -> "FlatViews":
        """Those of views of some flats, of which no two overlap."""
        filled = [number for number, flat in enumerate(flats) if flat.numel()]
        filled.sort(key=lambda number: flats[number].data_ptr())
        begins = [flats[number].data_ptr() for number in filled]
        slots = {}
        for name, view in views.items():
            if not view.numel():
                slots[name] = 0, 0, tuple(view.shape)
                continue
            number = filled[bisect_right(begins, view.data_ptr()) - 1]
            flat = flats[number]
            slots[name] = number, (view.data_ptr() - flat.data_ptr()) // flat.itemsize, tuple(view.shape)
        return cls(slots)

    def in_(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The views of other flats that are alike."""
        return {
            name: flats[number].view(-1)[begin : begin + math.prod(shape)].view(shape)
            for name, (number, begin, shape) in self.slots.items()
        }


@dataclass(slots=True)
class SentBytes:
    """What one rank has sent for sums of gradients: `sent` in truth, `raw` if they had gone as they are. In
    both are the bytes of weights that it made or keeps for replicas that share them: `gathered`.
    """

    raw: int = 0
    sent: int = 0
    gathered: int = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that are sent as they are."""
        self.raw += num_bytes
        self.sent += num_bytes

    def note(self, size: int, *, raw: int = 0, sent: int = 0) -> None:
        """Count tensors of these bytes that the members of a group of that size sum in a ring."""
        share = 2 * (size - 1) / size
        self.raw += round(share * raw)
        self.sent += round(share * sent)


def sum_in_slices(
    group: Group,
    names: Sequence[str],
    gradients: BatchGradients,
    flats: Sequence[Tensor] | Arrivals,
    slice_bytes: int,
    sent: SentBytes,
) -> None:
    """Sum `flats`, in which the gradients of `names` lie, over a group, and mark those that any member had;
    or the buckets of arrivals as they come.

    A gradient that no member has stays absent; where only some have it, the others count as zeros.
    """
    if group.size == 1 or not names:
        return
    before, noted, holders = sent.sent, list[str](), list[Tensor]()

    def all_flats() -> Iterator[Tensor]:
        whole = [Bucket(tuple(names), flats)] if isinstance(flats, Sequence) else flats.in_turn(group)
        for bucket in whole:
            noted.extend(bucket.names)
            holders.append(held_flags(bucket.names, gradients))
            yield from bucket.flats
        holders[:] = [torch.cat(holders)]
        yield holders[0]

    sum_flats(group, all_flats(), slice_bytes, sent)
    sent.raw += sent.sent - before
    note_held(gradients, noted, holders[0])


def sum_flats(group: Group, flats: Iterable[Tensor], slice_bytes: int, sent: SentBytes) -> None:
    """Sum flat tensors over a group, in place."""
    under_way: deque[Pending] = deque()
    for piece in _slices(flats, min(slice_bytes, DENSE_SLICE_BYTES)):
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


# Flat tensors cut into parts, each owned by one member of a group: sums that only the owner of a part gets.
#
# What is added up is added in the members' order, so it does not depend on who owns it.


def sum_parts(
    group: Group, names: Sequence[str], gradients: BatchGradients, slice_bytes: int, sent: SentBytes
) -> None:
    """Sum the flats of some gradients, in which those of `names` lie, each part where its owner is.

    Mark the gradients that any member had. What a member holds of other parts is of no use afterwards. The
    memory that this takes is counted in `part_sum_bytes`.
    """
    if not names or group.size == 1:
        return
    before, under_way = sent.sent, deque[_Round]()
    noted, holders = dict[str, None](), list[Tensor]()
    whole = _rounds(names, gradients, slice_bytes // group.size)
    for bucket in whole if gradients.arrivals is None else gradients.arrivals.in_turn(group):
        if new := [name for name in bucket.names if name not in noted]:
            holders.append(held_flags(new, gradients))
            noted |= dict.fromkeys(new)
        if not bucket.flats:
            continue
        if len(under_way) > NUM_IN_FLIGHT:
            under_way.popleft().add_up()
        under_way.append(_begin(group, bucket.flats, sent))
    flags = torch.cat(holders)
    pending = group.all_reduce(flags)
    sent.note(group.size, sent=flags.nbytes)
    while under_way:
        under_way.popleft().add_up()
    sent.raw += sent.sent - before
    pending.wait()
    note_held(gradients, [*noted], flags)


def _rounds(names: Sequence[str], gradients: BatchGradients, piece_bytes: int) -> Iterator[Bucket]:
    """The pieces of all parts, round after round; the names come first."""
    yield Bucket(tuple(names), ())
    for flat, parts in zip(gradients.flats, gradients.parts, strict=True):
        most = max(piece_bytes // flat.itemsize, 1)
        for begin in rounds_of(parts, most):
            yield Bucket((), pieces_of(flat, parts, begin, most))


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
        add_in_order(self.own, self.member, [*self.taken.view(self.num_others, -1)])


def _begin(group: Group, pieces: Sequence[Tensor], sent: SentBytes) -> _Round:
    own = pieces[group.rank]
    others = [piece for member, piece in enumerate(pieces) if member != group.rank]
    given = others[0] if len(others) == 1 else torch.cat(others)
    taken = own.new_empty(len(others) * len(own))
    lengths, taken_lengths = [*map(len, pieces)], [len(own)] * group.size
    lengths[group.rank] = taken_lengths[group.rank] = 0
    sent.sent += given.nbytes
    pending = group.exchange(given, lengths, taken, taken_lengths)
    return _Round(own, given, taken, group.rank, len(others), pending)
