"""One framed connection between two processes: its header, its writer, its reader, and the poller.

Stage boundaries, exchanges between replicas, the coordinator and healing all use it. A frame is a header and
a body. The header gives the kind and the length of the frame, and a tag by which the receiver finds out what
the body is for; each kind has its own layout of tags. A connection never blocks: the thread that owns it
writes and reads as much as the kernel takes and has, and the `Poller` waits for more.

    ┌─────────┬─────────┬──────┬───────────┬──────────┬─────────┐
    │ "BIREME"│ version │ kind │ num_bytes │   tag    │  body   │
    └─────────┴─────────┴──────┴───────────┴──────────┴─────────┘
     6 bytes   1         1      8           48         num_bytes - 64
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from struct import Struct, calcsize
from typing import Final, NamedTuple

from bireme.errors import BiremeError
from bireme.wire.encryption import EncryptedSocket

VERSION = 4
"""Of the layout of frames and of greetings."""
TAG_BYTES = 48
_START = "<6sBBQ"
_LAYOUT = Struct(f"{_START}{TAG_BYTES}s")
_MAGIC = b"BIREME"
HEADER_BYTES = _LAYOUT.size
STAGING_BYTES = 64 * 1024
"""Bytes to read ahead at most. The rest of a longer body goes to its place directly."""
CHUNK_BYTES = 1 << 20
"""Bytes to write at once. A link that moves less than this within a timeout counts as stuck."""
_RINGS = 4096
_LOOK_S = 0.05
"""The longest wait for a bell, after which its caller looks whether to wait on."""


class FrameKind(IntEnum):
    """What a frame is for, and so the layout of its tag."""

    BOUNDARY = 1
    """A message between two stages."""
    EXCHANGE = 2
    """A piece of an exchange between replicas."""
    TEXT = 3
    """A text in UTF-8, without a tag."""
    TENSOR = 4
    """The bytes of a tensor that a text has announced, without a tag."""


class FrameHeader(NamedTuple):
    """A header, taken apart. `num_bytes` is the length of the frame with its header."""

    kind: int
    num_bytes: int
    tag: bytes


def frame_header(kind: FrameKind, num_body_bytes: int, tag: bytes = b"") -> bytes:
    """The header of a frame whose body has that length."""
    return _LAYOUT.pack(_MAGIC, VERSION, kind, HEADER_BYTES + num_body_bytes, tag)


def frame_header_maker(kind: FrameKind, tag: str) -> Callable[..., bytes]:
    """A function that makes the headers of a kind, with the values of a tag of that format (as of `struct`)
    and the length of the frame, by which it begins. One call of `struct` costs less than two.
    """
    layout = Struct(f"{_START}{tag}{TAG_BYTES - calcsize('<' + tag)}x")
    return partial(layout.pack, _MAGIC, VERSION, kind)


def read_frame_header(header: bytes, expected: FrameKind | None = None) -> FrameHeader:
    """Take a header apart. Raises an error if it is not one of this version, and of the kind expected."""
    magic, version, kind, num_bytes, tag = _LAYOUT.unpack(header)
    if magic != _MAGIC or version != VERSION or num_bytes < HEADER_BYTES or kind != (expected or kind):
        raise BiremeError(
            "Received data is not a message of this version of Bireme: it begins with "
            f"{header[:8].hex(' ')}. Run the same version on all ranks."
        )
    return FrameHeader(kind, num_bytes, tag)


class OutgoingFrame:
    """A frame to send. `rest` is the part that the kernel has not taken, and empty once the frame is sent."""

    __slots__ = ("is_begun", "rest")

    def __init__(self, views: list[memoryview]) -> None:
        self.rest = views
        self.is_begun = False

    def take(self, num_bytes: int) -> None:
        """The kernel has taken that many bytes."""
        self.is_begun = True
        while self.rest and num_bytes >= len(self.rest[0]):
            num_bytes -= len(self.rest.pop(0))
        if num_bytes:
            self.rest[0] = self.rest[0][num_bytes:]


class Skip:
    """A frame whose body is to be read and thrown away."""


SKIP: Final = Skip()


class Connection:
    """One end of a connection. It belongs to one thread, or to one thread for each direction."""

    def __init__(
        self, made: socket.socket, *, blocks: bool = False, ahead_bytes: int = STAGING_BYTES
    ) -> None:
        """Bytes that are read ahead cost a copy and spare a call. With `blocks` the socket waits in `write`
        and `next_frame`, for a thread that does nothing else.
        """
        made.settimeout(None if blocks else 0.0)
        self.socket = made
        self._encrypted = made if isinstance(made, EncryptedSocket) else None
        self.outgoing: deque[OutgoingFrame] = deque()
        self.came_bytes = 0
        self.sent_s = self.came_s = time.monotonic()
        """When bytes last moved in each direction."""
        self._staging = memoryview(bytearray(ahead_bytes))
        self._begin = self._end = 0
        """Of the bytes in `_staging` that were read ahead."""
        self._header: bytes | None = None
        """Of the frame whose body is being read."""
        self._into: memoryview | None = None
        """The place of the rest of the body; None throws it away."""
        self._missing = 0
        self._text = bytearray()

    @property
    def moved_s(self) -> float:
        """When bytes last moved in any direction."""
        return max(self.sent_s, self.came_s)

    @property
    def has_staged(self) -> bool:
        """Whether bytes may have been read ahead, for which nobody has to wait."""
        return self._begin != self._end or self.is_ready

    @property
    def is_ready(self) -> bool:
        """Whether bytes may have come that `poll` does not find, because they have left the kernel."""
        return self._encrypted is not None and self._encrypted.is_ready

    @property
    def is_reading(self) -> bool:
        """Whether a frame has been read in part."""
        return self._header is not None

    # Writing.

    def send(self, *views: memoryview) -> OutgoingFrame:
        """Send a frame: a header, and the body in any number of parts. `write` passes it to the kernel, in
        the order of these calls. The memory must stay as it is until the frame is sent.
        """
        frame = OutgoingFrame([*views])
        self.outgoing.append(frame)
        return frame

    def say(self, text: bytes) -> None:
        """Send a frame with a text."""
        self.send(memoryview(frame_header(FrameKind.TEXT, len(text)) + text))

    def write(self) -> None:
        """Pass to the kernel what it takes. Raises an `OSError` if the connection is broken."""
        outgoing = self.outgoing
        while outgoing:
            frame = outgoing[0]
            rest = frame.rest
            try:
                if len(rest) == 1:
                    view = rest[0]
                    num_bytes = self.socket.send(view if len(view) <= CHUNK_BYTES else view[:CHUNK_BYTES])
                    if num_bytes == len(view):
                        rest.clear()
                else:
                    num_bytes = self.socket.sendmsg(rest)
            except BlockingIOError:
                if self._encrypted is not None and self._encrypted.is_half_sent:
                    frame.is_begun = True
                return
            self.sent_s = time.monotonic()
            if rest:
                frame.take(num_bytes)
            if not rest:
                outgoing.popleft()

    def flush(self, timeout_s: float) -> None:
        """Write all that is to be sent. Raises `TimeoutError` if nothing moves for so long."""
        self.write()
        while self.outgoing:
            if not wait_for(self, select.POLLOUT, self.sent_s + timeout_s - time.monotonic()):
                raise TimeoutError(f"the other end has taken nothing for {timeout_s:g} s")
            self.write()

    # Reading.

    def next_frame(self, place: Callable[[bytes], memoryview | Skip | None]) -> bytes | None:
        """Read on until a frame is complete, and return its header; None if that takes more bytes.

        `place` is called with the header of each frame that begins. It returns the memory for the body, of
        just that length, or `SKIP`; with None the frame waits, and so do all frames after it.
        """
        if self._header is None:
            while self._end - self._begin < HEADER_BYTES:
                if not self._stage():
                    return None
            body = self._begin + HEADER_BYTES
            header = bytes(self._staging[self._begin : body])
            into = place(header)
            if into is None:
                return None
            if isinstance(into, Skip):
                self._into, self._missing = None, read_frame_header(header).num_bytes - HEADER_BYTES
            else:
                num_bytes = len(into)
                if num_bytes <= self._end - body:
                    self._begin = body + num_bytes
                    into[:] = self._staging[body : self._begin]
                    return header
                self._into, self._missing = into, num_bytes
            self._begin, self._header = body, header
        if self._missing and not self._read_body():
            return None
        header, self._header, self._into = self._header, None, None
        return header

    def skip_body(self) -> None:
        """Throw the rest of the frame away that is being read: its memory is needed for something else."""
        self._into = None

    def next_text(self, most_bytes: int) -> bytes | None:
        """The next frame, which must be a text of at most that length; None if it has not come."""

        def place(header: bytes) -> memoryview:
            num_bytes = read_frame_header(header, FrameKind.TEXT).num_bytes - HEADER_BYTES
            if num_bytes > most_bytes:
                raise ConnectionError(f"a text of {num_bytes} bytes was announced")
            self._text = bytearray(num_bytes)
            return memoryview(self._text)

        return None if self.next_frame(place) is None else bytes(self._text)

    def _read_body(self) -> bool:
        """Read the rest of the body; whether it is complete."""
        staged = min(self._missing, self._end - self._begin)
        if staged:
            if self._into is not None:
                rest = len(self._into) - self._missing
                self._into[rest : rest + staged] = self._staging[self._begin : self._begin + staged]
            self._begin += staged
            self._missing -= staged
        into = self._into
        if into is None and self._missing:
            into = memoryview(bytearray(min(self._missing, STAGING_BYTES)))
        while self._missing:
            assert into is not None, "there is memory for what is missing"
            begin = 0 if self._into is None else len(into) - self._missing
            num_bytes = self._receive(into[begin : begin + self._missing])
            if not num_bytes:
                return False
            self._missing -= num_bytes
        return True

    def _stage(self) -> bool:
        """Read ahead, when less than a header is staged; whether anything came."""
        rest = self._end - self._begin
        if rest:
            self._staging[:rest] = self._staging[self._begin : self._end]
        self._begin = 0
        num_bytes = self._receive(self._staging[rest:])
        self._end = rest + num_bytes
        return num_bytes > 0

    def _receive(self, view: memoryview) -> int:
        try:
            num_bytes = self.socket.recv_into(view)
        except BlockingIOError:
            return 0
        if not num_bytes:
            raise ConnectionResetError("the connection was closed")
        self.came_bytes += num_bytes
        self.came_s = time.monotonic()
        return num_bytes

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def shut_down(self) -> None:
        """End the connection for whoever waits here or at the other end, from any thread."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def wait_for(connection: Connection, events: int, seconds: float) -> bool:
    """Wait until a connection can be read or written (`select.POLLIN`, `POLLOUT`); whether it can."""
    if events & select.POLLIN and connection.is_ready:
        return True
    poller = select.poll()
    poller.register(connection.socket, events)
    return bool(poller.poll(max(seconds, 0.0) * 1000))


