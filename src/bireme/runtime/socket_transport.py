"""Messages between stages over sockets, read and written by the rank's own thread.

A message of ordinary size lies in the kernel's buffers while it is under way, so it takes no thread to move
it: the sender writes and goes on, the receiver reads when it needs it. That saves the wake-ups that a
transport with threads costs, which is most of what a small message takes. What the buffers have no room for
goes on whenever the rank waits for anything. Large messages, which the buffers do not hold, go over a second
socket with a thread at each end, so that they move while the rank computes.
"""

import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from struct import Struct
from typing import NamedTuple

from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.board import PeerLost
from bireme.runtime.message_format import read_header
from bireme.runtime.stores import Store
from bireme.schedule.instruction import Message
from bireme.sync.group import AbortedError
from bireme.wire.connection import HEADER_BYTES, SKIP, Connection, OutgoingFrame, Poller, Skip
from bireme.wire.listener import Caller, Doorway, Listener, call, new_key

LOOK_S = 0.2
"""How often a wait looks whether the transport was given up."""

LARGE_BYTES = 256 * 1024
"""Messages of more bytes go over the second socket, and of fewer if the kernel's buffers are small."""

NUM_UNDER_WAY = 4
"""Ordinary messages that the kernel should take at once, so that they move while their sender computes."""

BUFFER_BYTES = NUM_UNDER_WAY * LARGE_BYTES
"""The buffer to ask the kernel for. A new connection would begin with a tenth of it and grow by traffic."""


def ordinary_bytes() -> int:
    """The longest message that this machine's kernel lets go over the small socket."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        granted = probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(granted // NUM_UNDER_WAY, LARGE_BYTES)


def silence(key: Message, peer: int, payload: Tensor, waited_s: float, *, is_send: bool) -> BiremeError:
    """The error of a send or a receive for which nothing moved for too long."""
    happened = f"The {key} ({payload.numel()} bytes) did not arrive from rank {peer}"
    if is_send:
        happened = f"Rank {peer} did not take the {key} ({payload.numel()} bytes)"
    return BiremeError(
        f"{happened} within {waited_s:g} s. That rank may have died or hang, or its batch has other shapes, "
        "so that its message has another size. See what it says; give all ranks the same batches; raise the "
        "timeout if a step can take that long."
    )


class SocketPending(OutgoingFrame):
    """A message under way in either direction; `rest` is the part that has not moved.

    The memory of a message to receive begins with the header that is expected. The receive is done as well
    when another message comes in its place; then the header is that message's. The body is too if there is
    room for it: the message may be the one expected, and only shorter.
    """

    __slots__ = ("data", "error", "is_send", "key", "line", "payload")

    line: "SocketLine | LargeMessages"

    def __init__(self, key: Message, payload: Tensor, num_bytes: int | None, is_send: bool) -> None:
        data: memoryview = payload.numpy().data
        self.rest = [data if num_bytes is None else data[:num_bytes]]
        self.is_begun = False
        self.data, self.key, self.payload, self.is_send = data, key, payload, is_send
        self.error: Exception | None = None

    def is_done(self) -> bool:
        """Whether it has come, or the kernel has all of it, or neither will ever be so."""
        return not self.rest or self.error is not None

    def wait(self) -> None:
        """Return when it has come, or when the kernel has all of it."""
        if self.rest or self.error is not None:
            self.line.transport.wait(self)

    def place(self, header: bytes) -> memoryview | Skip:
        """The memory for the body of a message that has come for this receive."""
        if header == self.data[:HEADER_BYTES]:
            return self.data[HEADER_BYTES:]
        self.data[:HEADER_BYTES] = header
        num_bytes = read_header(header).num_bytes
        return self.data[HEADER_BYTES:num_bytes] if num_bytes <= len(self.data) else SKIP

    def deliver(self, header: bytes, body: bytearray) -> None:
        """The message came before this receive was posted."""
        place = self.place(header)
        if not isinstance(place, Skip):
            place[:] = body
        self.rest.clear()


_Posted = dict[bytes, SocketPending]
"""Receives by the headers expected, so that an ordinary one need not be taken apart."""


def _taken_for(header: bytes, posted: _Posted) -> SocketPending | None:
    """The receive that a message belongs to, which is taken out of those posted; None if there is none yet.

    A message that comes first on its channel, in place of another one, belongs to the receive of that one.
    """
    receive = posted.pop(header, None)
    if receive is None and posted:
        come = read_header(header).key
        for expected, other in posted.items():
            if other.key.forward == come.forward and other.key.to_stage == come.to_stage:
                return posted.pop(expected)
    return receive


class SocketLine:
    """Ordinary messages to and from one rank, moved by the rank's own thread."""

    def __init__(self, transport: "SocketTransport", peer: int, small: socket.socket) -> None:
        self.transport, self.peer = transport, peer
        self.connection = Connection(small)
        self._posted: _Posted = {}
        self._current: SocketPending | bytearray | None = None
        """The receive whose message is being read, or the body of a message that nothing is posted for."""
        self._early: dict[bytes, bytearray] = {}
        """Bodies that came before they were expected, by their headers."""

    def awaited_events(self) -> int:
        """The events that a wait must wake up for. Bytes that no receive expects may stay where they are."""
        reads = bool(self._posted) or self._current is not None
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self.connection.outgoing else 0)

    def send(self, one: SocketPending) -> None:
        """Begin to send."""
        self.connection.outgoing.append(one)
        self.transport.move(self)

    def post(self, receive: SocketPending) -> None:
        """Expect a message; it may have come already."""
        self._posted[bytes(receive.data[:HEADER_BYTES])] = receive
        for header in self._early:
            found = _taken_for(header, self._posted)
            if found is not None:
                found.deliver(header, self._early.pop(header))
                return
        if self.connection.has_staged:
            self.transport.move(self)

    def move(self) -> None:
        """Write what goes, and read what has come as long as anything is expected."""
        connection = self.connection
        if connection.outgoing:
            connection.write()
        while self._posted or self._current is not None:
            header = connection.next_frame(self._place)
            if header is None:
                return
            current, self._current = self._current, None
            if isinstance(current, SocketPending):
                current.rest.clear()
                continue
            assert current is not None, "a message goes to a receive or into memory of its own"
            found = _taken_for(header, self._posted)  # it may have been posted meanwhile
            if found is None:
                self._early[header] = current
            else:
                found.deliver(header, current)

    def _place(self, header: bytes) -> memoryview | Skip:
        receive = self._posted.pop(header, None)
        if receive is not None:
            self._current = receive
            return receive.data[HEADER_BYTES:]
        num_bytes = read_header(header).num_bytes
        if num_bytes > LARGE_BYTES:
            raise BiremeError(
                f"Received data is not a message of this version of Bireme: {num_bytes} bytes long. Run the "
                "same version on all ranks."
            )
        receive = _taken_for(header, self._posted)
        if receive is not None:
            self._current = receive
            return receive.place(header)
        self._current = bytearray(num_bytes - HEADER_BYTES)
        return memoryview(self._current)


