"""Sums of gradients through a codec: fewer bytes, and still the same bits on every replica.

Low rank is linear, so its factors are summed as gradients are. Messages of the other codecs are gathered, and
every replica decodes all of them, its own too, and adds them up in the replicas' order. Gradients that are
small, or of another kind than real numbers, are summed as they are.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.description import aligned
from bireme.codec.lowrank import as_matrix, first_basis, next_basis, orthonormal, product
from bireme.codec.sum_description import SumCodec, SumKind
from bireme.sync.exchange import BatchGradients, SentBytes, held_flags, note_held, sum_flats
from bireme.sync.group import Group, Pending
from bireme.sync.slices import NUM_IN_FLIGHT

# What codecs of sums keep from batch to batch: residuals, thresholds, bases. In two copies.
#
# A residual is what a replica has not sent yet of a gradient. A batch writes to one copy while the other
# stays as the batch before left it; only a batch that counts makes its copy the settled one, so a skipped
# batch leaves all as it was. While the next batch is summed up in the background, what the one before left
# can still be copied for a checkpoint.

RESIDUAL, THRESHOLD, BASIS = "residual", "threshold", "basis"

_Kept = dict[str, dict[str, Tensor]]
"""By the name of a parameter, what is kept of it by what it is."""


class Feedback:
    """Both copies, for one rank. Residuals lie in flat memory, which is taken when the first batch ends."""

    def __init__(self) -> None:
        self._copies: tuple[_Kept, _Kept] = ({}, {})
        self._given: _Kept = {}
        self._settled = 0
        self._num_batches = 0
        self._is_open = False
        self._after = {0: 0}
        """Which copy there was after so many batches; of the last two."""

    @property
    def num_batches(self) -> int:
        """How many batches have been settled."""
        return self._num_batches

    @property
    def num_bytes(self) -> int:
        """The bytes of both copies."""
        return sum(one.nbytes for copy in self._copies for kept in copy.values() for one in kept.values())

    @property
    def before(self) -> _Kept:
        """What the last batch that counted has left."""
        return self._copies[self._settled]

    def open(self, views: Mapping[str, Tensor]) -> _Kept:
        """The copy for a batch with these gradients: residuals are gradients and settled residuals, added.

        What the batch has no gradient of is as it was.
        """
        self._make(views)
        self._is_open = True
        settled, staged = self.before, self._copies[1 - self._settled]
        for name, kept in settled.items():
            residual = staged[name][RESIDUAL]
            if name in views:
                torch.add(views[name], kept[RESIDUAL], out=residual)
            else:
                residual.copy_(kept[RESIDUAL])
            rest = {key: value.clone() for key, value in kept.items() if key != RESIDUAL}
            staged[name] = {**rest, RESIDUAL: residual}
        return staged

    def settle(self, *, counts: bool) -> None:
        """The batch is done; what it left is settled if it counts."""
        if counts and self._is_open:
            self._settled = 1 - self._settled
        self._is_open = False
        self._num_batches += 1
        self._after = {
            self._num_batches - 1: self._after[self._num_batches - 1],
            self._num_batches: self._settled,
        }

    def staged(self, key: str) -> dict[str, Tensor]:
        """What the batch under way has left under a key, by parameter."""
        copy = self._copies[1 - self._settled] if self._is_open else {}
        return {name: kept[key] for name, kept in copy.items() if key in kept}

    def clear_residuals(self) -> None:
        """All that was not sent has been sent by other means."""
        for kept in (*self._given.values(), *self.before.values()):
            if RESIDUAL in kept:
                kept[RESIDUAL].zero_()

    def put(self, name: str, key: str, value: Tensor) -> None:
        """Have this settled for a parameter."""
        kept = self.before.get(name)
        if kept is None:
            kept = self._given.setdefault(name, {})
        kept[key] = value

    def after(self, num_batches: int) -> _Kept:
        """What was settled after so many batches: those done, or one fewer. Not copies."""
        return {**self._given, **self._copies[self._after[num_batches]]}

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], *, num_batches: int) -> None:
        """Go on from what was settled after so many batches."""
        self._copies = ({}, {})
        self._given = {name: dict(values) for name, values in kept.items()}
        self._settled, self._num_batches, self._after = 0, num_batches, {num_batches: 0}

    def _make(self, views: Mapping[str, Tensor]) -> None:
        """Take memory for gradients that were not there before."""
        new = {name: view for name, view in views.items() if name not in self._copies[0]}
        for copy in self._copies if new else ():
            for name, residual in _zeros_like(new).items():
                given = self._given.get(name, {})
                # What was saved may be of a piece, where replicas of a site shared the optimizer.
                if RESIDUAL in given and given[RESIDUAL].shape == residual.shape:
                    residual.copy_(given[RESIDUAL])
                copy[name] = {**given, RESIDUAL: residual}
        for name in new:
            self._given.pop(name, None)


def _zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in these shapes, those of one dtype and device in one piece of memory."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(name)
    made: dict[str, Tensor] = {}
    for (dtype, device), names in alike.items():
        lengths: Sequence[int] = [tensors[name].numel() for name in names]
        flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
        for name, piece in zip(names, torch.split(flat, list(lengths)), strict=True):
            made[name] = piece.view(tensors[name].shape)
    return made


class CodedSums:
    """Sums of one rank's gradients through a codec, batch by batch.

    Where members change from sum to sum no basis is the same on all of them, so none `keeps_basis`: each sum
    begins with a random one.
    """

    def __init__(self, codec: SumCodec, *, keeps_basis: bool = True) -> None:
        self.codec = codec
        self._keeps_basis = keeps_basis
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
        """Sum the gradients of `names`, in place, over a group, and mark those that any member had.

        Each member's part counts times its factor, if there are factors; a codec sees it without. `sender` is
        this member's number wherever groups change; it seeds what is random in its messages. What is `plain`
        goes as it is. What is `apart` is summed in the same way whatever it is summed with.
        """
        if not names:
            return
        if group.size == 1:
            self._send_all_to_itself(names, gradients, 1.0 if factors is None else factors[0])
            return
        views = {name: gradients.views[name] for name in names}
        flags = held_flags(names, gradients)
        sent.note(group.size, raw=flags.nbytes + sum(view.nbytes for view in views.values()))
        begins = batch >= self.codec.whole_steps
        coded = {
            name: view for name, view in views.items() if begins and name not in plain and self._codes(view)
        }
        whole = {name: view for name, view in views.items() if name not in coded}
        # What no member has a gradient of is opened too, and left as it is.
        staged = self.feedback.open(coded) if self.feedback is not None and coded else {}
        number = group.rank if sender is None else sender
        own = [
            _Own(name, view, staged.get(name, {}), f"{batch} {number} {_seed_name(name)}")
            for name, view in coded.items()
        ]
        parts = (1.0,) * group.size if factors is None else factors
        first = [*whole.values()] or [one.view for one in own]
        numbers = flags.to(first[0].dtype if not first[0].is_complex() else torch.float32)
        matrices = (
            _factors(own, self.codec.rank, parts[group.rank], "" if self._keeps_basis else f"{batch} ")
            if self.codec.kind is SumKind.LOWRANK
            else []
        )
        for view in whole.values() if parts[group.rank] != 1.0 else ():
            view.mul_(parts[group.rank])
        lefts = {one.own.name: one.left for one in matrices}
        sum_all(group, {"": numbers, **whole, **lefts}, apart, slice_bytes, sent)
        note_held(gradients, names, numbers)
        if self.codec.kind is SumKind.LOWRANK:
            held = [one for one in matrices if one.own.name in gradients.held]
            _sum_factors(group, held, apart, slice_bytes, sent)
            for one in held if not self._keeps_basis else ():
                del one.own.kept[BASIS]
        elif own:
            held_own = [one for one in own if one.name in gradients.held]
            _gather(group, held_own, coder_of(self.codec), parts, slice_bytes, sent)

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

    def _send_all_to_itself(self, names: Sequence[str], gradients: BatchGradients, factor: float) -> None:
        """The sum of one member is all that it has, with what it has not sent before."""
        views = {name: gradients.views[name] for name in names}
        known = {} if self.feedback is None else self.feedback.after(self.feedback.num_batches)
        coded = {name: view for name, view in views.items() if RESIDUAL in known.get(name, {})}
        staged = self.feedback.open(coded) if self.feedback is not None and coded else {}
        for name in coded if staged else ():
            if name not in gradients.held:
                views[name].zero_()
            residual = staged[name][RESIDUAL]
            views[name].copy_(residual)
            residual.zero_()
            gradients.held.add(name)
        for name in gradients.held.intersection(names) if factor != 1.0 else ():
            views[name].mul_(factor)

    def _codes(self, view: Tensor) -> bool:
        return view.dtype in (torch.float32, torch.float64) and self.codec.codes(view.shape)


@dataclass(frozen=True, slots=True)
class _Own:
    """A gradient of this replica: where its sum belongs, what is kept of it, and a word for its chances."""

    name: str
    view: Tensor
    kept: dict[str, Tensor]
    word: str

    @property
    def wanted(self) -> Tensor:
        """What is to be sent: the gradient, with what was not sent before if that is kept."""
        return self.kept.get(RESIDUAL, self.view)


def _seed_name(name: str) -> str:
    """What seeds the chances of a tensor: without what tells its copies on one rank apart."""
    return name.partition("@")[0]


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


@dataclass(frozen=True, slots=True)
class _Factors:
    """A gradient as a matrix, which lies where it is kept, and the left factor of this replica's part."""

    own: _Own
    matrix: Tensor
    left: Tensor
    seed: int
    factor: float


