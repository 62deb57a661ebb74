"""Clusters as nouns: the ways between devices, and what meets on them."""

import math
import pickle
import re
from dataclasses import replace
from io import StringIO
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Overlap, Server, Switch
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.report.cluster_table import print_cluster
from bireme.schedule.catalogue import generate
from bireme.simulate.costs import Costs
from bireme.simulate.links import agreement_s, cluster_network, ring_latency_s, round_trip_s
from bireme.simulate.network import Network, Traffic
from bireme.simulate.simulator import simulate
from tests.support.clusters import clusters
from tests.support.extent import examples

PLAIN = Device("plain", "emulated", 2**30)
BOUNDED = examples(60)


def lanes(cluster: Cluster, source: str, destination: str) -> list[str]:
    ends = cluster.number_of(source), cluster.number_of(destination)
    return [lane.name for lane in cluster.path(*ends)]


def test_devices_of_other_servers_are_reached_over_bridge_card_and_switch() -> None:
    cluster = load_cluster("four-servers-of-4")
    assert lanes(cluster, "server0/gpu1", "server2/gpu3") == [
        "server0/bridge0 out",
        "server0/card0 out",
        "server2/card0 in",
        "server2/bridge1 in",
    ]
    assert cluster.bandwidth(1, 11) == 1.2e9
    assert cluster.latency(1, 11) == pytest.approx(8e-6 + 25e-6 + 5e-6 + 25e-6 + 8e-6)


def test_the_total_of_a_switch_is_on_every_way_between_servers_and_on_none_inside() -> None:
    inside = load_cluster("four-servers-of-4")
    cluster = Cluster(inside.servers, Switch(1e9, 2e-6))
    assert "switch" in lanes(cluster, "server0/gpu0", "server1/gpu0")
    assert "switch" not in lanes(cluster, "server0/gpu0", "server0/gpu3")
    assert cluster.bandwidth(0, 4) == 1e9


def test_a_mesh_spares_its_devices_the_bridges() -> None:
    cluster = load_cluster("two-unequal-servers")
    assert lanes(cluster, "fast/gpu0", "fast/gpu3") == ["fast/nvlink gpu0 → gpu3"]
    assert lanes(cluster, "fast/gpu3", "fast/gpu0") == ["fast/nvlink gpu3 → gpu0"]
    assert lanes(cluster, "slow/gpu0", "slow/gpu1") == ["slow/bridge0 out", "slow/bridge0 in"]
    assert lanes(cluster, "slow/gpu0", "slow/gpu3") == ["slow/bridge0 out", "slow/bridge1 in"]


def test_the_ports_of_a_switched_mesh_are_shared_by_all_flows_of_a_device() -> None:
    cluster = load_cluster("one-server-of-8")
    assert set(cluster.path(0, 1)) & set(cluster.path(0, 2)) == {cluster.path(0, 1)[0]}
    assert not set(cluster.path(0, 1)) & set(cluster.path(1, 0))


def test_a_way_overlaps_as_little_as_its_least_link() -> None:
    device = Device("any", "emulated", 2**30)
    bridge = Bridge("bus", (0, 1), Link(1.0, overlap=Overlap.RECEIVER))
    cards = [Card("net", (0, 1), Link(1.0, overlap=one)) for one in (Overlap.FULL, Overlap.NONE)]
    servers = tuple(
        Server(name, (device,) * 2, (bridge,), (), (card,)) for name, card in zip("ab", cards, strict=True)
    )
    found = Cluster(servers)
    assert [found.overlap(*ends) for ends in ((0, 0), (0, 1), (1, 3), (3, 1))] == [
        Overlap.FULL,
        Overlap.RECEIVER,
        Overlap.NONE,
        Overlap.NONE,
    ]


def test_the_table_of_links_says_who_waits() -> None:
    card = Card("net", (0,), Link(1e9, overlap=Overlap.NONE))
    console = Console(file=StringIO(), width=200)
    print_cluster(Cluster((Server("here", (PLAIN,), cards=(card,)),)), console)
    assert "both ends wait for messages" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_half_duplex_link_is_one_lane_both_ways() -> None:
    cluster = load_cluster("laptop")
    assert cluster.path(0, 1) == cluster.path(3, 2)
    assert len(cluster.path(0, 1)) == 1


