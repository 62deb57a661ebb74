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

STAGING_BYTES = 3 * LARGE_BYTES
"""Of what has come over the small socket and is not looked at yet. The longest message must fit."""

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
        self._move(line)
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
            self._move(line)
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
            self._move(self._by_number[number])

    def _move(self, line: "_Line") -> None:
        """Write what goes and read what has come; a broken connection means that its rank is gone, or that
        this one gave up.
        """
        try:
            if line.queue:
                line.write()
            line.read()
        except OSError as error:
            self.check()
            raise self.fail(PeerLost(line.peer, str(error) or type(error).__name__)) from error


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

    def take(self, body: bytes | memoryview) -> None:
        """The message has come."""
        if len(body) == len(self.data):
            self.data[:] = body
        else:
            self.size_sent = len(body)
        self.is_done = True


class _Line:
    """The socket for ordinary messages to one rank, which never blocks.

    What has come is read into `_staging`, whole messages and parts of one; from `_begin` to `_end` it is not
    looked at yet.
    """

    def __init__(self, peer: int, small: socket.socket) -> None:
        self.peer = peer
        self.socket = small
        self.queue: list[_Sent] = []
        self.polled_events = -1
        self._posted: dict[bytes, _Received] = {}
        """By their frames, so that an ordinary one need not be taken apart."""
        self._early: dict[Message, bytes] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0

    def awaited_events(self) -> int:
        """What a wait must wake up for. Bytes that nobody expects yet may stay where they are."""
        return (select.POLLIN if self._posted else 0) | (select.POLLOUT if self.queue else 0)

    def post(self, received: _Received) -> None:
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
                after = behind + (len(received.data) if received is not None else read_frame(frame)[1])
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

    def _deliver(self, frame: bytes, received: _Received | None, body: memoryview) -> None:
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
