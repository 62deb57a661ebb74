"""The devices of a cluster as those of a workload: accelerators, CPUs, and what a message costs."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.placement.model import fleet_of
from tests.support.clusters import few
from tests.support.placed_models import equal_devices, model_of, untied


def two_servers(one: Device, other: Device, *, rate: float = 1e9) -> Cluster:
    servers = [
        Server(name, (device,), (), (), (Card("net", (0,), Link(rate, 0.0)),))
        for name, device in (("a", one), ("b", other))
    ]
    return Cluster(tuple(servers))


@pytest.mark.parametrize(
    "other",
    [Device("any", "emulated", 100, speed=0.5), Device("any", "emulated", 200)],
    ids=["speed", "memory"],
)
def test_unequal_accelerators_are_refused_by_name(other: Device) -> None:
    with pytest.raises(
        BiremeError, match=r"a/emulated0 \(speed 1, 100 bytes\) and b/emulated0 .*bireme plan"
    ):
        fleet_of(two_servers(Device("any", "emulated", 100), other))


@pytest.mark.slow
def test_processors_alone_are_the_accelerators() -> None:
    workload = model_of(untied(), equal_devices(3, kind="cpu", memory_bytes=10**8)).workload
    assert (workload.num_accelerators, workload.num_cpus, workload.accelerator_bytes) == (3, 0, 1e8)


def test_processors_with_accelerators_are_cpus_and_leave_them_the_whole_message() -> None:
    slow, fast = Device("any", "cpu", 500, speed=0.25), Device("any", "emulated", 10**9)
    cluster = two_servers(slow, fast)
    fleet = fleet_of(cluster)
    assert (fleet.names, fleet.num_accelerators, fleet.num_cpus) == (("b/emulated0", "a/cpu0"), 1, 1)
    assert fleet.cost_ms(10**6) == pytest.approx(1.0)
    assert fleet_of(two_servers(fast, fast)).cost_ms(10**6) == pytest.approx(0.5)
    for node in model_of(untied(), cluster).workload.nodes:
        assert node.cpu_time == pytest.approx(4 * node.accelerator_time)


def test_one_device_pays_for_no_message() -> None:
    assert fleet_of(equal_devices(1)).cost_ms(10**9) == 0


@pytest.mark.slow
@given(few(), st.integers(0, 10**10))
def test_the_price_is_that_of_the_slowest_way_there_is(cluster: Cluster, num_bytes: int) -> None:
    ends = list(permutations(range(cluster.num_devices), 2))
    seconds = [num_bytes / cluster.bandwidth(*pair) + cluster.latency(*pair) for pair in ends]
    assert fleet_of(cluster).cost_ms(num_bytes) == pytest.approx(500 * max(seconds, default=0.0))
