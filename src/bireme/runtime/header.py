"""The header that every message between ranks begins with: which message it is, and of what shape.

It is the only thing that identifies a message, whatever it goes over: 64 bytes, which the sender writes and
the receiver compares with what it expects.
"""

from struct import Struct
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.schedule.instruction import Message

__all__ = ["HEADER_BYTES", "Header", "header_of", "read_header"]

LAYOUT = Struct("<8sqiiiiQQ16x")
HEADER_BYTES = LAYOUT.size
MAGIC = b"BIREME\x00\x02"
"""With the version of this layout."""


class Header(NamedTuple):
    """What a header says. `num_bytes` is the length of the message with its header."""

    key: Message
    num_bytes: int
    signature: int


def header_of(key: Message, num_bytes: int, signature: int) -> bytes:
    """The header of a message. `signature` tells apart what tensors it may hold."""
    return LAYOUT.pack(
        MAGIC,
        key.batch,
        -1 if key.microbatch is None else key.microbatch,
        -1 if key.half is None else key.half,
        key.to_stage,
        key.forward,
        num_bytes,
        signature,
    )


def read_header(header: bytes) -> Header:
    """What a header says. Raises where it is none."""
    magic, batch, microbatch, half, to_stage, forward, num_bytes, signature = LAYOUT.unpack(header)
    if magic != MAGIC or num_bytes < HEADER_BYTES:
        raise BiremeError(
            "Received data is not a message of this version of Bireme: it begins with "
            f"{header[:8].hex(' ')}. Run the same version on all ranks."
        )
    key = Message(
        bool(forward), to_stage, batch, None if microbatch < 0 else microbatch, None if half < 0 else half
    )
    return Header(key, num_bytes, signature)
