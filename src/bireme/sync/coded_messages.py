"""Messages of gradients through a codec: encoded, sent to all members or to owners of pieces, added up."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.description import ALIGNMENT_BYTES
from bireme.codec.sum_description import SumCodec, SumKind
from bireme.sync.exchange import SentBytes
from bireme.sync.feedback import THRESHOLD
from bireme.sync.group import Group, Pending
from bireme.sync.slices import NUM_IN_FLIGHT

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
        """Sum the pieces of every owner, about so many bytes of each at a time."""
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
