"""Sums of gradients through a codec: fewer bytes, and still the same bits on every replica.

Low rank is linear, so its factors are summed as gradients are. Of the other codecs a replica sends a message
of each gradient to all members, or of each piece to the member that owns the piece. Who gets messages decodes
those of all members, its own too, and adds them up in the members' order. Residuals stay with the sender.
Gradients that are small, or of another kind than real numbers, are summed as they are.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.description import ALIGNMENT_BYTES
from bireme.codec.lowrank import as_matrix, first_basis, next_basis, orthonormal, product
from bireme.codec.sum_description import DENSE, SumCodec, SumKind
from bireme.sync.exchange import (
    BatchGradients,
    SentBytes,
    held_flags,
    note_held,
    sum_flats,
    sum_in_slices,
    sum_parts,
)
from bireme.sync.feedback import BASIS, RESIDUAL, THRESHOLD, Feedback
from bireme.sync.group import Group, Pending
from bireme.sync.slices import NUM_IN_FLIGHT, PART_SLICE_BYTES


class GradientSummation:
    """Sums of one rank's gradients over a group, batch by batch, as they are or through a codec: whole on all
    members or, `in_parts`, each piece at its owner.

    If members change from sum to sum no basis is the same on all of them, so none `keeps_basis`: each sum
    begins with a random one.
    """

    def __init__(self, codec: SumCodec = DENSE, *, in_parts: bool = False, keeps_basis: bool = True) -> None:
        self.codec = codec
        self._in_parts, self._keeps_basis = in_parts, keeps_basis
        self.feedback = Feedback() if codec.has_feedback else None
        """What was not sent yet, where that is kept."""

    def sum(
        self,
        group: Group,
        names: Sequence[str],
        gradients: BatchGradients,
        slice_bytes: int,
        sent: SentBytes,
        *,
        batch: int,
        factors: Sequence[float] | None = None,
        sender: int | None = None,
        plain: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> None:
        """Sum the gradients of `names`, in place, over a group, and mark those that any member had. What a
        member holds of pieces that others own is of no use afterwards.

        Each member's part counts times its factor, if there are factors; a codec sees it without. `sender` is
        this member's number wherever groups change; it seeds what is random in its messages. What is `plain`
        goes as it is. What is `apart` is summed in the same way whatever it is summed with.
        """
        if not names:
            return
        if self.codec == DENSE and factors is None:
            if self._in_parts:
                sum_parts(group, names, gradients, min(slice_bytes, PART_SLICE_BYTES), sent)
            else:
                sum_in_slices(group, names, gradients, gradients.flats, slice_bytes, sent)
            return
        if group.size == 1:
            self._send_all_to_itself(names, gradients, 1.0 if factors is None else factors[0])
            return
        views = {name: gradients.views[name] for name in names}
        flags = held_flags(names, gradients)
        sent.note(group.size, raw=flags.nbytes)
        begins = batch >= self.codec.whole_steps
        coded = {
            name: view for name, view in views.items() if begins and name not in plain and self._codes(view)
        }
        whole = {} if self._in_parts else {name: views[name] for name in views if name not in coded}
        # What no member has a gradient of is opened too, and left as it is.
        kept = self._opened(batch, coded)
        factors = (1.0,) * group.size if factors is None else factors
        factor = factors[group.rank]
        matrices: list[_Matrix] = []
        if self.codec.kind is SumKind.LOWRANK:
            word = "" if self._keeps_basis else f"{batch} "
            for name, view in coded.items():
                piece = gradients.cuts[name][group.rank] if self._in_parts else None
                matrices.append(_matrix_of(name, view, kept[name], self.codec.rank, word, factor, piece))
        for view in whole.values() if factor != 1.0 else ():
            view.mul_(factor)
        first = next(iter((whole or coded or views).values()))
        numbers = flags.to(first.dtype if not first.is_complex() else torch.float32)
        lefts = {one.name: one.left for one in matrices}
        sum_all(group, {"": numbers, **whole, **lefts}, apart, slice_bytes, sent)
        note_held(gradients, names, numbers)
        held = [one for one in matrices if one.name in gradients.held]
        if held:
            _sum_matrices(group, held, apart, slice_bytes, sent)
        for one in held if not self._keeps_basis else ():
            del one.kept[BASIS]
        done = {one.name for one in matrices}
        left = [name for name in views if name in gradients.held and name not in whole and name not in done]
        number = group.rank if sender is None else sender
        coder = None if matrices or not coded else coder_of(self.codec)
        if self._in_parts:
            pieces = [
                _pieces_of(owner, group.rank, f"{batch} {number}", left, gradients, kept)
                for owner in range(group.size)
            ]
            sent.raw += sum(one.others_bytes for one in held)
            most_bytes = min(slice_bytes, PART_SLICE_BYTES) // group.size
            Parted(group, coder, factors, sent).sum(pieces, most_bytes)
            return
        sent.note(group.size, raw=sum(view.nbytes for view in views.values()))
        if coder is not None and left:
            own = [_piece_of(name, coded[name], kept[name], f"{batch} {number}") for name in left]
            GatheredMessages(group, coder, factors, sent).sum([own], slice_bytes)

    @property
    def common(self) -> dict[str, Tensor]:
        """What the batch under way leaves that is the same on all members, by parameter."""
        return {} if self.feedback is None else self.feedback.staged(BASIS)

    def settle(self, *, counts: bool, common: Mapping[str, Tensor] | None = None) -> None:
        """The batch is done; what it left is kept if it counts. `common` is what it left on all members that
        counted, for a member that did not.
        """
        if self.feedback is not None:
            self.feedback.settle(counts=counts)
            for name, basis in (common or {}).items():
                self.feedback.put(name, BASIS, basis)

    def _codes(self, view: Tensor) -> bool:
        """Whether a gradient goes through the codec."""
        return view.dtype in (torch.float32, torch.float64) and self.codec.codes(view.shape)

    def _opened(self, batch: int, coded: Mapping[str, Tensor]) -> Mapping[str, dict[str, Tensor]]:
        """What is kept of these gradients, to which they are added."""
        if self.feedback is None:
            return {name: {} for name in coded}
        return self.feedback.open(coded, batch if self._in_parts else None)

    def _send_all_to_itself(self, names: Sequence[str], gradients: BatchGradients, factor: float) -> None:
        """The sum of one member is all that it has, with what it has not sent before."""
        if self._in_parts:
            return
        views = {name: gradients.views[name] for name in names}
        known = {} if self.feedback is None else self.feedback.after(self.feedback.num_batches)
        coded = {name: view for name, view in views.items() if RESIDUAL in known.get(name, {})}
        for name in coded.keys() - gradients.held:
            views[name].zero_()
        staged = {} if self.feedback is None else self.feedback.open(coded)
        for name in coded:
            residual = staged[name][RESIDUAL]
            views[name].copy_(residual)
            residual.zero_()
            gradients.held.add(name)
        for name in gradients.held.intersection(names) if factor != 1.0 else ():
            views[name].mul_(factor)


def _piece_of(name: str, view: Tensor, kept: dict[str, Tensor], word: str) -> "Piece":
    """A whole gradient."""
    residual = kept.get(RESIDUAL)
    return Piece(view, view if residual is None else residual, kept, residual, f"{word} {_seed_name(name)}")


def _pieces_of(
    owner: int,
    rank: int,
    word: str,
    names: Sequence[str],
    gradients: BatchGradients,
    kept: Mapping[str, dict[str, Tensor]],
) -> Iterable["Piece"]:
    """What an owner has of some gradients."""
    for name in names:
        place = gradients.cuts[name][owner]
        if place.start == place.stop:
            continue
        target, own = gradients.views[name].view(-1)[place], kept.get(name)
        residual = own[RESIDUAL].view(-1)[place] if own and RESIDUAL in own else None
        wanted = target if residual is None else residual
        chance, threshold = f"{word} {name} {owner}", f"{THRESHOLD}.{owner}"
        yield Piece(target, wanted, own, residual, chance, threshold, is_own=owner == rank)


def _seed_name(name: str) -> str:
    """What seeds the chances of a tensor: without what tells its copies on one rank apart."""
    return name.partition("@")[0]


# Low rank: factors for all members, and of the product what a member owns.


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A gradient as a matrix, which lies where it is kept, and the left factor of this member's part times
    its factor. The product belongs into the gradient, or of it the elements in `piece`.
    """

    name: str
    view: Tensor
    kept: dict[str, Tensor]
    matrix: Tensor
    left: Tensor
    seed: int
    factor: float
    piece: slice | None

    @property
    def others_bytes(self) -> int:
        """The bytes of the elements that other members own."""
        num_own = 0 if self.piece is None else self.piece.stop - self.piece.start
        return (self.view.numel() - num_own) * self.view.itemsize

    def put_product(self, left: Tensor, right: Tensor) -> None:
        """Write the product, or the elements of it that this member owns."""
        piece = self.piece
        if piece is None:
            product(left, right, out=self.view.view(self.matrix.shape))
        elif piece.start != piece.stop:
            num_columns = self.matrix.shape[1]
            first, end = piece.start // num_columns, -(-piece.stop // num_columns)
            rows = product(left[first:end], right).view(-1)
            begin = piece.start - first * num_columns
            self.view.view(-1)[piece] = rows[begin : begin + piece.stop - piece.start]


