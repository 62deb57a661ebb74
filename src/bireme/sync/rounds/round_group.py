"""The group of a round among ranks of the same stage in different replicas.

A `RoundGroup` is a group for one attempt at a round. Dense sums go around in a ring, whose pieces begin at
each member in turn, so every link is busy all the time; two members exchange.

    a piece that begins at member 0 of 4       0 ──▶ 1 ──▶ 2 ──▶ 3        parts: each adds its own
                                               3 ──▶ 0 ──▶ 1 ──▶ 2        the total goes on

Each piece of a sum is made at one member, or by two in the same way, so all members have the same bits. A
flat with a first member of its own has the same bits wherever it lies among the flats. What a member
contributes is only read, so an attempt that lost a member is repeated with the same contribution.
"""

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sync.group import Pending
from bireme.sync.rounds.peer_line import LineBroken, PeerLine, Stamp, Tag

PIECE_BYTES = 512 * 1024
LOOK_S = 0.05
"""How often a wait looks whether the attempt is still wanted."""

_WHOLE, _PART, _TOTAL = 1, 2, 3


class _Traffic:
    """Moves the frames of one attempt on the lines to all its members."""

    def __init__(self, lines: Mapping[int, PeerLine], timeout_s: float, check: Callable[[], None]) -> None:
        self.lines = lines
        self._timeout_s = timeout_s
        self._check = check
        self._by_number = {line.socket.fileno(): line for line in lines.values()}

    def go(self, is_done: Callable[[], bool], on_frame: Callable[[int, Tag], None]) -> None:
        """Move until `is_done` and all is sent; `on_frame` gets each frame that has come, with its member."""
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
        if line.events & select.POLLOUT:  # frames that the arrivals led to go at once
            line.move_out()

    def _look_for_silence(self, began_s: float) -> None:
        moved_s = max([began_s, *(line.moved_s for line in self.lines.values())])
        if time.monotonic() - moved_s <= self._timeout_s:
            return
        silent = [line for line in self.lines.values() if line.expects or not line.has_sent]
        longest = min(silent or [*self.lines.values()], key=lambda line: line.moved_s)
        raise LineBroken(longest.member, f"nothing has moved for {self._timeout_s:g} s")


class RoundGroup:
    """The `members` of an attempt, of which this is `me`, as a group that adds up and gathers.

    It belongs to one thread. `check` is called now and then, and ends the attempt by what it raises. Raises
    `LineBroken` if a member is gone, or if nothing moves for the timeout. Tensors are on the host.
    """

    def __init__(
        self,
        me: int,
        members: Sequence[int],
        line_to: Callable[[int], PeerLine],
        stamp: Stamp,
        *,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self.members = tuple(members)
        self.rank, self.size = self.members.index(me), len(self.members)
        lines = {member: line_to(member) for member in self.members if member != me}
        for line in lines.values():
            line.begin(stamp)
        self._stamp, self._traffic = stamp, _Traffic(lines, timeout_s, check)
        self._num_pieces = 0
        self._arrives: dict[int, Callable[[int, Tag], None]] = {}
        """What a frame of each piece leads to."""
        self._held: list[object] = []
        """Frames may still be on their way from these tensors."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the group; the same bits on every member."""
        return self.add_up([tensor.clone()], [tensor])

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to fill `into` with the members' tensors, which are all alike, in the members' order."""
        into[self.rank].copy_(tensor)
        return self._exchanged(
            dict.fromkeys(self._traffic.lines, tensor),
            {member: into[place] for place, member in enumerate(self.members) if place != self.rank},
        )

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Pending:
        """Begin to send every member its part of `given`, and to fill `taken` with what all send here."""
        parts, places = torch.split(given, list(lengths)), torch.split(taken, list(taken_lengths))
        places[self.rank].copy_(parts[self.rank])
        others = [place for place in range(self.size) if place != self.rank]
        return self._exchanged(
            {self.members[place]: parts[place] for place in others},
            {self.members[place]: places[place] for place in others},
        )

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor, which is flat, with that of the member `source`."""
        if source != self.rank:
            return self._exchanged({}, {self.members[source]: tensor})
        return self._exchanged(dict.fromkeys(self._traffic.lines, tensor), {})

    def add_up(
        self,
        own: Sequence[Tensor],
        into: Sequence[Tensor],
        factor: float = 1.0,
        firsts: Sequence[int | None] = (),
    ) -> Pending:
        """Begin to write the sum of all members' tensors, each times that member's factor, into others.

        `firsts` are as in a `Contribution`.
        """
        pieces: list[_Piece] = []
        for flat, result, first in zip(own, into, firsts or [None] * len(own), strict=True):
            begin = len(pieces) if first is None else first
            parts = zip(_cut(flat), _cut(result), strict=True)
            pieces += [_Piece(mine, target, begin + place) for place, (mine, target) in enumerate(parts)]
        if self.size == 1:
            for piece in pieces:
                piece.into.copy_(piece.scaled(factor))
            return _UnderWay(self, set())
        ring = _Ring(self, pieces, factor, self._numbers(len(pieces)))
        ring.begin()
        return _UnderWay(self, ring.missing)

    def send(self, to: int, kind: int, piece: int, what: Tensor) -> None:
        """Send a frame to the member at that place. The tensor must stay as it is."""
        self._held.append(what)
        self._traffic.lines[self.members[to]].send(Tag(self._stamp, kind, piece), bytes_of(what))

    def expect(self, source: int, kind: int, piece: int, into: Tensor, then: Callable[[Tag], None]) -> None:
        """Have a frame of the member at that place written there; `then` is called when it has come."""
        self._arrives[piece] = lambda _member, tag: then(tag)
        self._traffic.lines[self.members[source]].expect(Tag(self._stamp, kind, piece), bytes_of(into))

    def finish(self, missing: set[int]) -> None:
        """Return when none of these pieces is missing, and all that others need is sent."""
        self._traffic.go(lambda: not missing, lambda member, tag: self._arrives[tag.piece](member, tag))
        self._held.clear()

    def _exchanged(self, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]) -> Pending:
        """Tensors for some members and from some, as frames of one piece."""
        (number,) = self._numbers(1)
        missing = set(taken)
        self._arrives[number] = lambda member, _tag: missing.discard(member)
        tag = Tag(self._stamp, _WHOLE, number)
        for member, what in given.items():
            flat = what.contiguous()
            self._held.append(flat)
            self._traffic.lines[member].send(tag, bytes_of(flat))
        for member, into in taken.items():
            self._traffic.lines[member].expect(tag, bytes_of(into))
        return _UnderWay(self, missing)

    def _numbers(self, num: int) -> range:
        self._num_pieces += num
        return range(self._num_pieces - num, self._num_pieces)


