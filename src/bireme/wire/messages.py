"""Texts in JSON and frames of bytes on a connection, for a thread that waits for them.

Checks of a line, machines that join, keepers of second copies, and ranks that give each other tensors outside
of rounds talk so.
"""

import json
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bireme.wire.connection import (
    HEADER_BYTES,
    Connection,
    FrameKind,
    frame_header,
    read_frame_header,
    wait_for,
)

_PIECE_BYTES = 1 << 20
_LOOK_S = 0.1


class MessageConnection:
    """One end. Raises an `OSError` if nothing moves for `timeout_s`. With `look`, which is called while
    nothing moves and ends a wait by what it raises, the first bytes may take as long as they like. A text has
    at most `most_bytes`.
    """

    def __init__(
        self,
        made: socket.socket,
        timeout_s: float,
        look: Callable[[], None] | None = None,
        most_bytes: int = 1 << 28,
    ) -> None:
        self.socket = made
        self._connection = Connection(made, ahead_bytes=HEADER_BYTES)
        self._timeout_s, self._look, self._most_bytes = timeout_s, look, most_bytes

    def say(self, words: Mapping[str, Any] | Sequence[Any]) -> None:
        """Send a text."""
        self._connection.say(json.dumps(words).encode())
        self._connection.flush(self._timeout_s)

    def hear(self, *, limit_s: float | None = None) -> Any:
        """The next text; it may take `limit_s`, by default the timeout. Raises a `ValueError` if it is no
        JSON.
        """
        return json.loads(self._come(lambda: self._connection.next_text(self._most_bytes), limit_s))

    def send(self, *views: bytes | memoryview, share: float = 1.0) -> int:
        """Send a frame of bytes, in at most that share of the time of a link; returns how many these are."""
        num_bytes = sum(map(len, views))
        header = frame_header(FrameKind.TENSOR, num_bytes)
        *first, last = (memoryview(one) for one in (header, *views))
        for begin in range(0, max(len(last), 1), _PIECE_BYTES):
            began_s = time.monotonic()
            self._connection.send(*first, last[begin : begin + _PIECE_BYTES])
            self._connection.flush(self._timeout_s)
            first = []
            if share < 1.0:
                time.sleep((time.monotonic() - began_s) * (1.0 / share - 1.0))
        return num_bytes

    def take(self, place: Callable[[int], memoryview]) -> None:
        """Read the next frame of bytes into the memory that `place` has for that many."""

        def place_of(header: bytes) -> memoryview:
            return place(read_frame_header(header, FrameKind.TENSOR).num_bytes - HEADER_BYTES)

        self._come(lambda: self._connection.next_frame(place_of))

    def take_at_most(self, most_bytes: int) -> bytes:
        """The next frame of bytes. Raises an `OSError` if it is longer."""
        found = bytearray()

        def place(num_bytes: int) -> memoryview:
            nonlocal found
            if num_bytes > most_bytes:
                raise ConnectionError(f"{num_bytes} bytes were announced")
            found = bytearray(num_bytes)
            return memoryview(found)

        self.take(place)
        return bytes(found)

    def _come(self, read: Callable[[], bytes | None], limit_s: float | None = None) -> bytes:
        """The next frame, once it is complete."""
        connection, began_s, limit_s = self._connection, time.monotonic(), limit_s or self._timeout_s
        while (found := read()) is None:
            left_s = max(connection.came_s, began_s) + limit_s - time.monotonic()
            if wait_for(connection, select.POLLIN, left_s if self._look is None else _LOOK_S):
                continue
            if self._look is not None:
                self._look()
            if left_s <= 0 and (self._look is None or connection.came_bytes):
                raise TimeoutError(f"nothing has come for {limit_s:g} s")
        return found