def _matrix_of(
    name: str,
    view: Tensor,
    kept: dict[str, Tensor],
    rank: int,
    word: str,
    factor: float,
    piece: slice | None = None,
) -> _Matrix:
    """What is kept of a gradient as a matrix, with the next factor of the power iteration. If what that goes
    on from does not fit, it starts again.
    """
    matrix, seed = as_matrix(kept.get(RESIDUAL, view)), crc32(f"{word}{_seed_name(name)}".encode())
    basis = kept.get(BASIS)
    if basis is None or basis.shape != (matrix.shape[1], rank):
        basis = first_basis(matrix.shape[1], rank, seed=seed)
    left = matrix @ basis.to(matrix)
    return _Matrix(
        name, view, kept, matrix, left if factor == 1.0 else left.mul_(factor), seed, factor, piece
    )


def _sum_matrices(
    group: Group, matrices: Sequence[_Matrix], apart: Collection[str], slice_bytes: int, sent: SentBytes
) -> None:
    """Sums from left factors that are summed. Residuals become what the replica's own part of them lacks."""
    lefts = orthonormal_all([one.left for one in matrices])
    rights = [one.matrix.T @ left for one, left in zip(matrices, lefts, strict=True)]
    sums = [right * one.factor for one, right in zip(matrices, rights, strict=True)]
    of_names = {one.name: whole for one, whole in zip(matrices, sums, strict=True)}
    sum_all(group, of_names, apart, slice_bytes, sent)
    for one, left, right, whole in zip(matrices, lefts, rights, sums, strict=True):
        # A residual is the replica's own, and may round as it does.
        one.matrix.addmm_(left, right.T, alpha=-1)
        one.put_product(left, whole)
        one.kept[BASIS] = next_basis(whole, seed=one.seed)


