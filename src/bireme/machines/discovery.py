"""Find a coordinator in the local network: `bireme join` without an address.

The machine asks a multicast group, over each of its network cards, and each coordinator there answers with
its address, the name of its run and its version of Bireme, and nothing else. Packets do not leave the local
network. Anybody there can answer, so an answer is only a hint: the key in the token, or the one that the
machine knows, decides whom it trusts. If no packet comes through, people type the address.
"""

import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from json import dumps
from typing import Annotated

from annotated_types import Len
from pydantic import StringConstraints, TypeAdapter, ValidationError

from bireme.errors import printable
from bireme.wire.listener import interface_of

DISCOVERY_PORT = 29600
_GROUP = "239.255.66.73"
"""Of the range for networks of one organization."""
_QUERY, _NONCE_BYTES, _PACKET_BYTES = b"BIREME, WHO COORDINATES?", 16, 1024
"""Of a query. No answer is longer: else a forged sender would have a victim get more than was sent."""
_NUM_QUERIES, _MOST_AT_ONCE, _MOST_FOUND = 3, 16, 20
_MULTICAST_ALL = 49
"""An option of Linux: a socket also gets what other sockets of the machine have joined."""


@dataclass(frozen=True, slots=True)
class FoundCoordinator:
    """A coordinator as it answers; `address` is `HOST:PORT`."""

    address: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_.:\[\]-]{1,255}:[0-9]{1,5}$")]
    run: Annotated[str, Len(1, 200)]
    version: Annotated[str, Len(1, 50)]

    @property
    def sentence(self) -> str:
        """The answer in words, without letters that a terminal would act on."""
        return printable(f"{self.address} coordinates the run {self.run} with Bireme {self.version}.")


_FOUND = TypeAdapter(FoundCoordinator)


class DiscoveryAnswers:
    """The end of the coordinator. Raises an `OSError` if there is no multicast here."""

    def __init__(self, host: str, own: FoundCoordinator, port: int = DISCOVERY_PORT) -> None:
        """`host` is this machine's address for the others: on the loopback, only this machine is answered."""
        self._answer = dumps(asdict(own), ensure_ascii=False).encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._join(port, is_local=bool(interface_of(host)))
        except OSError:
            self.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def _join(self, port: int, *, is_local: bool) -> None:
        made, is_linux = self._socket, sys.platform == "linux"
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if is_linux else socket.SO_REUSEPORT, 1)
        if is_linux:
            made.setsockopt(socket.IPPROTO_IP, _MULTICAST_ALL, 0)
        made.bind((_GROUP, port))  # so nothing is heard that was sent to this machine alone
        made.setblocking(False)
        if is_local:
            here = socket.inet_aton(_GROUP) + socket.inet_aton("127.0.0.1")
            made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, here)
            return
        for card in _cards():
            with suppress(OSError):  # it is down, or carries no multicast
                made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, card)

    def answer(self) -> None:
        """Answer the queries that have come. Call it a few times a second."""
        with suppress(OSError):  # there are no others, or an answer cannot be sent
            for _ in range(_MOST_AT_ONCE):
                query, caller = self._socket.recvfrom(_PACKET_BYTES)
                nonce = query[len(_QUERY) : len(_QUERY) + _NONCE_BYTES]
                if len(query) == _PACKET_BYTES and query.startswith(_QUERY):
                    self._socket.sendto(nonce + self._answer, caller)

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()


def find_coordinators(wait_s: float = 2.0, port: int = DISCOVERY_PORT) -> list[FoundCoordinator]:
    """The coordinators that answer within this time, by their addresses; none if there is no multicast."""
    nonce, found = secrets.token_bytes(_NONCE_BYTES), set[FoundCoordinator]()
    query = (_QUERY + nonce).ljust(_PACKET_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        for _ in range(_NUM_QUERIES):  # a packet may be lost
            for card in _cards():
                with suppress(OSError):  # it is down, or carries no multicast
                    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, card)
                    made.sendto(query, (_GROUP, port))
            ends_s = time.monotonic() + wait_s / _NUM_QUERIES
            while (left_s := ends_s - time.monotonic()) > 0 and len(found) < _MOST_FOUND:
                made.settimeout(left_s)
                with suppress(OSError, ValidationError):  # nothing has come, or no answer
                    answer = made.recv(_PACKET_BYTES)
                    if answer.startswith(nonce):
                        found.add(_FOUND.validate_json(answer[_NONCE_BYTES:]))
    return sorted(found, key=lambda one: one.address)


def _cards() -> Iterator[bytes]:
    """For each network card, what joins the group on it, or sends to the group over it."""
    for index, _ in socket.if_nameindex():
        yield struct.pack("=4s4si", socket.inet_aton(_GROUP), bytes(4), index)
