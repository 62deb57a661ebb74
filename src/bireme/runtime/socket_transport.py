"""Messages between CPUs over sockets, read and written by the rank's own thread.

A message of ordinary size lies in the kernel's buffers while it is under way, so it takes no thread to move
it: the sender writes and goes on, the receiver reads when it needs it. That saves the wake-ups that a
transport with threads costs, which is most of what a small message takes. What the buffers have no room for
goes on whenever the rank waits for anything. Large messages, which they do not hold, go over a second socket
with a thread at each end, so that they move while the rank computes.
"""

import os
import secrets
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from struct import Struct

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.board import PeerLost
from bireme.runtime.socket_line import (
    BUFFER_BYTES,
    LARGE_BYTES,
    LargeMessages,
    SocketLine,
    Transfer,
    nothing_came,
    nothing_taken,
    ordinary_bytes,
)
from bireme.runtime.stores import Store
from bireme.schedule.instruction import Message
from bireme.sync.group import AbortedError

_RINGS = 4096

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
    """The transport of one rank; `lines` lead to those it has boundaries with."""

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
        self._large_messages = {
            peer: LargeMessages(peer, pair.large, self._ring) for peer, pair in lines.items()
        }
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
            large_messages = self._large_messages[to]
            large_messages.send(transfer)
            return SocketPending(self, large_messages, transfer)
        line = self._lines[to]
        line.queue.append(transfer)
        self._move(line)
        return SocketPending(self, line, transfer)

    def receive(self, key: Message, source: int, payload: Tensor) -> "SocketPending":
        """Begin to receive."""
        self.check()
        transfer = Transfer(key, payload, is_send=False)
        if len(transfer.data) > self._ordinary_bytes[source]:
            large_messages = self._large_messages[source]
            large_messages.post(transfer)
            return SocketPending(self, large_messages, transfer)
        line = self._lines[source]
        line.post(transfer)
        if line.has_staged:
            self._move(line)
        return SocketPending(self, line, transfer)

    def close(self) -> None:
        """Close the sockets."""
        for large_messages in self._large_messages.values():
            large_messages.close()
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
                    self._rung.recv(_RINGS)

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


# How ranks find one another for sockets: each says in the store where it listens, the later rank calls.
#
# Addresses are those that the ranks reach the store from. Ranks of one machine meet on a Unix socket: to
# send a small message there costs a fraction of what it costs over the loopback. A caller greets with a token
# that only this run knows. Whoever does not is refused, and holds up nobody.

TOKEN_BYTES = 16
GREETING = Struct(f"<{TOKEN_BYTES}sIBI")
"""The token, who calls, for which of the two lines, and the longest message that goes over the small one."""
GREETING_S = 5.0
"""How long a caller may take to greet; a rank does so with its first packet."""
_CONNECT_LOOK_S = 0.5

HAS_ABSTRACT_NAMES = sys.platform == "linux"
"""Whether Unix sockets may have names that no file system knows, and that nobody need clean up."""


def meet(
    store: Store,
    name: str,
    *,
    rank: int,
    ranks: Sequence[int],
    neighbors: Collection[int],
    timeout_s: float,
) -> dict[int, Lines]:
    """Sockets to the neighbors of a rank, which are numbered by their places in `ranks`, as it is.

    `name` must be this meeting's own in the store. All of `ranks` take part.
    """
    own_bytes = ordinary_bytes()
    with ExitStack() as undo:
        backlog = 2 * len(neighbors) + 16
        listeners = [socket.create_server(("", 0), backlog=backlog)]
        undo.callback(listeners[0].close)
        port, local, token = listeners[0].getsockname()[1], "-", secrets.token_bytes(TOKEN_BYTES)
        if HAS_ABSTRACT_NAMES:
            local = f"bireme-{secrets.token_hex(16)}"
            listeners.append(local_listener(local, backlog))
            undo.callback(listeners[1].close)
        own_host = own_address()
        here = f"{own_host} {port} {token.hex()} {own_bytes} {local}"
        store.set(f"{name}/{ranks[rank]}", here)
        acceptor = _Acceptor(listeners, token, {peer for peer in neighbors if peer > rank})
        undo.callback(acceptor.close)
        sockets, limits = acceptor.sockets, acceptor.limits
        for peer in sorted(peer for peer in neighbors if peer < rank):
            where = f"{name}/{ranks[peer]}"
            store.wait([where], timedelta(seconds=timeout_s))
            host, its_port, its_token, its_bytes, its_local = store.get(where).decode().split()
            limits[peer] = int(its_bytes)
            for line in (0, 1):
                made = called_locally(its_local, timeout_s) if host == own_host else None
                if made is None:
                    made = socket.create_connection((host, int(its_port)), timeout=timeout_s)
                sockets[peer, line] = made
                made.sendall(GREETING.pack(bytes.fromhex(its_token), rank, line, own_bytes))
        acceptor.wait(timeout_s)
        lines = {
            peer: Lines(sockets[peer, 0], sockets[peer, 1], min(own_bytes, limits[peer]))
            for peer in neighbors
        }
        for pair in lines.values():
            pair.prepare()
        sockets.clear()
    return lines