def sum_all(
    group: Group, tensors: Mapping[str, Tensor], apart: Collection[str], slice_bytes: int, sent: SentBytes
) -> None:
    """Sum tensors as they are, in place, those of one dtype in one piece but for those `apart`."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in apart:
            alike.setdefault(tensor.dtype, []).append(tensor)
    for own in [*alike.values(), *([tensors[name]] for name in sorted(apart) if name in tensors)]:
        flat = torch.cat([tensor.reshape(-1) for tensor in own])
        sum_flats(group, [flat], slice_bytes, sent)
        for tensor, piece in zip(own, torch.split(flat, [one.numel() for one in own]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def orthonormal_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Each with orthonormal columns; those with as many rows together, which costs as much as one."""
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((len(matrix), matrix.dtype), []).append(place)
    found = list(matrices)
    for places in alike.values():
        made = orthonormal(torch.stack([matrices[place] for place in places]))
        for place, matrix in zip(places, made, strict=True):
            found[place] = matrix
    return found


# Messages of gradients through a codec: encoded, sent to all members or to owners of pieces, added up.


Coder = Threshold | BlockCodec


def coder_of(codec: SumCodec) -> Coder:
    """What makes messages. Bits that nothing is kept of are rounded by chance, so that no mean is shifted."""
    if codec.kind is SumKind.THRESHOLD:
        return Threshold(codec.share, codec.life)
    return BlockCodec(codec.bits, is_rotated=codec.bits < 8, is_stochastic=not codec.has_feedback)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is sent of a gradient: `wanted` goes, and the sum belongs into `target`. `kept` is what is kept of
    the gradient, None if the piece goes as it is; what it has not sent stays in `residual`, if that is kept.
    `chance` seeds what is random in the message, and `threshold` names the piece's own. The message of one
    that `is_own` comes back here.
    """

    target: Tensor
    wanted: Tensor
    kept: dict[str, Tensor] | None
    residual: Tensor | None
    chance: str
    threshold: str = THRESHOLD
    is_own: bool = True


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Messages on their way: the pieces that they are of, the lengths of all members' messages of these, and
    the messages, once they are there. What is `given` must stay as it is until then.
    """

    own: Sequence[Piece]
    lengths: Sequence[Sequence[int]]
    messages: Sequence[Tensor]
    given: Tensor
    pending: Pending


