"""A socket between two ranks of the same stage in different replicas, and the frames that go over it.

Every frame begins with a tag: the stamp of what it belongs to (epoch, batch, attempt), its kind and its
piece. A frame of an older stamp is read and dropped. One that nobody expects yet stays in the socket. So a
rank that was interrupted in the middle of an attempt begins the next one on the same lines.
"""

import select
import socket
from struct import Struct
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.wire.connection import (
    HEADER_BYTES,
    SKIP,
    Connection,
    FrameKind,
    Skip,
    frame_header,
    read_frame_header,
)

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
    """The line to one member. It belongs to one thread, and never blocks."""

    def __init__(self, member: int, made: socket.socket) -> None:
        self.member = member
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
        outgoing = self._connection.outgoing
        while outgoing and not outgoing[-1].is_begun:
            outgoing.pop()
        for frame in outgoing:
            frame.rest = [memoryview(bytes(view)) for view in frame.rest]
        self._current = None
        self._connection.skip_body()

    def send(self, tag: Tag, payload: memoryview) -> None:
        """Send a frame. The payload must stay as it is until the frame has gone, or until `begin`."""
        (epoch, batch, attempt), kind, piece = tag
        packed = _TAG.pack(epoch, batch, attempt, kind, piece)
        header = frame_header(FrameKind.EXCHANGE, payload.nbytes, packed)
        self._connection.send(memoryview(header), payload.cast("B"))

    def expect(self, tag: Tag, into: memoryview) -> None:
        """Have a frame written there; its size must be just that."""
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

    def move(self) -> list[Tag]:
        """Write what goes and read what has come; gives the expected frames that are there now.

        Raises `LineBroken` if the other end is gone.
        """
        arrived: list[Tag] = []
        self.move_out()
        try:
            while self.expects and not self._is_held:
                if self._connection.next_frame(self._place) is None:
                    break
                if self._current is not None:
                    arrived.append(self._current)
                    self._current = None
        except (OSError, BiremeError) as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error
        return arrived

    def move_out(self) -> None:
        """Write what goes."""
        try:
            self._connection.write()
        except OSError as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _place(self, header: bytes) -> memoryview | Skip | None:
        """Where a frame goes: to its place, away if it is of an older stamp, nowhere until it is expected."""
        _, num_bytes, packed = read_frame_header(header, FrameKind.EXCHANGE)
        epoch, batch, attempt, kind, piece = _TAG.unpack_from(packed)
        tag = Tag(Stamp(epoch, batch, attempt), kind, piece)
        into = self._expected.pop(tag, None)
        if into is None:
            self._is_held = tag.stamp >= self._stamp
            return None if self._is_held else SKIP
        if len(into) != num_bytes - HEADER_BYTES:
            came = f"{num_bytes - HEADER_BYTES} bytes came instead of the {len(into)} expected"
            raise LineBroken(self.member, came)
        self._current = tag
        return into
