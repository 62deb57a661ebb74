"""The socket between two ranks for messages of ordinary size, which never blocks."""

import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import NamedTuple, Protocol

from torch import Tensor

from bireme.errors import BiremeError
from bireme.schedule.instruction import Message
from bireme.sync.group import Pending

# How a message gets from one rank to another: the contract that every transport keeps, and its words.
#
# A message is one piece of memory, made by a `WireFormat`. Messages of different boundaries or directions
# never mix, even between the same two ranks: each pair (direction, stage) is a channel of its own. Within a
# channel messages are received in the order they were sent.


class Channel(NamedTuple):
    """One direction over one boundary."""

    forward: bool
    to_stage: int


class Transport(Protocol):
    """Point-to-point messages of one rank with the others of its pipeline.

    Ranks are places in the pipeline. `payload` is contiguous, of uint8, in the memory that the transport is
    for, and must stay alive, a sent one also unchanged, until `wait` of what is returned has returned. Stages
    that share a rank need no transport, and none sends to its own rank.

    A payload begins with the header that names its message. On the host a payload to receive into begins with
    the header expected. Where another message comes in its place, that one's header is there afterwards and
    the rest is undefined, so whoever takes a message apart must compare. Only if it is a shorter message, as
    its header says, all of it is there.
    """

    @property
    def is_host(self) -> bool:
        """Whether payloads lie in host memory, or else on the device."""

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send. To wait is to know that the payload may be used for something else.

        A message of `num_bytes`, as its header says, ends before the payload does. The receiver has room for
        the payload, and what comes after the end may be sent or not.
        """

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive into the payload, which must have the message's size. To wait is to have it."""

    def close(self) -> None:
        """Let go of the transport. Every send and receive has been waited for."""

    def abort(self) -> None:
        """Give up: whoever waits here, in any thread, or on a rank for this one, is told at once."""


def nothing_came(key: Message, source: int, payload: Tensor, waited_s: float) -> BiremeError:
    """The error of a receive for which nothing moved for too long."""
    return BiremeError(
        f"The {key} ({payload.numel()} bytes) did not arrive from rank {source} within {waited_s:g} s. That "
        "rank may have died or hang, or its batch has other shapes, so that its message has another "
        "size. See what it says; give all ranks the same batches; raise the timeout if a step can take that "
        "long."
    )


def nothing_taken(key: Message, to: int, payload: Tensor, waited_s: float) -> BiremeError:
    """The error of a send for which nothing moved for too long."""
    return BiremeError(
        f"Rank {to} did not take the {key} ({payload.numel()} bytes) within {waited_s:g} s. That rank may be "
        "gone, or stuck, or was given a batch of other shapes, so that it waits for a message of another "
        "size. See what it says; give all ranks the same batches; raise the timeout if a step can take that "
        "long."
    )


# The header that every message between ranks begins with: which message it is, and of what shape.
#
# It is the only thing that identifies a message, whatever it goes over: 64 bytes, which the sender writes and
# the receiver compares with what it expects.

_LAYOUT = Struct("<8sqiiiiQQ16x")
HEADER_BYTES = _LAYOUT.size
_MAGIC = b"BIREME\x00\x02"
"""With the version of this layout."""


class _Header(NamedTuple):
    """What a header says. `num_bytes` is the length of the message with its header."""

    key: Message
    num_bytes: int
    signature: int


def header_of(key: Message, num_bytes: int, signature: int) -> bytes:
    """The header of a message. `signature` tells apart what tensors it may hold."""
    return _LAYOUT.pack(
        _MAGIC,
        key.batch,
        -1 if key.microbatch is None else key.microbatch,
        -1 if key.half is None else key.half,
        key.to_stage,
        key.forward,
        num_bytes,
        signature,
    )


def read_header(header: bytes) -> _Header:
    """What a header says. Raises where it is none."""
    magic, batch, microbatch, half, to_stage, forward, num_bytes, signature = _LAYOUT.unpack(header)
    if magic != _MAGIC or num_bytes < HEADER_BYTES:
        raise BiremeError(
            "Received data is not a message of this version of Bireme: it begins with "
            f"{header[:8].hex(' ')}. Run the same version on all ranks."
        )
    key = Message(
        bool(forward), to_stage, batch, None if microbatch < 0 else microbatch, None if half < 0 else half
    )
    return _Header(key, num_bytes, signature)


LARGE_BYTES = 256 * 1024
"""Messages of more bytes go over the second socket, and of fewer where the kernel's buffers are small."""