class _Messages(ABC):
    """Encodes pieces, sends the messages to their owners, and adds up those that come, each member's times
    its factor. Without a coder all are sent as they are.
    """

    alignment_bytes = ALIGNMENT_BYTES
    """Messages begin at multiples of this."""

    def __init__(self, coder: Coder | None, factors: Sequence[float], sent: SentBytes, rank: int) -> None:
        self._coder, self._factors, self._sent, self._rank = coder, factors, sent, rank
        # To get new memory, page by page, takes longer than to decode into it.
        self._room = torch.empty(0)

    @abstractmethod
    def _send(
        self, pieces: Sequence[list[Piece]], lengths: Sequence[list[int]], message: Tensor, ends: list[int]
    ) -> _UnderWay:
        """Begin to send messages of some pieces of every owner. They lie one after the other, those of each
        owner up to its end.
        """

    def sum(self, pieces: Sequence[Iterable[Piece]], most_bytes: int) -> None:
        """Sum the pieces of every owner, about that many bytes of each at a time."""
        waiting = [deque(own) for own in pieces]
        under_way: deque[_UnderWay] = deque()
        while any(waiting):
            if len(under_way) > NUM_IN_FLIGHT:
                self._add_up(under_way.popleft())
            under_way.append(self._begin([_next(own, most_bytes) for own in waiting]))
        while under_way:
            self._add_up(under_way.popleft())

    def _begin(self, pieces: Sequence[list[Piece]]) -> _UnderWay:
        every = [one for own in pieces for one in own]
        most = sum(self._aligned(self._most_bytes(one)) for one in every)
        message = torch.empty(most, dtype=torch.uint8, device=every[0].target.device)
        lengths: list[list[int]] = []
        ends = [0]
        for own in pieces:
            end = ends[-1]
            lengths.append([])
            for one in own:
                lengths[-1].append(self._encode(one, message[end:]))
                end += self._aligned(lengths[-1][-1])
            ends.append(end)
        return self._send(pieces, lengths, message, ends)

    def _add_up(self, some: _UnderWay) -> None:
        """Decode all members' messages, in their order."""
        some.pending.wait()
        ends = [0] * len(some.messages)
        for place, one in enumerate(some.own):
            for member, message in enumerate(some.messages):
                begin, length = ends[member], some.lengths[member][place]
                ends[member] += self._aligned(length)
                into = self._room_like(one.target) if member else one.target
                part = self._decode(one, message[begin : begin + length], into)
                if member == self._rank and one.residual is not None:
                    one.residual.sub_(part)
                if self._factors[member] != 1.0:
                    part.mul_(self._factors[member])
                if member:
                    one.target.add_(part)

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self.alignment_bytes) * self.alignment_bytes

    def _most_bytes(self, one: Piece) -> int:
        if one.kept is None or self._coder is None:
            return one.target.nbytes
        return self._coder.most_bytes(tuple(one.target.shape), one.target.dtype)

    def _encode(self, one: Piece, out: Tensor) -> int:
        """Write the message of a piece; gives its length. What others get of it, no residual has any more."""
        if one.kept is None or self._coder is None:
            out[: one.target.nbytes].copy_(one.wanted.view(torch.uint8))
            return one.target.nbytes
        if isinstance(self._coder, Threshold):
            memory = one.kept.setdefault(one.threshold, new_memory())
            length = self._coder.encode(one.wanted, out, memory)
        else:
            length = self._coder.encode(one.wanted, out, seed=crc32(one.chance.encode()))
        if one.residual is not None and not one.is_own:
            one.residual.sub_(self._decode(one, out[:length], self._room_like(one.target)))
        return length

    def _decode(self, one: Piece, message: Tensor, into: Tensor) -> Tensor:
        if one.kept is None or self._coder is None:
            return into.copy_(message.view(into.dtype))
        return self._coder.decode(message, tuple(into.shape), into.dtype, out=into)

    def _room_like(self, tensor: Tensor) -> Tensor:
        """Room for a tensor of that shape; what was there before is lost."""
        is_alike = (self._room.dtype, self._room.device) == (tensor.dtype, tensor.device)
        if not is_alike or len(self._room) < tensor.numel():
            self._room = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return self._room[: tensor.numel()].view(tensor.shape)


