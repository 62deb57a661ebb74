"""Which network card leads to the other machines of a run.

Gloo takes the one of this machine's own name, which on many machines is the loopback: then no other machine
can answer.
"""

import os
import socket
import sys

__all__ = ["let_gloo_use_the_way_to"]

NAMED = "GLOO_SOCKET_IFNAME"

ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: the address of a card by its name."""


def let_gloo_use_the_way_to(host: str) -> None:
    """Have gloo use the card that reaches a host, unless somebody has named one or it cannot be told.

    A host that turns out to be this machine by its loopback says nothing, for other machines may be in it.
    """
    if NAMED in os.environ or sys.platform != "linux":
        return
    card = _card_to(host)
    if card is not None:
        os.environ[NAMED] = card


def _card_to(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # which sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        if address.startswith("127."):
            return None
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == address), None)


def _address_of(card: str, any_socket: socket.socket) -> str | None:
    import fcntl  # there is none but on Unix

    request = card.encode()[:15].ljust(40, b"\0")
    try:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), ASK_ADDRESS, request)[20:24])
    except OSError:  # a card without an address
        return None