class Bell:
    """A file that wakes up a thread that waits for it, among others. Another thread rings."""

    def __init__(self) -> None:
        self._end, self._rung = socket.socketpair()
        for end in (self._end, self._rung):
            end.setblocking(False)

    def fileno(self) -> int:
        """The number of the file, which can be read once it rings."""
        return self._rung.fileno()

    def ring(self) -> None:
        """End the wait, or the next one."""
        with suppress(OSError):  # it rings already, or is closed
            self._end.send(b"\0")

    def listen(self) -> None:
        """Wait a while until it rings, and hush it."""
        poller = select.poll()
        poller.register(self, select.POLLIN)
        if poller.poll(_LOOK_S * 1000):
            self.hush()

    def hush(self) -> None:
        """Ring no more."""
        with suppress(OSError):
            self._rung.recv(_RINGS)

    def close(self) -> None:
        """Close its sockets."""
        self._end.close()
        self._rung.close()


class Poller(Bell):
    """Waits for any number of sockets. Another thread ends a wait with `ring`."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._wanted: dict[int, int] = {}
        self._acts: dict[int, Callable[[], None]] = {}
        self.want(self.fileno(), select.POLLIN, self.hush)

    def want(self, file: int, events: int, act: Callable[[], None]) -> None:
        """Call `act` in a wait when these events happen on a file; nothing is called with 0 events."""
        if self._wanted.get(file, 0) != events:
            if events:
                self._poll.register(file, events)
                self._wanted[file] = events
            else:
                self._poll.unregister(file)
                del self._wanted[file]
        self._acts[file] = act

    def forget(self, file: int) -> None:
        """The file is about to be closed."""
        if self._wanted.pop(file, 0):
            self._poll.unregister(file)
        self._acts.pop(file, None)

    def wait(self, seconds: float, *, awake_s: float = 0.0) -> None:
        """Sleep until events happen or the seconds are over, and act. Stays awake for the first `awake_s`:
        to wake up takes longer than most small messages.
        """
        found: list[tuple[int, int]] = []
        if awake_s:
            ends_s = time.monotonic() + min(awake_s, seconds)
            while not found and time.monotonic() < ends_s:
                found = self._poll.poll(0)
        for file, _ in found or self._poll.poll(seconds * 1000):
            act = self._acts.get(file)  # another act may have let go of the file
            if act is not None:
                act()
