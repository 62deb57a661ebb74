"""The sum of a batch's gradients over the members of a round, in a ring; two members exchange.

What members contribute is only read, so an attempt that lost a member is made again from the same. The sum is
made elsewhere: each piece of it at one member, or by two in the same way, so that all have the same bits.

    a piece that begins at member 0 of 4       0 ──▶ 1 ──▶ 2 ──▶ 3        parts: each adds its own
                                               3 ──▶ 0 ──▶ 1 ──▶ 2        the total goes on

Pieces begin at each member in turn and are independent, so each link is busy all the time.

Where all there is is small, the way around the ring takes longer than the bytes: each member sends all of its
own to each other one, and adds up in the order of the ring, to the same bits.
"""

import select
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sync.quorum.line import NO_DIGEST, Digest, LineBroken, PeerLine, Stamp, Tag, check_same

PIECE_BYTES = 512 * 1024
SMALL_BYTES = 64 * 1024
"""Of gradients that each member sends to all others; less than a piece."""
LOOK_S = 0.05
"""How often a wait looks whether the attempt is still wanted."""

_NUMBERS, _PART, _TOTAL = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member has of a batch: its gradients, flat and on the host, as a mean of `nominal` in weight.

    `weight` is what in truth counts in its samples. `holds` says for each parameter whether it has a gradient
    there; where it has none, `flats` are zero. `numbers` are further ones to add up: those in `means` as the
    gradients, the others as they are. `digest` is the last one of the member's weights.
    """

    flats: Sequence[Tensor]
    holds: bytes
    weight: float
    nominal: float
    means: tuple[float, ...] = ()
    numbers: tuple[float, ...] = ()
    digest: Digest = NO_DIGEST


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum over all members: the mean of all that counts, of so much `weight`. The flats lie where it was
    asked for.
    """

    holds: bytes
    weight: float
    means: tuple[float, ...]
    numbers: tuple[float, ...]


def sum_over(
    own: Contribution,
    into: Sequence[Tensor],
    *,
    me: int,
    members: Sequence[int],
    line_to: Callable[[int], PeerLine],
    stamp: Stamp,
    timeout_s: float,
    check: Callable[[], None],
) -> Summed:
    """The sum over some members, of which this is one; its gradients are written into flats like its own.

    `check` is called now and then; what it raises ends the attempt. Raises `LineBroken` where a member is
    gone, where nothing moves for the timeout, or where a member has other weights than the rest of them, and
    `OtherWeightsError` where that one is this.
    """
    lines = {member: line_to(member) for member in members if member != me}
    for line in lines.values():
        line.begin(stamp)
    traffic = _Traffic(lines, timeout_s, check)
    is_small = sum(flat.nbytes for flat in own.flats) <= SMALL_BYTES
    told = _told(own, traffic, me, members, stamp, with_flats=is_small)
    check_same({member: one.digest for member, one in zip(members, told, strict=True)}, me)
    weight = sum(one.weight for one in told)
    factors = [one.nominal / weight if weight else 0.0 for one in told]
    if is_small:
        _add_up(told, factors, into)
    else:
        _Ring(own, into, factors[members.index(me)], traffic, me, members, stamp).go()
    holds = bytes(map(max, *(one.holds for one in told))) if len(told) > 1 else own.holds
    means = tuple(
        sum(factor * one.means[place] for factor, one in zip(factors, told, strict=True))
        for place in range(len(own.means))
    )
    numbers = tuple(map(sum, zip(*(one.numbers for one in told), strict=True)))
    return Summed(holds, weight, means, numbers)


class _Traffic:
    """Moves the frames of one attempt on the lines to all its members."""

    def __init__(self, lines: Mapping[int, PeerLine], timeout_s: float, check: Callable[[], None]) -> None:
        self.lines = lines
        self._timeout_s = timeout_s
        self._check = check
        self._by_number = {line.socket.fileno(): line for line in lines.values()}

    def go(self, is_done: Callable[[], bool], on_frame: Callable[[int, Tag], None]) -> None:
        """Move until that is so and all is sent; each frame that has come is told with its member."""
        began_s = time.monotonic()
        for line in self.lines.values():
            self._move(line, on_frame)
        while not (is_done() and all(line.has_sent for line in self.lines.values())):
            self._check()
            self._look_for_silence(began_s)
            poller = select.poll()
            for number, line in self._by_number.items():
                if events := line.events:
                    poller.register(number, events)
            for number, _event in poller.poll(LOOK_S * 1000):
                self._move(self._by_number[number], on_frame)

    def _move(self, line: PeerLine, on_frame: Callable[[int, Tag], None]) -> None:
        for tag in line.move():
            on_frame(line.member, tag)
        if line.events & select.POLLOUT:  # what the frames led to goes at once
            line.move_out()

    def _look_for_silence(self, began_s: float) -> None:
        moved_s = max([began_s, *(line.moved_s for line in self.lines.values())])
        if time.monotonic() - moved_s <= self._timeout_s:
            return
        silent = [line for line in self.lines.values() if line.expects or not line.has_sent]
        longest = min(silent or [*self.lines.values()], key=lambda line: line.moved_s)
        raise LineBroken(longest.member, f"nothing has moved for {self._timeout_s:g} s")


