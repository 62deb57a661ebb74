"""Large messages to and from one other rank, moved by a thread for each direction while the rank computes."""

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from bireme.runtime.frame import FRAME_BYTES, framed, read_frame
from bireme.schedule.instruction import Message

__all__ = ["Freight", "Load"]


class Load:
    """One large message under way. `error` says why it will never arrive, `size_sent` that it is another
    size.
    """

    __slots__ = ("data", "error", "is_done", "key", "size_sent")

    def __init__(self, key: Message, data: memoryview) -> None:
        self.key = key
        self.data = data
        self.is_done = threading.Event()
        self.error: OSError | None = None
        self.size_sent: int | None = None


class Freight:
    """Both directions of one socket, which blocks. The threads start with the first message that needs
    them, and `ring` whenever one is done with.
    """

    def __init__(self, peer: int, line: socket.socket, ring: Callable[[], None]) -> None:
        self.peer = peer
        self._line = line
        self._ring = ring
        self._outgoing: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._posted: dict[Message, Load] = {}
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._is_closed = False
        self._has_writer = self._has_reader = False

    def send(self, key: Message, data: memoryview) -> Load:
        """Begin to send."""
        load = Load(key, data)
        if not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name=f"bireme to {self.peer}", daemon=True).start()
        self._outgoing.put(load)
        return load

    def receive(self, key: Message, data: memoryview) -> Load:
        """Begin to receive."""
        load = Load(key, data)
        with self._changed:
            if self._error is not None:
                load.error = self._error
                load.is_done.set()
                return load
            self._posted[key] = load
            self._changed.notify()
        if not self._has_reader:
            self._has_reader = True
            threading.Thread(target=self._read, name=f"bireme from {self.peer}", daemon=True).start()
        return load

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._outgoing.put(None)
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (load := self._outgoing.get()) is not None:
            try:
                if self._error is not None:
                    raise self._error
                self._line.sendall(framed(load.key, len(load.data)))
                self._line.sendall(load.data)
            except OSError as error:
                self._error = load.error = error
            self._end(load)

    def _end(self, load: Load) -> None:
        load.is_done.set()
        self._ring()

    def _read(self) -> None:
        load: Load | None = None
        try:
            while True:
                frame = bytearray(FRAME_BYTES)
                self._fill(memoryview(frame))
                key, size = read_frame(frame)
                load = self._expected(key)
                if load is None:
                    return
                if len(load.data) == size:
                    self._fill(load.data)
                else:
                    load.size_sent = size
                    self._fill(memoryview(bytearray(size)))
                self._end(load)
                load = None
        except OSError as error:
            with self._changed:
                self._error = error
                left, self._posted = list(self._posted.values()), {}
            for one in left if load is None else [load, *left]:
                one.error = error
                self._end(one)

    def _expected(self, key: Message) -> Load | None:
        """The receive for a message that has come; waits until it is posted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or key in self._posted)
            return self._posted.pop(key, None)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            num_bytes = self._line.recv_into(view[filled:])
            if num_bytes == 0:
                raise ConnectionResetError("the connection was closed")
            filled += num_bytes
