"""Where ranks of other replicas reach this one, and how it reaches them: lines for sums, and requests.

Of two ranks the one of the higher replica calls. All listening is by one thread, whatever strangers do; each
request of another rank has a thread of its own.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from bireme.sync.coordinator.messages import RankId
from bireme.sync.rounds.round_group import LineBroken, PeerLine, bytes_of
from bireme.wire.listener import Caller, Doorway, ListenerThread, call
from bireme.wire.messages import MessageConnection

# Tensors on a connection of their own: a text that announces them, and a frame for each.
#
# They are what one process gives another outside of rounds: committed sums, snapshots and second copies.


class TensorConnection(MessageConnection):
    """Texts and the bytes of tensors on a connection."""

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Read the next frames into these tensors."""
        for tensor in tensors:
            data = bytes_of(tensor)

            def place(num_bytes: int, data: memoryview = data) -> memoryview:
                if num_bytes != len(data):
                    raise ConnectionError(f"{num_bytes} bytes came for a tensor of {len(data)}")
                return data

            self.take(place)

    def named(self, words: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that a text has announced."""
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in words["tensors"]
        }
        self.fill(found.values())
        return found


def send_tensors(
    made: socket.socket, words: Mapping[str, Any], tensors: Iterable[Tensor], *, share: float = 1.0
) -> None:
    """Send a text and tensors on the host. They take at most that share of the time of a link."""
    timeout_s = made.gettimeout()
    assert timeout_s is not None, "a silent receiver must not hold up this thread for ever"
    connection = TensorConnection(made, timeout_s)
    connection.say(words)
    for tensor in tensors:
        connection.send(bytes_of(tensor.contiguous()), share=share)


def listed(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """The names, types and shapes of tensors, for a text that announces them."""
    return [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in tensors.items()
    ]


_PURPOSE = Struct("<Biiq")
"""What the connection is for, who calls (replica and incarnation), and the batch that is asked for."""
LOOK_S = 0.05
_CALL_S = 3.0
"""How long a call may take before the caller looks whether it is still wanted, and calls again."""
_LINE, SUM, SNAPSHOT = 1, 2, 3

Answer = Callable[[socket.socket, int, int], None]
"""Answers a request: on that socket, of that kind, for that batch."""


class PeerConnections:
    """The connections of one rank to those of its stage in other replicas. All know the `key` of the run."""

    def __init__(self, own: RankId, answer: Answer, *, key: str, timeout_s: float) -> None:
        self._own, self._answer, self._key, self._timeout_s = own, answer, key, timeout_s
        self._changed = threading.Condition()
        self._called: dict[tuple[int, int], socket.socket] = {}
        """Lines that others have called for and nobody has taken."""
        self._lines: dict[int, tuple[int, PeerLine]] = {}
        """The line to each replica, with its incarnation."""
        self._open: set[socket.socket] = set()
        self._is_closed = False
        doorway = Doorway()
        self.address = doorway.address
        """Where others call, for them to know."""
        self._listening = ListenerThread(key, doorway.sockets, self._take, "bireme calls")

    def line(self, replica: int, life: int, address: str, check: Callable[[], None]) -> PeerLine:
        """The line to the rank of a replica in one of its incarnations. `check` is called while it waits."""
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

    def drop(self, replica: int) -> None:
        """Let go of the line to a replica, if there is one."""
        known = self._lines.pop(replica, None)
        if known is not None:
            self._forget(known[1].socket)

    def close(self) -> None:
        """Close everything, which wakes whoever waits on it."""
        with self._changed:
            self._is_closed = True
            sockets = [*self._open]
            self._open.clear()
            self._changed.notify_all()
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._listening.close()

    def _call(
        self, replica: int, address: str, what: int, check: Callable[[], None], batch: int = 0
    ) -> socket.socket:
        purpose = _PURPOSE.pack(what, self._own.replica, self._own.life, batch)
        ends_s = time.monotonic() + self._timeout_s
        while True:
            try:
                made = call(address, self._key, purpose, min(_CALL_S, self._timeout_s))
                break
            except TimeoutError as error:  # the network may be cut
                check()
                if time.monotonic() > ends_s or self._is_closed:
                    raise _unreached(replica, address, error) from error
            except (OSError, ValueError) as error:
                raise _unreached(replica, address, error) from error
        made.settimeout(self._timeout_s)
        self._remember(replica, made)
        return made

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

    def _take(self, caller: Caller) -> None:
        """Another rank has connected."""
        what, replica, life, batch = _PURPOSE.unpack_from(caller.purpose)
        with suppress(LineBroken):
            self._remember(replica, caller.socket)
            if what == _LINE:
                self._take_line(caller.socket, replica, life)
            else:
                order = (caller.socket, what, batch)
                threading.Thread(
                    target=self._answer_one, args=order, name="bireme answer", daemon=True
                ).start()

    def _answer_one(self, made: socket.socket, what: int, batch: int) -> None:
        try:
            made.settimeout(self._timeout_s)
            with suppress(OSError, LineBroken):
                self._answer(made, what, batch)
        finally:
            self._forget(made)

    def _take_line(self, made: socket.socket, replica: int, life: int) -> None:
        """Somebody has called for a line. Whoever called before and was not heard is gone."""
        with self._changed:
            stale = [key for key in self._called if key[0] == replica and key[1] <= life]
            gone = [self._called.pop(key) for key in stale]
            self._called[replica, life] = made
            self._changed.notify_all()
        for one in gone:
            self._forget(one)


def _unreached(replica: int, address: str, error: Exception) -> LineBroken:
    return LineBroken(replica, f"it cannot be called at {address.rpartition(' ')[0]}: {error}")