def _told(
    own: Contribution,
    traffic: _Traffic,
    me: int,
    members: Sequence[int],
    stamp: Stamp,
    *,
    with_flats: bool,
) -> list[Contribution]:
    """What all members say of their contributions, in the order of the members, and maybe the gradients."""
    plain = array("d", [own.weight, own.nominal, *own.means, *own.numbers])
    of_weights = own.digest
    digest = array("q", [of_weights.version, of_weights.value, of_weights.kind, of_weights.first])
    flats = own.flats if with_flats else ()
    gradients = b"".join(_bytes_of(flat) for flat in flats)
    message = memoryview(plain.tobytes() + digest.tobytes() + gradients + own.holds)
    tag = Tag(stamp, _NUMBERS, 0)
    come = {member: bytearray(len(message)) for member in traffic.lines}
    missing = set(come)
    for member, line in traffic.lines.items():
        line.send(tag, message)
        line.expect(tag, memoryview(come[member]))
    traffic.go(lambda: not missing, lambda member, _tag: missing.discard(member))

    def read(member: int) -> Contribution:
        if member == me:
            return own
        size = len(plain) * plain.itemsize
        weight, nominal, *rest = array("d", bytes(come[member][:size]))
        end = size + len(digest) * digest.itemsize
        its_digest = Digest(*array("q", bytes(come[member][size:end])))
        means, numbers = tuple(rest[: len(own.means)]), tuple(rest[len(own.means) :])
        its_flats, holds = _flats_in(come[member], end, flats), bytes(come[member][end + len(gradients) :])
        return Contribution(its_flats, holds, weight, nominal, means, numbers, its_digest)

    return [read(member) for member in members]


def _flats_in(message: bytearray, begin: int, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The flats that lie in a message from there on."""
    found = []
    for flat in like:
        if flat.numel():
            one = torch.frombuffer(message, dtype=flat.dtype, count=flat.numel(), offset=begin)
        else:
            one = torch.empty(0, dtype=flat.dtype)
        found.append(one.view(flat.shape))
        begin += flat.nbytes
    return found


@torch.no_grad()
def _add_up(told: Sequence[Contribution], factors: Sequence[float], into: Sequence[Tensor]) -> None:
    """The sum of small gradients, as the ring makes it: each flat, a piece, begins at the next member."""
    pieces = [place for place, target in enumerate(into) if target.numel()]
    for number, place in enumerate(pieces):
        parts = [
            _Piece(one.flats[place], into[place]).scaled(factor)
            for one, factor in zip(told, factors, strict=True)
        ]
        first, *rest = (parts[(number + step) % len(parts)] for step in range(len(parts)))
        into[place].copy_(first)
        for part in rest:
            into[place].add_(part)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a flat: what is read, and where the sum of it goes."""

    own: Tensor
    into: Tensor

    def scaled(self, factor: float) -> Tensor:
        """This member's part as it counts in the sum."""
        return self.own if factor == 1.0 else self.own * factor


class _Ring:
    """The gradients of one attempt at one member."""

    def __init__(
        self,
        own: Contribution,
        into: Sequence[Tensor],
        factor: float,
        traffic: _Traffic,
        me: int,
        members: Sequence[int],
        stamp: Stamp,
    ) -> None:
        self._factor = factor
        self._traffic = traffic
        self._stamp = stamp
        self._place, self._size = members.index(me), len(members)
        self._members = members
        self._pieces = [
            _Piece(mine, target)
            for flat, result in zip(own.flats, into, strict=True)
            for mine, target in zip(_cut(flat), _cut(result), strict=True)
        ]
        self._num_open = len(self._pieces)

    @torch.no_grad()
    def go(self) -> None:
        """Return when all sums are there and this member has passed on what others need."""
        if self._size == 1:
            for piece in self._pieces:
                piece.into.copy_(piece.scaled(self._factor))
            return
        for number in range(len(self._pieces)):
            self._begin(number)
        self._traffic.go(lambda: not self._num_open, self._come)

    def _begin(self, number: int) -> None:
        piece, place = self._pieces[number], self._offset(number)
        if self._size == 2:
            self._send(_PART, number, piece.scaled(self._factor))
            self._expect(_PART, number)
            return
        if place == 0:
            self._send(_PART, number, piece.scaled(self._factor))
        else:
            self._expect(_PART, number)
        if place != self._size - 1:
            self._expect(_TOTAL, number)

    def _come(self, _member: int, tag: Tag) -> None:
        piece, place = self._pieces[tag.piece], self._offset(tag.piece)
        is_last = place == self._size - 1
        if tag.kind == _PART:
            piece.into.add_(piece.scaled(self._factor))
            if self._size > 2:
                self._send(_TOTAL if is_last else _PART, tag.piece, piece.into)
        elif place + 1 < self._size - 1:
            self._send(_TOTAL, tag.piece, piece.into)
        if tag.kind == _TOTAL or is_last or self._size == 2:
            self._num_open -= 1

    def _offset(self, number: int) -> int:
        """How far this member is from where a piece begins."""
        return (self._place - number) % self._size

    def _send(self, kind: int, number: int, what: Tensor) -> None:
        after = self._members[(self._place + 1) % self._size]
        self._traffic.lines[after].send(Tag(self._stamp, kind, number), _bytes_of(what))

    def _expect(self, kind: int, number: int) -> None:
        before = self._members[self._place - 1]
        tag = Tag(self._stamp, kind, number)
        self._traffic.lines[before].expect(tag, _bytes_of(self._pieces[number].into))


def _cut(flat: Tensor) -> Sequence[Tensor]:
    if not flat.numel():
        return ()
    return torch.split(flat.view(-1), max(PIECE_BYTES // flat.itemsize, 1))


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return data
