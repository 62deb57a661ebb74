"""How ranks find one another for sockets: each says in the store where it listens, the later rank calls.

Addresses are those that the ranks reach the store from, so ranks on one machine meet on its loopback. A word
that only this run knows keeps strangers out.
"""

import os
import secrets
import socket
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import timedelta

from bireme.runtime.peers import PeerLost
from bireme.runtime.socket_transport import Lines
from bireme.runtime.stores import Store

__all__ = ["meet"]

WORD_BYTES = 16
GREETING_BYTES = WORD_BYTES + 5


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
    own = ranks[rank]
    found: dict[int, list[socket.socket | None]] = {peer: [None, None] for peer in neighbours}
    with ExitStack() as undo:
        listener = socket.create_server(("", 0), backlog=2 * len(neighbours) + 1)
        undo.callback(listener.close)
        listener.settimeout(timeout_s)
        word = secrets.token_bytes(WORD_BYTES)
        port = listener.getsockname()[1]
        store.set(f"{name}/{own}", f"{_address()} {port} {word.hex()}")
        limit = timedelta(seconds=timeout_s)
        for peer in sorted(neighbours):
            if peer < rank:
                store.wait([f"{name}/{ranks[peer]}"], limit)
                host, its_port, its_word = store.get(f"{name}/{ranks[peer]}").decode().split()
                for line in (0, 1):
                    made = socket.create_connection((host, int(its_port)), timeout=timeout_s)
                    undo.callback(made.close)
                    made.sendall(bytes.fromhex(its_word) + rank.to_bytes(4, "little") + bytes([line]))
                    found[peer][line] = made
        missing = 2 * sum(peer > rank for peer in neighbours)
        while missing:
            try:
                made, _ = listener.accept()
            except TimeoutError as error:
                absent = min(peer for peer, pair in found.items() if None in pair)
                raise PeerLost(absent, f"it has not called within {timeout_s:g} s") from error
            made.settimeout(timeout_s)
            greeting = _greeting(made)
            peer = int.from_bytes(greeting[WORD_BYTES:-1], "little")
            if not secrets.compare_digest(greeting[:WORD_BYTES], word) or peer not in found:
                made.close()
                continue
            undo.callback(made.close)
            found[peer][greeting[-1]] = made
            missing -= 1
        lines = {}
        for peer, (small, large) in found.items():
            assert small is not None
            assert large is not None
            for one in (small, large):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small.setblocking(False)
            large.settimeout(None)
            lines[peer] = Lines(small, large)
        undo.pop_all()
        listener.close()
    return lines


def _greeting(line: socket.socket) -> bytes:
    greeting = b""
    while len(greeting) < GREETING_BYTES:
        more = line.recv(GREETING_BYTES - len(greeting))
        if not more:
            return bytes(GREETING_BYTES)
        greeting += more
    return greeting


def _address() -> str:
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
