"""Where ranks of other replicas reach this one, and how it reaches them: lines for sums, and requests.

Of two ranks the one of the higher replica calls. A caller greets with the token that is in the address, which
only ranks of this run know; whoever does not is refused, and holds up nobody.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.socket_transport import called_locally, local_listener, own_address
from bireme.sync.coordinator.messages import RankId
from bireme.sync.quorum.line import LineBroken, PeerLine

# Tensors on a connection of their own: a text that says what comes, and then the bytes, as they lie.
#
# It is for what one rank gives another outside of rounds: committed sums and snapshots. Who sends gives up
# when nothing moves for its socket's timeout. Who receives waits for the beginning as long as it likes, and
# gives up when nothing moves after that.

_LENGTH = Struct("<Q")
_PIECE_BYTES = 1 << 20
_MOST_WORDS_BYTES = 1 << 28
_PARCEL_LOOK_S = 0.1


def send_tensors(
    made: socket.socket, words: Mapping[str, Any], tensors: Sequence[Tensor], *, share: float = 1.0
) -> None:
    """Send a text and tensors on the host. They take at most that share of the time of a link."""
    text = json.dumps(words).encode()
    made.sendall(_LENGTH.pack(len(text)) + text)
    for tensor in tensors:
        data = _bytes_of(tensor)
        for begin in range(0, len(data), _PIECE_BYTES):
            began_s = time.monotonic()
            made.sendall(data[begin : begin + _PIECE_BYTES])
            if share < 1.0:
                time.sleep((time.monotonic() - began_s) * (1.0 / share - 1.0))


def send_named(
    made: socket.socket, words: Mapping[str, Any], tensors: Mapping[str, Tensor], *, share: float
) -> None:
    """Send tensors with their names, types and shapes."""
    send_tensors(made, {**words, "tensors": listed(tensors)}, [*tensors.values()], share=share)


def listed(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """The names, types and shapes of tensors, for a text that announces them."""
    return [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in tensors.items()
    ]


class IncomingTensors:
    """A parcel that comes on a connection. `look` is called while nothing moves, and ends the wait by what it
    raises. Once the parcel has begun to come, nothing may move for `timeout_s` at most.
    """

    def __init__(self, made: socket.socket, look: Callable[[], None], *, timeout_s: float) -> None:
        made.settimeout(_PARCEL_LOOK_S)
        self._socket, self._look, self._timeout_s = made, look, timeout_s
        self._has_begun = False

    def words(self) -> dict[str, Any]:
        """The text."""
        (size,) = _LENGTH.unpack(self._received(_LENGTH.size))
        if size > _MOST_WORDS_BYTES:
            raise ConnectionError(f"a text of {size} bytes was announced")
        found: dict[str, Any] = json.loads(self._received(size))
        return found

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """The tensors, into these."""
        for tensor in tensors:
            self._fill(_bytes_of(tensor))

    def named(self, words: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that a text has announced."""
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in words["tensors"]
        }
        self.fill([*found.values()])
        return found

    def _received(self, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        self._fill(memoryview(found))
        return bytes(found)

    def _fill(self, view: memoryview) -> None:
        moved_s = time.monotonic()
        while len(view):
            try:
                num_bytes = self._socket.recv_into(view)
            except TimeoutError:
                self._look()
                if self._has_begun and time.monotonic() > moved_s + self._timeout_s:
                    raise
                continue
            if not num_bytes:
                raise ConnectionResetError("the connection was closed")
            self._has_begun, moved_s = True, time.monotonic()
            view = view[num_bytes:]


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


_TOKEN_BYTES = 16
_GREETING = Struct(f"<{_TOKEN_BYTES}sBiiq")
"""The token, what for, who calls (replica and life), and the batch that is asked for."""
_GREETING_S = 5.0
LOOK_S = 0.05
_CALL_S = 3.0
"""How long a call may take before the caller looks whether it is still wanted, and calls again."""
_LINE, SUM, SNAPSHOT = 1, 2, 3

Answer = Callable[[socket.socket, int, int], None]
"""Answers a request: on that socket, of that kind, for that batch."""


class PeerConnections:
    """The connections of one rank to those of its stage in other replicas."""

    def __init__(self, own: RankId, answer: Answer, *, timeout_s: float) -> None:
        self._own = own
        self._answer = answer
        self._timeout_s = timeout_s
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._changed = threading.Condition()
        self._called: dict[tuple[int, int], socket.socket] = {}
        """Lines that others have called for and nobody has taken."""
        self._lines: dict[int, tuple[int, PeerLine]] = {}
        """The line to each replica, with its life."""
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._listeners = [socket.create_server(("", 0), backlog=64)]
        port, local = self._listeners[0].getsockname()[1], f"bireme-{secrets.token_hex(16)}"
        with suppress(OSError):
            self._listeners.append(local_listener(local, 64))
        self._host = own_address()
        self.address = f"{self._host} {port} {self._token.hex()} {local}"
        """Where others call, for them to know."""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="bireme calls", daemon=True).start()

    def line(self, replica: int, life: int, address: str, check: Callable[[], None]) -> PeerLine:
        """The line to the rank of a replica in one of its lives. `check` is called while it waits."""
        with self._changed:
            come = self._called.pop((replica, life), None)
        known = self._lines.get(replica)
        if come is None and known is not None and known[0] == life:
            return known[1]
        self.drop(replica)
        if come is None:
            calls = self._own.replica > replica
            come = (
                self._call(replica, address, _LINE, check) if calls else self._awaited(replica, life, check)
            )
        line = PeerLine(replica, come)
        self._lines[replica] = life, line
        return line

    @contextmanager
    def ask(
        self, replica: int, address: str, what: int, batch: int, check: Callable[[], None]
    ) -> Iterator[socket.socket]:
        """A connection to another rank, on which it answers. `check` is called while it waits for that."""
        made = self._call(replica, address, what, check, batch)
        try:
            yield made
        finally:
            self._forget(made)

    @property
    def is_idle(self) -> bool:
        """Whether there is no connection to any other rank."""
        return not self._open

    def drop(self, replica: int) -> None:
        """Let go of the line to a replica, if there is one."""
        known = self._lines.pop(replica, None)
        if known is not None:
            self._forget(known[1].socket)

    def close(self) -> None:
        """Close everything, which wakes whoever waits on it."""
        with self._changed:
            self._is_closed = True
            sockets = [*self._listeners, *self._open]
            self._open.clear()
            self._changed.notify_all()
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _call(
        self, replica: int, address: str, what: int, check: Callable[[], None], batch: int = 0
    ) -> socket.socket:
        try:
            host, port, token, local = address.split()
            made = called_locally(local, self._timeout_s) if host == self._host else None
            if made is None:
                made = self._reached(host, int(port), check)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.settimeout(self._timeout_s)
            greeting = (bytes.fromhex(token), what, self._own.replica, self._own.life, batch)
            made.sendall(_GREETING.pack(*greeting))
        except (OSError, ValueError) as error:
            raise LineBroken(
                replica, f"it cannot be called at {address.rpartition(' ')[0]}: {error}"
            ) from error
        self._remember(replica, made)
        return made

    def _reached(self, host: str, port: int, check: Callable[[], None]) -> socket.socket:
        """A connection over the network, where nobody may answer."""
        ends_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return socket.create_connection((host, port), timeout=min(_CALL_S, self._timeout_s))
            except TimeoutError:
                check()
                if time.monotonic() > ends_s or self._is_closed:
                    raise

    def _remember(self, replica: int, made: socket.socket) -> None:
        with self._changed:
            if self._is_closed:
                made.close()
                raise LineBroken(replica, "this rank has given its lines up")
            self._open.add(made)

    def _forget(self, made: socket.socket) -> None:
        with self._changed:
            self._open.discard(made)
        made.close()

    def _awaited(self, replica: int, life: int, check: Callable[[], None]) -> socket.socket:
        """The line that another rank calls for."""
        ends_s = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (replica, life) in self._called or self._is_closed, LOOK_S)
                come = self._called.pop((replica, life), None)
            if come is not None:
                return come
            check()
            if time.monotonic() > ends_s or self._is_closed:
                raise LineBroken(replica, f"it has not called within {self._timeout_s:g} s")

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                made = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._greet, args=(made,), name="bireme call", daemon=True).start()

    def _greet(self, made: socket.socket) -> None:
        """Hear what a caller wants, and do it."""
        with suppress(OSError, LineBroken):
            made.settimeout(_GREETING_S)
            token, what, replica, life, batch = _GREETING.unpack(_exactly(made, _GREETING.size))
            if not secrets.compare_digest(token, self._token):
                made.close()
                return
            self._remember(replica, made)
            if what == _LINE:
                self._take_line(made, replica, life)
                return
            made.settimeout(self._timeout_s)
            try:
                self._answer(made, what, batch)
            finally:
                self._forget(made)

    def _take_line(self, made: socket.socket, replica: int, life: int) -> None:
        """Somebody has called for a line. Whoever called before and was not heard is gone."""
        if made.family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            stale = [key for key in self._called if key[0] == replica and key[1] <= life]
            gone = [self._called.pop(key) for key in stale]
            self._called[replica, life] = made
            self._changed.notify_all()
        for one in gone:
            self._forget(one)


def _exactly(made: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = made.recv(num_bytes - len(found))
        if not more:
            raise ConnectionResetError("the caller has hung up")
        found += more
    return found
