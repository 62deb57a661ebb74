"""Transports of ranks on threads, joined by sockets, and messages of bytes for them."""

import socket

import pytest
import torch
from torch import Tensor

from bireme.runtime.message_format import Arrival, TensorSpec, WireFormat
from bireme.runtime.socket_transport import Lines, SocketTransport
from bireme.schedule.instruction import Message
from bireme.sync.group import Pending
from bireme.wire.encryption import EncryptedSocket

__all__ = ["HOST", "Receive", "encrypted_sockets", "format_of", "key", "mesh", "pair", "send"]

HOST = torch.device("cpu")


def encrypted_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends of an encrypted connection, as a caller and a listener have them. Skips the test if the
    package for encryption is missing.
    """
    pytest.importorskip("cryptography", reason="encryption needs it")
    here, there = socket.socketpair()
    for one in (here, there):
        one.setblocking(False)
    calls, listens = (
        EncryptedSocket(here, "key", is_listener=False),
        EncryptedSocket(there, "key", is_listener=True),
    )
    calls.shake_hands()
    listens.shake_hands()
    assert calls.shake_hands()
    assert listens.shake_hands()
    return calls, listens


def pair(
    timeout_s: float = 20.0, buffer_bytes: int | None = None, *, is_encrypted: bool = False
) -> list[SocketTransport]:
    """Two transports, joined; the kernel takes `buffer_bytes` of what one has written, or what it likes."""
    make = encrypted_sockets if is_encrypted else socket.socketpair
    (small, its_small), (large, its_large) = (make() for _ in range(2))
    for one in (small, its_small):
        one.setblocking(False)
        if buffer_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return [
        SocketTransport({1: Lines(small, large)}, timeout_s=timeout_s),
        SocketTransport({0: Lines(its_small, its_large)}, timeout_s=timeout_s),
    ]


def mesh(num_ranks: int, timeout_s: float = 20.0) -> list[SocketTransport]:
    """Each rank joined with every other."""
    lines: list[dict[int, Lines]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank + 1, num_ranks):
            (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
            for one in (small, its_small):
                one.setblocking(False)
            lines[rank][other], lines[other][rank] = Lines(small, large), Lines(its_small, its_large)
    return [SocketTransport(own, timeout_s=timeout_s) for own in lines]


def key(microbatch: int, *, forward: bool = True) -> Message:
    return Message(forward, 1 if forward else 0, 3, microbatch, None)


def format_of(size: int) -> WireFormat:
    return WireFormat([TensorSpec("bytes", (size,), torch.uint8)])


def send(transport: SocketTransport, one: Message, to: int, body: Tensor) -> Pending:
    parcel = format_of(len(body)).parcel(HOST)
    parcel.address(one)
    parcel.pack({"bytes": body})
    return transport.send(one, to, parcel.message)


class Receive:
    """A receive that was posted."""

    def __init__(self, transport: SocketTransport, one: Message, source: int, size: int) -> None:
        self.arrival: Arrival = format_of(size).arrival(one, HOST)
        self.pending = transport.receive(one, source, self.arrival.message)

    def wait(self) -> Tensor:
        """What came."""
        self.pending.wait()
        return self.arrival.unpack(HOST)["bytes"]