def _factors(own: Sequence[_Own], rank: int, factor: float, word: str) -> list[_Factors]:
    found = []
    for one in own:
        matrix, seed = as_matrix(one.wanted), crc32(f"{word}{_seed_name(one.name)}".encode())
        left = matrix @ _basis(one, matrix, rank, seed)
        found.append(_Factors(one, matrix, left if factor == 1.0 else left.mul_(factor), seed, factor))
    return found


def _basis(one: _Own, matrix: Tensor, rank: int, seed: int) -> Tensor:
    """What the power iteration goes on from; where that does not fit, it starts again."""
    known = one.kept.get(BASIS)
    if known is None or known.shape != (matrix.shape[1], rank):
        known = first_basis(matrix.shape[1], rank, seed=seed)
    return known.to(matrix)


def _sum_factors(
    group: Group, factors: Sequence[_Factors], apart: Collection[str], slice_bytes: int, sent: SentBytes
) -> None:
    """Sums from left factors that are summed. Residuals become what the replica's own part of them lacks."""
    lefts = orthonormal_all([one.left for one in factors])
    rights = [one.matrix.T @ left for one, left in zip(factors, lefts, strict=True)]
    sums = [right * one.factor for one, right in zip(factors, rights, strict=True)]
    of_names = {one.own.name: whole for one, whole in zip(factors, sums, strict=True)}
    sum_all(group, of_names, apart, slice_bytes, sent)
    for one, left, right, whole in zip(factors, lefts, rights, sums, strict=True):
        # A residual is the replica's own, and may round as it does.
        one.matrix.addmm_(left, right.T, alpha=-1)
        product(left, whole, out=one.own.view.view(one.matrix.shape))
        one.own.kept[BASIS] = next_basis(whole, seed=one.seed)


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


