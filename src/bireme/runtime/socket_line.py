"""The socket between two ranks for messages of ordinary size, which never blocks."""

import select
import socket

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.frame import FRAME_BYTES, framed, read_frame
from bireme.schedule.instruction import Message

__all__ = ["LARGE_BYTES", "Line", "Received", "Sent"]

LARGE_BYTES = 256 * 1024
"""Messages of more bytes go over the second socket."""

STAGING_BYTES = 3 * LARGE_BYTES
"""Of what has come over the small socket and is not looked at yet. The longest message must fit."""


class Sent:
    """A message being written."""

    __slots__ = ("key", "parts", "payload")

    def __init__(self, key: Message, payload: Tensor, data: memoryview) -> None:
        self.key = key
        self.payload = payload
        self.parts: list[memoryview] = [memoryview(framed(key, len(data))), data]


class Received:
    """A message being read."""

    __slots__ = ("data", "is_done", "key", "payload", "size_sent")

    def __init__(self, key: Message, payload: Tensor, data: memoryview) -> None:
        self.key = key
        self.payload = payload
        self.data = data
        self.is_done = False
        self.size_sent: int | None = None
        """Of the message that came, where that is not the size expected."""

    def take(self, body: bytes | memoryview) -> None:
        """The message has come."""
        if len(body) == len(self.data):
            self.data[:] = body
        else:
            self.size_sent = len(body)
        self.is_done = True


class Line:
    """The socket for ordinary messages to one rank, which never blocks.

    What has come is read into `_staging`, whole messages and parts of one; from `_begin` to `_end` it is not
    looked at yet.
    """

    def __init__(self, peer: int, small: socket.socket) -> None:
        self.peer = peer
        self.socket = small
        self.queue: list[Sent] = []
        self.polled_events = 0
        self._posted: dict[bytes, Received] = {}
        """By their frames, so that an ordinary one need not be taken apart."""
        self._early: dict[Message, bytes] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0

    @property
    def has_staged(self) -> bool:
        """Whether bytes have been read that nobody has looked at."""
        return self._begin != self._end

    def awaited_events(self) -> int:
        """What a wait must wake up for. Bytes that nobody expects yet may stay where they are."""
        return (select.POLLIN if self._posted else 0) | (select.POLLOUT if self.queue else 0)

    def post(self, received: Received) -> None:
        """Expect a message; it may have come already."""
        early = self._early.pop(received.key, None) if self._early else None
        if early is not None:
            received.take(early)
        else:
            self._posted[framed(received.key, len(received.data))] = received

    def write(self) -> None:
        """Write what the kernel takes of what waits."""
        while self.queue:
            parts = self.queue[0].parts
            try:
                num_bytes = self.socket.sendmsg(parts)
            except BlockingIOError:
                return
            while parts and num_bytes >= len(parts[0]):
                num_bytes -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][num_bytes:]
                return
            self.queue.pop(0)

    def read(self) -> None:
        """Read what has come, as long as anything is expected."""
        while self._posted:
            behind = self._begin + FRAME_BYTES
            if behind <= self._end:
                frame = bytes(self._staging[self._begin : behind])
                received = self._posted.get(frame)
                after = behind + (len(received.data) if received is not None else _ordinary_size(frame))
                if after <= self._end:
                    self._begin = after
                    self._deliver(frame, received, self._staging[behind:after])
                    continue
            if not self._stage_more():
                return

    def _stage_more(self) -> bool:
        """Read more behind what is staged; whether there was any."""
        if STAGING_BYTES - self._begin < FRAME_BYTES + LARGE_BYTES or self._begin == self._end:
            rest = self._end - self._begin
            self._staging[:rest] = self._staging[self._begin : self._end]
            self._begin, self._end = 0, rest
        try:
            num_bytes = self.socket.recv_into(self._staging[self._end :])
        except BlockingIOError:
            return False
        if num_bytes == 0:
            raise ConnectionResetError("the connection was closed")
        self._end += num_bytes
        return True

    def _deliver(self, frame: bytes, received: Received | None, body: memoryview) -> None:
        if received is not None:
            del self._posted[frame]
            received.take(body)
            return
        key, _ = read_frame(frame)
        for posted, other in self._posted.items():
            if other.key == key:  # it was expected in another size
                del self._posted[posted]
                other.take(body)
                return
        self._early[key] = bytes(body)


def _ordinary_size(frame: bytes) -> int:
    """The size of a message on the socket for small ones."""
    key, size = read_frame(frame)
    if not 0 <= size <= LARGE_BYTES:
        raise BiremeError(
            f"What came is no message of this version of Bireme: it would be {key} with {size} bytes. Run "
            "the same version on all ranks."
        )
    return size