def test_a_link_may_carry_less_on_the_way_back() -> None:
    home = [Card("line", (0,), Link(5e6, 0.01, back_bytes_per_s=30e6))]
    servers = [Server(name, (PLAIN,), cards=tuple(home)) for name in ("here", "there")]
    cluster = Cluster(tuple(servers))
    assert [lane.bytes_per_s for lane in cluster.path(0, 1)] == [5e6, 30e6]
    assert cluster.latency(0, 1) == 0.02


def test_nothing_is_in_the_way_where_no_link_is_said() -> None:
    cluster = Cluster((Server("alone", (PLAIN, PLAIN)),))
    assert cluster.path(0, 1) == ()
    assert cluster.bandwidth(0, 1) == cluster.bandwidth(0, 0) == math.inf
    assert cluster.latency(0, 1) == 0


@BOUNDED
@given(clusters(), st.data())
def test_the_way_back_meets_the_way_there_only_on_half_duplex_links(
    cluster: Cluster, data: st.DataObject
) -> None:
    numbers = st.integers(0, cluster.num_devices - 1)
    a, b = data.draw(numbers), data.draw(numbers)
    there, back = cluster.path(a, b), cluster.path(b, a)
    assert len(set(there)) == len(there) == len(back)
    assert cluster.latency(a, b) == pytest.approx(cluster.latency(b, a))
    groups: list[Bridge | Mesh | Card] = []
    for server in cluster.servers:
        groups += [*server.bridges, *server.meshes, *server.cards]
    halves = {group.link.bytes_per_s for group in groups if not group.link.full_duplex}
    met = {lane for lane in set(there) & set(back) if lane.name != "switch"}
    same_bridge = {lane for lane in met if lane.name.endswith((" out", " in"))}
    assert {lane.bytes_per_s for lane in met - same_bridge} <= halves
    assert all(cluster.devices()[a].server == cluster.devices()[b].server for _ in same_bridge)


def test_devices_are_named_by_their_server_and_found_by_name() -> None:
    mixed = Server("box", (Device("x", "cuda", 1), Device("y", "cpu", 1), Device("z", "cuda", 1)))
    cluster = Cluster((mixed,))
    assert [placed.name for placed in cluster.devices()] == ["box/gpu0", "box/cpu0", "box/gpu1"]
    assert cluster.number_of("box/gpu1") == 2
    with pytest.raises(BiremeError, match="Did you mean 'box/gpu0'"):
        cluster.number_of("box/gp0")


def test_a_cluster_can_go_to_another_process() -> None:
    cluster = load_cluster("two-unequal-servers")
    copy = pickle.loads(pickle.dumps(cluster))
    assert copy == cluster
    assert copy.path(0, 7) == cluster.path(0, 7)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Link(0.0), "bytes_per_s is 0.0"),
        (lambda: Link(math.inf), "bytes_per_s is inf"),
        (lambda: Link(1.0, math.nan), "latency_s is nan"),
        (lambda: Link(1.0, full_duplex=False, back_bytes_per_s=2.0), "leave out back_bytes_per_s"),
        (lambda: Mesh("m", (0, 1), Link(1.0, back_bytes_per_s=2.0)), "alike both ways"),
        (lambda: Mesh("m", (0,), Link(1.0)), "at least 2"),
        (lambda: Bridge("b", (0, 0), Link(1.0)), "a device twice"),
        (lambda: Bridge("b/c", (0,), Link(1.0)), "is not a name for a bridge"),
        (lambda: Switch(-1.0), "bytes_per_s is -1"),
        (lambda: Server("s", ()), "no devices"),
        (lambda: Server("s", (Device("x", "cpu"),)), "memory_bytes = 0"),
        (lambda: Server("s", (PLAIN,), (Bridge("b", (1,), Link(1.0)),)), "b of s joins device 1"),
        (lambda: Cluster(()), "no servers"),
        (lambda: Cluster((Server("s", (PLAIN,)),) * 2), "Two servers are named 's'"),
        (
            lambda: Cluster((Server("s", (PLAIN,)), Server("t", (PLAIN,)))),
            "s/emulated0 is on no network card",
        ),
        (lambda: Device("x", "cpu", 1, speed=0.0), "The speed of x is 0.0"),
    ],
)
def test_what_cannot_be_is_refused(made: object, said: str) -> None:
    assert callable(made)
    with pytest.raises(BiremeError, match=re.escape(said)):
        made()


# --- the network of a program's ranks ----------------------------------------------------------------------


