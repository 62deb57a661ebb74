"""Links as numbers, and what they join: bridges, meshes, cards of a server, and the switch between servers.

The devices of a group are named by their place in their server, from 0. Who else is in a group and whether
the places exist is for the server to check.
"""

import re
from dataclasses import dataclass

from bireme.errors import BiremeError

__all__ = [
    "ASSUMED_CARD",
    "ASSUMED_LINK",
    "LONGEST_S",
    "MOST_BYTES_PER_S",
    "NAME",
    "Bridge",
    "Card",
    "Link",
    "Mesh",
    "Switch",
    "check_name",
]

MOST_BYTES_PER_S = 1e18
LONGEST_S = 3600.0

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of servers and links: what is before and after the slash of `server0/gpu1`."""


def check_name(name: str, of: str) -> None:
    """Refuse a name that could not be told from the words around it."""
    if not NAME.fullmatch(name):
        raise BiremeError(
            f"{name!r} is not a name for a {of}. A name begins with a letter or digit; letters, digits, '.', "
            "'_' and '-' may follow."
        )


@dataclass(frozen=True, slots=True)
class Link:
    """What carries `bytes_per_s`: each way at once if `full_duplex`, else in all.

    `back_bytes_per_s` is for a link that is not alike both ways: what it carries towards the devices that
    share it, where `bytes_per_s` is what it carries away from them.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    full_duplex: bool = True
    back_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rate("bytes_per_s", self.bytes_per_s)
        _check_latency(self.latency_s)
        if self.back_bytes_per_s is not None:
            _check_rate("back_bytes_per_s", self.back_bytes_per_s)
            if not self.full_duplex:
                raise BiremeError("A half duplex link is one for both ways: leave out back_bytes_per_s.")

    @property
    def into_bytes_per_s(self) -> float:
        """What it carries towards the devices that share it."""
        return self.bytes_per_s if self.back_bytes_per_s is None else self.back_bytes_per_s


@dataclass(frozen=True, slots=True)
class Bridge:
    """A PCIe host bridge or the like: all that its devices send and receive passes it, also among themselves.

    A device with lanes of its own is alone on its bridge; one without a bridge has nothing in its way.
    """

    name: str
    devices: tuple[int, ...]
    link: Link

    def __post_init__(self) -> None:
        _check_group(self.name, "bridge", self.devices, least=1)


@dataclass(frozen=True, slots=True)
class Mesh:
    """NVLink or the like: devices that reach each other without the bridges.

    Every two have a cable of their own or, if `switched`, each has one port for all the others.
    """

    name: str
    devices: tuple[int, ...]
    link: Link
    switched: bool = False

    def __post_init__(self) -> None:
        _check_group(self.name, "mesh", self.devices, least=2)
        if self.link.back_bytes_per_s is not None and not self.switched:
            raise BiremeError(
                f"The cables of {self.name} are alike both ways: leave out back_bytes_per_s, or make it "
                "switched."
            )


@dataclass(frozen=True, slots=True)
class Card:
    """A network card: all that its devices send to other servers and receive from there passes it."""

    name: str
    devices: tuple[int, ...]
    link: Link

    def __post_init__(self) -> None:
        _check_group(self.name, "card", self.devices, least=1)


@dataclass(frozen=True, slots=True)
class Switch:
    """What joins the servers; `bytes_per_s` is what it carries in all, None if more than the cards do."""

    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None:
            _check_rate("bytes_per_s", self.bytes_per_s)
        _check_latency(self.latency_s)


def _check_rate(name: str, value: float) -> None:
    if not 0 < value <= MOST_BYTES_PER_S:
        raise BiremeError(f"{name} is {value}; it must be greater than 0 and at most {MOST_BYTES_PER_S:g}.")


def _check_latency(value: float) -> None:
    if not 0 <= value <= LONGEST_S:
        raise BiremeError(f"latency_s is {value}; it must be 0 to {LONGEST_S:g}.")


def _check_group(name: str, kind: str, devices: tuple[int, ...], *, least: int) -> None:
    check_name(name, kind)
    if len(devices) < least:
        raise BiremeError(f"{name} joins {len(devices)} devices; a {kind} has at least {least}.")
    if len(set(devices)) < len(devices):
        raise BiremeError(f"{name} names a device twice. Leave out one of the two.")


ASSUMED_CARD, ASSUMED_LINK = "assumed", Link(1.25e8, latency_s=2.5e-4)
"""The name and the link of a card of which nothing is known: 1 Gbit/s, and 0.5 ms between two hosts."""