class LargeMessages:
    """Large messages to and from one rank, moved by a thread for each direction while the rank computes.

    The threads start with the first message that needs them, and ring whenever a message is done.
    """

    def __init__(
        self, transport: "SocketTransport", peer: int, large: socket.socket, ring: Callable[[], None]
    ) -> None:
        self.transport, self.peer = transport, peer
        self.connection = Connection(large, blocks=True, ahead_bytes=HEADER_BYTES)
        self._ring = ring
        self._outgoing: queue.SimpleQueue[SocketPending | None] = queue.SimpleQueue()
        self._posted: _Posted = {}
        self._current: SocketPending | None = None
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False
        self._has_writer = self._has_reader = False

    def send(self, one: SocketPending) -> None:
        """Begin to send."""
        if not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name=f"bireme to {self.peer}", daemon=True).start()
        self._outgoing.put(one)

    def post(self, receive: SocketPending) -> None:
        """Expect a message."""
        with self._changed:
            if self._error is not None:
                receive.error = self._error
                return
            self._posted[bytes(receive.data[:HEADER_BYTES])] = receive
            self._changed.notify()
        if not self._has_reader:
            self._has_reader = True
            threading.Thread(target=self._read, name=f"bireme from {self.peer}", daemon=True).start()

    def move(self) -> None:
        """The threads do that."""

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._outgoing.put(None)
        self.connection.shut_down()

    def _write(self) -> None:
        while (one := self._outgoing.get()) is not None:
            try:
                if self._error is None:
                    self.connection.outgoing.append(one)
                    self.connection.write()
                one.error = self._error
            except OSError as error:
                self._error = one.error = error
            self._ring()

    def _read(self) -> None:
        try:
            while self.connection.next_frame(self._place) is not None:
                assert self._current is not None, "its body has a place"
                done, self._current = self._current, None
                done.rest.clear()
                self._ring()
        except (OSError, BiremeError) as error:
            with self._changed:
                self._error = error
                left = [*self._posted.values(), *([] if self._current is None else [self._current])]
                self._posted = {}
            for one in left:
                one.error = error
            self._ring()

    def _place(self, header: bytes) -> memoryview | Skip | None:
        """Wait until a receive is posted for the message that has come; None once this is closed."""
        with self._changed:
            while not self._is_closed:
                self._current = _taken_for(header, self._posted)
                if self._current is not None:
                    return self._current.place(header)
                self._changed.wait()
            return None


