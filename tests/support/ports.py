"""Ports that stay free until the process that a test starts listens there."""

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

BELOW_OTHERS = range(20_000, 32_000)
"""Below the ports that Linux gives to calls and to listeners that ask for any port. One of those may be taken
by another test before the process that is to listen there has started.
"""


def free_port(address: str = "127.0.0.1") -> int:
    """A port at which nothing listens. Each call draws another one."""
    draw = random.SystemRandom()
    while True:
        port = draw.choice(BELOW_OTHERS)
        with suppress(OSError), socket.create_server((address, port)):
            return port
