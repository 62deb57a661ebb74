"""From measurements to a cluster: those of a known one give its bandwidths and sharing back."""

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Server, Switch
from bireme.cluster.cluster_file import read_cluster, save_cluster
from bireme.cluster.device import Device
from bireme.cluster.inference import fair_rates, infer
from bireme.cluster.probed import Experiment, Measurements, experiments_for
from bireme.errors import BiremeError
from bireme.simulate.network import Network, Traffic, Wire
from bireme.simulate.network import Path as Way
from tests.support.clusters import parts_of
from tests.support.extent import examples

RATES = st.sampled_from([1e8, 3e8, 1e9, 2.5e9, 1e10, 3.7e10])
LATENCIES = st.sampled_from([0.0, 5e-6, 1e-5, 1e-4, 7e-4])


def rates_on(cluster: Cluster, flows: tuple[tuple[int, int], ...]) -> tuple[float, ...]:
    """How fast the simulator's network lets flows go that all begin at once."""
    paths = [cluster.path(a, b) for a, b in flows]
    lanes = list(dict.fromkeys(lane for path in paths for lane in path))
    network = Network(tuple(Wire(lane.name, lane.bytes_per_s) for lane in lanes), {})
    traffic = Traffic(network)
    for number, path in enumerate(paths):
        traffic.begin(number, Way(tuple(lanes.index(lane) for lane in path)), 1e9, 0.0)
    return tuple(traffic.flows[number].rate for number in range(len(flows)))


def measured_on(cluster: Cluster, noise: dict[int, float] | None = None) -> Measurements:
    """What a probe would find on a cluster; the n-th experiment is wrong by the n-th part."""
    hosts = tuple(cluster.servers[placed.server].name for placed in cluster.devices())
    experiments = []
    for number, flows in enumerate(experiments_for(hosts)):
        factor = 1 + (noise or {}).get(number, 0.0)
        experiments.append(Experiment(flows, tuple(factor * rate for rate in rates_on(cluster, flows))))
    return Measurements(
        hosts,
        tuple(placed.device for placed in cluster.devices()),
        {pair: cluster.latency(*pair) for pair in permutations(range(len(hosts)), 2)},
        tuple(experiments),
    )


@st.composite
def links(draw: st.DrawFn, *, one_way: bool = True) -> Link:
    full = draw(st.booleans())
    back = draw(st.one_of(st.none(), RATES)) if full and one_way else None
    return Link(draw(RATES), draw(LATENCIES), full, back)


@st.composite
def joined(draw: st.DrawFn, name: str, *, most: int, on_cards: bool) -> Server:
    """A server whose devices are joined in one of the ways that there are."""
    devices = (Device("emulated", "emulated", 1),) * draw(st.integers(1 if on_cards else 2, most))
    everyone = tuple(range(len(devices)))
    cards: tuple[Card, ...] = ()
    if on_cards:
        full = draw(st.booleans())
        each: list[tuple[int, ...]] = [(one,) for one in everyone]
        parts: list[tuple[int, ...]] = draw(st.sampled_from([[everyone], each]))
        own = []
        for n, part in enumerate(parts):
            back = draw(st.one_of(st.none(), RATES)) if full else None
            own.append(Card(f"eth{n}", part, Link(draw(RATES), draw(LATENCIES), full, back)))
        cards = tuple(own)
    if len(devices) == 1:
        return Server(name, devices, cards=cards)
    match draw(st.sampled_from(["cables", "unequal cables", "ports", "bridges"])):
        case "cables":
            mesh = Mesh("nvlink", everyone, draw(links(one_way=False)))
            return Server(name, devices, meshes=(mesh,), cards=cards)
        case "unequal cables":
            full = draw(st.booleans())
            pairs = [(a, b) for a in everyone for b in everyone[a + 1 :]]
            cables = [Link(draw(RATES), 0.0, full) for _ in pairs]
            meshes = tuple(
                Mesh(f"m{n}", pair, cable) for n, (pair, cable) in enumerate(zip(pairs, cables, strict=True))
            )
            return Server(name, devices, meshes=meshes, cards=cards)
        case "ports":
            mesh = Mesh("nvlink", everyone, draw(links()), switched=True)
            return Server(name, devices, meshes=(mesh,), cards=cards)
    full = draw(st.booleans())
    bridges = []
    for n, part in enumerate(draw(parts_of(len(devices), 1, everyone=True))):
        back = draw(st.one_of(st.none(), RATES)) if full else None
        # Faster than any card, or nobody could tell the two apart.
        faster = 1e3 if on_cards else 1.0
        into = None if back is None else back * faster
        bridges.append(Bridge(f"pcie{n}", part, Link(draw(RATES) * faster, draw(LATENCIES), full, into)))
    return Server(name, devices, bridges=tuple(bridges), cards=cards)


