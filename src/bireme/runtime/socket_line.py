"""The socket between two ranks for messages of ordinary size, which never blocks."""

import select
import socket
import time

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.header import HEADER_BYTES, read_header
from bireme.schedule.instruction import Message

__all__ = [
    "BUFFER_BYTES",
    "LARGE_BYTES",
    "NUM_UNDER_WAY",
    "SocketLine",
    "Transfer",
    "ordinary_bytes",
    "posted_for",
]

LARGE_BYTES = 256 * 1024
"""Messages of more bytes go over the second socket, and of fewer where the kernel's buffers are small."""

NUM_UNDER_WAY = 4
"""Ordinary messages that the kernel should take at once, so that they move while their sender computes."""

BUFFER_BYTES = NUM_UNDER_WAY * LARGE_BYTES
"""What to ask the kernel for. A new connection would begin with a tenth of that and grow with its traffic."""

STAGING_BYTES = 3 * LARGE_BYTES
"""Of what has come over the small socket and is not looked at yet. The longest message must fit."""


def ordinary_bytes() -> int:
    """The longest message that this machine's kernel lets go over the small socket."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        granted = probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(granted // NUM_UNDER_WAY, LARGE_BYTES)


class Transfer:
    """One message to send or to receive, which begins with the header that is sent or expected.

    A receive is done as well when another message comes in its place; then the header is that one's. What
    follows is its too where there is room for it: the message may be the one expected, and only shorter.
    """

    __slots__ = ("data", "error", "is_done", "is_send", "key", "payload", "rest")

    def __init__(self, key: Message, payload: Tensor, *, is_send: bool) -> None:
        self.key = key
        self.payload = payload
        self.data: memoryview = payload.numpy().data
        self.rest = self.data
        """What the kernel has not taken yet of a message to send."""
        self.is_send = is_send
        self.is_done = False
        self.error: Exception | None = None

    def take(self, header: bytes, body: bytes | memoryview) -> None:
        """A message has come."""
        if header == self.data[:HEADER_BYTES]:
            self.data[HEADER_BYTES:] = body
        else:
            self.data[:HEADER_BYTES] = header
            end = HEADER_BYTES + len(body)
            if end <= len(self.data):
                self.data[HEADER_BYTES:end] = body
        self.is_done = True


def posted_for(header: bytes, posted: dict[bytes, Transfer]) -> Transfer | None:
    """The receive that a message belongs to, which is taken out of those posted; None if there is none yet.

    A message that comes first on its channel where another one is expected belongs to that one's receive.
    """
    transfer = posted.pop(header, None)
    if transfer is None and posted:
        come = read_header(header).key
        for expected, other in posted.items():
            if other.key.forward == come.forward and other.key.to_stage == come.to_stage:
                return posted.pop(expected)
    return transfer


class SocketLine:
    """The socket for ordinary messages to one rank, which never blocks.

    What has come is read into `_staging`, whole messages and parts of one; from `_begin` to `_end` it is not
    looked at yet.
    """

    def __init__(self, peer: int, small: socket.socket) -> None:
        self.peer = peer
        self.socket = small
        self.queue: list[Transfer] = []
        self.polled_events = 0
        self.sent_s = self.came_s = 0.0
        """When bytes last moved in each direction."""
        self._posted: dict[bytes, Transfer] = {}
        """By the headers expected, so that an ordinary one need not be taken apart."""
        self._early: dict[bytes, bytes] = {}
        """What came before it was expected, by its header."""
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0

    @property
    def has_staged(self) -> bool:
        """Whether bytes have been read that nobody has looked at."""
        return self._begin != self._end

    def awaited_events(self) -> int:
        """What a wait must wake up for. Bytes that nobody expects yet may stay where they are."""
        return (select.POLLIN if self._posted else 0) | (select.POLLOUT if self.queue else 0)

    def post(self, transfer: Transfer) -> None:
        """Expect a message; it may have come already."""
        self._posted[bytes(transfer.data[:HEADER_BYTES])] = transfer
        for header, body in self._early.items():
            found = posted_for(header, self._posted)
            if found is not None:
                del self._early[header]
                found.take(header, body)
                return

    def move(self) -> None:
        """Write what goes, and read what has come."""
        if self.queue:
            self._write()
        self._read()

    def _write(self) -> None:
        """Write what the kernel takes of what waits."""
        while self.queue:
            transfer = self.queue[0]
            try:
                num_bytes = self.socket.send(transfer.rest)
            except BlockingIOError:
                return
            self.sent_s = time.monotonic()
            if num_bytes < len(transfer.rest):
                transfer.rest = transfer.rest[num_bytes:]
                return
            transfer.is_done = True
            self.queue.pop(0)

    def _read(self) -> None:
        """Read what has come, as long as anything is expected."""
        while self._posted:
            body = self._begin + HEADER_BYTES
            if body <= self._end:
                header = bytes(self._staging[self._begin : body])
                expected = self._posted.get(header)
                size = _ordinary_size(header) if expected is None else len(expected.data)
                after = self._begin + size
                if after <= self._end:
                    self._begin = after
                    if expected is not None:
                        del self._posted[header]
                        expected.data[HEADER_BYTES:] = self._staging[body:after]
                        expected.is_done = True
                    else:
                        self._take_unexpected(header, self._staging[body:after])
                    continue
            if not self._stage_more():
                return

    def _take_unexpected(self, header: bytes, body: memoryview) -> None:
        transfer = posted_for(header, self._posted)
        if transfer is None:
            self._early[header] = bytes(body)
        else:
            transfer.take(header, body)

    def _stage_more(self) -> bool:
        """Read more after what is staged; return whether there was any."""
        if STAGING_BYTES - self._begin < LARGE_BYTES or self._begin == self._end:
            rest = self._end - self._begin
            self._staging[:rest] = self._staging[self._begin : self._end]
            self._begin, self._end = 0, rest
        try:
            num_bytes = self.socket.recv_into(self._staging[self._end :])
        except BlockingIOError:
            return False
        if num_bytes == 0:
            raise ConnectionResetError("the connection was closed")
        self.came_s = time.monotonic()
        self._end += num_bytes
        return True


def _ordinary_size(header: bytes) -> int:
    """The size of a message on the socket for small ones."""
    size = read_header(header).num_bytes
    if size > LARGE_BYTES:
        raise BiremeError(
            f"Received data is not a message of this version of Bireme: {size} bytes long. Run the same "
            "version on all ranks."
        )
    return size
