"""The noun of this room: a `Cluster`, servers with devices and the links that join them.

Devices are numbered through, server by server. Every question about a way between two of them is answered
here: which lanes it crosses, how fast and how late that makes it alone. What flows that meet on a lane do
to each other is for who simulates or plans.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import combinations
from typing import ClassVar

from bireme.cluster.device import Device
from bireme.errors import BiremeError, closest

# Links as numbers, and what they join: bridges, meshes, cards of a server, and the switch between servers.
#
# The devices of a group are named by their place in their server, from 0. Who else is in a group and whether
# the places exist is for the server to check.

MOST_BYTES_PER_S = 1e18
LONGEST_S = 3600.0

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of servers and links: what is before and after the slash of `server0/gpu1`."""


def _check_name(name: str, of: str) -> None:
    """Refuse a name that could not be told from the words around it."""
    if not NAME.fullmatch(name):
        raise BiremeError(
            f"{name!r} is not a name for a {of}. A name begins with a letter or digit; letters, digits, '.', "
            "'_' and '-' may follow."
        )


class Overlap(StrEnum):
    """Who computes while a message crosses a link."""

    NONE = "none"
    """No work goes on at either end: both wait for each other and for the message, as at a rendezvous."""
    RECEIVER = "receiver"
    """The sender: the receiver waits."""
    FULL = "full"
    """Both ends."""

    @property
    def words(self) -> str:
        """Who waits for a message, in words."""
        return {"none": "both ends wait", "receiver": "the receiver waits"}.get(self, "neither end waits")

    @staticmethod
    def least(found: Iterable["Overlap"]) -> "Overlap":
        """That of a way over several links, or of a link under a framework."""
        return min(found, key=tuple(Overlap).index, default=Overlap.FULL)


def overlap_named(text: str) -> Overlap:
    """The overlap of that name."""
    if text not in tuple(Overlap):
        raise BiremeError(f"There is no overlap {text!r}. {closest(text, tuple(Overlap))}")
    return Overlap(text)


@dataclass(frozen=True, slots=True)
class Link:
    """What carries `bytes_per_s`: each way at once if `full_duplex`, else in all.

    `back_bytes_per_s` is for a link that is not alike both ways: what it carries towards the devices that
    share it, where `bytes_per_s` is what it carries away from them. `overlap` says which end of it computes
    while a message crosses. `curve` has bytes of messages, and the seconds that one of each size takes alone,
    if small ones are slower than `latency_s` and `bytes_per_s` make them.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    full_duplex: bool = True
    back_bytes_per_s: float | None = None
    overlap: Overlap = Overlap.FULL
    curve: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_rate("bytes_per_s", self.bytes_per_s)
        _check_latency(self.latency_s)
        self._check_curve()
        if self.back_bytes_per_s is not None:
            _check_rate("back_bytes_per_s", self.back_bytes_per_s)
            if not self.full_duplex:
                raise BiremeError("A half duplex link is one for both ways: leave out back_bytes_per_s.")

    def _check_curve(self) -> None:
        before = (0, self.latency_s)
        for num_bytes, seconds in self.curve:
            if num_bytes <= before[0] or not before[1] <= seconds <= LONGEST_S:
                raise BiremeError(
                    f"The curve has {num_bytes} bytes in {seconds} s after {before[0]} in {before[1]} s. "
                    "Give larger messages one after the other, none faster than a smaller one or latency_s."
                )
            before = num_bytes, seconds

    def busy_bytes(self, num_bytes: float) -> float:
        """The bytes that the link carries at its full rate in the time that a message keeps it busy: the
        seconds of its curve without the latency, and at least its own bytes.

        Between the points of a curve seconds grow evenly. Past the last one they grow as `bytes_per_s`.
        """
        before = (0, self.latency_s)
        for point in self.curve:
            if num_bytes <= point[0]:
                share = (num_bytes - before[0]) / (point[0] - before[0])
                seconds = before[1] + share * (point[1] - before[1])
                return max(num_bytes, (seconds - self.latency_s) * self.bytes_per_s)
            before = point
        seconds = before[1] - self.latency_s
        return max(num_bytes, seconds * self.bytes_per_s + num_bytes - before[0])

    @property
    def into_bytes_per_s(self) -> float:
        """What it carries towards the devices that share it."""
        return self.bytes_per_s if self.back_bytes_per_s is None else self.back_bytes_per_s


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices of a server that share a link, or have one like the others."""

    name: str
    devices: tuple[int, ...]
    link: Link
    least: ClassVar = 1

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        _check_name(self.name, kind)
        if len(self.devices) < self.least:
            raise BiremeError(
                f"{self.name} joins {len(self.devices)} devices; a {kind} has at least {self.least}."
            )
        if len(set(self.devices)) < len(self.devices):
            raise BiremeError(f"{self.name} names a device twice. Leave out one of the two.")


