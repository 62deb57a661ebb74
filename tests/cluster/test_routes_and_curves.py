"""Links that depend on the pair of servers or on the size of a message: file, ways, simulator and planner."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import Card, Cluster, Link, Overlap, Route, Server, Switch
from bireme.cluster.cluster_file import cluster_hash, read_cluster, save_cluster
from bireme.cluster.device import Device
from bireme.cluster.inference import infer
from bireme.cluster.probed import Experiment, Measurements
from bireme.cluster.symmetry import Symmetry
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import forecast_of
from bireme.schedule.catalogue import generate
from bireme.simulate import Costs, simulate
from bireme.simulate.links import cluster_network
from bireme.simulate.network import busy_bytes

CURVE = ((1_000, 0.002), (10_000, 0.005))
SLOW_START = Link(1e7, 0.001, curve=CURVE)


def servers(*names: str, link: Link | None = None, switch: Switch | None = None) -> Cluster:
    """Servers of one device each, with equal cards."""
    device, card = Device("d", "emulated", 2**40), (Card("card0", (0,), link or Link(1e9, 1e-4)),)
    return Cluster(tuple(Server(name, (device,), cards=card) for name in names), switch)


def routed(cluster: Cluster, *routes: Route) -> Cluster:
    """The cluster with these routes."""
    return replace(cluster, routes=routes)


LINE = Route(("a", "b"), Link(1e7, 0.05, back_bytes_per_s=5e6, overlap=Overlap.RECEIVER))


def test_a_route_limits_its_pair_alone_and_adds_its_latency() -> None:
    cluster = routed(servers("a", "b", "c", switch=Switch(None, 1e-3)), LINE)
    assert [lane.name for lane in cluster.path(0, 1)] == ["a/card0 out", "a – b out", "b/card0 in"]
    assert (cluster.bandwidth(0, 1), cluster.bandwidth(1, 0)) == (1e7, 5e6)
    assert cluster.bandwidth(0, 2) == cluster.bandwidth(2, 1) == 1e9
    assert cluster.latency(0, 1) == cluster.latency(1, 0) == pytest.approx(0.05 + 2e-4 + 1e-3)
    assert cluster.latency(0, 2) == pytest.approx(1.2e-3)
    assert cluster.overlap(0, 1) is Overlap.RECEIVER
    assert cluster.overlap(0, 2) is Overlap.FULL


def test_servers_with_routes_of_their_own_are_like_no_others() -> None:
    plain = servers("a", "b", "c", "d")
    assert Symmetry(plain).classes() == ((0, 1, 2, 3),)
    assert Symmetry(routed(plain, LINE)).classes() == ((0,), (1,), (2, 3))


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        ((Route(("a", "x"), Link(1.0)),), "A route names the server 'x'"),
        ((LINE, Route(("b", "a"), Link(1.0))), "There are two routes b – a"),
    ],
)
def test_wrong_routes_are_refused(routes: tuple[Route, ...], sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        routed(servers("a", "b"), *routes)
    with pytest.raises(BiremeError, match="not a with itself"):
        Route(("a", "a"), Link(1.0))


@pytest.mark.parametrize("curve", [((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((1, 1e-9),), ((0, 1.0),)])
def test_curves_that_fall_or_stand_are_refused(curve: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(BiremeError, match="The curve has"):
        Link(1e7, 0.001, curve=curve)


def test_a_file_has_routes_and_curves(tmp_path: Path) -> None:
    cluster = routed(servers("a", "b", link=SLOW_START), LINE)
    save_cluster(cluster, tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == cluster
    hashes = {cluster_hash(one) for one in (cluster, routed(cluster), servers("a", "b"))}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('servers = ["a"]\nbytes_per_s = 1.0', "servers"),
        ('servers = ["a", "b"]', "bytes_per_s"),
        ('servers = ["a", "b"]\nbytes_per_s = 1.0\ncurve = [[1, 2, 3]]', r"two numbers, bytes and seconds"),
        (
            'servers = ["a", "b"]\nbytes_per_s = 1.0\ncurve = [[5, 1.0], [4, 2.0]]',
            r"route\[0\].*The curve has",
        ),
        ('servers = ["a", "c"]\nbytes_per_s = 1.0', "A route names the server 'c'"),
    ],
)
def test_a_wrong_table_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    save_cluster(servers("a", "b"), tmp_path / "cluster.toml")
    whole = (tmp_path / "cluster.toml").read_text() + f"\n[[route]]\n{text}\n"
    (tmp_path / "cluster.toml").write_text(whole)
    with pytest.raises(BiremeError, match=sentence):
        read_cluster(tmp_path / "cluster.toml")


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [(1, 0.001001), (500, 0.0015), (1_000, 0.002), (5_500, 0.0035), (10_000, 0.005), (110_000, 0.015)],
)
def test_a_message_alone_takes_what_the_curve_says(num_bytes: int, seconds: float) -> None:
    cluster = servers("a", "b", link=replace(SLOW_START, latency_s=0.001))
    path = cluster_network(cluster, PROGRAM, (0, 1)).paths[0, 1]
    network = cluster_network(cluster, PROGRAM, (0, 1))
    assert network.seconds(path, num_bytes) + 0.001 == pytest.approx(seconds)


PROGRAM = generate("1f1b", num_stages=2, num_microbatches=2, num_batches=1)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e-3)), min_size=1, max_size=4),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(1, 9),
)
def test_more_bytes_never_take_less_and_a_curve_never_makes_them_faster(
    steps: list[tuple[int, float]], one: int, other: int, parts: int
) -> None:
    num_bytes, seconds, curve = 0, 0.001, []
    for more_bytes, more_s in steps:
        num_bytes, seconds = num_bytes + more_bytes, seconds + more_s
        curve.append((num_bytes, seconds))
    link = Link(1e9, 0.001, curve=tuple(curve))
    least, most = sorted((one, other))
    assert least <= busy_bytes([link], least, parts) * (1 + 1e-12)
    assert busy_bytes([link], least, parts) <= busy_bytes([link], most, parts) * (1 + 1e-12)
    assert busy_bytes([link], one, parts) <= parts * busy_bytes([link], one) * (1 + 1e-12)


def test_the_simulator_the_planner_and_the_curve_agree() -> None:
    """Two stages without a bubble to hide in: a batch is the pace of the link."""
    cluster = servers("a", "b", link=Link(1e7, 0.0, curve=((20_000, 0.05),)))
    plan = Plan((1,), 8, "2bw", micro_batch_sizes=(1,), devices=(("a/emulated0",), ("b/emulated0",)))
    profile = profile_of([0.01] * 2, [0.01] * 2, boundary_bytes=[20_000, 0])
    found = forecast_of(plan, profile, cluster, PlanRequest(8))
    assert found.batch_s >= 8 * 0.05
    assert found.bottleneck in ("a/card0 out", "b/card0 in", "b/card0 out", "a/card0 in")
    program = generate("2bw", num_stages=2, num_microbatches=8, num_batches=6)
    costs = Costs.per_stage(2, forward_s=0.01, backward_s=0.01, message_bytes=(20_000.0, 0.0))
    steady_s = simulate(program, costs, cluster_network(cluster, program, (0, 1))).steady_batch_s
    assert steady_s == pytest.approx(found.batch_s)


def measured_on(cluster: Cluster) -> Measurements:
    """What a probe would find on a cluster whose flows go alone."""
    pairs = list(permutations(range(cluster.num_devices), 2))
    sizes = (4_096, 32_768)
    return Measurements(
        tuple(server.name for server in cluster.servers),
        tuple(placed.device for placed in cluster.devices()),
        {pair: cluster.latency(*pair) for pair in pairs},
        tuple(Experiment((pair,), (cluster.bandwidth(*pair),)) for pair in pairs),
        by_size={
            pair: tuple(
                (
                    size,
                    cluster.latency(*pair)
                    + busy_bytes(cluster.curved(*pair), size) / cluster.bandwidth(*pair),
                )
                for size in sizes
            )
            for pair in pairs
        },
    )


def test_a_probe_finds_the_routes_of_slow_pairs() -> None:
    route = Route(("a", "b"), Link(1e7, 0.05, back_bytes_per_s=5e6))
    cluster = routed(servers("a", "b", "c", "d", link=Link(1e9, 1e-4)), route)
    found = infer(measured_on(cluster)).cluster
    assert [one.servers for one in found.routes] == [("a", "b")]
    for pair in permutations(range(4), 2):
        assert found.bandwidth(*pair) == pytest.approx(cluster.bandwidth(*pair), rel=1e-3)
        assert found.latency(*pair) == pytest.approx(cluster.latency(*pair), rel=1e-2)


def test_a_probe_finds_no_routes_where_servers_differ_by_their_cards() -> None:
    slow = servers("c", link=Link(1e8, 1e-4)).servers
    found = infer(measured_on(Cluster((*servers("a", "b").servers, *slow)))).cluster
    assert found.routes == ()
    assert not found.has_curves


def test_a_probe_finds_the_curve_of_a_link() -> None:
    link = Link(1e9, 1e-4, curve=((4_096, 1e-3), (32_768, 2e-3)))
    cluster = servers("a", "b", link=link)
    found = infer(measured_on(cluster)).cluster
    for size in (1_000, 4_096, 10_000, 32_768, 10**6):
        there, known = (busy_bytes(one.curved(0, 1), size) for one in (found, cluster))
        assert there == pytest.approx(known, rel=0.02)


def test_a_device_that_stands_for_several_has_the_figures_of_all(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'format = 1\n[[server]]\n[[server.device]]\nlike = "a100"\nmembers = 8\nname = "node"\nwatts = 5e3\n'
    )
    (node,), one = read_cluster(path).servers[0].devices, device_named("a100")
    assert (node.members, node.name, node.watts) == (8, "node", 5e3)
    assert node.memory_bytes == 8 * one.memory_bytes
    assert (node.bytes_per_s, node.bfloat16_flops_per_s) == (
        8 * one.bytes_per_s,
        8 * one.bfloat16_flops_per_s,
    )
    save_cluster(read_cluster(path), path)
    assert read_cluster(path).servers[0].devices == (node,)


def test_a_ring_sends_its_bytes_in_parts() -> None:
    """Three replicas send four messages of a third of the gradients each over every hop."""
    cluster = servers("a", "b", "c", link=Link(1e7, 0.0, curve=((30_000, 0.1),)))
    names = tuple(placed.name for placed in cluster.devices())
    plan = Plan((), 1, "sequential", width=3, micro_batch_sizes=(1,) * 3, devices=(names,))
    profile = profile_of([0.01], [0.01], parameter_bytes=[90_000])
    found = forecast_of(plan, profile, cluster, PlanRequest(3))
    assert found.batch_s == pytest.approx(0.02 + 4 * 0.1)
