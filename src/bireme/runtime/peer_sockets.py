"""How ranks find one another for sockets: each says in the store where it listens, the later rank calls.

Addresses are those that the ranks reach the store from. Ranks of one machine meet on a Unix socket: to
send a small message there costs a fraction of what it costs over the loopback. A caller greets with a token
that only this run knows. Whoever does not is refused, and holds up nobody.
"""

import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from struct import Struct

from bireme.runtime.peers import PeerLost
from bireme.runtime.socket_line import ordinary_bytes
from bireme.runtime.socket_transport import Lines
from bireme.runtime.stores import Store

__all__ = ["called_locally", "local_listener", "meet", "own_address"]

TOKEN_BYTES = 16
GREETING = Struct(f"<{TOKEN_BYTES}sIBI")
"""The token, who calls, for which of the two lines, and the longest message that goes over the small one."""
GREETING_S = 5.0
"""How long a caller may take to greet; a rank does so with its first packet."""
CONNECT_LOOK_S = 0.5

HAS_ABSTRACT_NAMES = sys.platform == "linux"
"""Whether Unix sockets may have names that no file system knows, and that nobody need clean up."""


def meet(
    store: Store,
    name: str,
    *,
    rank: int,
    ranks: Sequence[int],
    neighbours: Collection[int],
    timeout_s: float,
) -> dict[int, Lines]:
    """Sockets to the neighbours of a rank, which are numbered by their places in `ranks`, as it is.

    `name` must be this meeting's own in the store. All of `ranks` take part.
    """
    own_bytes = ordinary_bytes()
    with ExitStack() as undo:
        backlog = 2 * len(neighbours) + 16
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
        acceptor = _Acceptor(listeners, token, {peer for peer in neighbours if peer > rank})
        undo.callback(acceptor.close)
        sockets, limits = acceptor.sockets, acceptor.limits
        for peer in sorted(peer for peer in neighbours if peer < rank):
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
            for peer in neighbours
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
            for key, _ in self._selector.select(min(CONNECT_LOOK_S, timeout_s)):
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