class Bridge(_Group):
    """A PCIe host bridge or the like: all that its devices send and receive passes it, also among themselves.

    A device with lanes of its own is alone on its bridge; one without a bridge has nothing in its way.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Mesh(_Group):
    """NVLink or the like: devices that reach each other without the bridges.

    Every two have a cable of their own or, if `switched`, each has one port for all the others.
    """

    switched: bool = False
    least: ClassVar = 2

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.link.back_bytes_per_s is not None and not self.switched:
            raise BiremeError(
                f"The cables of {self.name} are alike both ways: leave out back_bytes_per_s, or make it "
                "switched."
            )


class Card(_Group):
    """A network card: all that its devices send to other servers and receive from there passes it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """What joins the servers; `bytes_per_s` is what it carries in all, None if more than the cards do."""

    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None:
            _check_rate("bytes_per_s", self.bytes_per_s)
        _check_latency(self.latency_s)


@dataclass(frozen=True, slots=True)
class Route:
    """A limit on the messages between two servers beside their cards and the switch, such as a line between
    two sites: away from the first server at `bytes_per_s` of the link, and back.
    """

    servers: tuple[str, str]
    link: Link

    def __post_init__(self) -> None:
        if self.servers[0] == self.servers[1]:
            raise BiremeError(f"A route joins two servers, not {self.servers[0]} with itself.")

    @property
    def name(self) -> str:
        """Such as `server0 – server1`."""
        return f"{self.servers[0]} – {self.servers[1]}"


def _check_rate(name: str, value: float) -> None:
    if not 0 < value <= MOST_BYTES_PER_S:
        raise BiremeError(f"{name} is {value}; it must be greater than 0 and at most {MOST_BYTES_PER_S:g}.")


def _check_latency(value: float) -> None:
    if not 0 <= value <= LONGEST_S:
        raise BiremeError(f"latency_s is {value}; it must be 0 to {LONGEST_S:g}.")


ASSUMED_CARD, ASSUMED_LINK = "assumed", Link(1.25e8, latency_s=2.5e-4)
"""The name and the link of a card of which nothing is known: 1 Gbit/s, and 0.5 ms between two hosts."""


# A server: a machine with devices, and the links within it and out of it.

WORDS = {"cuda": "gpu", "xpu": "xpu", "mps": "mps", "cpu": "cpu", "emulated": "emulated"}