@st.composite
def several(draw: st.DrawFn) -> Cluster:
    """Two servers of any kind, or three alike."""
    count = draw(st.integers(2, 3))
    first = draw(joined("server0", most=3, on_cards=True))
    found = [first]
    for n in range(1, count):
        other = draw(joined(f"server{n}", most=3, on_cards=True)) if count == 2 else first
        found.append(Server(f"server{n}", other.devices, other.bridges, other.meshes, other.cards))
    total = draw(st.one_of(st.none(), st.just(5e8)))
    return Cluster(tuple(found), Switch(total, draw(LATENCIES)))


def check_alike(found: Cluster, known: Cluster) -> None:
    devices = range(known.num_devices)
    for pair in permutations(devices, 2):
        assert found.bandwidth(*pair) == pytest.approx(known.bandwidth(*pair), rel=1e-6)
    hosts = tuple(known.servers[placed.server].name for placed in known.devices())
    for flows in experiments_for(hosts):
        assert rates_on(found, flows) == pytest.approx(rates_on(known, flows), rel=1e-5)


@pytest.mark.slow
@examples(20)
@given(joined("server0", most=5, on_cards=False))
def test_a_server_is_found_with_its_bandwidths_sharing_and_asymmetry(server: Server) -> None:
    known = Cluster((server,))
    found = infer(measured_on(known), same=0.0)
    check_alike(found.cluster, known)
    assert found.error < 1e-6


@pytest.mark.slow
@examples(12)
@given(several())
def test_servers_are_found_with_their_cards(known: Cluster) -> None:
    found = infer(measured_on(known), same=0.0)
    check_alike(found.cluster, known)


def test_latencies_of_ports_and_cards_add_up() -> None:
    devices = (Device("emulated", "emulated", 1),) * 3
    cards = (Card("eth0", (0, 1, 2), Link(1e9, 3e-4)),)
    first = Server("server0", devices, (), (Mesh("mesh0", (0, 1, 2), Link(1e10, 1e-5)),), cards)
    known = Cluster(
        (first, Server("server1", devices, (), first.meshes, (Card("eth0", (0, 1, 2), Link(1e9, 2e-4)),))),
        Switch(None, 1e-4),
    )
    found = infer(measured_on(known)).cluster
    for pair in permutations(range(6), 2):
        assert found.latency(*pair) == pytest.approx(known.latency(*pair), rel=1e-3)


def test_noise_of_a_few_percent_changes_no_structure_and_makes_equal_what_is_equal(tmp_path: Path) -> None:
    devices = (Device("emulated", "emulated", 1),) * 4
    bridges = (Bridge("b0", (0, 1), Link(1e10)), Bridge("b1", (2, 3), Link(1e10)))
    known = Cluster((Server("server0", devices, bridges),))
    noise = {number: 0.02 * (-1) ** number for number in range(100)}
    found = infer(measured_on(known, noise))
    assert [one.devices for one in found.cluster.servers[0].bridges] == [(0, 1), (2, 3)]
    assert len({one.link for one in found.cluster.servers[0].bridges}) == 1
    assert found.cluster.servers[0].bridges[0].link.bytes_per_s == pytest.approx(1e10, rel=0.05)
    path = tmp_path / "cluster.toml"
    save_cluster(found.cluster, path)
    assert read_cluster(path) == found.cluster


def test_an_asymmetric_way_is_told() -> None:
    devices = (Device("emulated", "emulated", 1),) * 2
    known = Cluster((Server("server0", devices, (Bridge("b0", (0,), Link(1e9, back_bytes_per_s=1e8)),)),))
    (note,) = infer(measured_on(known)).notes
    assert "from device 0 to 1 carries 1 GB/s, and back 0.1 GB/s" in note


def test_devices_of_nearly_one_speed_are_alike() -> None:
    devices = tuple(Device("a", "emulated", 1, speed=speed) for speed in (1.0, 1.02, 0.5, 0.51))
    mesh = Mesh("mesh0", (0, 1, 2, 3), Link(1e9))
    found = infer(measured_on(Cluster((Server("server0", devices, meshes=(mesh,)),)))).cluster
    speeds = [placed.device.speed for placed in found.devices()]
    assert speeds[0] == speeds[1] != speeds[2] == speeds[3]


def test_servers_whose_ranks_are_mixed_are_refused() -> None:
    with pytest.raises(BiremeError, match="follow each other"):
        Measurements(("a", "b", "a"), (Device("cpu", "cpu", 1),) * 3, {}, ())


def test_a_way_that_nobody_measured_is_named() -> None:
    with pytest.raises(BiremeError, match="from device 0 to 1 was not measured alone"):
        Measurements(("a", "a"), (Device("cpu", "cpu", 1),) * 2, {}, ())


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_flow_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(BiremeError, match="greater than 0"):
        Experiment(((0, 1),), (rate,))


def test_one_device_is_a_cluster() -> None:
    found = infer(Measurements(("a",), (Device("cpu", "cpu", 1),), {}, ()))
    assert found.cluster.num_devices == 1
    assert found.error == 0.0


def test_fair_rates_fill_what_others_leave() -> None:
    assert fair_rates([[0], [0, 1], [1]], {0: 10.0, 1: 2.0}) == [9.0, 1.0, 1.0]
