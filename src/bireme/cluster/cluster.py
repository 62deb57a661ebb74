"""The noun of this room: a `Cluster`, servers with devices and the links that join them.

Devices are numbered through, server by server. Every question about a way between two of them is answered
here: which lanes it crosses, how fast and how late that makes it alone. What flows that meet on a lane do
to each other is for who simulates or plans.
"""

import math
from dataclasses import dataclass, field

from bireme.cluster.device import Device
from bireme.cluster.links import Switch
from bireme.cluster.routes import Lane, Routes
from bireme.cluster.server import Server
from bireme.errors import BiremeError, closest

__all__ = ["MOST_DEVICES", "Cluster", "PlacedDevice"]

MOST_DEVICES = 65_536
"""In a cluster: past that a number is a slip of the hand."""


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A device of the cluster: the server it is in, its place there, and its name such as `server0/gpu1`."""

    server: int
    place: int
    name: str
    device: Device


@dataclass(frozen=True, slots=True)
class Cluster:
    """Servers and what joins them. Devices are asked for by number, 0 being the first server's first."""

    servers: tuple[Server, ...]
    switch: Switch | None = None
    _devices: tuple[PlacedDevice, ...] = field(init=False, repr=False, compare=False)
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)
    _routes: Routes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.servers:
            raise BiremeError("The cluster has no servers; it needs at least one.")
        count = sum(len(server.devices) for server in self.servers)
        if count > MOST_DEVICES:
            raise BiremeError(f"The cluster has {count} devices; {MOST_DEVICES} are the most.")
        seen: set[str] = set()
        for server in self.servers:
            if server.name in seen:
                raise BiremeError(f"Two servers are named {server.name!r}. Rename one of them.")
            seen.add(server.name)
        for server in self.servers:
            self._check_reached(server)
        devices = tuple(
            PlacedDevice(number, place, f"{server.name}/{name}", device)
            for number, server in enumerate(self.servers)
            for place, (name, device) in enumerate(zip(server.device_names, server.devices, strict=True))
        )
        object.__setattr__(self, "_devices", devices)
        object.__setattr__(self, "_numbers", {placed.name: n for n, placed in enumerate(devices)})
        object.__setattr__(self, "_routes", Routes.over(self.servers, self.switch))

    def _check_reached(self, server: Server) -> None:
        if len(self.servers) == 1:
            return
        on_cards = {place for card in server.cards for place in card.devices}
        for place, name in enumerate(server.device_names):
            if place not in on_cards:
                raise BiremeError(
                    f"{server.name}/{name} is on no network card, so it cannot reach the other servers. Put "
                    "it on a card."
                )

    @property
    def num_devices(self) -> int:
        """How many devices all servers have."""
        return len(self._devices)

    def devices(self) -> tuple[PlacedDevice, ...]:
        """All devices in the order of their numbers."""
        return self._devices

    def number_of(self, name: str) -> int:
        """The number of the device of that name."""
        if name not in self._numbers:
            raise BiremeError(f"There is no device {name!r} in the cluster. {closest(name, self._numbers)}")
        return self._numbers[name]

    def path(self, source: int, destination: int) -> tuple[Lane, ...]:
        """The lanes that a flow between two devices crosses, none where nothing is in its way."""
        return self._routes.path(source, destination)

    def bandwidth(self, source: int, destination: int) -> float:
        """Bytes a second of a flow that meets no other; infinite where nothing is in its way."""
        return min((lane.bytes_per_s for lane in self.path(source, destination)), default=math.inf)

    def latency(self, source: int, destination: int) -> float:
        """The seconds a message is late whatever its size: those of all links it crosses, added up."""
        return self._routes.latency(source, destination)
