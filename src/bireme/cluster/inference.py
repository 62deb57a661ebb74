"""The structures that may join devices, and which of them explains what was measured.

Inside a server these are cables between every two devices, a port for each device, and bridges that several
share. Which devices share one is read off flows side by side. Between servers they are network cards, one
for all devices of a server or one for some, routes of pairs of servers that are slower with each other than
with the rest, and a switch that may be the narrow place. Each but routes in full and in half duplex. A link
that is never the slowest on any way cannot be found.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import TypeVar

import numpy as np

from bireme.cluster.cluster import (
    MOST_BYTES_PER_S,
    Bridge,
    Card,
    Cluster,
    Lane,
    Link,
    Mesh,
    Route,
    Server,
    Switch,
)
from bireme.cluster.probed import Experiment, Flow, Measurements

# Flows that meet on lanes: how fast each of them goes when all want to go as fast as they can.
#
# Rates are max-min fair: the lane with the least for each of its flows settles their rates, then the next
# one. This is a moment, without messages or time; a network in time is for who simulates.

_Lane = TypeVar("_Lane", bound=Hashable)


def fair_rates(paths: Sequence[Sequence[_Lane]], capacity: Mapping[_Lane, float]) -> list[float]:
    """The bytes a second of each flow; infinite where it crosses no lane."""
    rates = [math.inf] * len(paths)
    on_lane: dict[_Lane, list[int]] = {}
    for flow, path in enumerate(paths):
        for lane in dict.fromkeys(path):
            on_lane.setdefault(lane, []).append(flow)
    room = {lane: capacity[lane] for lane in on_lane}
    waiting = {lane: len(flows) for lane, flows in on_lane.items()}
    while waiting:
        scarcest = min(waiting, key=lambda lane: room[lane] / waiting[lane])
        rate = room[scarcest] / waiting[scarcest]
        if rate == math.inf:
            break
        for flow in on_lane[scarcest]:
            if rates[flow] < math.inf:
                continue
            rates[flow] = rate
            for lane in dict.fromkeys(paths[flow]):
                room[lane] = max(room[lane] - rate, 0.0)
                waiting[lane] -= 1
        waiting = {lane: count for lane, count in waiting.items() if count}
    return rates


# The latencies of links, from those of the ways that lead over them.


def _with_latencies(shape: Cluster, latency_s: Mapping[tuple[int, int], float]) -> Cluster:
    """The latencies of the links, such that those of all ways come out as nearly as can be."""
    links = [_key(server, group) for server in shape.servers for group in server.groups]
    links += [_key(None, route) for route in shape.routes]
    if not links:
        return shape
    pairs = list(latency_s)
    crossed = np.zeros((len(pairs), len(links)))
    for column, key in enumerate(links):
        probe = _late(shape, {key: 1.0})
        crossed[:, column] = [probe.latency(*pair) for pair in pairs]
    seconds = _least_squares(crossed, np.array([latency_s[pair] for pair in pairs]))
    return _late(shape, dict(zip(links, seconds, strict=True)))


def _late(shape: Cluster, latency_s: dict[tuple[str, str], float]) -> Cluster:
    """The structure with these latencies, and none elsewhere."""
    return shape.with_links(
        lambda server, group: replace(group.link, latency_s=latency_s.get(_key(server, group), 0.0))
    )


def _key(server: Server | None, group: Bridge | Mesh | Card | Route) -> tuple[str, str]:
    return "" if server is None else server.name, group.name


_SWEEPS = 4000


def _least_squares(
    matrix: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
    wanted: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> list[float]:
    """What makes `matrix` times it most nearly what is wanted, with nothing below zero; one at a time."""
    square, target = matrix.T @ matrix, matrix.T @ wanted
    known = np.zeros(len(target))
    for _ in range(_SWEEPS):
        before = known.copy()
        for column in range(len(known)):
            if square[column, column] > 0:
                rest = target[column] - square[column] @ known
                known[column] = max(known[column] + rest / square[column, column], 0.0)
        if np.abs(known - before).max(initial=0.0) <= 1e-12 * np.abs(known).max(initial=0.0):
            break
    return [float(one) for one in known]


_TOLERANCE = 0.10
"""The mean part by which a structure may miss what was measured, for a simpler one to be taken."""

_EXPLAINED = 1e-3
"""Nothing else is looked for where a structure misses no more."""

_SAME = 0.05
"""Figures that differ by no more are taken for equal, so that equal devices and links are known as such."""

_SHARING = 0.8
"""Flows that together come to less than this part of what each does alone share something."""

_ASYMMETRIC = 1.25
"""Times as fast one way as the other."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """The cluster, by which mean part it misses the experiments, and in sentences what stands out."""

    cluster: Cluster
    error: float
    notes: tuple[str, ...]


def infer(found: Measurements, *, same: float = _SAME) -> Inferred:
    """The simplest cluster that explains what was measured; what differs by less than `same` is equal."""
    servers = found.servers()
    inside: dict[str, Server] = {}
    for name, own in servers.items():
        bare = Server(name, tuple(found.devices[device] for device in own))
        inside[name] = _inside(bare, own, found)
    best = Cluster(tuple(inside.values())) if len(inside) == 1 else _with_cards(inside, servers, found)
    tidy = _with_curves(_tidied(_with_latencies(best, found.latency_s), same), found.by_size)
    error = _error(tidy, found.experiments)
    return Inferred(tidy, error, tuple(_notes(found, error)))


def _inside(bare: Server, own: Sequence[int], found: Measurements) -> Server:
    """How the devices of a server are joined, from the experiments that stay in it."""
    if len(own) == 1:
        return bare
    place = {device: number for number, device in enumerate(own)}
    experiments = [
        Experiment(tuple((place[a], place[b]) for a, b in one.flows), one.bytes_per_s)
        for one in found.experiments
        if all(a in place and b in place for a, b in one.flows)
    ]
    shapes = [Cluster((server,)) for server in _joined(bare, experiments)]
    best = _simplest([_fitted(shape, experiments) for shape in shapes], experiments)
    return best.servers[0]


_Grouping = tuple[tuple[int, ...], ...]
"""Devices of a server, each in one part."""

_ANY = 1.0
"""A bandwidth that is yet to be found."""


def _joined(bare: Server, experiments: Sequence[Experiment]) -> Iterator[Server]:
    """The server with each structure that is looked for, the simplest first."""
    everyone = tuple(range(len(bare.devices)))
    pairs = list(combinations(everyone, 2))
    shapes = [(everyone,)] if len(pairs) == 1 else [(everyone,), pairs, (everyone,)]
    for number, full in product(range(len(shapes)), (True, False)):
        link, is_port = Link(_ANY, 0.0, full), number == 2
        meshes = (Mesh(f"mesh{n}", own, link, is_port) for n, own in enumerate(shapes[number]))
        yield replace(bare, meshes=tuple(meshes))
    for full, groups in product((True, False), _groupings(len(everyone), experiments)):
        yield replace(
            bare,
            bridges=tuple(Bridge(f"bridge{n}", own, Link(_ANY, 0.0, full)) for n, own in enumerate(groups)),
        )


def _groupings(num_devices: int, experiments: Sequence[Experiment]) -> Iterator[_Grouping]:
    """Which devices may share a bridge or card: none, all, and those that slow each other down."""
    alone = {one.flows[0]: one.bytes_per_s[0] for one in experiments if len(one.flows) == 1}
    singles = tuple((one,) for one in range(num_devices))
    found = [
        singles,
        (tuple(range(num_devices)),),
        *(_parts(num_devices, _sharers(experiments, alone, end)) for end in (0, 1)),
    ]
    if num_devices <= _MOST_TRIED:
        found += sorted(_partitions(num_devices), key=len)
    yield from dict.fromkeys(found)


_MOST_TRIED = 5
"""So few devices are put together in every way, of which five have 52."""


def _partitions(num_devices: int) -> Iterator[_Grouping]:
    if num_devices == 0:
        yield ()
        return
    last = num_devices - 1
    for parts in _partitions(last):
        yield (*parts, (last,))
        for place, part in enumerate(parts):
            yield (*parts[:place], (*part, last), *parts[place + 1 :])


def _sharers(
    experiments: Sequence[Experiment], alone: dict[tuple[int, int], float], end: int
) -> set[tuple[int, int]]:
    """Pairs of devices whose flows slowed each other down whatever was at the other end."""
    slowed: dict[tuple[int, int], list[bool]] = {}
    for one in experiments:
        if len(one.flows) != 2 or len({*one.flows[0], *one.flows[1]}) < 4:
            continue
        a, b = sorted(flow[end] for flow in one.flows)
        sum_alone = sum(alone[flow] for flow in one.flows)
        slowed.setdefault((a, b), []).append(sum(one.bytes_per_s) < _SHARING * sum_alone)
    return {pair for pair, verdicts in slowed.items() if all(verdicts)}


def _parts(num_devices: int, together: set[tuple[int, int]]) -> _Grouping:
    """The devices, those that are together, directly or through others, in one part."""
    part = list(range(num_devices))
    for a, b in combinations(range(num_devices), 2):
        if (a, b) in together:
            part = [part[a] if one == part[b] else one for one in part]
    return tuple(tuple(d for d in range(num_devices) if part[d] == one) for one in dict.fromkeys(part))


def _with_cards(inside: dict[str, Server], members: dict[str, list[int]], found: Measurements) -> Cluster:
    """All servers with their cards and the switch: alike first, then each in its own way."""
    ways = {
        name: [
            tuple(Card(f"card{n}", part, Link(_ANY, 0.0, full)) for n, part in enumerate(parts))
            for full, parts in product((True, False), _card_groupings(own, found))
        ]
        for name, own in members.items()
    }
    experiments = [
        one for one in found.experiments if any(found.hosts[a] != found.hosts[b] for a, b in one.flows)
    ]

    routes = _slow_pairs(members, found)

    def shape(chosen: dict[str, int], limited: bool) -> Cluster:
        servers = (
            replace(server, cards=ways[name][min(chosen[name], len(ways[name]) - 1)])
            for name, server in inside.items()
        )
        switch = Switch(_ANY if limited else None)
        return _fitted(Cluster(tuple(servers), switch, routes), found.experiments)

    shapes: list[Cluster] = []
    for limited in (False, True):
        shapes += [
            shape(chosen, limited) for chosen in _choices({name: len(way) for name, way in ways.items()})
        ]
        errors = [_error(one, experiments) for one in shapes]
        if min(errors) < _EXPLAINED:
            break
    return _simplest(shapes, found.experiments)


def _slow_pairs(members: dict[str, list[int]], found: Measurements) -> tuple[Route, ...]:
    """The routes between servers that are slower with each other than with any others, one way or both."""
    best = {
        (one, other): max(found.alone(a, b) for a in members[one] for b in members[other])
        for one, other in permutations(members, 2)
    }
    out = {name: max(best[name, other] for other in members if other != name) for name in members}
    into = {name: max(best[other, name] for other in members if other != name) for name in members}
    return tuple(
        Route((one, other), Link(best[one, other], back_bytes_per_s=best[other, one]))
        for one, other in combinations(members, 2)
        if any(best[a, b] < _SHARING * min(out[a], into[b]) for a, b in ((one, other), (other, one)))
    )


_MOST_CHOICES = 600


def _choices(num_ways: dict[str, int]) -> Iterator[dict[str, int]]:
    """Which way each server may be: all alike, one unlike the others, all ways where those are few."""
    alike = [dict.fromkeys(num_ways, number) for number in range(max(num_ways.values()))]
    yield from alike
    if math.prod(num_ways.values()) <= _MOST_CHOICES:
        yield from (dict(zip(num_ways, one, strict=True)) for one in product(*map(range, num_ways.values())))
        return
    for one in alike:
        for name, count in num_ways.items():
            yield from ({**one, name: number} for number in range(count))


def _card_groupings(own: Sequence[int], found: Measurements) -> list[_Grouping]:
    place = {device: number for number, device in enumerate(own)}
    everyone = tuple(range(len(own)))
    alone = {one.flows[0]: one.bytes_per_s[0] for one in found.experiments if len(one.flows) == 1}
    outside = [
        one
        for one in found.experiments
        if all((a in place) != (b in place) for a, b in one.flows)
        and len({a in place for a, _ in one.flows}) == 1
    ]
    groupings = [(everyone,), tuple((one,) for one in everyone)]
    for end in (0, 1):
        sharers = _sharers([one for one in outside if one.flows[0][end] in place], alone, end)
        shared = {(place[a], place[b]) for a, b in sharers}
        groupings.append(_parts(len(own), shared))
    return list(dict.fromkeys(groupings))


def _fitted(shape: Cluster, experiments: Sequence[Experiment]) -> Cluster:
    """The structure whose lanes carry the most that was seen to cross them."""
    ways, most = _ways(shape, experiments), dict[str, float]()
    for one in experiments:
        crossed: defaultdict[str, float] = defaultdict(float)
        for flow, rate in zip(one.flows, one.bytes_per_s, strict=True):
            for lane in ways[flow]:
                crossed[lane.name] += rate
        for lane_name, total in crossed.items():
            most[lane_name] = max(most.get(lane_name, 0.0), total)
    servers = tuple(_server_with(server, most) for server in shape.servers)
    switch = shape.switch
    if switch is not None and switch.bytes_per_s is not None:
        switch = replace(switch, bytes_per_s=min(most.get("switch", _ANY), MOST_BYTES_PER_S))
    return replace(shape, servers=servers, switch=switch)


def _server_with(server: Server, most: dict[str, float]) -> Server:
    def link(group: Bridge | Mesh | Card) -> Link:
        if isinstance(group, Mesh):
            return cable(group)
        name = named(group)
        if not group.link.full_duplex:
            return replace(group.link, bytes_per_s=most.get(name, _ANY))
        out, into = (most.get(f"{name} {way}", 0.0) for way in ("out", "in"))
        # What nothing ever crossed one way is as fast as the other way.
        out, into = out or into or _ANY, into or out or _ANY
        return replace(group.link, bytes_per_s=out, back_bytes_per_s=None if into == out else into)

    def cable(mesh: Mesh) -> Link:
        seen = {name: rate for name, rate in most.items() if name.startswith(f"{named(mesh)} ")}
        if mesh.switched and mesh.link.full_duplex:
            ways = {way: max(r for n, r in seen.items() if n.endswith(f" {way}")) for way in ("out", "in")}
            back = None if ways["in"] == ways["out"] else ways["in"]
            return replace(mesh.link, bytes_per_s=ways["out"], back_bytes_per_s=back)
        return replace(mesh.link, bytes_per_s=(max if mesh.switched else statistics.median)(seen.values()))

    def named(group: Bridge | Card | Mesh) -> str:
        return f"{server.name}/{group.name}"

    return server.with_links(link)


def _simplest(shapes: Sequence[Cluster], experiments: Sequence[Experiment]) -> Cluster:
    """The first that explains the experiments about as well as any does."""
    errors = [_error(shape, experiments) for shape in shapes]
    enough = max(_TOLERANCE, 1.1 * min(errors))
    exact = [error for error in errors if error < 1e-6]
    if exact:
        enough = 1e-6
    return next(shape for shape, error in zip(shapes, errors, strict=True) if error <= enough)


def _error(shape: Cluster, experiments: Sequence[Experiment]) -> float:
    """The mean part by which it misses a flow, as the logarithm has it; experiments count alike."""
    ways = _ways(shape, experiments)
    number: dict[Lane, int] = {}  # numbers are quicker to look up
    numbered = {
        flow: [number.setdefault(lane, len(number)) for lane in lanes] for flow, lanes in ways.items()
    }
    capacity = {place: lane.bytes_per_s for lane, place in number.items()}
    missed = []
    for one in experiments:
        rates = fair_rates([numbered[flow] for flow in one.flows], capacity)
        pairs = zip(rates, one.bytes_per_s, strict=True)
        missed.append(statistics.fmean(abs(math.log(rate / seen)) for rate, seen in pairs))
    return statistics.fmean(missed) if missed else 0.0


def _ways(shape: Cluster, experiments: Sequence[Experiment]) -> dict[Flow, tuple[Lane, ...]]:
    """The lanes of each flow that was measured."""
    return {flow: shape.path(*flow) for flow in {flow for one in experiments for flow in one.flows}}


def _tidied(cluster: Cluster, same: float) -> Cluster:
    """Links and speeds that hardly differ made equal, so that equal devices are known to be alike."""
    groups = [group.link for server in cluster.servers for group in server.groups]
    groups += [route.link for route in cluster.routes]
    rate = _evened([one for link in groups for one in (link.bytes_per_s, link.into_bytes_per_s)], same)
    late = _evened([link.latency_s for link in groups], same)
    speed: dict[str, dict[float, float]] = {}
    devices = [placed.device for placed in cluster.devices()]
    for name in {device.name for device in devices}:
        speed[name] = _evened([device.speed for device in devices if device.name == name], same)
    # All speeds are relative to the first device's, which stays what it is.
    first = devices[0]
    of_first = speed[first.name][first.speed]
    speed[first.name] = {
        one: first.speed if even == of_first else even for one, even in speed[first.name].items()
    }

    def link(_server: Server | None, group: Bridge | Mesh | Card | Route) -> Link:
        one = group.link
        out, into = rate[one.bytes_per_s], rate[one.into_bytes_per_s]
        back = None if out == into or not one.full_duplex else into
        return Link(out, late[one.latency_s], one.full_duplex, back)

    even = cluster.with_links(link)
    servers = tuple(
        _bundled(replace(one, devices=tuple(replace(d, speed=speed[d.name][d.speed]) for d in one.devices)))
        for one in even.servers
    )
    return replace(even, servers=servers)


def _with_curves(cluster: Cluster, by_size: Mapping[tuple[int, int], Sequence[tuple[int, float]]]) -> Cluster:
    """The cluster with a curve on each link that is the slowest of a way on which messages of some size take
    notably longer than its latency and bandwidth explain.
    """
    seen: defaultdict[Link, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ends, points in by_size.items():
        links = cluster.links(*ends)
        if links:
            slowest = min(links, key=lambda link: min(link.bytes_per_s, link.into_bytes_per_s))
            for num_bytes, seconds in points:
                seen[slowest][num_bytes].append(seconds - cluster.latency(*ends) + slowest.latency_s)
    curves = {link: _curve(link, measured) for link, measured in seen.items()}

    return cluster.with_links(lambda _, group: replace(group.link, curve=curves.get(group.link, ())))


def _curve(link: Link, measured: Mapping[int, Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """The medians of the measured seconds, none less than for a smaller message; no points at all if latency
    and bandwidth explain them.
    """
    points, least_s, is_slower = [], link.latency_s, False
    for num_bytes in sorted(measured):
        least_s = max(least_s, float(f"{statistics.median(measured[num_bytes]):.3g}"))
        points.append((num_bytes, least_s))
        is_slower |= least_s > _ASYMMETRIC * (link.latency_s + num_bytes / link.bytes_per_s)
    return tuple(points) if is_slower else ()


def _bundled(server: Server) -> Server:
    """Equal ports of all devices as one switched mesh, equal cables of all pairs as one mesh."""
    everyone = tuple(range(len(server.devices)))
    links = {bridge.link for bridge in server.bridges}
    each_alone = len(server.bridges) == len(everyone) > 1
    if each_alone and len(links) == 1 and next(iter(links)).full_duplex and not server.cards:
        (one,) = links
        # A port's latency counts at both ends, a mesh's once.
        mesh = Mesh("mesh0", everyone, replace(one, latency_s=2 * one.latency_s), switched=True)
        return replace(server, bridges=(), meshes=(mesh,))
    cables = {mesh.link for mesh in server.meshes}
    if len(server.meshes) == len(list(combinations(everyone, 2))) > 1 and len(cables) == 1:
        return replace(server, meshes=(Mesh("mesh0", everyone, next(iter(cables))),))
    return server


def _evened(values: Sequence[float], same: float) -> dict[float, float]:
    """For each value the median of those that hardly differ from the least of them."""
    found: dict[float, float] = {}
    run: list[float] = []
    for value in [*sorted(values), math.inf]:
        if run and value > run[0] * (1 + same):
            middle = run[0] if run[0] == run[-1] else statistics.median(run)
            # Nothing is measured to more than a few digits.
            found |= dict.fromkeys(run, float(f"{middle:.4g}") if same else middle)
            run = []
        run.append(value)
    return found


def _notes(found: Measurements, error: float) -> Iterator[str]:
    """What a person should know who looks at the cluster."""
    for a, b in combinations(range(len(found.hosts)), 2):
        forth, back = found.alone(a, b), found.alone(b, a)
        if max(forth, back) > _ASYMMETRIC * min(forth, back):
            yield (
                f"The way from device {a} to {b} carries {forth / 1e9:.3g} GB/s, and back {back / 1e9:.3g} "
                "GB/s."
            )
    if error > _TOLERANCE:
        yield (
            f"The links explain the measurements only to {error:.0%}. Something else used them, or they are "
            "connected in a way that this file cannot describe. Probe again, for longer, or edit the file."
        )