class _UnderWay:
    """What is done when nothing of it is missing."""

    __slots__ = ("_group", "_missing")

    def __init__(self, group: RoundGroup, missing: set[int]) -> None:
        self._group, self._missing = group, missing

    def wait(self) -> None:
        self._group.finish(self._missing)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a flat: what is read, and where its sum goes, which begins at the `first` member."""

    own: Tensor
    into: Tensor
    first: int = 0

    def scaled(self, factor: float) -> Tensor:
        """This member's part as it counts in the sum."""
        return scaled(self.own, factor)


def scaled(part: Tensor, factor: float) -> Tensor:
    """A part times a factor, or as it is."""
    return part if factor == 1.0 else part * factor


class _Ring:
    """Pieces that go around among all members of a group, of which there are at least two."""

    def __init__(self, group: RoundGroup, pieces: Sequence[_Piece], factor: float, numbers: range) -> None:
        self._group, self._pieces, self._factor, self._numbers = group, pieces, factor, numbers
        self.missing = set(numbers)

    def begin(self) -> None:
        """Send what begins here, and expect the rest."""
        group = self._group
        for place, piece in enumerate(self._pieces):
            number, offset = self._numbers[place], self._offset(place)
            if group.size == 2:
                self._send(_PART, number, piece.scaled(self._factor))
                self._expect(_PART, number)
                continue
            if offset == 0:
                self._send(_PART, number, piece.scaled(self._factor))
            else:
                self._expect(_PART, number)
            if offset != group.size - 1:
                self._expect(_TOTAL, number)

    def _come(self, tag: Tag) -> None:
        place, size = tag.piece - self._numbers.start, self._group.size
        piece, offset = self._pieces[place], self._offset(place)
        is_last = offset == size - 1
        if tag.kind == _PART:
            piece.into.add_(piece.scaled(self._factor))
            if size > 2:
                self._send(_TOTAL if is_last else _PART, tag.piece, piece.into)
        elif offset + 1 < size - 1:
            self._send(_TOTAL, tag.piece, piece.into)
        if tag.kind == _TOTAL or is_last or size == 2:
            self.missing.discard(tag.piece)

    def _offset(self, place: int) -> int:
        """How far this member is from where a piece begins."""
        return (self._group.rank - self._pieces[place].first) % self._group.size

    def _send(self, kind: int, number: int, what: Tensor) -> None:
        self._group.send((self._group.rank + 1) % self._group.size, kind, number, what)

    def _expect(self, kind: int, number: int) -> None:
        piece = self._pieces[number - self._numbers.start]
        self._group.expect(self._group.rank - 1, kind, number, piece.into, self._come)


def _cut(flat: Tensor) -> Sequence[Tensor]:
    if not flat.numel():
        return ()
    return torch.split(flat.view(-1), max(PIECE_BYTES // flat.itemsize, 1))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, where they lie."""
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data
