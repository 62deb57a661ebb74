"""Who may connect: every listening socket of a run asks for the key of the run before it reads anything else.

    caller                                        listener
      │ ◀──── challenge: version, policy, nonce ───── │   at once
      │ ── answer: nonce, encrypts, purpose, HMAC ──▶ │   within 5 s, 97 bytes in all
      │ ◀────── handshake of TLS if it encrypts ────▶ │
      │ ◀──────────────── proof: HMAC ─────────────── │

Both HMACs are made with the key over both nonces, so the key itself never crosses the network, and an answer
is of no use a second time. A caller that gives a wrong answer is refused. A caller that gives none is refused
after 5 s, or as soon as too many wait: then the oldest goes. Strangers so cost at most 64 sockets, and they
have no thread and no memory of their own. From the answer on, a connection that leaves the host is encrypted
(`encryption.py`). The HMACs cover the policy, so nobody between the ends can turn that off.
"""

import hashlib
import hmac
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.wire.connection import TAG_BYTES, VERSION, Poller
from bireme.wire.encryption import LACKS, LEAVES, WANTED, EncryptedSocket, encrypts, leaves_host, policy_for

_NONCE_BYTES = 16
_CHALLENGE_START = b"BIREME?" + bytes([VERSION])
_CHALLENGE_BYTES = len(_CHALLENGE_START) + 1 + _NONCE_BYTES
_MAC_BYTES = hashlib.sha256().digest_size
_ANSWER_BYTES = _NONCE_BYTES + 1 + TAG_BYTES + _MAC_BYTES
GREETING_S = 5.0
"""How long a caller may take to answer; a process of the run answers at once."""
MOST_STRANGERS = 64
"""Callers that have not answered yet."""
_MOST_AT_ONCE = 16
_TRIES, _AGAIN_S = 5, 0.05
"""Calls of a listener that hangs up, which may have too many strangers, and the pause between them."""
_LOOK_S = 0.5
_HUNG_UP = "the listener has hung up: it is of another run, or closes"

KEY = "BIREME_KEY"
"""The environment variable with the key of a run whose processes were started by something else."""
HEAL_SHARE = 0.25
"""The share of a link's time that state for another replica, or for its second copy, may take."""
RATE_VARIABLE = "BIREME_RATE"
"""The environment variable with the most bytes a second to send over each line that leaves the host."""
_SO_MAX_PACING_RATE, _MOST_RATE = 47, 2**32 - 2
"""An option of Linux, by which the kernel spreads what a socket sends."""

HAS_ABSTRACT_NAMES = sys.platform == "linux"
"""Whether Unix sockets may have names outside the file system, which vanish with the socket."""


def new_key() -> str:
    """A key for a run, as a text."""
    return secrets.token_hex(16)


KeyOf = Callable[[bytes], str]
"""Gives the key that callers of a purpose have. Raises a `BiremeError` if the purpose is none."""


class Caller(NamedTuple):
    """A process of the run that has connected, and what it said the connection is for."""

    socket: socket.socket
    purpose: bytes


class _Stranger:
    """A connection whose other end has not answered yet."""

    __slots__ = ("ends_s", "key", "nonce", "policy", "said", "socket")

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self.socket = made
        self.policy = policy_for(made)
        self.nonce = bytes([self.policy]) + secrets.token_bytes(_NONCE_BYTES)
        """The policy and a nonce: what the challenge has beside its start."""
        self.said = b""
        self.key = ""
        """The key by which it has answered."""
        self.ends_s = time.monotonic() + GREETING_S


