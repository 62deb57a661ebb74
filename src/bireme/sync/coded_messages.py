"""Messages of gradients through a codec: encoded, sent to all members or to owners of pieces, added up.

Each call of a codec costs as much as coding some thousand values, so small pieces that are alike are bundled
and coded as one.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.description import BLOCK, aligned
from bireme.codec.sum_description import SumCodec, SumKind
from bireme.sync.exchange import SentBytes
from bireme.sync.feedback import RESIDUAL, THRESHOLD
from bireme.sync.group import Group, Waiting
from bireme.sync.slices import NUM_IN_FLIGHT

Coder = Threshold | BlockCodec


def coder_of(codec: SumCodec, *, keeps: bool) -> Coder:
    """What makes messages. Unless one `keeps` what they lack, bits are rounded by chance."""
    if codec.kind is SumKind.THRESHOLD:
        return Threshold(codec.share, codec.life)
    return BlockCodec(codec.bits, is_rotated=codec.bits < 8, is_stochastic=not keeps)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is sent of a gradient: `wanted` goes, and the sum belongs into `target`. `kept` is what is kept of
    the gradient, None if the piece goes as it is; what it has not sent stays in `residual`, if that is kept.
    `chance` seeds what is random in the message, and `threshold` names the piece's own. One that `is_own` is
    added up here.

    A bundle has copies of its `parts`, each of which begins with a block of its own: their lengths are in
    `lengths`, each with the elements up to the next part. It must `settle`.
    """

    target: Tensor
    wanted: Tensor
    kept: dict[str, Tensor] | None
    residual: Tensor | None
    chance: str
    threshold: str = THRESHOLD
    is_own: bool = True
    lengths: tuple[int, ...] = ()
    parts: Sequence[Tensor] = ()
    residuals: Sequence[Tensor] = ()

    def clear_between(self) -> None:
        """Make what lies between the parts of a bundle zero again, in the target."""
        if any(self.lengths[1::2]):
            torch._foreach_zero_(self.target.split_with_sizes(self.lengths)[1::2])

    def settle(self) -> None:
        """Put the sums of a bundle and what was not sent where they belong."""
        torch._foreach_copy_([*self.parts], self.target.split_with_sizes(self.lengths)[::2])
        if self.residual is not None:
            torch._foreach_copy_([*self.residuals], self.residual.split_with_sizes(self.lengths)[::2])


_APART = 16
"""Messages begin at multiples of these bytes: what goes as it is can be read as numbers of any kind."""

MOST_BUNDLED = 2**16
"""Values: to code many small tensors one by one takes longer than to code their values."""


class Given(NamedTuple):
    """A gradient that is summed: its name, its elements, its type, whether it is coded, and whether what is
    not sent of it is kept.
    """

    name: str
    size: int
    dtype: torch.dtype
    is_coded: bool
    is_kept: bool


_Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""By gradient, the first element of each owner's piece and the one after its last."""

_Place = tuple[str, slice | None, int]
"""A piece of a gradient: its name, the elements, None for all of them, and how many these are."""


@lru_cache(maxsize=64)  # the same in every batch
def _places_of(
    given: tuple[Given, ...], cuts: _Cuts, apart: frozenset[str], most: int
) -> list[list[list[_Place]]]:
    """What is coded as one, by owner. Small pieces that are alike are bundled, at most that many values, but
    for those that are `apart`.
    """
    found: list[list[list[_Place]]] = [[] for _ in (cuts[0] if cuts else ())]
    for owner, together in enumerate(found):
        small: dict[object, list[_Place]] = {}
        sizes: Counter[object] = Counter()
        for one, (begin, end) in zip(given, (places[owner] for places in cuts), strict=True):
            size, kind = end - begin, one[2:]
            piece = one.name, None if size == one.size else slice(begin, end), size
            if size and (one.name in apart or size > most):
                together.append([piece])
            elif size:
                if sizes[kind] + size > most:
                    together.append(small.pop(kind))
                    del sizes[kind]
                small.setdefault(kind, []).append(piece)
                sizes[kind] += size
        together.extend(small.values())
    return found


