"""Rehearsals: plans on emulated devices and links, run by the real engine in real processes."""

from dataclasses import replace

import pytest

from benchmarks.made_up.models import unequal_units
from benchmarks.rehearsal.rehearsal import Effort, rehearse
from benchmarks.rehearsal.rehearsed import rehearsed, simulated_s
from benchmarks.rehearsal.shaped import wiring_of
from bireme.cluster.cluster import Card, Cluster, Link, Mesh, Server, Switch
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.profile.stages import stage_cost
from tests.support.extent import TRY_ALL

PROFILE = unequal_units(8, 0.001)


def emulated(speeds: list[float], link: Link, memory_bytes: int = 2**30) -> Cluster:
    devices = tuple(Device("emulated", "emulated", memory_bytes, speed=speed) for speed in speeds)
    places = tuple(range(len(devices)))
    meshes = (Mesh("mesh0", places, link, switched=True),) if len(devices) > 1 else ()
    return Cluster((Server("server0", devices, meshes=meshes),))


def test_a_stage_costs_what_its_units_do_on_its_device() -> None:
    cluster = emulated([1.0, 0.5], Link(1e9))
    one = rehearsed(PROFILE, cluster, Plan((3,), 4, "1f1b"), 2)
    (costs,) = one.costs
    stages = [stage_cost(PROFILE, 0, 3, 2), stage_cost(PROFILE, 3, 8, 2)]
    assert costs.forward_s == pytest.approx([stage.forward_s for stage in stages])
    assert costs.backward_s == pytest.approx([stage.backward_s for stage in stages])
    assert costs.message_bytes[0] == stages[0].boundary_bytes
    assert costs.rank_speed == (1.0, 0.5)
    assert one.batch_size == 8


def test_units_that_run_again_make_the_backward_longer() -> None:
    cluster = emulated([1.0, 1.0], Link(1e9))
    plain = rehearsed(PROFILE, cluster, Plan((3,), 4, "1f1b")).costs[0]
    again = rehearsed(PROFILE, cluster, Plan((3,), 4, "1f1b", recompute_units=(0, 4))).costs[0]
    for stage, unit in ((0, 0), (1, 4)):
        more_s = again.backward_s[stage] - plain.backward_s[stage]
        assert more_s == pytest.approx(PROFILE.units[unit].at(1).forward_s)


def test_the_wiring_shares_lanes_over_all_replicas() -> None:
    """Two replicas whose boundaries cross the same two network cards."""
    devices = (Device("emulated", "emulated", 2**30),) * 2
    servers = tuple(
        Server(f"server{n}", devices, cards=(Card("card0", (0, 1), Link(1e8, 1e-4)),)) for n in range(2)
    )
    cluster = Cluster(servers, Switch())
    wiring = wiring_of(cluster, Plan((4,), 2, "1f1b", width=2), ((0, 1), (2, 3)))
    forth = [wiring.channels[wiring.messages[pair]].lanes for pair in ((0, 1), (2, 3))]
    assert forth[0] == forth[1]
    assert len(forth[0]) == 2
    assert wiring.channels[wiring.messages[0, 1]].latency_s == pytest.approx(2e-4)
    sums = wiring.channels[wiring.sums[0]]
    assert (sums.num_ready, sums.num_takers) == (2, 2)


def test_the_ranks_of_a_wide_stage_have_channels_of_their_own_and_one_sum() -> None:
    cluster = emulated([1.0] * 3, Link(1e9))
    plan = Plan((4,), 4, "1f1b", stage_widths=(2, 1))
    one = rehearsed(PROFILE, cluster, plan)
    assert one.devices == ((0,), (1,), (2,))
    wiring = wiring_of(cluster, plan, one.devices)
    assert set(wiring.messages) == {(0, 2), (2, 0), (1, 2), (2, 1)}
    assert set(wiring.sums) == {0}
    sums = wiring.channels[wiring.sums[0]]
    assert (sums.num_ready, sums.num_takers) == (2, 2)
    (costs,) = one.costs
    assert costs.reduce_bytes == (stage_cost(PROFILE, 0, 4, 1).gradient_bytes, 0.0)


@pytest.mark.parametrize(
    ("plan", "cluster", "part"),
    [
        (Plan((4,), 2), emulated([1.0], Link(1e9)), "2 devices, and the cluster has 1"),
        (Plan((4,), 2), load_cluster("one-server-of-8"), "only emulated ones are rehearsed"),
        (Plan((4,), 2), emulated([1.0, 1.0], Link(1e9), 10**8), "Recompute its stage"),
        (Plan((4,), 2, "pipedream"), emulated([1.0, 1.0], Link(1e9)), "does not run pipedream"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_a_sentence(plan: Plan, cluster: Cluster, part: str) -> None:
    with pytest.raises(BiremeError, match=part):
        rehearse(PROFILE, cluster, [plan])


def test_no_plan_is_no_rehearsal() -> None:
    with pytest.raises(BiremeError, match="at least one"):
        rehearse(PROFILE, emulated([1.0, 1.0], Link(1e9)), [])


@pytest.mark.slow
@pytest.mark.long
def test_plans_of_every_kind_run_and_none_is_faster_than_its_devices_and_links_allow() -> None:
    """Sleeps and lanes may end late, but never early: the bounds hold on the busiest machine."""
    cluster = emulated([1.0, 0.5], Link(100e6, 1e-3))
    plans = [Plan((4,), 4, "2bw"), Plan((), 2, "2bw-fresh", width=2, micro_batch_sizes=(2, 2))]
    if TRY_ALL:
        plans += [Plan((4,), 4, "2bw", stage_widths=(2, 1))]
        plans += [Plan((5,), 4, "1f1b-sliced", recompute=(0,)), Plan((2, 4, 6), 4, "interleaved")]
    found = rehearse(PROFILE, cluster, plans, micro_batches=[2] * len(plans), effort=Effort(1, 1))
    for one, plan in zip(found, plans, strict=True):
        ready = rehearsed(PROFILE, cluster, plan, 2)
        for replica, costs in enumerate(ready.costs):
            ranks = plan.program(1).rank_of_stage
            for rank, speed in enumerate(costs.rank_speed):
                own = [stage for stage, holder in enumerate(ranks) if holder == rank]
                busy_s = sum(costs.forward_s[stage] + costs.backward_s[stage] for stage in own)
                assert one.measured_s.least > 0.99 * plan.num_microbatches * busy_s / speed, (plan, replica)
        assert one.batch_size == plan.num_microbatches * 2 * plan.width
        assert one.simulated_s == simulated_s(ready, cluster)
    # Four messages of 1 MB go each way over ports of 100 MB/s.
    assert found[0].measured_s.least > 0.99 * 4 * 1e6 / 100e6


def test_a_slower_device_is_rehearsed_at_its_pace() -> None:
    one = rehearsed(PROFILE, emulated([1.0, 0.5], Link(1e12)), Plan((4,), 4, "2bw"))
    even = rehearsed(PROFILE, emulated([1.0, 1.0], Link(1e12)), Plan((4,), 4, "2bw"))
    slow_s = simulated_s(one, emulated([1.0, 0.5], Link(1e12)))
    assert slow_s > 1.5 * simulated_s(even, emulated([1.0, 1.0], Link(1e12)))
    assert replace(one.engine_plan, cuts=one.plan.cuts) == replace(one.plan, devices=())
