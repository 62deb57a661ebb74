"""Tensors on a connection of their own: a text that says what comes, and then the bytes, as they lie.

It is for what one rank gives another beside the rounds: committed sums and snapshots. Both ends block, and
give up when nothing moves for their socket's timeout.
"""

import json
import socket
import time
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import torch
from torch import Tensor

__all__ = ["receive_into", "receive_named", "receive_words", "send_named", "send_parcel"]

LENGTH = Struct("<Q")
PIECE_BYTES = 1 << 20
MOST_WORDS_BYTES = 1 << 28


def send_parcel(
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


def receive_words(made: socket.socket) -> dict[str, Any]:
    """The text of a parcel."""
    (size,) = LENGTH.unpack(_received(made, LENGTH.size))
    if size > MOST_WORDS_BYTES:
        raise ConnectionError(f"a text of {size} bytes was announced")
    found: dict[str, Any] = json.loads(_received(made, size))
    return found


def receive_into(made: socket.socket, tensors: Sequence[Tensor]) -> None:
    """The tensors of a parcel."""
    for tensor in tensors:
        _fill(made, _bytes_of(tensor))


def send_named(
    made: socket.socket, words: Mapping[str, Any], tensors: Mapping[str, Tensor], *, share: float
) -> None:
    """Send tensors with their names, types and shapes."""
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in tensors.items()
    ]
    send_parcel(made, {**words, "tensors": listed}, [*tensors.values()], share=share)


def receive_named(made: socket.socket, words: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a text has announced."""
    found = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in words["tensors"]}
    receive_into(made, [*found.values()])
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


def _received(made: socket.socket, num_bytes: int) -> bytes:
    found = bytearray(num_bytes)
    _fill(made, memoryview(found))
    return bytes(found)


def _fill(made: socket.socket, view: memoryview) -> None:
    while len(view):
        num_bytes = made.recv_into(view)
        if not num_bytes:
            raise ConnectionResetError("the connection was closed")
        view = view[num_bytes:]