def pieces_of(
    given: tuple[Given, ...],
    views: Mapping[str, Tensor],
    kept: Mapping[str, dict[str, Tensor]],
    cuts: _Cuts | None,
    rank: int,
    word: str,
    apart: Collection[str],
    *,
    bundles: bool,
) -> list[list[Piece]]:
    """The pieces of some gradients, by owner; without `cuts` the gradients whole. `word` seeds what is random
    in their messages. Small ones are bundled, if any are, but for those that are `apart`.
    """
    whole = tuple(((0, one.size),) for one in given)
    by_owner = _places_of(given, cuts or whole, frozenset(apart), MOST_BUNDLED if bundles else 0)
    found: list[list[Piece]] = [[] for _ in by_owner]
    for owner, together in enumerate(by_owner):
        for places in together:
            first = places[0][0]
            chance, threshold, own = f"{word} {seed_name(first)}", THRESHOLD, kept.get(first)
            if cuts is not None:
                chance, threshold = f"{chance} {owner}", f"{threshold}.{owner}"
            targets, residuals = [_elements(views[name], place) for name, place, _ in places], list[Tensor]()
            if own and RESIDUAL in own:
                residuals = [_elements(kept[name][RESIDUAL], place) for name, place, _ in places]
            sent, lengths = residuals or targets, tuple[int, ...]()
            target, wanted, residual = targets[0], sent[0], residuals[0] if residuals else None
            if len(places) > 1:
                lengths = tuple(length for *_, size in places for length in (size, -size % BLOCK))
                target = wanted = wanted.new_zeros(sum(lengths))
                torch._foreach_copy_(wanted.split_with_sizes(lengths)[::2], sent)
                if residuals:
                    residual, target = wanted, torch.empty_like(wanted)
            is_own = cuts is None or owner == rank
            made = Piece(
                target, wanted, own, residual, chance, threshold, is_own, lengths, targets, residuals
            )
            found[owner].append(made)
    return found


def _elements(tensor: Tensor, place: slice | None) -> Tensor:
    return tensor.view(-1) if place is None else tensor.view(-1)[place]


