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
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from bireme.devices import on_host, room_on_host
from bireme.errors import BiremeError
from bireme.sync.group import Waiting, add_in_order
from bireme.wire.connection import (
    HEADER_BYTES,
    SKIP,
    Bell,
    Connection,
    FrameKind,
    Skip,
    frame_header,
    read_frame_header,
)

# A socket between two ranks of the same stage in different replicas, and the frames that go over it.
#
# Every frame begins with a tag: the stamp of what it belongs to (epoch, batch, attempt), its kind and its
# piece. A frame of an older stamp is read and dropped. One that nobody expects yet stays in the socket. So a
# rank that was interrupted in the middle of an attempt begins the next one on the same lines.


_TAG = Struct("<qqiBI")


class LineBroken(Exception):  # noqa: N818 (it is an event, which others act on)
    """The connection to a member broke: its process has ended, or has given up."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(member, reason)
        self.member = member
        self.reason = reason

    def __str__(self) -> str:
        return f"The line to replica {self.member} broke: {self.reason}"


class Stamp(NamedTuple):
    """Which attempt to sum up which batch, in which epoch of the membership. A later one is greater."""

    epoch: int
    batch: int
    attempt: int


class Tag(NamedTuple):
    """Which frame."""

    stamp: Stamp
    kind: int
    piece: int


class PeerLine:
    """The line to one member. It belongs to one thread, and never blocks. If it `reads_early` what nobody
    expects yet does not hold up what comes behind it.
    """

    def __init__(self, member: int, made: socket.socket, *, reads_early: bool = False) -> None:
        self.member = member
        self._early: dict[Tag, bytearray] | None = {} if reads_early else None
        """What has come before it was expected."""
        self._reads: tuple[Tag, bytearray] | None = None
        """What is being read so."""
        self._came: list[Tag] = []
        """Of what is expected, what had come before."""
        self.socket = made
        # Nothing is read ahead: a frame that waits stays in the socket, which wakes up who waits for it.
        self._connection = Connection(made, ahead_bytes=HEADER_BYTES)
        self._expected: dict[Tag, memoryview] = {}
        self._stamp = Stamp(-1, -1, -1)
        self._is_held = False
        """Whether the next frame belongs to something that has not begun here."""
        self._current: Tag | None = None
        """Of the expected frame that is being read."""

    def begin(self, stamp: Stamp) -> None:
        """Let go of all that belongs to older stamps. Memory that was given for them is free afterwards."""
        self._stamp = stamp
        self._is_held = False
        self._expected.clear()
        self._came.clear()
        if self._early is not None:
            self._early = {tag: body for tag, body in self._early.items() if tag.stamp >= stamp}
        outgoing = self._connection.outgoing
        while outgoing and not outgoing[-1].is_begun:
            outgoing.pop()
        for frame in outgoing:
            frame.rest = [memoryview(bytes(view)) for view in frame.rest]
        self._current = None
        if self._reads is None or self._reads[0].stamp < stamp:
            self._reads = None
            self._connection.skip_body()

    def send(self, tag: Tag, payload: memoryview) -> None:
        """Send a frame. The payload must stay as it is until the frame has gone, or until `begin`."""
        (epoch, batch, attempt), kind, piece = tag
        packed = _TAG.pack(epoch, batch, attempt, kind, piece)
        header = frame_header(FrameKind.EXCHANGE, payload.nbytes, packed)
        self._connection.send(memoryview(header), payload.cast("B"))

    def expect(self, tag: Tag, into: memoryview) -> None:
        """Have a frame written there; its size must be just that."""
        early = self._early.pop(tag, None) if self._early else None
        if early is not None:
            self._fit(len(early), into)[:] = early
            self._came.append(tag)
            return
        self._expected[tag] = into.cast("B")
        self._is_held = False

    @property
    def moved_s(self) -> float:
        """When bytes last moved."""
        return self._connection.moved_s

    @property
    def has_sent(self) -> bool:
        """Whether the kernel has taken all that was to be sent."""
        return not self._connection.outgoing

    @property
    def expects(self) -> bool:
        """Whether a frame is to come, or the rest of one."""
        return bool(self._expected) or self._connection.is_reading

    @property
    def events(self) -> int:
        """The events that a wait must wake up for."""
        reads = self.expects and not self._is_held
        return (select.POLLIN if reads else 0) | (0 if self.has_sent else select.POLLOUT)

    @property
    def is_ready(self) -> bool:
        """Whether an expected frame may have come that `poll` does not find."""
        return bool(self._came) or (self._connection.is_ready and bool(self.events & select.POLLIN))

    def move(self) -> list[Tag]:
        """Write what goes and read what has come; gives the expected frames that are there now.

        Raises `LineBroken` if the other end is gone.
        """
        arrived, self._came = self._came, []
        self.move_out()
        try:
            while self.expects and not self._is_held:
                if self._connection.next_frame(self._place) is None:
                    break
                if self._current is not None:
                    arrived.append(self._current)
                    self._current = None
                elif self._reads is not None and self._early is not None:
                    (tag, body), self._reads = self._reads, None
                    self._early[tag] = body
                    if (into := self._expected.pop(tag, None)) is not None:  # meanwhile
                        self.expect(tag, into)
                        arrived.append(self._came.pop())
        except (OSError, BiremeError) as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error
        return arrived

    def move_out(self) -> None:
        """Write what goes."""
        try:
            self._connection.write()
        except OSError as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error

    def _place(self, header: bytes) -> memoryview | Skip | None:
        """Where a frame goes: to its place, away if it is of an older stamp, nowhere until it is expected."""
        _, num_bytes, packed = read_frame_header(header, FrameKind.EXCHANGE)
        epoch, batch, attempt, kind, piece = _TAG.unpack_from(packed)
        tag = Tag(Stamp(epoch, batch, attempt), kind, piece)
        into = self._expected.pop(tag, None)
        num_bytes -= HEADER_BYTES
        if into is not None:
            self._current = tag
            return self._fit(num_bytes, into)
        if tag.stamp < self._stamp:
            return SKIP
        if self._early is None:
            self._is_held = True
            return None
        self._reads = tag, bytearray(num_bytes)
        return memoryview(self._reads[1])

    def _fit(self, num_bytes: int, into: memoryview) -> memoryview:
        """The memory, if it is for so many bytes."""
        if len(into) != num_bytes:
            raise LineBroken(self.member, f"{num_bytes} bytes came instead of the {len(into)} expected")
        return into


PIECE_BYTES = 512 * 1024
_WHOLE_BYTES, _FEW_BYTES = 64 * 1024, 4096
"""The most that a member sends whole to several others together, and what it sends to however many: parts are
fewer bytes, but two messages.
"""
LOOK_S = 0.05
"""How often a wait looks whether the attempt is still wanted."""

_WHOLE, _PART, _TOTAL, _MESSAGE = 1, 2, 3, 4


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
            self._look_for_silence(began_s)
            self.go_a_step(on_frame)

    def go_a_step(self, on_frame: Callable[[int, Tag], None], bell: Bell | None = None) -> None:
        """Wait a while until something can move, or the bell rings, and move it."""
        self._check()
        poller = select.poll()
        for number, line in self._by_number.items():
            if events := line.events:
                poller.register(number, events)
        if bell is not None:
            poller.register(bell, select.POLLIN)
        ready = {number for number, line in self._by_number.items() if line.is_ready}
        found = poller.poll(0 if ready else LOOK_S * 1000)
        for number in ready.union(number for number, _ in found):
            if number in self._by_number:
                self._move(self._by_number[number], on_frame)
            elif bell is not None:
                bell.hush()

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
    `LineBroken` if a member is gone, or if nothing moves for the timeout. With `in_parts` large sums are made
    part by part at the members that own the parts, instead of in a ring.
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
        in_parts: bool = False,
    ) -> None:
        self.members, self._in_parts = tuple(members), in_parts
        self.rank, self.size = self.members.index(me), len(self.members)
        self.others = [place for place in range(self.size) if place != self.rank]
        lines = {member: line_to(member) for member in self.members if member != me}
        for line in lines.values():
            line.begin(stamp)
        self._stamp, self._traffic = stamp, _Traffic(lines, timeout_s, check)
        self._num_pieces = 0
        self._num_messages: Counter[tuple[int, int]] = Counter()
        """Which members have sent to one another, by their places, and how many messages."""
        self._arrives: dict[tuple[int, Tag], Callable[[Tag], None]] = {}
        """What a frame of a member leads to."""
        self._held: list[object] = []
        """Frames may still be on their way from these tensors."""

    def all_reduce(self, tensor: Tensor) -> Waiting:
        """Begin to replace the tensor, in place, by its sum over the group; the same bits on every member. A
        few numbers take one message to each member, and go on without a member that waits for others.
        """
        here, room = on_host(tensor), dict[int, Tensor]()
        flat = here.view(-1)
        if self.size == 2 or flat.nbytes <= max(_FEW_BYTES, _WHOLE_BYTES // max(self.size - 1, 1)):
            room = {place: torch.empty_like(flat) for place in self.others}
            begun = self.swap(dict.fromkeys(self.others, flat), room)
        elif self._in_parts:
            begun = self._add_up_parts(torch.tensor_split(flat, self.size))
        else:
            begun = self.add_up([flat.clone()], [flat])
        under_way = [begun]

        def wait() -> None:
            while under_way:  # only once
                under_way.pop().wait()
                if room:
                    add_in_order(flat, self.rank, [*room.values()])
                if here is not tensor:
                    tensor.copy_(here)

        return Waiting(wait, begun.is_done)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Waiting:
        """Begin to fill `into` with the members' tensors, which are all alike, in the members' order."""
        into[self.rank].copy_(tensor)
        own = on_host(tensor)
        return self.swap(dict.fromkeys(self.others, own), {place: into[place] for place in self.others})

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part of `given`, and to fill `taken` with what all send here."""
        parts, places = torch.split(on_host(given), [*lengths]), torch.split(taken, [*taken_lengths])
        places[self.rank].copy_(parts[self.rank])
        return self.swap(
            {place: parts[place] for place in self.others}, {place: places[place] for place in self.others}
        )

    def copy_from(self, tensor: Tensor, source: int) -> Waiting:
        """Begin to fill the tensor, which is flat, with that of the member `source`."""
        if source != self.rank:
            return self.swap({}, {source: tensor})
        return self.swap(dict.fromkeys(self.others, on_host(tensor)), {})

    def add_up(
        self,
        own: Sequence[Tensor],
        into: Sequence[Tensor],
        factor: float = 1.0,
        firsts: Sequence[int | None] = (),
    ) -> Waiting:
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
            return Waiting()
        ring = _Ring(self, pieces, factor, self._numbers(len(pieces)))
        ring.begin()
        return Waiting(partial(self.finish, ring.missing))

    def post(self, to: int, tag: Tag, what: Tensor) -> None:
        """Send a frame to the member at that place. The tensor must stay as it is."""
        self._held.append(what)
        self._traffic.lines[self.members[to]].send(tag, bytes_of(what))

    def expect(self, source: int, tag: Tag, into: Tensor, then: Callable[[Tag], None]) -> None:
        """Have a frame of the member at that place written there; `then` is called when it has come."""
        member = self.members[source]
        self._arrives[member, tag] = then
        self._traffic.lines[member].expect(tag, bytes_of(into))

    def finish(self, missing: set[int]) -> None:
        """Return when nothing is missing, and all that others need is sent."""
        self._traffic.go(lambda: not missing, self._come)
        self._held.clear()

    def go_on(self, bell: Bell) -> None:
        """Move what has begun until the bell rings, or for a while."""
        self._traffic.go_a_step(self._come, bell)

    def _come(self, member: int, tag: Tag) -> None:
        self._arrives.pop((member, tag))(tag)

    def swap(self, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]) -> Waiting:
        """Begin to send tensors on the host to the members at some places, and to fill others with what some
        send. As much goes at once as the kernel takes. A tensor without elements is not sent.
        """
        missing, here = set[int](), {place: room_on_host(into) for place, into in taken.items()}
        self._move(given, here, self.tag(_WHOLE, self._numbers(1).start), missing)
        apart = [(here[place], into) for place, into in taken.items() if here[place] is not into]

        def wait() -> None:
            self.finish(missing)
            while apart:  # only once
                came, into = apart.pop()
                into.copy_(came)

        return Waiting(wait, lambda: not missing)

    def _add_up_parts(self, parts: Sequence[Tensor]) -> Waiting:
        """Begin to replace parts by their sums over the group, added in the members' order: each member
        adds up the part at its place, and sends the sum to all others.
        """
        own, missing, numbers = parts[self.rank], set[int](), self._numbers(2)
        others = {place: parts[place] for place in self.others}
        room = {place: torch.empty_like(own) for place in self.others}

        def add_up() -> None:
            add_in_order(own, self.rank, [*room.values()])
            self._move(dict.fromkeys(others, own), others, self.tag(_WHOLE, numbers[1]), missing)

        self._move(others, room, self.tag(_WHOLE, numbers[0]), missing, add_up)
        return Waiting(partial(self.finish, missing), lambda: not missing)

    def message(self, tensor: Tensor, source: int, target: int) -> Waiting:
        """Begin to send a tensor to the member at a place, or to fill one with what another sends; those of
        two members come in their order, and no other member takes part.
        """
        self._num_messages[source, target] += 1
        tag = self.tag(_MESSAGE, self._num_messages[source, target])
        is_sent, missing = source == self.rank, set[int]()
        self._move({target: tensor} if is_sent else {}, {} if is_sent else {source: tensor}, tag, missing)
        return Waiting(partial(self.finish, missing), lambda: not missing)

    def _move(
        self,
        given: Mapping[int, Tensor],
        taken: Mapping[int, Tensor],
        tag: Tag,
        missing: set[int],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to send and to expect tensors by the places of members, which are `missing` until theirs have
        come; call `then` when all have.
        """
        missing.update(place for place, into in taken.items() if into.numel())
        for place, what in given.items():
            if what.numel():
                self.post(place, tag, what.contiguous())
                self._traffic.lines[self.members[place]].move_out()

        def come(place: int) -> None:
            missing.discard(place)
            if not missing:
                then()

        for place in tuple(missing):
            self.expect(place, tag, taken[place], lambda _tag, place=place: come(place))  # type: ignore[misc]
        if not missing:
            then()

    def tag(self, kind: int, piece: int) -> Tag:
        """That of a frame of this attempt."""
        return Tag(self._stamp, kind, piece)

    def _numbers(self, num: int) -> range:
        """So many numbers for pieces, the next ones."""
        self._num_pieces += num
        return range(self._num_pieces - num, self._num_pieces)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a flat: what is read, and where its sum goes, which begins at the `first` member."""

    own: Tensor
    into: Tensor
    first: int = 0

    def scaled(self, factor: float) -> Tensor:
        """This member's part as it counts in the sum."""
        return self.own if factor == 1.0 else self.own * factor


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
        group = self._group
        group.post((group.rank + 1) % group.size, group.tag(kind, number), what)

    def _expect(self, kind: int, number: int) -> None:
        piece = self._pieces[number - self._numbers.start]
        group = self._group
        group.expect(group.rank - 1, group.tag(kind, number), piece.into, self._come)


def _cut(flat: Tensor) -> Sequence[Tensor]:
    if not flat.numel():
        return ()
    return torch.split(flat.view(-1), max(PIECE_BYTES // flat.itemsize, 1))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, where they lie."""
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data