def _next(waiting: deque[Piece], most_bytes: int) -> list[Piece]:
    """The next pieces: as many as are no larger together, but at least one if there is one."""
    found: list[Piece] = []
    size = 0
    while waiting and (not found or size + waiting[0].target.nbytes <= most_bytes):
        found.append(waiting.popleft())
        size += found[-1].target.nbytes
    return found


class GatheredMessages(_Messages):
    """All members own all pieces."""

    def __init__(self, group: Group, coder: Coder, factors: Sequence[float], sent: SentBytes) -> None:
        super().__init__(coder, factors, sent, group.rank)
        self._group = group

    def _send(
        self, pieces: Sequence[list[Piece]], lengths: Sequence[list[int]], message: Tensor, ends: list[int]
    ) -> _UnderWay:
        group, (own,), (of_own,) = self._group, pieces, lengths
        of_all = [of_own] * group.size
        if isinstance(self._coder, Threshold):
            of_one = torch.tensor(of_own, dtype=torch.int64, device=message.device)
            found = [torch.empty_like(of_one) for _ in range(group.size)]
            self._sent.sent += (group.size - 1) * of_one.nbytes
            group.gather(of_one, found).wait()
            of_all = [of_member.tolist() for of_member in found]
        longest = max(sum(map(self._aligned, of_member)) for of_member in of_all)
        messages = [torch.empty(longest, dtype=torch.uint8, device=message.device) for _ in range(group.size)]
        given = message[:longest]  # what one sends is as long as the longest; its end may be anything
        self._sent.sent += (group.size - 1) * longest
        return _UnderWay(own, of_all, messages, given, group.gather(given, messages))


class Parted(_Messages):
    """Each member owns its own pieces, and gets the messages of these alone."""

    alignment_bytes = 16  # so that what goes as it is can be read as numbers of any kind

    def __init__(self, group: Group, coder: Coder | None, factors: Sequence[float], sent: SentBytes) -> None:
        super().__init__(coder, factors, sent, group.rank)
        self._group = group

    def _send(
        self, pieces: Sequence[list[Piece]], lengths: Sequence[list[int]], message: Tensor, ends: list[int]
    ) -> _UnderWay:
        group, rank = self._group, self._group.rank
        self._sent.raw += sum(one.target.nbytes for own in pieces for one in own if not one.is_own)
        given = [message[begin:end] for begin, end in pairwise(ends)]
        of_all = self._lengths_of_all(lengths, len(pieces[rank]), message.device)
        sizes = [sum(map(self._aligned, of_member)) for of_member in of_all]
        own_message, given[rank], sizes[rank] = given[rank], message[:0], 0
        together = torch.cat(given)
        taken = together.new_empty(sum(sizes))
        self._sent.sent += together.nbytes
        pending = group.exchange(together, [*map(len, given)], taken, sizes)
        messages = [*torch.split(taken, sizes)]
        messages[rank] = own_message
        return _UnderWay(pieces[rank], of_all, messages, together, pending)

    def _lengths_of_all(
        self, lengths: Sequence[list[int]], num_own: int, device: torch.device
    ) -> list[list[int]]:
        """How long the messages of this member's pieces are, of every member."""
        group = self._group
        if not isinstance(self._coder, Threshold):
            return [lengths[group.rank]] * group.size
        given = torch.tensor([one for own in lengths for one in own], dtype=torch.int64, device=device)
        taken = given.new_empty(group.size * num_own)
        self._sent.sent += given.nbytes - num_own * given.itemsize
        group.exchange(given, [*map(len, lengths)], taken, [num_own] * group.size).wait()
        return [one.tolist() for one in taken.view(group.size, num_own)]
