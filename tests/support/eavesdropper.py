"""Everything that a host sends, as a file: `python -m tests.support.eavesdropper CARD FILE`, for root.

It listens to the packets that leave by a card until it is told to end, and writes what their TCP streams and
other packets carried. It says on standard output when it listens, and at its end how many packets were lost.
"""

import signal
import socket
import struct
import sys
from collections import defaultdict
from pathlib import Path

__all__ = ["Streams", "main"]

SOL_PACKET, PACKET_OUTGOING, PACKET_STATISTICS = 263, 4, 6
SO_RCVBUFFORCE = 33
EVERYTHING, TCP = 0x0003, 6
"""A socket for one protocol hears nothing of what is sent, only of what comes."""
MOST_BYTES = 1 << 18


class Streams:
    """What was sent: TCP put together by its sequence numbers, anything else packet by packet."""

    def __init__(self) -> None:
        self._segments: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        self._others: list[bytes] = []

    def take(self, packet: bytes) -> None:
        """One packet, from its IP header on."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != TCP:
            self._others.append(packet)
            return
        length = struct.unpack("!H", packet[2:4])[0] or len(packet)
        header = (packet[0] & 15) * 4
        segment = packet[header:length]
        (number,) = struct.unpack("!I", segment[4:8])
        self._segments[packet[12:20] + segment[:4]].append((number, segment[(segment[12] >> 4) * 4 :]))

    def __bytes__(self) -> bytes:
        return b"\n".join([*map(_joined, self._segments.values()), *self._others])


def _joined(segments: list[tuple[int, bytes]]) -> bytes:
    """The bytes of a stream in their order; those that were sent twice once."""
    first = segments[0][0]
    placed = sorted(((number - first) % (1 << 32), data) for number, data in segments)
    found = bytearray()
    for place, data in placed:
        if place >> 31:  # before the first that was seen
            continue
        found += data[max(len(found) - place, 0) :] if place <= len(found) else data
    return bytes(found)


def main() -> None:
    """Listen until SIGTERM."""
    card, path = sys.argv[1], Path(sys.argv[2])
    listening = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERYTHING))
    listening.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
    listening.bind((card, EVERYTHING))
    listening.settimeout(0.1)
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, end)
    print("listening", flush=True)  # noqa: T201
    streams = Streams()
    while not is_over:
        try:
            packet, (_, _, kind, *_) = listening.recvfrom(MOST_BYTES)
        except TimeoutError:
            continue
        if kind == PACKET_OUTGOING:
            streams.take(packet)
    path.write_bytes(bytes(streams))
    _, lost = struct.unpack("II", listening.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    print(lost, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