Coder = Threshold | BlockCodec


def coder_of(codec: SumCodec) -> Coder:
    """What makes messages. Bits that nothing is kept of are rounded by chance, so that no mean is shifted."""
    if codec.kind is SumKind.THRESHOLD:
        return Threshold(codec.share, codec.life)
    return BlockCodec(codec.bits, is_rotated=codec.bits < 8, is_stochastic=not codec.has_feedback)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Messages of some gradients: the lengths of each member's, and the messages, once they are there."""

    own: Sequence[_Own]
    lengths: Sequence[Sequence[int]]
    messages: Sequence[Tensor]
    pending: Pending


class _Room:
    """Memory for a tensor at a time. To get new memory, page by page, takes longer than to decode into it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def like(self, tensor: Tensor) -> Tensor:
        """Room for a tensor of that shape; what was there before is lost."""
        is_alike = (self._flat.dtype, self._flat.device) == (tensor.dtype, tensor.device)
        if not is_alike or len(self._flat) < tensor.numel():
            self._flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return self._flat[: tensor.numel()].view(tensor.shape)


def _gather(
    group: Group,
    own: Sequence[_Own],
    coder: Coder,
    factors: Sequence[float],
    slice_bytes: int,
    sent: SentBytes,
) -> None:
    """Messages of all members, some gradients at a time, and their sums."""
    under_way: deque[_UnderWay] = deque()
    room = _Room()
    for some in _in_pieces(own, slice_bytes):
        if len(under_way) > NUM_IN_FLIGHT:
            _add_up(under_way.popleft(), coder, group.rank, factors, room)
        under_way.append(_begin(group, some, coder, sent))
    while under_way:
        _add_up(under_way.popleft(), coder, group.rank, factors, room)


def _begin(group: Group, own: Sequence[_Own], coder: Coder, sent: SentBytes) -> _UnderWay:
    """Encode some gradients, and begin to gather all members' messages of them."""
    device = own[0].view.device
    most = [coder.most_bytes(tuple(one.view.shape), one.view.dtype) for one in own]
    message = torch.empty(sum(map(aligned, most)), dtype=torch.uint8, device=device)
    lengths, end = [], 0
    for one, room in zip(own, most, strict=True):
        lengths.append(_encode(coder, one, message[end : end + room]))
        end += aligned(lengths[-1])
    of_all = [lengths] * group.size
    if isinstance(coder, Threshold):
        of_all = _all_lengths(group, lengths, device, sent)
    longest = max(sum(map(aligned, of_one)) for of_one in of_all)
    messages = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(group.size)]
    message = message[:longest]  # what one sends is as long as the longest; its end may be anything
    sent.sent += (group.size - 1) * longest
    return _UnderWay(own, of_all, messages, group.gather(message, messages))