class Lines(NamedTuple):
    """The two sockets to one other rank. Both ends must send the same sizes over the small one."""

    small: socket.socket
    large: socket.socket
    ordinary_bytes: int = LARGE_BYTES

    def prepare(self) -> None:
        """Have room in the kernel for small messages. The buffers of the large socket grow with traffic."""
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.small.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)


class SocketTransport:
    """The transport of one rank; `lines` lead to the ranks of neighboring stages."""

    is_host = True

    def __init__(
        self,
        lines: Mapping[int, Lines],
        *,
        timeout_s: float,
        awake_s: float = 0.0,
        ranks: Sequence[int] = (),
    ) -> None:
        """Every wait stays awake for `awake_s` before it sleeps. Errors name peers by their numbers in the
        world, if `ranks` has these.
        """
        self.timeout_s = timeout_s
        self._awake_s = awake_s
        self._failure: Exception | None = None
        self._poller = Poller()
        names = {peer: ranks[peer] if ranks else peer for peer in lines}
        self._lines = {peer: SocketLine(self, names[peer], pair.small) for peer, pair in lines.items()}
        self._large_messages = {
            peer: LargeMessages(self, names[peer], pair.large, self._poller.ring)
            for peer, pair in lines.items()
        }
        self._ordinary_bytes = {peer: pair.ordinary_bytes for peer, pair in lines.items()}
        self._moves = [
            (line, line.connection.socket.fileno(), partial(self.move, line)) for line in self._lines.values()
        ]

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> SocketPending:
        """Begin to send."""
        return self._begun(SocketPending(key, payload, num_bytes, True), to)

    def receive(self, key: Message, source: int, payload: Tensor) -> SocketPending:
        """Begin to receive."""
        return self._begun(SocketPending(key, payload, None, False), source)

    def _begun(self, one: SocketPending, peer: int) -> SocketPending:
        """Which of the two sockets a message goes over depends on the room for it."""
        if self._failure is not None:
            raise self._failure
        is_large = len(one.data) > self._ordinary_bytes[peer]
        line = one.line = self._large_messages[peer] if is_large else self._lines[peer]
        (line.send if one.is_send else line.post)(one)
        return one

    def close(self) -> None:
        """Close the sockets."""
        for large_messages in self._large_messages.values():
            large_messages.close()
        for line in self._all:
            line.connection.close()
        self._poller.close()

    def abort(self) -> None:
        """Give up: break all connections, which wakes whoever waits on them."""
        if self._failure is None:
            self._failure = AbortedError("This rank has given its transport up.")
        for line in self._all:
            line.connection.shut_down()
        self._poller.ring()

    @property
    def _all(self) -> "Sequence[SocketLine | LargeMessages]":
        return [*self._lines.values(), *self._large_messages.values()]

    def check(self) -> None:
        """Raise why nothing moves any more, if that is so."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> Exception:
        """Nothing moves from now on, for this reason."""
        self._failure = error
        return error

    def wait(self, one: SocketPending) -> None:
        """Move bytes on all lines until that message has gone or come. Raises an error if nothing moves on
        its line for the timeout.
        """
        began_s, line = 0.0, one.line
        while not one.is_done():
            self.check()
            self.move(line)
            if one.is_done():
                break
            now = time.monotonic()
            began_s = began_s or now
            moved_s = max(began_s, line.connection.sent_s if one.is_send else line.connection.came_s)
            if now > moved_s + self.timeout_s:
                waited_s, is_send = self.timeout_s, one.is_send
                raise self.fail(silence(one.key, line.peer, one.payload, waited_s, is_send=is_send))
            self.poll(min(LOOK_S, moved_s + self.timeout_s - now))
        if one.error is not None:
            self.check()
            if isinstance(one.error, BiremeError):
                raise self.fail(one.error)
            lost = PeerLost(line.peer, str(one.error) or type(one.error).__name__)
            raise self.fail(lost) from one.error

    def poll(self, seconds: float) -> None:
        """Sleep until some line can move or a large message is done with, and move what can."""
        for line, file, move in self._moves:
            self._poller.want(file, line.awaited_events(), move)
        self._poller.wait(seconds, awake_s=self._awake_s)

    def move(self, line: SocketLine | LargeMessages) -> None:
        """Write what goes and read what has come; a broken connection means that its rank is gone, or that
        this one gave up.
        """
        try:
            line.move()
        except OSError as error:
            self.check()
            raise self.fail(PeerLost(line.peer, str(error) or type(error).__name__)) from error


# How ranks find one another for sockets: each says in the store where it listens, the later rank calls.

_PURPOSE = Struct("<IBI")
"""The rank that calls, for which of the lines, and the longest message that goes over the small one."""


def meet(
    store: Store,
    name: str,
    *,
    rank: int,
    ranks: Sequence[int],
    neighbors: Collection[int],
    timeout_s: float,
) -> dict[int, Lines]:
    """The two sockets to each neighbor of a rank, as of `met`."""
    sockets, limits = met(store, name, rank, ranks, neighbors, timeout_s, num_lines=2)
    own_bytes = ordinary_bytes()
    lines = {
        peer: Lines(sockets[peer, 0], sockets[peer, 1], min(own_bytes, limits[peer])) for peer in neighbors
    }
    for pair in lines.values():
        pair.prepare()
    return lines


def met(
    store: Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    neighbors: Collection[int],
    timeout_s: float,
    *,
    num_lines: int = 1,
) -> tuple[dict[tuple[int, int], socket.socket], dict[int, int]]:
    """Sockets to the neighbors of a rank by the neighbor and the number of the line, `num_lines` to each; and
    the longest ordinary message of each neighbor. Neighbors are numbered by their places in `ranks`, as the
    rank is.

    `name` must be this meeting's own in the store. All of `ranks` take part. Whoever can read the store can
    connect.
    """
    own_bytes = ordinary_bytes()
    sockets: dict[tuple[int, int], socket.socket] = {}
    limits: dict[int, int] = {}
    with ExitStack() as undo:
        undo.callback(_close_all, sockets)
        key, doorway = new_key(), Doorway(num_lines * len(neighbors) + 16)
        poller = Poller()
        undo.callback(poller.close)
        expected = {(peer, line) for peer in neighbors if peer > rank for line in range(num_lines)}

        def take(caller: Caller) -> None:
            peer, line, its_bytes = _PURPOSE.unpack_from(caller.purpose)
            if (peer, line) not in expected or (peer, line) in sockets:
                caller.socket.close()
                return
            sockets[peer, line], limits[peer] = caller.socket, its_bytes

        listener = Listener(key, doorway.sockets, poller, take)
        undo.callback(listener.close)
        store.set(f"{name}/{ranks[rank]}", f"{own_bytes} {key} {doorway.address}")
        for peer in sorted(peer for peer in neighbors if peer < rank):
            where = f"{name}/{ranks[peer]}"
            store.wait([where], timedelta(seconds=timeout_s))
            its_bytes, its_key, address = store.get(where).decode().split(maxsplit=2)
            limits[peer] = int(its_bytes)
            for line in range(num_lines):
                purpose = _PURPOSE.pack(rank, line, own_bytes)
                try:
                    sockets[peer, line] = call(address, its_key, purpose, timeout_s)
                except OSError as error:
                    raise PeerLost(ranks[peer], str(error) or type(error).__name__) from error
        ends_s = time.monotonic() + timeout_s
        while absent := expected - sockets.keys():
            if time.monotonic() > ends_s:
                raise PeerLost(ranks[min(absent)[0]], f"it did not connect within {timeout_s:g} s")
            poller.wait(min(LOOK_S, timeout_s))
            listener.sweep()
        found = dict(sockets)
        sockets.clear()
    return found, limits


def hosts_met(store: Store, name: str, ranks: Sequence[int]) -> list[str]:
    """The addresses of the hosts of all who have met, in their order."""
    return [store.get(f"{name}/{rank}").decode().split()[2] for rank in ranks]


def _close_all(sockets: Mapping[tuple[int, int], socket.socket]) -> None:
    for made in sockets.values():
        made.close()