NUM_UNDER_WAY = 4
"""Ordinary messages that the kernel should take at once, so that they move while their sender computes."""

BUFFER_BYTES = NUM_UNDER_WAY * LARGE_BYTES
"""What to ask the kernel for. A new connection would begin with a tenth of that and grow with its traffic."""

_STAGING_BYTES = 3 * LARGE_BYTES
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


def _posted_for(header: bytes, posted: dict[bytes, Transfer]) -> Transfer | None:
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
        self._staging = memoryview(bytearray(_STAGING_BYTES))
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
            found = _posted_for(header, self._posted)
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
        transfer = _posted_for(header, self._posted)
        if transfer is None:
            self._early[header] = bytes(body)
        else:
            transfer.take(header, body)

    def _stage_more(self) -> bool:
        """Read more after what is staged; return whether there was any."""
        if _STAGING_BYTES - self._begin < LARGE_BYTES or self._begin == self._end:
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


# Large messages to and from one other rank, moved by a thread for each direction while the rank computes.

_CHUNK_BYTES = 1 << 20
"""What is written at once. A link that moves less than this within the timeout counts as stuck."""


class LargeMessages:
    """Both directions of one socket, which blocks. The threads start with the first message that needs
    them, and `ring` whenever one is done with.
    """

    def __init__(self, peer: int, line: socket.socket, ring: Callable[[], None]) -> None:
        self.peer = peer
        self.sent_s = self.came_s = 0.0
        """When bytes last moved in each direction."""
        self._line = line
        self._ring = ring
        self._outgoing: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._posted: dict[bytes, Transfer] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False
        self._has_writer = self._has_reader = False

    def send(self, transfer: Transfer) -> None:
        """Begin to send."""
        if not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name=f"bireme to {self.peer}", daemon=True).start()
        self._outgoing.put(transfer)

    def post(self, transfer: Transfer) -> None:
        """Expect a message."""
        with self._changed:
            if self._error is not None:
                transfer.error, transfer.is_done = self._error, True
                return
            self._posted[bytes(transfer.data[:HEADER_BYTES])] = transfer
            self._changed.notify()
        if not self._has_reader:
            self._has_reader = True
            threading.Thread(target=self._read, name=f"bireme from {self.peer}", daemon=True).start()

    def move(self) -> None:
        """Its threads do that."""

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._outgoing.put(None)
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (transfer := self._outgoing.get()) is not None:
            if self._error is not None:
                transfer.error = self._error
                self._end(transfer)
                continue
            try:
                while transfer.rest:
                    transfer.rest = transfer.rest[self._line.send(transfer.rest[:_CHUNK_BYTES]) :]
                    self.sent_s = time.monotonic()
            except OSError as error:
                self._error = transfer.error = error
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.is_done = True
        self._ring()

    def _read(self) -> None:
        transfer: Transfer | None = None
        try:
            while True:
                header = bytearray(HEADER_BYTES)
                self._fill(memoryview(header))
                transfer = self._expected(bytes(header))
                if transfer is None:
                    return
                if header == transfer.data[:HEADER_BYTES]:
                    self._fill(transfer.data[HEADER_BYTES:])
                else:
                    num_bytes = read_header(bytes(header)).num_bytes
                    if num_bytes <= len(transfer.data):
                        self._fill(transfer.data[HEADER_BYTES:num_bytes])
                    else:
                        self._skip(num_bytes - HEADER_BYTES)
                    transfer.data[:HEADER_BYTES] = header
                self._end(transfer)
                transfer = None
        except (OSError, BiremeError) as error:
            with self._changed:
                self._error = error
                left, self._posted = list(self._posted.values()), {}
            for one in left if transfer is None else [transfer, *left]:
                one.error = error
                self._end(one)

    def _expected(self, header: bytes) -> Transfer | None:
        """The receive for a message that has come; waits until it is posted."""
        with self._changed:
            while not self._is_closed:
                transfer = _posted_for(header, self._posted)
                if transfer is not None:
                    return transfer
                self._changed.wait()
            return None

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            num_bytes = self._line.recv_into(view[filled:])
            if num_bytes == 0:
                raise ConnectionResetError("the connection was closed")
            self.came_s = time.monotonic()
            filled += num_bytes

    def _skip(self, num_bytes: int) -> None:
        """Read that many bytes, which nobody wants."""
        scratch = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
        while num_bytes:
            part = scratch[:num_bytes]
            self._fill(part)
            num_bytes -= len(part)
