"""Sums of gradients through a codec of which each member of a group gets its own parts.

A member encodes the piece of each gradient that another member owns as a tensor by itself, and sends the
message to its owner alone. The owner decodes all members' messages, its own too, and adds them up in the
members' order. Residuals stay with the sender. Low rank needs whole matrices: its factors, which are small,
are summed for all members, and each makes the elements of their product that it owns.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.lowrank import as_matrix, first_basis, next_basis, product
from bireme.codec.sum_description import SumCodec, SumKind
from bireme.sync.coded import BASIS, RESIDUAL, THRESHOLD, Coder, Feedback, coder_of, orthonormal_all, sum_all
from bireme.sync.exchange import BatchGradients, SentBytes, are_finite, held_flags, note_held
from bireme.sync.group import Pending, SharingGroup
from bireme.sync.slices import NUM_IN_FLIGHT

# What codecs keep, where the gradients of a batch are opened some at a time, and a batch may begin before it
# is known whether the one before counts, as stages that share weights do.
#
# Batches write to the two copies in turn. Once a batch is known not to count, the next one goes on from what
# there was before it. A batch that begins earlier goes on from all that is finite.


class PartFeedback(Feedback):
    """The residuals, thresholds and bases of one rank, by the numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped: set[int] = set()
        self._last: dict[str, int] = {}
        """The last batch that opened each gradient."""

    def open_some(self, batch: int, views: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What the batch keeps of these gradients, which are added to their residuals."""
        own, before = self._copies[batch % 2], self._copies[(batch - 1) % 2]
        for name, view in views.items():
            if name not in before:
                self._take_memory(name, view, batch)
            if self._last[name] == batch:
                own[name][RESIDUAL].add_(view)
                continue
            if batch - 1 in self._skipped:
                before[name] = _copied(own[name], before[name][RESIDUAL])
            residual, known = own[name][RESIDUAL], before[name][RESIDUAL]
            if not are_finite([known]):
                torch.where(known.isfinite(), known, residual, out=known)
            own[name] = _copied(before[name], residual)
            residual.add_(view)
            self._last[name] = batch
        return {name: own[name] for name in views}

    def settle(self, *, counts: bool) -> None:
        """The next batch, by its number, is known to count or not."""
        if not counts:
            self._skipped = {one for one in self._skipped if one >= self._num_batches - 2}
            self._skipped.add(self._num_batches)
        self._num_batches += 1

    def after(self, num_batches: int) -> dict[str, dict[str, Tensor]]:
        """What there was after so many batches: those settled, or one fewer. Not copies."""
        found = dict(self._given)
        for name, last in self._last.items():
            goes_back = num_batches - 1 in self._skipped and last < num_batches
            found[name] = self._copies[(num_batches if goes_back else num_batches - 1) % 2][name]
        return found

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], *, num_batches: int) -> None:
        """Go on from what was settled after so many batches."""
        super().load(kept, num_batches=num_batches)
        self._skipped, self._last = set(), {}

    def _take_memory(self, name: str, view: Tensor, batch: int) -> None:
        """Have both copies of what is kept of a gradient, as they are before its first batch."""
        given = self._given.pop(name, {})
        for copy in self._copies:
            copy[name] = {**given, RESIDUAL: torch.zeros_like(view)}
            if RESIDUAL in given:
                copy[name][RESIDUAL].copy_(given[RESIDUAL])
        self._last[name] = batch - 1


def _copied(kept: Mapping[str, Tensor], residual: Tensor) -> dict[str, Tensor]:
    """Copies of what is kept of a gradient, with the residual in this memory."""
    copies = {key: value.clone() for key, value in kept.items() if key != RESIDUAL}
    return {**copies, RESIDUAL: residual.copy_(kept[RESIDUAL])}


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one owner has of a gradient: `wanted` is to be sent, and the sum belongs into `target`. `kept` is
    what is kept of the gradient, None if the piece is sent as it is.
    """

    name: str
    owner: int
    wanted: Tensor
    target: Tensor
    kept: dict[str, Tensor] | None
    residual: Tensor | None = None


class PartSums:
    """Sums of one rank's gradients through a codec, batch by batch, of which it gets its own parts."""

    def __init__(self, codec: SumCodec) -> None:
        self.codec = codec
        self.feedback = PartFeedback() if codec.has_feedback else None
        """What was not sent yet, where that is kept."""

    def sum(
        self,
        group: SharingGroup,
        names: Sequence[str],
        gradients: BatchGradients,
        slice_bytes: int,
        sent: SentBytes,
        *,
        batch: int,
    ) -> None:
        """Sum the gradients of `names`, in place, each piece where its owner is, and mark those that any
        member had. What a member holds of other pieces is of no use afterwards.
        """
        if group.size == 1 or not names:
            return
        flags = held_flags(names, gradients)
        group.all_reduce(flags).wait()
        sent.note(group.size, raw=flags.nbytes, sent=flags.nbytes)
        note_held(gradients, names, flags)
        begins = batch >= self.codec.whole_steps
        coded = {name: gradients.views[name] for name in names if begins and self._codes(gradients, name)}
        # What no member has a gradient of is opened too, and left as it is.
        kept = (
            {name: {} for name in coded} if self.feedback is None else self.feedback.open_some(batch, coded)
        )
        held = [name for name in names if name in gradients.held]
        if self.codec.kind is SumKind.LOWRANK:
            matrices = [
                _Matrix(name, gradients.views[name], kept[name], gradients.cuts[name][group.rank])
                for name in held
                if name in coded
            ]
            _sum_matrices(group, matrices, self.codec.rank, slice_bytes, sent)
            held = [name for name in held if name not in coded]
        pieces = [_pieces(gradients, held, kept, owner) for owner in range(group.size)]
        word = f"{batch} {group.rank}"
        coder = None if self.codec.kind is SumKind.LOWRANK else coder_of(self.codec)
        _Exchange(group, coder, word, sent).sum(pieces, slice_bytes)

    def settle(self, *, counts: bool) -> None:
        """The batch is done; what it left is kept if it counts."""
        if self.feedback is not None:
            self.feedback.settle(counts=counts)

    def _codes(self, gradients: BatchGradients, name: str) -> bool:
        view = gradients.views[name]
        return view.dtype in (torch.float32, torch.float64) and self.codec.codes(view.shape)


def _pieces(
    gradients: BatchGradients, names: Iterable[str], kept: Mapping[str, dict[str, Tensor]], owner: int
) -> Iterator[_Piece]:
    """What an owner has of some gradients."""
    for name in names:
        piece = gradients.cuts[name][owner]
        if piece.start == piece.stop:
            continue
        target, own = gradients.views[name].view(-1)[piece], kept.get(name)
        residual = own[RESIDUAL].view(-1)[piece] if own and RESIDUAL in own else None
        yield _Piece(name, owner, target if residual is None else residual, target, own, residual)


# Messages of pieces, some of every owner at a time.


@dataclass(frozen=True, slots=True)
class _Round:
    """Messages on their way: the own pieces, the lengths of all members' messages of them, and the bytes."""

    own: Sequence[_Piece]
    lengths: Sequence[Sequence[int]]
    given: Tensor
    messages: Sequence[Tensor]
    pending: Pending


class _Exchange:
    """Encodes pieces, sends each message to its owner, and adds up those that come. Without a coder all are
    sent as they are.
    """

    def __init__(self, group: SharingGroup, coder: Coder | None, word: str, sent: SentBytes) -> None:
        self._group = group
        self._coder = coder
        self._word = word
        self._sent = sent
        self._room = torch.empty(0)

    def sum(self, pieces: Sequence[Iterator[_Piece]], slice_bytes: int) -> None:
        """Sum the pieces of every owner."""
        under_way: deque[_Round] = deque()
        for some in _rounds(pieces, slice_bytes // self._group.size):
            if len(under_way) > NUM_IN_FLIGHT:
                self._add_up(under_way.popleft())
            under_way.append(self._begin(some))
        while under_way:
            self._add_up(under_way.popleft())

    def _begin(self, pieces: Sequence[Sequence[_Piece]]) -> _Round:
        """Encode some pieces of every owner, and begin to exchange the messages."""
        group, rank = self._group, self._group.rank
        device = next(one.target.device for of_owner in pieces for one in of_owner)
        most = sum(_aligned(self._most_bytes(one)) for of_owner in pieces for one in of_owner)
        message = torch.empty(most, dtype=torch.uint8, device=device)
        lengths: list[list[int]] = []
        end = 0
        bounds = [0]
        for owner, of_owner in enumerate(pieces):
            lengths.append([])
            for one in of_owner:
                lengths[-1].append(self._encode(one, message[end:]))
                end += _aligned(lengths[-1][-1])
                self._sent.raw += one.target.nbytes if owner != rank else 0
            bounds.append(end)
        given = [message[begin:end] for begin, end in pairwise(bounds)]
        own = pieces[rank]
        of_all = self._lengths_of_all(lengths, len(own), device)
        sizes = [sum(map(_aligned, of_one)) for of_one in of_all]
        own_message, given[rank], sizes[rank] = given[rank], message[:0], 0
        together = torch.cat(given)
        taken = together.new_empty(sum(sizes))
        self._sent.sent += together.nbytes
        pending = group.exchange(together, [*map(len, given)], taken, sizes)
        messages = [*torch.split(taken, sizes)]
        messages[rank] = own_message
        return _Round(own, of_all, together, messages, pending)

    def _lengths_of_all(
        self, lengths: Sequence[Sequence[int]], num_own: int, device: torch.device
    ) -> list[list[int]]:
        """How long the messages of this member's pieces are, of every member."""
        group = self._group
        if not isinstance(self._coder, Threshold):
            return [[*lengths[group.rank]] for _ in range(group.size)]
        given = torch.tensor([one for own in lengths for one in own], dtype=torch.int64, device=device)
        taken = given.new_empty(group.size * num_own)
        self._sent.sent += given.nbytes - num_own * given.itemsize
        group.exchange(given, [*map(len, lengths)], taken, [num_own] * group.size).wait()
        return [one.tolist() for one in taken.view(group.size, num_own)]

    def _add_up(self, some: _Round) -> None:
        """Decode all members' messages of the own pieces, in the members' order."""
        some.pending.wait()
        ends = [0] * self._group.size
        for place, one in enumerate(some.own):
            for member, message in enumerate(some.messages):
                begin, length = ends[member], some.lengths[member][place]
                ends[member] += _aligned(length)
                into = self._room_like(one.target) if member else one.target
                part = self._decode(one, message[begin : begin + length], into)
                if member:
                    one.target.add_(part)

    def _most_bytes(self, one: _Piece) -> int:
        if one.kept is None or self._coder is None:
            return one.target.nbytes
        return self._coder.most_bytes((len(one.target),), one.target.dtype)

    def _encode(self, one: _Piece, out: Tensor) -> int:
        """Write the message of a piece, and take what it sends from the residual; gives its length."""
        if one.kept is None or self._coder is None:
            out[: one.target.nbytes].copy_(one.wanted.view(torch.uint8))
            return one.target.nbytes
        if isinstance(self._coder, Threshold):
            memory = one.kept.setdefault(f"{THRESHOLD}.{one.owner}", new_memory())
            length = self._coder.encode(one.wanted, out, memory)
        else:
            word = f"{self._word} {one.name} {one.owner}"
            length = self._coder.encode(one.wanted, out, seed=crc32(word.encode()))
        if one.residual is not None:
            one.residual.sub_(self._decode(one, out[:length], self._room_like(one.target)))
        return length

    def _decode(self, one: _Piece, message: Tensor, into: Tensor) -> Tensor:
        if one.kept is None or self._coder is None:
            return into.copy_(message.view(into.dtype))
        return self._coder.decode(message, (len(into),), into.dtype, out=into)

    def _room_like(self, tensor: Tensor) -> Tensor:
        """Memory for a flat tensor; what was there before is lost."""
        is_alike = (self._room.dtype, self._room.device) == (tensor.dtype, tensor.device)
        if not is_alike or len(self._room) < len(tensor):
            self._room = torch.empty_like(tensor)
        return self._room[: len(tensor)]


_ALIGNED_BYTES = 16
"""Messages begin at multiples of this, so that they can be read as numbers of any kind."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _rounds(pieces: Sequence[Iterator[_Piece]], most_bytes: int) -> Iterator[list[list[_Piece]]]:
    """Pieces of every owner, about so many bytes at a time."""
    while True:
        some = [_next(of_owner, most_bytes) for of_owner in pieces]
        if not any(some):
            return
        yield some


def _next(pieces: Iterator[_Piece], most_bytes: int) -> list[_Piece]:
    """The next pieces, at least one if there is one."""
    found: list[_Piece] = []
    size = 0
    while size < most_bytes and (one := next(pieces, None)) is not None:
        found.append(one)
        size += one.target.nbytes
    return found


# Low rank: factors for all members, and of the product what a member owns.


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A gradient, what is kept of it, and the elements of it that this member owns."""

    name: str
    view: Tensor
    kept: dict[str, Tensor]
    piece: slice

    @property
    def wanted(self) -> Tensor:
        """What is to be sent."""
        return as_matrix(self.kept[RESIDUAL])

    @property
    def seed(self) -> int:
        """What a basis begins from."""
        return crc32(self.name.encode())

    def basis(self, rank: int) -> Tensor:
        """What the power iteration goes on from; if that does not fit, it starts again."""
        num_columns = self.wanted.shape[1]
        known = self.kept.get(BASIS)
        if known is None or known.shape != (num_columns, rank):
            known = first_basis(num_columns, rank, seed=self.seed)
        return known.to(self.wanted)

    def put_product(self, left: Tensor, right: Tensor) -> None:
        """Write the elements of the product that this member owns."""
        if self.piece.start == self.piece.stop:
            return
        num_columns = self.wanted.shape[1]
        first, end = self.piece.start // num_columns, -(-self.piece.stop // num_columns)
        rows = product(left[first:end], right).view(-1)
        begin = self.piece.start - first * num_columns
        self.view.view(-1)[self.piece] = rows[begin : begin + self.piece.stop - self.piece.start]


def _sum_matrices(
    group: SharingGroup, matrices: Sequence[_Matrix], rank: int, slice_bytes: int, sent: SentBytes
) -> None:
    """Sum matrices of low rank. Residuals become what the replica's own part of the factors lacks."""
    if not matrices:
        return
    lefts = [one.wanted @ one.basis(rank) for one in matrices]
    names = [one.name for one in matrices]
    sum_all(group, dict(zip(names, lefts, strict=True)), (), slice_bytes, sent)
    lefts = orthonormal_all(lefts)
    rights = [one.wanted.T @ left for one, left in zip(matrices, lefts, strict=True)]
    sums = [right.clone() for right in rights]
    sum_all(group, dict(zip(names, sums, strict=True)), (), slice_bytes, sent)
    for one, left, right, whole in zip(matrices, lefts, rights, sums, strict=True):
        one.wanted.addmm_(left, right.T, alpha=-1)
        one.put_product(left, whole)
        one.kept[BASIS] = next_basis(whole, seed=one.seed)
        others = one.view.numel() - (one.piece.stop - one.piece.start)
        sent.raw += others * one.view.itemsize