def device_names(devices: Sequence[Device]) -> tuple[str, ...]:
    """What the devices of a server are called in it: gpu0, gpu1, cpu0, each kind with its own numbers."""
    seen = dict.fromkeys(WORDS, 0)
    names = []
    for device in devices:
        names.append(f"{WORDS[device.kind]}{seen[device.kind]}")
        seen[device.kind] += 1
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Server:
    """A machine with devices: each on at most one bridge and one card, each two in at most one mesh.

    `num_cores` are the cores that its processor devices share; with 0 each has those that it says.
    `host_memory_bytes` and `disk_bytes` are what its devices can page to, and `disk_bytes_per_s` is how fast
    the disk reads and writes; what is 0 is not known.
    """

    name: str
    devices: tuple[Device, ...]
    bridges: tuple[Bridge, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    cards: tuple[Card, ...] = ()
    num_cores: int = 0
    host_memory_bytes: int = 0
    disk_bytes: int = 0
    disk_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        _check_name(self.name, "server")
        if not self.devices:
            raise BiremeError(f"{self.name} has no devices; a server has at least one.")
        for name, device in zip(self.device_names, self.devices, strict=True):
            if device.memory_bytes <= 0:
                raise BiremeError(
                    f"{self.name}/{name} has memory_bytes = {device.memory_bytes}; without it no "
                    "plan can be checked."
                )
        self._check_links()

    @property
    def groups(self) -> "tuple[Bridge | Mesh | Card, ...]":
        """All its links."""
        return (*self.meshes, *self.bridges, *self.cards)

    def with_links(self, link: "Callable[[Bridge | Mesh | Card], Link]") -> "Server":
        """The server with another link in each of its groups."""
        return replace(
            self,
            bridges=tuple(replace(one, link=link(one)) for one in self.bridges),
            meshes=tuple(replace(one, link=link(one)) for one in self.meshes),
            cards=tuple(replace(one, link=link(one)) for one in self.cards),
        )

    @property
    def device_names(self) -> tuple[str, ...]:
        """What its devices are called."""
        return device_names(self.devices)

    def _check_links(self) -> None:
        names: set[str] = set()
        for group in self.groups:
            if group.name in names:
                raise BiremeError(f"{self.name} has two links named {group.name!r}. Rename one of them.")
            names.add(group.name)
            outside = [place for place in group.devices if not 0 <= place < len(self.devices)]
            if outside:
                raise BiremeError(
                    f"{group.name} of {self.name} joins device {outside[0]}; there are 0 to "
                    f"{len(self.devices) - 1}."
                )
        for kind, exclusive in (("bridges", self.bridges), ("cards", self.cards)):
            taken: set[int] = set()
            for group in exclusive:
                if twice := sorted(taken.intersection(group.devices)):
                    raise BiremeError(
                        f"{self.name}/{self.device_names[twice[0]]} is on two {kind}, so the path "
                        "of its bytes is ambiguous. Leave it on one."
                    )
                taken.update(group.devices)
        for one, other in combinations(self.meshes, 2):
            both = sorted(set(one.devices).intersection(other.devices))
            if len(both) > 1:
                first, second = (self.device_names[place] for place in both[:2])
                raise BiremeError(
                    f"{first} and {second} of {self.name} meet in two meshes, so the path of their bytes "
                    "is ambiguous. Leave them in one."
                )


# The way from one device to another, in lanes.
#
# ```
#  device ◀─mesh─▶ device ◀─bridge─▶ server ◀─card─▶ switch ◀─route─▶ ◀─card─▶ server ◀─bridge─▶ device
# ```
#
# Two devices of a mesh talk over it. All others of a server talk over their bridges, and devices of different
# servers over bridges, cards, the switch and the route of the two. A bridge that both ends are on is crossed
# up and down.


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, or both where they are one: what flows share. No two have the same name."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Ends:
    """A link as its devices see it: the lane away from them and the lane back, which may be one."""

    out: Lane
    into: Lane
    link: Link

    @staticmethod
    def of(name: str, link: Link) -> "_Ends":
        if not link.full_duplex:
            lane = Lane(name, link.bytes_per_s)
            return _Ends(lane, lane, link)
        out, into = Lane(f"{name} out", link.bytes_per_s), Lane(f"{name} in", link.into_bytes_per_s)
        return _Ends(out, into, link)


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a device is: its server and what of the links there is its own."""

    server: int
    name: str
    bridge: _Ends | None
    card: _Ends | None
    meshes: dict[int, _Ends | None]
    """By the mesh's place in the server: the device's port, None where it has a cable to every other one."""


def _sites(servers: Sequence[Server]) -> Iterator[_Site]:
    """Where each device of some servers is."""
    for number, server in enumerate(servers):
        bridge, card = _ends(server.name, server.bridges), _ends(server.name, server.cards)
        for place, name in enumerate(server.device_names):
            ports = {
                index: _Ends.of(f"{server.name}/{mesh.name} {name}", mesh.link) if mesh.switched else None
                for index, mesh in enumerate(server.meshes)
                if place in mesh.devices
            }
            yield _Site(number, name, bridge.get(place), card.get(place), ports)


def _ends(server: str, groups: Sequence[Bridge] | Sequence[Card]) -> dict[int, _Ends]:
    """The link that each device is on."""
    found: dict[int, _Ends] = {}
    for group in groups:
        ends = _Ends.of(f"{server}/{group.name}", group.link)
        found |= dict.fromkeys(group.devices, ends)
    return found


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
    routes: tuple[Route, ...] = ()
    _devices: tuple[PlacedDevice, ...] = field(init=False, repr=False, compare=False)
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)
    _sites: tuple[_Site, ...] = field(init=False, repr=False, compare=False)
    _between: dict[tuple[int, int], _Ends] = field(init=False, repr=False, compare=False)
    """The routes of pairs of servers, as the first of the two sees them."""

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
        self._check_routes(seen)
        devices = tuple(
            PlacedDevice(number, place, f"{server.name}/{name}", device)
            for number, server in enumerate(self.servers)
            for place, (name, device) in enumerate(zip(server.device_names, server.devices, strict=True))
        )
        object.__setattr__(self, "_devices", devices)
        object.__setattr__(self, "_numbers", {placed.name: n for n, placed in enumerate(devices)})
        object.__setattr__(self, "_sites", tuple(_sites(self.servers)))
        places = {server.name: place for place, server in enumerate(self.servers)}
        between = {}
        for route in self.routes:
            one, other = (places[name] for name in route.servers)
            ends = _Ends.of(route.name, route.link)
            between[one, other], between[other, one] = ends, _Ends(ends.into, ends.out, ends.link)
        object.__setattr__(self, "_between", between)

    def _check_routes(self, names: set[str]) -> None:
        pairs: set[frozenset[str]] = set()
        for route in self.routes:
            for name in route.servers:
                if name not in names:
                    raise BiremeError(f"A route names the server {name!r}. {closest(name, names)}")
            if frozenset(route.servers) in pairs:
                raise BiremeError(f"There are two routes {route.name}. Leave out one of them.")
            pairs.add(frozenset(route.servers))

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

    def with_links(self, link: Callable[[Server | None, "Bridge | Mesh | Card | Route"], Link]) -> "Cluster":
        """The cluster with other links: those of the groups of each server, and those of the routes."""
        servers = tuple(server.with_links(partial(link, server)) for server in self.servers)
        routes = tuple(replace(one, link=link(None, one)) for one in self.routes)
        return replace(self, servers=servers, routes=routes)

    def with_devices(self, change: Callable[[Device], Device]) -> "Cluster":
        """The cluster with each device changed, in the order of their numbers."""
        servers = (replace(server, devices=tuple(map(change, server.devices))) for server in self.servers)
        return replace(self, servers=tuple(servers))

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

    def _mesh_of(self, a: _Site, b: _Site) -> int | None:
        """The mesh of a server that two devices are in, by its place there."""
        common = a.meshes.keys() & b.meshes.keys() if a.server == b.server else set()
        return next(iter(common), None)

    def path(self, source: int, destination: int) -> tuple[Lane, ...]:
        """The lanes that a flow between two devices crosses in their order, none if nothing is in its way."""
        if source == destination:
            return ()
        a, b = self._sites[source], self._sites[destination]
        if (index := self._mesh_of(a, b)) is not None:
            out, into = a.meshes[index], b.meshes[index]
            if out is not None and into is not None:
                return (out.out, into.into)
            return (self._cable(a, b, self.servers[a.server].meshes[index], forth=source < destination),)
        lanes = [] if a.bridge is None else [a.bridge.out]
        if a.server != b.server:
            assert a.card is not None  # checked in _check_reached
            assert b.card is not None
            rate = None if self.switch is None else self.switch.bytes_per_s
            route = self._between.get((a.server, b.server))
            lanes.append(a.card.out)
            lanes += [] if rate is None else [Lane("switch", rate)]
            lanes += [] if route is None else [route.out]
            lanes.append(b.card.into)
        if b.bridge is not None and b.bridge.into not in lanes:  # both ways of a half duplex one are one lane
            lanes.append(b.bridge.into)
        return tuple(lanes)

    def _cable(self, a: _Site, b: _Site, mesh: Mesh, *, forth: bool) -> Lane:
        where = f"{self.servers[a.server].name}/{mesh.name}"
        if mesh.link.full_duplex:
            return Lane(f"{where} {a.name} → {b.name}", mesh.link.bytes_per_s)
        one, other = (a, b) if forth else (b, a)
        return Lane(f"{where} {one.name} ↔ {other.name}", mesh.link.bytes_per_s)

    def bandwidth(self, source: int, destination: int) -> float:
        """Bytes a second of a flow that meets no other; infinite where nothing is in its way."""
        return min((lane.bytes_per_s for lane in self.path(source, destination)), default=math.inf)

    def latency(self, source: int, destination: int) -> float:
        """The seconds a message is late whatever its size: those of all links it crosses, added up."""
        total_s = sum(link.latency_s for link in self.links(source, destination))
        if self.switch is not None and self._sites[source].server != self._sites[destination].server:
            total_s += self.switch.latency_s
        return total_s

    def links(self, source: int, destination: int) -> tuple[Link, ...]:
        """All links between two devices; one that is crossed up and down is there once."""
        if source == destination:
            return ()
        a, b = self._sites[source], self._sites[destination]
        if (index := self._mesh_of(a, b)) is not None:
            return (self.servers[a.server].meshes[index].link,)
        ends = [a.bridge, None if b.bridge is a.bridge else b.bridge]
        if a.server != b.server:
            ends += [a.card, self._between.get((a.server, b.server)), b.card]
        return tuple(end.link for end in ends if end is not None)

    def curved(self, source: int, destination: int) -> tuple[Link, ...]:
        """The links between two devices on which the size of a message decides how fast it goes."""
        return tuple(link for link in self.links(source, destination) if link.curve)

    @property
    def has_curves(self) -> bool:
        """Whether any link has a curve."""
        groups = [group for server in self.servers for group in server.groups]
        return any(group.link.curve for group in (*groups, *self.routes))

    def overlap(self, source: int, destination: int) -> Overlap:
        """Which end computes while a message is on its way: as on the link that lets the fewest."""
        return Overlap.least(link.overlap for link in self.links(source, destination))


def link_notes(cluster: Cluster, servers: Collection[int] = ()) -> list[str]:
    """A sentence on the servers, of these or of all, whose links to other hosts are assumed; none if all are
    known.
    """
    names = [
        server.name
        for number, server in enumerate(cluster.servers)
        if number in (servers or range(len(cluster.servers)))
        and any((card.name, card.link) == (ASSUMED_CARD, ASSUMED_LINK) for card in server.cards)
    ]
    if not names:
        return []
    return [
        f"The links of {', '.join(names)} are unknown; plans assume 1 Gbit/s and 0.5 ms between hosts. "
        "`bireme cluster probe` measures them."
    ]
