"""Messages between CPUs over sockets, read and written by the rank's own thread.

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
from bireme.runtime.freight import LargeMessages
from bireme.runtime.peers import PeerLost
from bireme.runtime.socket_line import BUFFER_BYTES, LARGE_BYTES, SocketLine, Transfer
from bireme.runtime.transport import nothing_came, nothing_taken
from bireme.schedule.instruction import Message
from bireme.sync.group import AbortedError

__all__ = ["Lines", "SocketPending", "SocketTransport"]

RINGS = 4096

LOOK_S = 0.2
"""How often a wait looks whether the transport was given up."""


class Lines:
    """The two sockets to one other rank. Both ends must send the same sizes over the small one."""

    __slots__ = ("large", "ordinary_bytes", "small")

    def __init__(self, small: socket.socket, large: socket.socket, ordinary_bytes: int = LARGE_BYTES) -> None:
        self.small = small
        self.large = large
        self.ordinary_bytes = ordinary_bytes

    def prepare(self) -> None:
        """Set what sockets between two machines need: no delays, and room in the kernel for what is small.

        The large one keeps buffers that grow with what the link can do.
        """
        for one in (self.small, self.large):
            if one.family != socket.AF_UNIX:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.small.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
        self.small.setblocking(False)
        self.large.settimeout(None)


class SocketTransport:
    """The transport of one rank; `lines` lead to those it has borders with."""

    is_host = True

    def __init__(self, lines: Mapping[int, Lines], *, timeout_s: float, awake_s: float = 0.0) -> None:
        """Every wait stays awake for `awake_s` before it sleeps."""
        self.timeout_s = timeout_s
        self._awake_s = awake_s
        self._failure: Exception | None = None
        self._lines = {peer: SocketLine(peer, pair.small) for peer, pair in lines.items()}
        self._bell, self._rung = socket.socketpair()
        for one in (self._bell, self._rung):
            one.setblocking(False)
        self._freight = {peer: LargeMessages(peer, pair.large, self._ring) for peer, pair in lines.items()}
        self._ordinary_bytes = {peer: pair.ordinary_bytes for peer, pair in lines.items()}
        self._sockets = [one for pair in lines.values() for one in (pair.small, pair.large)]
        self._poller = select.poll()
        self._poller.register(self._rung, select.POLLIN)
        self._by_number = {line.socket.fileno(): line for line in self._lines.values()}
        self.on_arrival: Callable[[], None] | None = None
        """Called whenever this rank is about to sleep, so that it does for others what it can."""

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> "SocketPending":
        """Begin to send. Which of the two sockets a message goes over depends on the room for it."""
        self.check()
        transfer = Transfer(key, payload, is_send=True)
        if num_bytes is not None:
            transfer.rest = transfer.data[:num_bytes]
        if len(transfer.data) > self._ordinary_bytes[to]:
            freight = self._freight[to]
            freight.send(transfer)
            return SocketPending(self, freight, transfer)
        line = self._lines[to]
        line.queue.append(transfer)
        self._move(line)
        return SocketPending(self, line, transfer)

    def receive(self, key: Message, source: int, payload: Tensor) -> "SocketPending":
        """Begin to receive."""
        self.check()
        transfer = Transfer(key, payload, is_send=False)
        if len(transfer.data) > self._ordinary_bytes[source]:
            freight = self._freight[source]
            freight.post(transfer)
            return SocketPending(self, freight, transfer)
        line = self._lines[source]
        line.post(transfer)
        if line.has_staged:
            self._move(line)
        return SocketPending(self, line, transfer)

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

    def wait(self, line: SocketLine | LargeMessages, transfer: Transfer) -> None:
        """Move bytes on all lines until that message has gone or come, or for too long none moved on its."""
        began_s = 0.0
        while not transfer.is_done:
            self.check()
            self._move(line)
            if transfer.is_done:
                break
            now = time.monotonic()
            began_s = began_s or now
            moved_s = max(began_s, line.sent_s if transfer.is_send else line.came_s)
            if now > moved_s + self.timeout_s:
                words = nothing_taken if transfer.is_send else nothing_came
                raise self.fail(words(transfer.key, line.peer, transfer.payload, self.timeout_s))
            self.poll(min(LOOK_S, moved_s + self.timeout_s - now))
        if transfer.error is not None:
            self.check()
            if isinstance(transfer.error, BiremeError):
                raise self.fail(transfer.error)
            lost = PeerLost(line.peer, str(transfer.error) or type(transfer.error).__name__)
            raise self.fail(lost) from transfer.error

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
        for number, _event in self._events(seconds):
            line_or_bell = self._by_number.get(number)
            if line_or_bell is not None:
                self._move(line_or_bell)
            else:
                with suppress(BlockingIOError):
                    self._rung.recv(RINGS)

    def _events(self, seconds: float) -> list[tuple[int, int]]:
        """What has happened on the sockets, as soon as there is something, and after these seconds at the
        latest.
        """
        if self._awake_s:
            ends_s = time.monotonic() + min(self._awake_s, seconds)
            while time.monotonic() < ends_s:
                if events := self._poller.poll(0):
                    return events
        return self._poller.poll(seconds * 1000)

    def _ring(self) -> None:
        """Wake up whoever sleeps in `poll`; from any thread."""
        with suppress(OSError):  # full of rings, or closed
            self._bell.send(b"\0")

    def _move(self, line: SocketLine | LargeMessages) -> None:
        """Write what goes and read what has come; a broken connection means that its rank is gone, or that
        this one gave up.
        """
        try:
            line.move()
        except OSError as error:
            self.check()
            raise self.fail(PeerLost(line.peer, str(error) or type(error).__name__)) from error


class SocketPending:
    """A message under way, in either direction."""

    __slots__ = ("_line", "_transfer", "_transport")

    def __init__(
        self, transport: SocketTransport, line: SocketLine | LargeMessages, transfer: Transfer
    ) -> None:
        self._transport = transport
        self._line = line
        self._transfer = transfer

    def is_done(self) -> bool:
        """Whether it has come, or the kernel has all of it."""
        return self._transfer.is_done

    def wait(self) -> None:
        """Return when it has come, or when the kernel has all of it."""
        if not self._transfer.is_done or self._transfer.error is not None:
            self._transport.wait(self._line, self._transfer)