@lru_cache(maxsize=64)
def even_cuts(given: tuple[Given, ...], factors: tuple[float, ...], apart: frozenset[str]) -> _Cuts:
    """The pieces of gradients that each member owns: about as many elements of all that is coded, and of the
    rest. Gradients that are `apart` are not cut, and their owners follow from their names. A member whose
    part does not count owns nothing, because what it keeps of sums would be lost.
    """
    owners = [member for member, factor in enumerate(factors) if factor] or [*range(len(factors))]
    totals, begins, cuts = Counter[bool](), Counter[bool](), list[list[tuple[int, int]]]()
    for one in given:
        totals[one.is_coded] += one.size * (one.name not in apart)
    for one in given:
        is_coded, start, end = one.is_coded, 0, one.size
        pieces = [(0, 0)] * len(factors)
        cuts.append(pieces)
        if one.name in apart:
            pieces[owners[crc32(seed_name(one.name).encode()) % len(owners)]] = 0, end
            continue
        for place, owner in enumerate(owners, 1):
            wanted = -(-(totals[is_coded] * place // len(owners) - begins[is_coded]) // BLOCK) * BLOCK
            stop = min(max(wanted, start), end)
            pieces[owner] = start, stop
            start = stop
        begins[is_coded] += end
    return tuple(map(tuple, cuts))


def seed_name(name: str) -> str:
    """What seeds the chances of a tensor: without what tells its copies on one rank apart."""
    return name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Messages on their way: the pieces of every owner, the lengths of the messages that come, by member, and
    the messages once they are there. What is `given` must stay as it is until then.
    """

    pieces: Sequence[Sequence[Piece]]
    lengths: Sequence[Sequence[int]]
    messages: list[Tensor]
    given: Tensor
    pending: Waiting


@dataclass(eq=False)
class Messages:
    """Encodes pieces, sends each to its owner, and adds up those that come, each member's times its factor.
    Without a coder all are sent as they are. An owner adds its own part as it is.

    If messages go `to_all`, each member owns all pieces, and decodes its own messages too. If there is a
    coder `of_sums`, each owner sends the sums of its pieces to all through it: all members have what they
    decode, the owner too. What it has not sent of a sum counts as a rest of its own part.
    """

    group: Group
    coder: Coder | None
    factors: Sequence[float]
    sent: SentBytes
    to_all: bool = False
    of_sums: Coder | None = None

    def __post_init__(self) -> None:
        self._parts: deque[_UnderWay] = deque()
        self._num_added = 0
        """Of the first parts: they are added up already."""
        self._sums: deque[_UnderWay] = deque()
        self._bundles: list[Piece] = []
        # To get new memory, page by page, takes longer than to decode into it.
        self._rooms = [torch.empty(0), torch.empty(0)]

    def add(self, pieces: Sequence[Sequence[Piece]], most_bytes: int) -> None:
        """Begin to sum the pieces of every owner, about that many bytes of each at a time."""
        self._bundles += (one for own in pieces for one in own if one.lengths)
        waiting = [deque(own) for own in pieces]
        while any(waiting):
            if len(self._parts) > NUM_IN_FLIGHT:
                self._end_part()
            self._parts.append(self._begin([_next(own, most_bytes) for own in waiting]))

    def go_on(self) -> bool:
        """Decode the next messages, if they have come; gives whether they had. This sends no message: all
        members begin theirs in one order, whenever those of others come.
        """
        if self._num_added < len(self._parts) and self._parts[self._num_added].pending.is_done():
            self._add_up(self._parts[self._num_added])
            self._num_added += 1
            return True
        if self._sums and self._sums[0].pending.is_done():
            self._take_sums(self._sums.popleft())
            return True
        return False

    def finish(self) -> None:
        """Wait for all sums."""
        while self._parts:
            self._end_part()
        while self._sums:
            self._take_sums(self._sums.popleft())
        for one in self._bundles:
            one.settle()

    def _begin(self, pieces: Sequence[list[Piece]]) -> _UnderWay:
        lengths = [[_most_bytes(self.coder, one) for one in own] for own in pieces]
        device = next(one.target.device for own in pieces for one in own)
        most_bytes = sum(aligned(one, _APART) for of_own in lengths for one in of_own)
        message = torch.empty(most_bytes, dtype=torch.uint8, device=device)
        end, ends = 0, [0]
        for own, of_own in zip(pieces, lengths, strict=True):
            for place, one in enumerate(own):
                if one.is_own and not self.to_all:
                    continue
                length = of_own[place] = _encode(self.coder, one, message[end:])
                if one.residual is not None and not one.is_own:
                    part = self._room_like(one.target, 1)
                    one.residual.sub_(_decode(self.coder, one, message[end : end + length], part))
                end += aligned(length, _APART)
            ends.append(end)
        if self.to_all:
            lengths = lengths * self.group.size
            return self._sent_to_all(pieces, self._lengths_of_all(lengths, device), message[:end])
        given = [end - begin for begin, end in pairwise(ends)]
        return self._exchanged(pieces, self._lengths_of_all(lengths, device), message[:end], given)

    def _sent_to_all(
        self, pieces: Sequence[Sequence[Piece]], lengths: Sequence[Sequence[int]], message: Tensor
    ) -> _UnderWay:
        """Send all others a message, which comes here too."""
        given = [len(message)] * self.group.size
        given[self.group.rank] = 0
        some = self._exchanged(pieces, lengths, message.repeat(self.group.size - 1), given)
        some.messages[self.group.rank] = message
        return some

    def _exchanged(
        self,
        pieces: Sequence[Sequence[Piece]],
        lengths: Sequence[Sequence[int]],
        given: Tensor,
        given_sizes: Sequence[int],
    ) -> _UnderWay:
        """Send each of the others its part of `given`. What comes has these lengths, by member."""
        sizes = [sum(aligned(one, _APART) for one in of_member) for of_member in lengths]
        sizes[self.group.rank] = 0
        taken = given.new_empty(sum(sizes))
        self.sent.sent += given.nbytes
        pending = self.group.exchange(given, given_sizes, taken, sizes)
        return _UnderWay(pieces, lengths, [*torch.split(taken, sizes)], given, pending)

    def _lengths_of_all(self, lengths: Sequence[list[int]], device: torch.device) -> Sequence[Sequence[int]]:
        """How long the messages of this member's pieces are, of every member."""
        group = self.group
        num_own = len(lengths[group.rank])
        if not isinstance(self.coder, Threshold):
            return [lengths[group.rank]] * group.size
        given = torch.tensor([one for own in lengths for one in own], dtype=torch.int64, device=device)
        taken = given.new_empty(group.size * num_own)
        self.sent.sent += given.nbytes - num_own * given.itemsize
        group.exchange(given, [*map(len, lengths)], taken, [num_own] * group.size).wait()
        return [one.tolist() for one in taken.view(group.size, num_own)]

    def _add_up(self, some: _UnderWay) -> None:
        """Decode all members' messages, in their order."""
        some.pending.wait()
        rank, ends = self.group.rank, [0] * self.group.size
        own = some.pieces[0 if self.to_all else rank]
        for place, one in enumerate(own):
            # What goes as it is lies where its sum belongs, and is read before.
            is_free = self.to_all or one.residual is not None
            total = one.target if is_free else self._room_like(one.target, 0)
            for member, message in enumerate(some.messages):
                begin, length = ends[member], some.lengths[member][place]
                ends[member] += aligned(length, _APART)
                part = self._room_like(one.target, 1) if member else total
                if member != rank or self.to_all:
                    _decode(self.coder, one, message[begin : begin + length], part)
                else:
                    part.copy_(one.wanted)
                if member == rank and one.residual is not None:
                    one.residual.sub_(part)
                if self.factors[member] != 1.0:
                    part.mul_(self.factors[member])
                if member:
                    total.add_(part)
            if not is_free:
                one.target.copy_(total)

    def _end_part(self) -> None:
        """Add the first part up, if it is not, and begin to send its sums."""
        some = self._parts.popleft()
        if self._num_added:
            self._num_added -= 1
        else:
            self._add_up(some)
        if self.of_sums is not None:
            if len(self._sums) > NUM_IN_FLIGHT:
                self._take_sums(self._sums.popleft())
            self._sums.append(self._begin_sums(some.pieces, self.of_sums))

    def _begin_sums(self, pieces: Sequence[Sequence[Piece]], coder: Coder) -> _UnderWay:
        """Encode the sums of this member's pieces, and have them as others decode them."""
        own, factor = pieces[self.group.rank], self.factors[self.group.rank]
        lengths = [[_most_bytes(coder, one) for one in some] for some in pieces]
        sizes = [aligned(one, _APART) for one in lengths[self.group.rank]]
        device = next(one.target.device for some in pieces for one in some)
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for one, out in zip(own, torch.split(message, sizes), strict=True):
            one.clear_between()
            if one.residual is not None:
                one.residual.copy_(one.target)
            whole = replace(one, wanted=one.target, chance=f"{one.chance} sum")
            _decode(coder, one, out[: _encode(coder, whole, out)], one.target)
            if one.residual is not None:
                one.residual.sub_(one.target).div_(factor)
        return self._sent_to_all(pieces, lengths, message)

    def _take_sums(self, some: _UnderWay) -> None:
        some.pending.wait()
        for own, lengths, message in zip(some.pieces, some.lengths, some.messages, strict=True):
            end = 0
            for one, length in zip(own, lengths, strict=True):
                if not one.is_own:
                    _decode(self.of_sums, one, message[end : end + length], one.target)
                end += aligned(length, _APART)

    def _room_like(self, tensor: Tensor, which: int) -> Tensor:
        """One of the two rooms for a tensor of that shape; what was there before is lost."""
        room = self._rooms[which]
        is_alike = (room.dtype, room.device) == (tensor.dtype, tensor.device)
        if not is_alike or len(room) < tensor.numel():
            room = self._rooms[which] = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return room[: tensor.numel()].view(tensor.shape)


def _most_bytes(coder: Coder | None, one: Piece) -> int:
    if one.kept is None or coder is None:
        return one.target.nbytes
    return coder.most_bytes(tuple(one.target.shape), one.target.dtype)


def _encode(coder: Coder | None, one: Piece, out: Tensor) -> int:
    """Write the message of a piece; gives its length."""
    if one.kept is None or coder is None:
        out[: one.target.nbytes].copy_(one.wanted.view(torch.uint8))
        return one.target.nbytes
    if isinstance(coder, Threshold):
        return coder.encode(one.wanted, out, one.kept.setdefault(one.threshold, new_memory()))
    return coder.encode(one.wanted, out, seed=crc32(one.chance.encode()))


def _decode(coder: Coder | None, one: Piece, message: Tensor, into: Tensor) -> Tensor:
    if one.kept is None or coder is None:
        return into.copy_(message[: into.nbytes].view(into.dtype))
    return coder.decode(message, tuple(into.shape), into.dtype, out=into)


def _next(waiting: deque[Piece], most_bytes: int) -> list[Piece]:
    """The next pieces, of at most `most_bytes` together, but at least one if there is one."""
    found: list[Piece] = []
    size = 0
    while waiting and (not found or size + waiting[0].target.nbytes <= most_bytes):
        found.append(waiting.popleft())
        size += found[-1].target.nbytes
    return found
