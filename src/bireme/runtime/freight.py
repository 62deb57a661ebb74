"""Large messages to and from one other rank, moved by a thread for each direction while the rank computes."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from bireme.errors import BiremeError
from bireme.runtime.header import HEADER_BYTES, read_header
from bireme.runtime.socket_line import Transfer, posted_for

__all__ = ["LargeMessages"]

CHUNK_BYTES = 1 << 20
"""What is written at once. A link that moves less than this within the timeout counts as stuck."""


class LargeMessages:
    """Both directions of one socket, which blocks. The threads start with the first message that needs
    them, and `ring` whenever one is done with.
    """

    def __init__(self, peer: int, line: socket.socket, ring: Callable[[], None]) -> None:
        self.peer = peer
        self.sent_s = self.came_s = 0.0
        """When bytes last moved in each direction."""
        self._line = line
        self._ring = ring
        self._outgoing: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._posted: dict[bytes, Transfer] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False
        self._has_writer = self._has_reader = False

    def send(self, transfer: Transfer) -> None:
        """Begin to send."""
        if not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name=f"bireme to {self.peer}", daemon=True).start()
        self._outgoing.put(transfer)

    def post(self, transfer: Transfer) -> None:
        """Expect a message."""
        with self._changed:
            if self._error is not None:
                transfer.error, transfer.is_done = self._error, True
                return
            self._posted[bytes(transfer.data[:HEADER_BYTES])] = transfer
            self._changed.notify()
        if not self._has_reader:
            self._has_reader = True
            threading.Thread(target=self._read, name=f"bireme from {self.peer}", daemon=True).start()

    def move(self) -> None:
        """Its threads do that."""

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._outgoing.put(None)
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (transfer := self._outgoing.get()) is not None:
            if self._error is not None:
                transfer.error = self._error
                self._end(transfer)
                continue
            try:
                while transfer.rest:
                    transfer.rest = transfer.rest[self._line.send(transfer.rest[:CHUNK_BYTES]) :]
                    self.sent_s = time.monotonic()
            except OSError as error:
                self._error = transfer.error = error
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.is_done = True
        self._ring()

    def _read(self) -> None:
        transfer: Transfer | None = None
        try:
            while True:
                header = bytearray(HEADER_BYTES)
                self._fill(memoryview(header))
                transfer = self._expected(bytes(header))
                if transfer is None:
                    return
                if header == transfer.data[:HEADER_BYTES]:
                    self._fill(transfer.data[HEADER_BYTES:])
                else:
                    num_bytes = read_header(bytes(header)).num_bytes
                    if num_bytes <= len(transfer.data):
                        self._fill(transfer.data[HEADER_BYTES:num_bytes])
                    else:
                        self._skip(num_bytes - HEADER_BYTES)
                    transfer.data[:HEADER_BYTES] = header
                self._end(transfer)
                transfer = None
        except (OSError, BiremeError) as error:
            with self._changed:
                self._error = error
                left, self._posted = list(self._posted.values()), {}
            for one in left if transfer is None else [transfer, *left]:
                one.error = error
                self._end(one)

    def _expected(self, header: bytes) -> Transfer | None:
        """The receive for a message that has come; waits until it is posted."""
        with self._changed:
            while not self._is_closed:
                transfer = posted_for(header, self._posted)
                if transfer is not None:
                    return transfer
                self._changed.wait()
            return None

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            num_bytes = self._line.recv_into(view[filled:])
            if num_bytes == 0:
                raise ConnectionResetError("the connection was closed")
            self.came_s = time.monotonic()
            filled += num_bytes

    def _skip(self, num_bytes: int) -> None:
        """Read that many bytes, which nobody wants."""
        scratch = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
        while num_bytes:
            part = scratch[:num_bytes]
            self._fill(part)
            num_bytes -= len(part)
