"""Carries packets between the cards of hosts, as slowly and as late as a link of a given kind would.

    python relay.py BYTES_PER_S DELAY_S CARD …

Each card is a TUN device that this process makes; it prints a line when all are there. They may then move to
other network namespaces. Card n has the address that ends in n + 1. A packet leaves its card at the card's
speed, is under way for the delay, and arrives at the speed of the other card; a card that is 100 ms behind
drops packets. The process ends with its standard input. It is plain Python, without Bireme.
"""

import fcntl
import heapq
import os
import select
import struct
import sys
from contextlib import suppress
from itertools import count
from time import monotonic

_TUNSETIFF, _TUN, _NO_INFORMATION = 0x400454CA, 0x0001, 0x1000
_MOST_BEHIND_S = 0.1
_MOST_BYTES, _MOST_AT_ONCE = 65536, 32
_DESTINATION = slice(16, 20)
"""The address in the header of an IPv4 packet."""


def card(name: str) -> int:
    """A TUN device, as a file that has its packets."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFORMATION))
    return file


def carry(cards: list[int], bytes_per_s: float, delay_s: float) -> None:
    """Until standard input ends."""
    leaves_s, arrives_s = [0.0] * len(cards), [0.0] * len(cards)
    number_of = {file: number for number, file in enumerate(cards)}
    under_way: list[tuple[float, int, int, bytes]] = []
    order = count()
    while True:
        wait_s = None if not under_way else max(under_way[0][0] - monotonic(), 0.0)
        ready: list[int] = select.select([*cards, sys.stdin.fileno()], (), (), wait_s)[0]
        if sys.stdin.fileno() in ready:
            return
        now = monotonic()
        for file in ready:
            source = number_of[file]
            for packet in packets(file):
                target = packet[_DESTINATION][-1] - 1
                if packet[0] >> 4 != 4 or not 0 <= target < len(cards):
                    continue
                seconds = len(packet) / bytes_per_s
                gone_s = max(now, leaves_s[source]) + seconds
                there_s = max(gone_s + delay_s, arrives_s[target] + seconds)
                if max(gone_s - now, there_s - gone_s - delay_s) > _MOST_BEHIND_S:
                    continue
                leaves_s[source], arrives_s[target] = gone_s, there_s
                heapq.heappush(under_way, (there_s, next(order), cards[target], packet))
        now = monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, file, packet = heapq.heappop(under_way)
            with suppress(OSError):  # a card that is down takes none
                os.write(file, packet)


def packets(file: int) -> list[bytes]:
    """Those that wait at a card, up to a number."""
    found = list[bytes]()
    with suppress(OSError):
        while len(found) < _MOST_AT_ONCE:
            found.append(os.read(file, _MOST_BYTES))
    return found


if __name__ == "__main__":
    files = [card(name) for name in sys.argv[3:]]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(files, float(sys.argv[1]), float(sys.argv[2]))
