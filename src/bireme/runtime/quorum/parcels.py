"""Tensors on a connection of their own: a text that says what comes, and then the bytes, as they lie.

It is for what one rank gives another outside of rounds: committed sums and snapshots. Who sends gives up when
nothing moves for its socket's timeout. Who receives waits for the beginning as long as it likes, and gives up
when nothing moves after that.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any

import torch
from torch import Tensor

__all__ = ["IncomingTensors", "send_named", "send_tensors"]

LENGTH = Struct("<Q")
PIECE_BYTES = 1 << 20
MOST_WORDS_BYTES = 1 << 28
PARCEL_LOOK_S = 0.1


def send_tensors(
    made: socket.socket, words: Mapping[str, Any], tensors: Sequence[Tensor], *, share: float = 1.0
) -> None:
    """Send a text and tensors on the host. They take at most that share of the time of a link."""
    text = json.dumps(words).encode()
    made.sendall(LENGTH.pack(len(text)) + text)
    for tensor in tensors:
        data = _bytes_of(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            began_s = time.monotonic()
            made.sendall(data[begin : begin + PIECE_BYTES])
            if share < 1.0:
                time.sleep((time.monotonic() - began_s) * (1.0 / share - 1.0))


def send_named(
    made: socket.socket, words: Mapping[str, Any], tensors: Mapping[str, Tensor], *, share: float
) -> None:
    """Send tensors with their names, types and shapes."""
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in tensors.items()
    ]
    send_tensors(made, {**words, "tensors": listed}, [*tensors.values()], share=share)


class IncomingTensors:
    """A parcel that comes on a connection. `look` is called while nothing moves, and ends the wait by what it
    raises. Once the parcel has begun to come, nothing may move for `timeout_s` at most.
    """

    def __init__(self, made: socket.socket, look: Callable[[], None], *, timeout_s: float) -> None:
        made.settimeout(PARCEL_LOOK_S)
        self._socket, self._look, self._timeout_s = made, look, timeout_s
        self._has_begun = False

    def words(self) -> dict[str, Any]:
        """The text."""
        (size,) = LENGTH.unpack(self._received(LENGTH.size))
        if size > MOST_WORDS_BYTES:
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
