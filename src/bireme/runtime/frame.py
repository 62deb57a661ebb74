"""A frame: what goes ahead of every message on a socket, so that both ends agree on what follows."""

from struct import Struct

from bireme.schedule.instruction import Message

__all__ = ["FRAME_BYTES", "framed", "read_frame"]

LAYOUT = Struct("<?bhiqqq")
FRAME_BYTES = LAYOUT.size


def framed(key: Message, num_bytes: int) -> bytes:
    """The frame of a message."""
    half = -1 if key.half is None else key.half
    microbatch = -1 if key.microbatch is None else key.microbatch
    return LAYOUT.pack(key.forward, half, 0, key.to_stage, key.batch, microbatch, num_bytes)


def read_frame(frame: bytes | bytearray | memoryview) -> tuple[Message, int]:
    """Which message follows, and how long it is."""
    forward, half, _, to_stage, batch, microbatch, num_bytes = LAYOUT.unpack(frame)
    key = Message(
        forward, to_stage, batch, None if microbatch < 0 else microbatch, None if half < 0 else half
    )
    return key, num_bytes
