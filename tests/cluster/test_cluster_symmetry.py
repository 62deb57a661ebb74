"""Devices that are alike: what may be exchanged, and that nothing is met twice."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest
from hypothesis import given

from bireme.cluster.cluster import Bridge, Card, Cluster, Lane, Link, Server
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.device import Device
from bireme.cluster.symmetry import Symmetry
from tests.support.clusters import few
from tests.support.extent import examples

PLAIN = Device("plain", "emulated", 2**30)
BOUNDED = examples(80)


def leaves_all_as_it_was(cluster: Cluster, image: tuple[int, ...]) -> bool:
    """Whether devices so exchanged are the same, and the ways between them, with lanes exchanged alike."""
    devices = cluster.devices()
    if any(devices[a].device != devices[b].device for a, b in enumerate(image)):
        return False
    lanes: dict[Lane, Lane] = {}
    for a, b in product(range(cluster.num_devices), repeat=2):
        here, there = cluster.path(a, b), cluster.path(image[a], image[b])
        if len(here) != len(there) or cluster.latency(a, b) != cluster.latency(image[a], image[b]):
            return False
        for one, other in zip(here, there, strict=True):
            if one.bytes_per_s != other.bytes_per_s or lanes.setdefault(one, other) != other:
                return False
    return len(set(lanes.values())) == len(lanes)


def orders(symmetry: Symmetry, length: int, used: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if len(used) == length:
        yield used
        return
    for number in symmetry.choices(used):
        yield from orders(symmetry, length, (*used, number))


@BOUNDED
@given(few())
def test_what_is_called_alike_can_be_exchanged(cluster: Cluster) -> None:
    symmetry, length = Symmetry(cluster), min(cluster.num_devices, 4)
    exchanges = [
        image for image in permutations(range(cluster.num_devices)) if leaves_all_as_it_was(cluster, image)
    ]
    seen = set()
    for order in permutations(range(cluster.num_devices), length):
        canonical = symmetry.canonical(order)
        assert any(tuple(image[number] for number in order) == canonical for image in exchanges)
        seen.add(canonical)
    assert sorted(orders(symmetry, length)) == sorted(seen)
    for group in symmetry.classes():
        assert all(any(image[group[0]] == other for image in exchanges) for other in group)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("one-server-of-8", [8]),
        ("two-unequal-servers", [4, 4]),
        ("four-servers-of-4", [16]),
        ("laptop", [4]),
        ("emulated-8-equal", [8]),
        ("emulated-8-one-slow", [7, 1]),
        ("emulated-two-servers", [8]),
        ("emulated-two-memories", [4, 4]),
    ],
)
def test_the_examples_have_these_kinds_of_devices(name: str, classes: list[int]) -> None:
    assert [len(group) for group in Symmetry(load_cluster(name)).classes()] == classes


def test_orders_that_differ_only_by_exchanging_equal_devices_are_met_once() -> None:
    """A second device is on the first one's bridge, on another, or in another server."""
    assert list(orders(Symmetry(load_cluster("emulated-8-equal")), 4)) == [(0, 1, 2, 3)]
    assert list(orders(Symmetry(load_cluster("one-server-of-8")), 2)) == [(0, 1), (0, 2)]
    assert list(orders(Symmetry(load_cluster("four-servers-of-4")), 2)) == [(0, 1), (0, 2), (0, 4)]


def test_bridges_and_cards_that_cross_leave_only_those_alike_that_share_all() -> None:
    def server(pairs: list[tuple[int, int]]) -> Server:
        bridges = (Bridge("b0", (0, 1), Link(1e9)), Bridge("b1", (2, 3), Link(1e9)))
        return Server(
            "s", (PLAIN,) * 4, bridges, cards=tuple(Card(f"c{n}", p, Link(1e9)) for n, p in enumerate(pairs))
        )

    assert len(Symmetry(Cluster((server([(0, 1), (2, 3)]),))).classes()) == 1
    assert len(Symmetry(Cluster((server([(0, 2), (1, 3)]),))).classes()) == 4


def test_a_thousand_devices_are_no_trouble() -> None:
    eight = load_cluster("one-server-of-8").servers[0]
    card = (Card("card0", tuple(range(8)), Link(1e9)),)
    servers = [Server(f"n{n}", eight.devices, eight.bridges, eight.meshes, card) for n in range(128)]
    cluster = Cluster(tuple(servers))
    symmetry = Symmetry(cluster)
    assert [len(group) for group in symmetry.classes()] == [1024]
    assert symmetry.choices([0, 9]) == (1, 2, 8, 10, 16)
    assert symmetry.canonical([1023, 1022, 7]) == (0, 1, 8)
