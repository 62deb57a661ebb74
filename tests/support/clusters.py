"""Clusters for property tests: any that can be described, and small ones with many equal devices."""

from itertools import pairwise

from hypothesis import strategies as st

from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Overlap, Server, Switch
from bireme.cluster.device import Device

__all__ = ["clusters", "few"]

RATES = st.floats(1e-3, 1e18)
LATENCIES = st.floats(0, 3600)
FIGURES = st.one_of(st.just(0.0), st.floats(1.0, 1e16))
SPEEDS = st.one_of(st.none(), st.floats(1e-3, 1e6))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)


@st.composite
def links(draw: st.DrawFn, *, one_way: bool = True) -> Link:
    full = draw(st.booleans())
    back = draw(st.one_of(st.none(), RATES)) if full and one_way else None
    return Link(draw(RATES), draw(LATENCIES), full, back, draw(st.sampled_from(Overlap)))


@st.composite
def devices(draw: st.DrawFn) -> Device:
    return Device(
        draw(st.text(max_size=8)),
        draw(st.sampled_from(["cpu", "cuda", "emulated"])),
        draw(st.integers(1, 2**50)),
        draw(FIGURES),
        draw(FIGURES),
        draw(FIGURES),
        draw(st.integers(0, 1000)),
        draw(st.floats(1e-3, 1e6)),
        draw(st.one_of(st.just(0.0), st.floats(0.5, 1e5))),
        update_speed=draw(SPEEDS),
        host_speed=draw(SPEEDS),
        process_bytes=draw(st.one_of(st.none(), st.integers(0, 2**40))),
    )


@st.composite
def parts_of(
    draw: st.DrawFn, num_devices: int, least: int, *, everyone: bool = False
) -> list[tuple[int, ...]]:
    """Sets of devices that have none in common; all devices are in one of them if `everyone`."""
    order = draw(st.permutations(range(num_devices)))
    used = num_devices if everyone else draw(st.integers(0, num_devices))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, used - 1)), max_size=3)))
    bounds = [0, *(cut for cut in cuts if cut < used), used]
    found = [tuple(order[a:b]) for a, b in pairwise(bounds)]
    return [part for part in found if len(part) >= least]


@st.composite
def servers(draw: st.DrawFn, name: str, *, everyone_on_a_card: bool) -> Server:
    kinds = draw(st.lists(st.tuples(devices(), st.integers(1, 3)), min_size=1, max_size=2))
    own = tuple(device for device, count in kinds for _ in range(count))
    bridges = [Bridge(f"bridge{n}", p, draw(links())) for n, p in enumerate(draw(parts_of(len(own), 1)))]
    meshes = []
    for number, part in enumerate(draw(parts_of(len(own), 2))):
        switched = draw(st.booleans())
        meshes.append(Mesh(f"mesh{number}", part, draw(links(one_way=switched)), switched))
    cards = [
        Card(f"eth{n}", part, draw(links()))
        for n, part in enumerate(draw(parts_of(len(own), 1, everyone=everyone_on_a_card)))
    ]
    return Server(name, own, tuple(bridges), tuple(meshes), tuple(cards))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any cluster; often with servers that are equal, and with names that nearly follow a count."""
    several = draw(st.booleans())
    kinds = draw(st.integers(1, 3)) if several else 1
    found: list[Server] = []
    for _ in range(kinds):
        first = draw(servers("first", everyone_on_a_card=several))
        for _ in range(draw(st.integers(1, 3)) if several else 1):
            name = draw(
                st.one_of(st.just(f"server{len(found)}"), st.sampled_from(["a", "a0", "a1", "a2"]), NAMES)
            )
            if name in {server.name for server in found}:
                name = f"other{len(found)}"
            found.append(Server(name, first.devices, first.bridges, first.meshes, first.cards))
    switch = draw(st.one_of(st.none(), st.builds(Switch, st.one_of(st.none(), RATES), LATENCIES)))
    return Cluster(tuple(found), switch)


@st.composite
def few(draw: st.DrawFn) -> Cluster:
    """A cluster of few devices of two kinds, so that many are alike."""
    kinds = [Device(word, "emulated", 1) for word in ("one", "other")]
    rates = st.sampled_from([1e9, 2e9])
    found = []
    for number in range(draw(st.integers(1, 2))):
        own = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))
        parts = draw(parts_of(len(own), 1))
        bridges = [Bridge(f"b{n}", part, Link(draw(rates))) for n, part in enumerate(parts)]
        meshes = [Mesh(f"m{n}", part, Link(1e9)) for n, part in enumerate(draw(parts_of(len(own), 2)))]
        everyone = draw(parts_of(len(own), 1, everyone=True))
        cards = [Card(f"c{n}", part, Link(draw(rates))) for n, part in enumerate(everyone)]
        found.append(Server(f"s{number}", own, tuple(bridges), tuple(meshes), tuple(cards)))
    return Cluster(tuple(found))
