"""Messages between CPUs over TCP sockets, read and written by the rank's own thread.

A message of ordinary size lies in the kernel's buffers while it is under way, so it takes no thread to move
it: the sender writes and goes on, the receiver reads when it needs it. That saves the wake-ups that a
transport with threads costs, which is most of what a small message takes. What the buffers have no room for
goes on whenever the rank waits for anything. Large messages, which they do not hold, go over a second socket
with a thread at each end, so that they move while the rank computes.
"""

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.freight import Freight, Load
from bireme.runtime.peers import PeerLost
from bireme.runtime.socket_line import LARGE_BYTES, Line, Received, Sent
from bireme.runtime.transport import AbortedError, nothing_came, nothing_taken
from bireme.schedule.instruction import Message

__all__ = ["Lines", "SocketPending", "SocketTransport"]

RINGS = 4096

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
        self._lines = {peer: Line(peer, pair.small) for peer, pair in lines.items()}
        self._bell, self._rung = socket.socketpair()
        for one in (self._bell, self._rung):
            one.setblocking(False)
        self._freight = {peer: Freight(peer, pair.large, self._ring) for peer, pair in lines.items()}
        self._sockets = [one for pair in lines.values() for one in (pair.small, pair.large)]
        self._poller = select.poll()
        self._poller.register(self._rung, select.POLLIN)
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
        sent = Sent(key, payload, data)
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
        received = Received(key, payload, data)
        line.post(received)
        if line.has_staged:
            self._move(line)
        return _ReceivePending(self, line, received)

    def close(self) -> None:
        """Close the sockets."""
        for freight in self._freight.values():
            freight.close()
        for one in (*self._sockets, self._bell, self._rung):
            one.close()
        self._sockets.clear()
        self.on_arrival = None  # whose owner has this transport in turn

    def abort(self) -> None:
        """Give up: break all connections, which wakes whoever waits on them."""
        if self._failure is None:
            self._failure = AbortedError("This rank has given its transport up.")
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._ring()

    def check(self) -> None:
        """Raise why nothing moves any more, if that is so."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> Exception:
        """Nothing moves from now on, for this reason."""
        self._failure = error
        return error

    def move_until(self, line: "Line", pending: "_SendPending | _ReceivePending") -> None:
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
            self.poll(min(LOOK_S, ends_s - now))

    def poll(self, seconds: float) -> None:
        """Sleep until some line can move or a large message is done with, and move what can."""
        if self.on_arrival is not None:
            self.on_arrival()
        for number, line in self._by_number.items():
            events = line.awaited_events()
            if events != line.polled_events:
                if events:
                    self._poller.register(number, events)
                else:
                    self._poller.unregister(number)
                line.polled_events = events
        for number, _event in self._poller.poll(seconds * 1000):
            line_or_bell = self._by_number.get(number)
            if line_or_bell is not None:
                self._move(line_or_bell)
            else:
                with suppress(BlockingIOError):
                    self._rung.recv(RINGS)

    def _ring(self) -> None:
        """Wake up whoever sleeps in `poll`; from any thread."""
        with suppress(OSError):  # full of rings, or closed
            self._bell.send(b"\0")

    def _move(self, line: "Line") -> None:
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


class _SendPending:
    """A send under way."""

    __slots__ = ("_line", "_sent", "_transport")

    def __init__(self, transport: SocketTransport, line: Line, sent: Sent) -> None:
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

    def __init__(self, transport: SocketTransport, line: Line, received: Received) -> None:
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
        while not load.is_done.is_set():
            transport.check()
            if time.monotonic() > ends_s:
                words = nothing_taken if self._is_send else nothing_came
                raise transport.fail(words(load.key, self._peer, self._payload, transport.timeout_s))
            transport.poll(LOOK_S)
        transport.check()
        if load.error is not None:
            lost = PeerLost(self._peer, str(load.error) or type(load.error).__name__)
            raise transport.fail(lost) from load.error
        if load.size_sent is not None:
            raise _other_size(load.key, self._peer, len(load.data), load.size_sent)


SocketPending = _SendPending | _ReceivePending | _FreightPending


def _other_size(key: Message, source: int, expected: int, sent: int) -> BiremeError:
    return BiremeError(
        f"The {key} came from rank {source} with {sent} bytes, and {expected} were expected. The ranks were "
        "given batches of different shapes: give all ranks the same batches."
    )
