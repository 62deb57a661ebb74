"""The way from one device to another, in lanes.

```
 device ◀──mesh──▶ device ◀──bridge──▶ server ◀──card──▶ switch ◀──card──▶ server ◀──bridge──▶ device
```

Two devices of a mesh talk over it. All others of a server talk over their bridges, and devices of different
servers over bridges, cards and the switch. A bridge that both ends are on is crossed up and down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.cluster.links import Bridge, Card, Link, Mesh, Switch
from bireme.cluster.server import Server

__all__ = ["Lane", "Routes"]


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
    latency_s: float

    @staticmethod
    def of(name: str, link: Link) -> "_Ends":
        if not link.full_duplex:
            lane = Lane(name, link.bytes_per_s)
            return _Ends(lane, lane, link.latency_s)
        return _Ends(
            Lane(f"{name} out", link.bytes_per_s), Lane(f"{name} in", link.into_bytes_per_s), link.latency_s
        )


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a device is: its server and what of the links there is its own."""

    server: int
    name: str
    bridge: _Ends | None
    card: _Ends | None
    meshes: dict[int, _Ends | None]
    """By the mesh's place in the server: the device's port, None where it has a cable to every other one."""


@dataclass(frozen=True, slots=True)
class Routes:
    """All ways in a cluster."""

    servers: Sequence[Server]
    switch: Switch | None
    switch_lane: tuple[Lane, ...]
    sites: tuple[_Site, ...]

    @staticmethod
    def over(servers: Sequence[Server], switch: Switch | None) -> "Routes":
        """The ways between all devices of some servers."""
        sites: list[_Site] = []
        for number, server in enumerate(servers):
            names = server.device_names
            bridge, card = _ends(server.name, server.bridges), _ends(server.name, server.cards)
            for place, name in enumerate(names):
                ports = {
                    index: _Ends.of(f"{server.name}/{mesh.name} {name}", mesh.link) if mesh.switched else None
                    for index, mesh in enumerate(server.meshes)
                    if place in mesh.devices
                }
                sites.append(_Site(number, name, bridge.get(place), card.get(place), ports))
        total = None if switch is None else switch.bytes_per_s
        return Routes(tuple(servers), switch, () if total is None else (Lane("switch", total),), tuple(sites))

    def path(self, source: int, destination: int) -> tuple[Lane, ...]:
        """The lanes from one device to another, in the order they are crossed."""
        if source == destination:
            return ()
        a, b = self.sites[source], self.sites[destination]
        if a.server == b.server and (common := a.meshes.keys() & b.meshes.keys()):
            (index,) = common
            out, into = a.meshes[index], b.meshes[index]
            if out is not None and into is not None:
                return (out.out, into.into)
            return (self._cable(a, b, self.servers[a.server].meshes[index], forth=source < destination),)
        lanes = [] if a.bridge is None else [a.bridge.out]
        if a.server != b.server:
            assert a.card is not None  # the cluster has seen to it
            assert b.card is not None
            lanes += [a.card.out, *self.switch_lane, b.card.into]
        if b.bridge is not None and b.bridge.into not in lanes:  # both ways of a half duplex one are one lane
            lanes.append(b.bridge.into)
        return tuple(lanes)

    def latency(self, source: int, destination: int) -> float:
        """The seconds of all links between two devices; a link that is crossed up and down counts once."""
        if source == destination:
            return 0.0
        a, b = self.sites[source], self.sites[destination]
        if a.server == b.server and (common := a.meshes.keys() & b.meshes.keys()):
            (index,) = common
            return self.servers[a.server].meshes[index].link.latency_s
        total_s = sum(end.latency_s for end in dict.fromkeys((a.bridge, b.bridge)) if end is not None)
        if a.server != b.server:
            total_s += sum(end.latency_s for end in (a.card, b.card) if end is not None)
            total_s += 0.0 if self.switch is None else self.switch.latency_s
        return total_s

    def _cable(self, a: _Site, b: _Site, mesh: Mesh, *, forth: bool) -> Lane:
        where = f"{self.servers[a.server].name}/{mesh.name}"
        if mesh.link.full_duplex:
            return Lane(f"{where} {a.name} → {b.name}", mesh.link.bytes_per_s)
        one, other = (a, b) if forth else (b, a)
        return Lane(f"{where} {one.name} ↔ {other.name}", mesh.link.bytes_per_s)


def _ends(server: str, groups: Sequence[Bridge] | Sequence[Card]) -> dict[int, _Ends]:
    """The link that each device is on."""
    found: dict[int, _Ends] = {}
    for group in groups:
        ends = _Ends.of(f"{server}/{group.name}", group.link)
        found |= dict.fromkeys(group.devices, ends)
    return found
