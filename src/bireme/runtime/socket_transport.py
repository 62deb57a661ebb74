"""Messages between CPUs over TCP sockets, read and written by the rank's own thread.

A message of ordinary size lies in the kernel's buffers while it is under way, so it takes no thread to move
it: the sender writes and goes on, the receiver reads when it needs it. That saves the wake-ups that a
transport with threads costs, which is most of what a small message takes. Large messages, which the buffers
do not hold, go over a second socket with a thread at each end, so that they move while the rank computes.
"""

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.frame import FRAME_BYTES, framed, read_frame
from bireme.runtime.freight import Freight, Load
from bireme.runtime.peers import PeerLost
from bireme.runtime.transport import AbortedError, nothing_came, nothing_taken
from bireme.schedule.instruction import Message

__all__ = ["LARGE_BYTES", "Lines", "SocketPending", "SocketTransport"]

LARGE_BYTES = 256 * 1024
"""Messages of more bytes go over the second socket."""

LOOK_S = 0.2
"""How often a wait looks whether the transport was given up."""


class Lines:
    """The two sockets to one other rank."""

    __slots__ = ("large", "small")

    def __init__(self, small: socket.socket, large: socket.socket) -> None:
        self.small = small
        self.large = large


class SocketTransport:
    """The transport of one rank; `lines` lead to those it has borders with."""

    def __init__(self, lines: Mapping[int, Lines], *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._failure: Exception | None = None
        self._lines = {peer: _Line(peer, pair.small) for peer, pair in lines.items()}
        self._freight = {peer: Freight(peer, pair.large) for peer, pair in lines.items()}
        self._sockets = [one for pair in lines.values() for one in (pair.small, pair.large)]
        self._poller = select.poll()
        self._by_number = {line.socket.fileno(): line for line in self._lines.values()}
        self.on_arrival: Callable[[], None] | None = None
        """Called whenever this rank is about to sleep, so that it does for others what it can."""

    def send(self, key: Message, to: int, payload: Tensor) -> "SocketPending":
        """Begin to send."""
        self.check()
        data = payload.numpy().data
        if len(data) > LARGE_BYTES:
            return _FreightPending(self, to, payload, self._freight[to].send(key, data), is_send=True)
        line = self._lines[to]
        sent = _Sent(key, payload, framed(key, len(data)), data)
        line.queue.append(sent)
        with _Translated(line, self):
            line.write()
        return _SendPending(self, line, sent)

    def receive(self, key: Message, source: int, payload: Tensor) -> "SocketPending":
        """Begin to receive."""
        self.check()
        data = payload.numpy().data
        if len(data) > LARGE_BYTES:
            waiting = self._freight[source].receive(key, data)
            return _FreightPending(self, source, payload, waiting, is_send=False)
        line = self._lines[source]
        received = _Received(key, payload, data)
        line.post(received)
        return _ReceivePending(self, line, received)

    def close(self) -> None:
        """Close the sockets."""
        for freight in self._freight.values():
            freight.close()
        for one in self._sockets:
            one.close()

    def abort(self) -> None:
        """Give up: break all connections, which wakes whoever waits on them."""
        if self._failure is None:
            self._failure = AbortedError("This rank has given its transport up.")
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise why nothing moves any more, if that is so."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> Exception:
        """Nothing moves from now on, for this reason."""
        self._failure = error
        return error

    def move_until(self, line: "_Line", pending: "_SendPending | _ReceivePending") -> None:
        """Move bytes on all lines until that message has gone or come."""
        ends_s = 0.0
        while not pending.is_done():
            self.check()
            with _Translated(line, self):
                line.write()
                line.read()
            if pending.is_done():
                return
            now = time.monotonic()
            ends_s = ends_s or now + self.timeout_s
            if now > ends_s:
                raise self.fail(pending.too_late(self.timeout_s))
            self._poll(min(LOOK_S, ends_s - now))

    def _poll(self, seconds: float) -> None:
        """Sleep until some line can move, and move what can."""
        if self.on_arrival is not None:
            self.on_arrival()
        for number, line in self._by_number.items():
            events = line.awaited_events()
            if events != line.polled_events:
                line.polled_events = events
                self._poller.register(number, events)
        for number, _event in self._poller.poll(seconds * 1000):
            line = self._by_number[number]
            with _Translated(line, self):
                line.write()
                line.read()


class _Translated:
    """Turns a broken connection into the news that its rank is gone, or that this one gave up."""

    __slots__ = ("_line", "_transport")

    def __init__(self, line: "_Line", transport: SocketTransport) -> None:
        self._line = line
        self._transport = transport

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            self._transport.check()
            raise self._transport.fail(
                PeerLost(self._line.peer, str(error) or type(error).__name__)
            ) from error


class _Sent:
    """A message being written."""

    __slots__ = ("key", "parts", "payload")

    def __init__(self, key: Message, payload: Tensor, frame: bytes, data: memoryview) -> None:
        self.key = key
        self.payload = payload
        self.parts: list[memoryview] = [memoryview(frame), data]


class _Received:
    """A message being read."""

    __slots__ = ("data", "is_done", "key", "payload", "size_sent")

    def __init__(self, key: Message, payload: Tensor, data: memoryview) -> None:
        self.key = key
        self.payload = payload
        self.data = data
        self.is_done = False
        self.size_sent: int | None = None
        """Of the message that came, where that is not the size expected."""


class _Line:
    """The socket for ordinary messages to one rank, which never blocks."""

    def __init__(self, peer: int, small: socket.socket) -> None:
        self.peer = peer
        self.socket = small
        self.queue: list[_Sent] = []
        self._posted: dict[Message, _Received] = {}
        self._early: dict[Message, bytearray] = {}
        self._frame = bytearray(FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self._filled = 0
        self._body: memoryview | None = None
        self._body_filled = 0
        self._reading: tuple[Message, _Received | None] | None = None
        self.polled_events = -1

    def awaited_events(self) -> int:
        """What a wait must wake up for. Bytes that nobody expects yet may stay where they are."""
        reads = self._posted or self._body is not None or self._filled
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self.queue else 0)

    def post(self, received: _Received) -> None:
        """Expect a message; it may have come already."""
        early = self._early.pop(received.key, None)
        if early is not None:
            self._deliver(received, early)
        else:
            self._posted[received.key] = received

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
        """Read what has come, as far as it is expected."""
        while self._posted or self._body is not None or self._filled:
            if self._body is None and not self._read_frame():
                return
            if not self._read_body():
                return

    def _read_frame(self) -> bool:
        while self._filled < FRAME_BYTES:
            num_bytes = self._receive_into(self._frame_view[self._filled :])
            if num_bytes == 0:
                return False
            self._filled += num_bytes
        key, size = read_frame(self._frame)
        received = self._posted.pop(key, None)
        if received is not None and len(received.data) == size:
            self._body = received.data
        else:
            self._body = memoryview(bytearray(size))
        self._body_filled = 0
        self._reading = key, received
        return True

    def _read_body(self) -> bool:
        assert self._body is not None
        assert self._reading is not None
        while self._body_filled < len(self._body):
            num_bytes = self._receive_into(self._body[self._body_filled :])
            if num_bytes == 0:
                return False
            self._body_filled += num_bytes
        key, received = self._reading
        body, self._body, self._reading, self._filled = self._body, None, None, 0
        if received is None:
            self._early[key] = bytearray(body)
        elif body is received.data:
            received.is_done = True
        else:
            received.size_sent = len(body)
            received.is_done = True
        return True

    def _deliver(self, received: _Received, early: bytearray) -> None:
        if len(early) == len(received.data):
            received.data[:] = early
        else:
            received.size_sent = len(early)
        received.is_done = True

    def _receive_into(self, view: memoryview) -> int:
        """How many bytes came; zero where none are there yet."""
        try:
            num_bytes = self.socket.recv_into(view)
        except BlockingIOError:
            return 0
        if num_bytes == 0:
            raise ConnectionResetError("the connection was closed")
        return num_bytes


class _SendPending:
    """A send under way."""

    __slots__ = ("_line", "_sent", "_transport")

    def __init__(self, transport: SocketTransport, line: _Line, sent: _Sent) -> None:
        self._transport = transport
        self._line = line
        self._sent = sent

    def is_done(self) -> bool:
        """Whether the kernel has it all."""
        return not self._sent.parts

    def too_late(self, timeout_s: float) -> BiremeError:
        return nothing_taken(self._sent.key, self._line.peer, self._sent.payload, timeout_s)

    def wait(self) -> None:
        """Return when the kernel has it all."""
        if self._sent.parts:
            self._transport.move_until(self._line, self)


class _ReceivePending:
    """A receive under way."""

    __slots__ = ("_line", "_received", "_transport")

    def __init__(self, transport: SocketTransport, line: _Line, received: _Received) -> None:
        self._transport = transport
        self._line = line
        self._received = received

    def is_done(self) -> bool:
        """Whether the message is there."""
        return self._received.is_done

    def too_late(self, timeout_s: float) -> BiremeError:
        return nothing_came(self._received.key, self._line.peer, self._received.payload, timeout_s)

    def wait(self) -> None:
        """Return when the message is there."""
        if not self._received.is_done:
            self._transport.move_until(self._line, self)
        if self._received.size_sent is not None:
            raise _other_size(
                self._received.key, self._line.peer, len(self._received.data), self._received.size_sent
            )


class _FreightPending:
    """A large message under way, which a thread moves."""

    __slots__ = ("_is_send", "_load", "_payload", "_peer", "_transport")

    def __init__(
        self, transport: SocketTransport, peer: int, payload: Tensor, load: Load, *, is_send: bool
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._payload = payload
        self._load = load
        self._is_send = is_send

    def is_done(self) -> bool:
        """Whether it is there, or the kernel has all of it."""
        return self._load.is_done.is_set()

    def wait(self) -> None:
        """Return when it is there, or when the kernel has all of it."""
        load, transport = self._load, self._transport
        ends_s = time.monotonic() + transport.timeout_s
        while not load.is_done.wait(LOOK_S):
            transport.check()
            if time.monotonic() > ends_s:
                words = nothing_taken if self._is_send else nothing_came
                raise transport.fail(words(load.key, self._peer, self._payload, transport.timeout_s))
        transport.check()
        if load.error is not None:
            raise PeerLost(self._peer, str(load.error) or type(load.error).__name__) from load.error
        if load.size_sent is not None:
            raise _other_size(load.key, self._peer, len(load.data), load.size_sent)


SocketPending = _SendPending | _ReceivePending | _FreightPending


def _other_size(key: Message, source: int, expected: int, sent: int) -> BiremeError:
    return BiremeError(
        f"The {key} came from rank {source} with {sent} bytes, and {expected} were expected. The ranks were "
        "given batches of different shapes: give all ranks the same batches."
    )