def test_flows_of_two_devices_halve_each_other_on_their_server_s_card() -> None:
    cluster = load_cluster("four-servers-of-4")
    program = generate("1f1b", num_stages=4, num_microbatches=4, num_batches=1)
    network = cluster_network(cluster, program, [0, 4, 1, 5])
    traffic = Traffic(network)
    assert traffic.begin(0, network.paths[0, 1], 1.2e9, 0.0) == {0: 1.0}
    assert traffic.begin(1, network.paths[2, 3], 1.2e9, 0.0) == {0: 2.0, 1: 2.0}
    apart = cluster_network(cluster, program, [0, 4, 8, 12])
    assert not set(apart.paths[0, 1].wires) & set(apart.paths[2, 3].wires)


def test_a_cluster_of_cards_alone_is_simulated_as_servers_with_one_card_are() -> None:
    card = (Card("card0", (0, 1), Link(1e6, 1e-3)),)
    cluster = Cluster(tuple(Server(f"server{n}", (PLAIN, PLAIN), cards=card) for n in range(2)))
    program = generate("2bw", num_stages=4, num_microbatches=4, num_batches=3)
    costs = Costs.per_stage(4, forward_s=0.1, backward_s=0.2, message_bytes=2e5)
    order = [0, 2, 1, 3]
    pairs = [(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1]
    same = Network.dedicated(pairs, bytes_per_s=1e6, latency_s=2e-3, servers=[0, 1, 0, 1])
    ours = simulate(program, costs, cluster_network(cluster, program, order))
    theirs = simulate(program, costs, same)
    assert ours.makespan_s == pytest.approx(theirs.makespan_s)
    assert ours.makespan_s > simulate(program, costs).makespan_s


def test_a_ring_takes_as_long_as_what_it_crosses_most() -> None:
    """Two devices in each of two servers: a full duplex card is crossed once each way, a half one twice."""
    program = generate("1f1b", num_stages=1, num_microbatches=2, num_batches=1)
    for full, rate in ((True, 1e9), (False, 0.5e9)):
        card = (Card("card0", (0, 1), Link(1e9, 1e-3, full)),)
        cluster = Cluster(tuple(Server(f"server{n}", (PLAIN, PLAIN), cards=card) for n in range(2)))
        network = cluster_network(cluster, program, [0], replicas={0: [0, 1, 2, 3]})
        ring = network.sync_paths[0]
        assert network.seconds(ring, 1e9) == 1e9 / rate
        assert ring.latency_s == pytest.approx(2 * 3 * 2e-3)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_messages_that_wait_for_each_other_each_have_their_latency(kind: str) -> None:
    """Members on hosts of their own send parts and then sums; NCCL, a round, and members that share a host
    go around a ring.
    """
    device = replace(PLAIN, kind=kind)
    cards = (Card("card0", (0, 1), Link(1e9, latency_s)) for latency_s in (1e-3, 2e-3, 5e-3))
    cluster = Cluster(tuple(Server(f"server{n}", (device,) * 2, cards=(own,)) for n, own in enumerate(cards)))
    is_nccl = kind == "cuda"
    assert ring_latency_s(cluster, [0, 2, 4]) == pytest.approx(2 * (2 if is_nccl else 1) * 7e-3)
    assert ring_latency_s(cluster, [0, 2, 4], is_direct=True) == pytest.approx(2 * 7e-3)
    assert ring_latency_s(cluster, [0, 1, 2, 4]) == pytest.approx(2 * 3 * 7e-3)
    assert ring_latency_s(cluster, [0, 2, 4], in_round=True) == pytest.approx(2 * 2 * 7e-3)
    assert ring_latency_s(cluster, [0, 2]) == pytest.approx((2 if is_nccl else 1) * 3e-3)
    assert ring_latency_s(cluster, [0], in_round=True) == ring_latency_s(cluster, [0]) == 0
    assert agreement_s(cluster, [0, 2]) == pytest.approx(3e-3)
    for devices in permutations((0, 2, 3, 4)):
        assert round_trip_s(cluster, devices) == pytest.approx(2 * 7e-3)
    assert round_trip_s(cluster, [2, 3]) == round_trip_s(cluster, [1]) == 0


def test_ranks_on_one_device_send_each_other_nothing() -> None:
    cluster = load_cluster("laptop")
    program = generate("1f1b", num_stages=2, num_microbatches=2, num_batches=1)
    assert cluster_network(cluster, program, [3, 3]).paths[0, 1].wires == ()
    with pytest.raises(BiremeError, match="1 devices are given for 2 ranks"):
        cluster_network(cluster, program, [0])
    with pytest.raises(BiremeError, match="There is no device 9"):
        cluster_network(cluster, program, [0, 9])