def _encode(coder: Coder, one: _Own, out: Tensor) -> int:
    if isinstance(coder, BlockCodec):
        return coder.encode(one.wanted, out, seed=crc32(one.word.encode()))
    return coder.encode(one.wanted, out, one.kept.setdefault(THRESHOLD, new_memory()))


def _all_lengths(
    group: Group, lengths: Sequence[int], device: torch.device, sent: SentBytes
) -> list[list[int]]:
    """How long all members' messages are."""
    own = torch.tensor(lengths, dtype=torch.int64, device=device)
    of_all = [torch.empty_like(own) for _ in range(group.size)]
    sent.sent += (group.size - 1) * own.nbytes
    group.gather(own, of_all).wait()
    return [of_one.tolist() for of_one in of_all]


def _add_up(some: _UnderWay, coder: Coder, rank: int, factors: Sequence[float], room: _Room) -> None:
    """Decode all members' messages, in their order, on every member."""
    some.pending.wait()
    ends = [0] * len(some.messages)
    for place, one in enumerate(some.own):
        shape, dtype = tuple(one.view.shape), one.view.dtype
        for member, message in enumerate(some.messages):
            begin, length = ends[member], some.lengths[member][place]
            ends[member] += aligned(length)
            into = room.like(one.view) if member else one.view
            part = coder.decode(message[begin : begin + length], shape, dtype, out=into)
            if member == rank and RESIDUAL in one.kept:
                one.kept[RESIDUAL].sub_(part)
            if factors[member] != 1.0:
                part.mul_(factors[member])
            if member:
                one.view.add_(part)


def _in_pieces(own: Sequence[_Own], slice_bytes: int) -> Iterator[list[_Own]]:
    """The gradients, so many together as are no larger than a slice."""
    some: list[_Own] = []
    size = 0
    for one in own:
        if some and size + one.view.nbytes > slice_bytes:
            yield some
            some, size = [], 0
        some.append(one)
        size += one.view.nbytes
    if some:
        yield some