class Listener:
    """Takes connections on sockets for whoever knows the key, or the key for the purpose that the caller
    gives; `on_caller` is called with each.

    It is part of a `Poller`, whose thread it uses. Call `sweep` now and then.
    """

    def __init__(
        self,
        key: str | KeyOf,
        sockets: Sequence[socket.socket],
        poller: Poller,
        on_caller: Callable[[Caller], None],
    ) -> None:
        self._key_of = (lambda _: key) if isinstance(key, str) else key
        self._sockets, self._poller, self._on_caller = tuple(sockets), poller, on_caller
        self._strangers: dict[int, _Stranger] = {}
        """By their file, the oldest first."""
        for one in self._sockets:
            one.setblocking(False)
            poller.want(one.fileno(), select.POLLIN, lambda one=one: self._accept(one))  # type: ignore[misc]

    def sweep(self) -> None:
        """Refuse callers that take too long."""
        now_s = time.monotonic()
        for stranger in [one for one in self._strangers.values() if one.ends_s < now_s]:
            self._refuse(stranger)

    def close(self) -> None:
        """Refuse all that have not answered, and listen no more."""
        for stranger in tuple(self._strangers.values()):
            self._refuse(stranger)
        for one in self._sockets:
            self._poller.forget(one.fileno())
            one.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                stranger = _Stranger(listening.accept()[0])
            except OSError:  # there is none, or it has hung up
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._refuse(next(iter(self._strangers.values())))
            file = stranger.socket.fileno()
            self._strangers[file] = stranger
            self._poller.want(file, select.POLLIN, lambda one=stranger: self._hear(one))  # type: ignore[misc]
            self._say(stranger, _CHALLENGE_START + stranger.nonce)

    def _hear(self, stranger: _Stranger) -> None:
        if isinstance(stranger.socket, EncryptedSocket):
            self._shake_hands(stranger, stranger.socket)
            return
        more = b""
        with suppress(OSError):
            more = stranger.socket.recv(_ANSWER_BYTES - len(stranger.said))
        stranger.said += more
        if more and len(stranger.said) < _ANSWER_BYTES:
            return
        asked, answer = stranger.said[:-_MAC_BYTES], stranger.said[-_MAC_BYTES:]
        expected = b""
        if more:
            with suppress(BiremeError):
                stranger.key = self._key_of(asked[_NONCE_BYTES + 1 :])
                expected = _mac(stranger.key, b"answer", stranger.nonce, asked)
        if not expected or not hmac.compare_digest(answer, expected):
            self._refuse(stranger)
        elif not asked[_NONCE_BYTES]:
            is_needed = stranger.policy & (WANTED | LEAVES) == WANTED | LEAVES
            (self._refuse if is_needed else self._let_in)(stranger)
        elif stranger.policy & (WANTED | LACKS) == WANTED:
            self._encrypt(stranger)
        else:
            self._refuse(stranger)

    def _encrypt(self, stranger: _Stranger) -> None:
        try:
            stranger.socket = EncryptedSocket(stranger.socket, stranger.key, is_listener=True)
        except OSError:  # as on a full disk
            self._refuse(stranger)
        else:
            self._shake_hands(stranger, stranger.socket)

    def _shake_hands(self, stranger: _Stranger, made: EncryptedSocket) -> None:
        is_done = None
        with suppress(OSError):
            is_done = made.shake_hands()
        if is_done:
            self._let_in(stranger)
        elif is_done is None:
            self._refuse(stranger)

    def _let_in(self, stranger: _Stranger) -> None:
        asked = stranger.said[:-_MAC_BYTES]
        if self._say(stranger, _mac(stranger.key, b"proof", asked[:_NONCE_BYTES], stranger.nonce)):
            self._forget(stranger)
            _prepare(stranger.socket)
            self._on_caller(Caller(stranger.socket, asked[_NONCE_BYTES + 1 :]))

    def _say(self, stranger: _Stranger, words: bytes) -> bool:
        """Send a few bytes, which a new connection has room for."""
        with suppress(OSError):
            if stranger.socket.send(words) == len(words):
                return True
        self._refuse(stranger)
        return False

    def _forget(self, stranger: _Stranger) -> None:
        self._poller.forget(stranger.socket.fileno())
        del self._strangers[stranger.socket.fileno()]

    def _refuse(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()


class ListenerThread:
    """A thread that takes connections until it is closed; `on_caller` is called in it."""

    def __init__(
        self,
        key: str | KeyOf,
        sockets: Sequence[socket.socket],
        on_caller: Callable[[Caller], None],
        name: str,
    ) -> None:
        self._poller = Poller()
        self._listener = Listener(key, sockets, self._poller, on_caller)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._is_closing = True
        self._poller.ring()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closing:
            self._poller.wait(_LOOK_S)
            self._listener.sweep()
        self._listener.close()
        self._poller.close()


def authenticated(made: socket.socket, key: str, purpose: bytes = b"") -> socket.socket:
    """Answer the challenge on a new connection, and have the listener prove that it knows the key as well.
    Returns the connection to use, which is encrypted if the line leaves the host.

    Raises an `OSError` if the listener does not, or after the socket's timeout, and closes the socket then.
    Raises a `BiremeError` if the line is to be encrypted and a package for it is missing.
    """
    with ExitStack() as undo:
        undo.callback(made.close)
        challenge = _exactly(made, _CHALLENGE_BYTES)
        if not challenge.startswith(_CHALLENGE_START):
            raise ConnectionError("the listener is not of this version of Bireme")
        nonce, its_nonce = secrets.token_bytes(_NONCE_BYTES), challenge[len(_CHALLENGE_START) :]
        is_encrypted = encrypts(made, its_nonce[0])
        asked = nonce + bytes([is_encrypted]) + purpose.ljust(TAG_BYTES, b"\0")
        made.sendall(asked + _mac(key, b"answer", its_nonce, asked))
        if is_encrypted:
            made = EncryptedSocket(made, key, is_listener=False)
            undo.callback(made.close)
            try:
                made.shake_hands()
            except BrokenPipeError:
                raise ConnectionResetError(_HUNG_UP) from None
        if not hmac.compare_digest(_exactly(made, _MAC_BYTES), _mac(key, b"proof", nonce, its_nonce)):
            raise ConnectionError("the listener does not know the key of the run")
        _prepare(made)
        undo.pop_all()
    return made


def _mac(key: str, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key.encode(), role + b"".join(parts), "sha256")


def _exactly(made: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = made.recv(num_bytes - len(found))
        if not more:
            raise ConnectionResetError(_HUNG_UP)
        found += more
    return found


def _prepare(made: socket.socket) -> None:
    if made.family != socket.AF_UNIX:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rate = os.environ.get(RATE_VARIABLE, "")
    if rate.isdecimal() and sys.platform == "linux" and leaves_host(made):
        found = min(int(rate), _MOST_RATE).to_bytes(4, sys.byteorder)
        made.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, found)


# Addresses: where a process listens, as a text for others.
#
# Processes of one machine meet on a Unix socket: to send a small message there costs a fraction of what it
# costs over the loopback. A run on a single machine listens on the loopback alone.


class Doorway:
    """The sockets on which a process listens, and the `address` at which others call it."""

    def __init__(self, backlog: int = 64) -> None:
        host, local = own_address(), f"bireme-{secrets.token_hex(16)}"
        self.sockets = [open_port(interface_of(host), backlog=backlog)]
        if HAS_ABSTRACT_NAMES:
            self.sockets.append(socket.socket(socket.AF_UNIX))
            self.sockets[1].bind(f"\0{local}")
            self.sockets[1].listen(backlog)
        self.address = f"{host} {self.sockets[0].getsockname()[1]} {local}"


def call(address: str, key: str, purpose: bytes, timeout_s: float) -> socket.socket:
    """An authenticated connection to the process at the address of a `Doorway`; its socket blocks."""
    host, port, local = address.split()

    def connect() -> socket.socket:
        if HAS_ABSTRACT_NAMES and host == own_address():
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(timeout_s)
            try:
                made.connect(f"\0{local}")
            except OSError:  # out of reach, as in another container
                made.close()
            else:
                return made
        return socket.create_connection((host, int(port)), timeout=timeout_s)

    return call_by(connect, key, purpose)


def call_port(address: tuple[str, int], key: str, timeout_s: float) -> socket.socket:
    """An authenticated connection to a port. Raises an `OSError` if there is none, or if the key is wrong."""
    return call_by(lambda: socket.create_connection(address, timeout=timeout_s), key, b"")


def call_by(connect: Callable[[], socket.socket], key: str, purpose: bytes) -> socket.socket:
    """An authenticated connection, of which `connect` makes each try."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return authenticated(connect(), key, purpose)
        except ConnectionResetError:  # too many strangers call there
            if not tries_left:
                raise
            time.sleep(_AGAIN_S)
    raise AssertionError("the last try returns or raises")


def open_port(interface: str = "", port: int = 0, *, backlog: int = 256) -> socket.socket:
    """A listening socket on an interface, or on all of them; port 0 is a free one."""
    return socket.create_server((interface, port), backlog=backlog)


def interface_of(address: str) -> str:
    """The interface to listen on, if others call at an address: the loopback alone if that will do. An
    address behind a router is of no interface here, so else all are used.
    """
    return address if address == "localhost" or address.startswith("127.") else ""


def is_own_address(host: str) -> bool:
    """Whether a host is this machine, by an address of one of its network cards."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def own_address() -> str:
    """This machine's address, as the process sees it that holds the store of the run."""
    named = os.environ.get("BIREME_ADDRESS")
    if named:
        return named
    towards = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return towards or socket.gethostbyname(socket.gethostname())


def address_towards(host: str) -> str:
    """This machine's address on the way to a host, to which nothing is sent; empty if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address
    return ""