class _Call:
    """A connection that somebody made, and what it has said so far."""

    __slots__ = ("ends_s", "said", "socket")

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self.socket = made
        self.said = b""
        self.ends_s = time.monotonic() + GREETING_S

    def hear(self) -> None:
        """Take what has come of the greeting. Who hangs up has said all."""
        with suppress(BlockingIOError):
            more = self.socket.recv(GREETING.size - len(self.said))
            self.said += more or bytes(GREETING.size)

    @property
    def is_over(self) -> bool:
        return len(self.said) >= GREETING.size


class _Acceptor:
    """Takes the calls of some ranks while strangers may call as well, and say anything or nothing."""

    def __init__(self, listeners: Collection[socket.socket], token: bytes, expected: set[int]) -> None:
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        """The socket of each rank for each of its two lines."""
        self.limits: dict[int, int] = {}
        """The longest message that each rank sends over the small line."""
        self._token = token
        self._expected = expected
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._calls: list[_Call] = []

    def wait(self, timeout_s: float) -> None:
        """Return when all have called."""
        ends_s = time.monotonic() + timeout_s
        wanted = {(peer, line) for peer in self._expected for line in (0, 1)}
        while absent := wanted - self.sockets.keys():
            if time.monotonic() > ends_s:
                raise PeerLost(min(absent)[0], f"it did not connect within {timeout_s:g} s")
            for key, _ in self._selector.select(min(_CONNECT_LOOK_S, timeout_s)):
                if isinstance(key.data, _Call):
                    self._hear(key.data)
                else:
                    self._accept(key.data)
            now = time.monotonic()
            for call in [one for one in self._calls if one.ends_s < now]:
                self._refuse(call)

    def close(self) -> None:
        """Refuse whoever still waits, and close what was not taken."""
        for call in tuple(self._calls):
            self._refuse(call)
        self._selector.close()
        for made in self.sockets.values():
            made.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the caller has hung up already
            call = _Call(listener.accept()[0])
            self._calls.append(call)
            self._selector.register(call.socket, selectors.EVENT_READ, call)

    def _hear(self, call: _Call) -> None:
        with suppress(OSError):
            call.hear()
            if not call.is_over:
                return
        if not call.is_over or not self._take(call):
            self._refuse(call)

    def _take(self, call: _Call) -> bool:
        """Whether the caller is a rank that is expected; then its socket is among the others."""
        token, peer, line, its_bytes = GREETING.unpack(call.said[: GREETING.size])
        is_known = secrets.compare_digest(token, self._token) and peer in self._expected
        if not is_known or line not in (0, 1) or (peer, line) in self.sockets:
            return False
        self._forget(call)
        self.sockets[peer, line] = call.socket
        self.limits[peer] = its_bytes
        return True

    def _refuse(self, call: _Call) -> None:
        self._forget(call)
        call.socket.close()

    def _forget(self, call: _Call) -> None:
        self._selector.unregister(call.socket)
        self._calls.remove(call)


def local_listener(name: str, backlog: int) -> socket.socket:
    """Listens under a name that only this machine knows. Raises an `OSError` where there are none."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def called_locally(name: str, timeout_s: float) -> socket.socket | None:
    """A connection to a rank of this machine; None where that is out of reach, as from another container."""
    if not HAS_ABSTRACT_NAMES:
        return None
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout_s)
    try:
        made.connect(f"\0{name}")
    except OSError:
        made.close()
        return None
    return made


def own_address() -> str:
    """This machine's address as whoever holds the store sees it."""
    named = os.environ.get("BIREME_ADDRESS")
    if named:
        return named
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        address: str = probe.getsockname()[0]
    return address
