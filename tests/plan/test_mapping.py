"""Mappings: each once, equal devices and replicas told apart by nothing; and what requests leave of them."""

from itertools import islice, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.contention import HopBytes, busiest_lane
from bireme.plan.search.draft import Grid
from bireme.plan.search.mapping import all_grids, exchanged, promising_grids
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan
from bireme.plan.search.shapes import Outline
from bireme.schedule.program import Rule
from tests.support.clusters import few
from tests.support.extent import examples

UNITS = profile_of(
    [1, 2, 1, 2, 1, 2],
    [2, 4, 2, 4, 2, 4],
    sizes=(1, 2),
    parameter_bytes=[10] * 6,
    kept_bytes=[5] * 6,
    boundary_bytes=[1] * 6,
)


def devices(*speeds: float, memory: int = 10_000) -> tuple[Device, ...]:
    return tuple(Device(f"{speed}", "emulated", memory, speed=speed) for speed in speeds)


def server(name: str, own: tuple[Device, ...], *, card: float = 1e9, bus: float = 1e9) -> Server:
    places = tuple(range(len(own)))
    return Server(name, own, (Bridge("bus", places, Link(bus)),), (), (Card("net", places, Link(card)),))


def ways_of(problem: PlanningProblem, grid: Grid) -> frozenset[tuple[object, ...]]:
    """What can be told of a mapping: for each replica its devices, and every way between any two of all."""
    flat = [device for replica in zip(*grid, strict=True) for device in replica]
    lanes: dict[str, int] = {}
    replicas = []
    cluster = problem.cluster
    for order in permutations(zip(*grid, strict=True)):
        lanes.clear()
        flat = [device for replica in order for device in replica]
        replicas.append(
            (
                tuple(cluster.devices()[device].device for device in flat),
                tuple(
                    (lanes.setdefault(lane.name, len(lanes)), lane.bytes_per_s)
                    for a in flat
                    for b in flat
                    for lane in cluster.path(a, b)
                ),
            )
        )
    return frozenset(replicas)


@examples(60)
@given(few(), st.integers(1, 2), st.integers(1, 2))
def test_every_mapping_is_there_once(cluster: Cluster, width: int, depth: int) -> None:
    if width * depth > cluster.num_devices:
        return
    problem = PlanningProblem(UNITS, cluster, PlanRequest(4))
    outline = Outline("gpipe", depth, 1, (1,) * width, 4)
    found = all_grids(problem, outline, 10_000)
    assert found is not None
    kinds = {ways_of(problem, grid) for grid in found}
    for order in permutations(range(cluster.num_devices), width * depth):
        grid = tuple(tuple(order[rank * width : (rank + 1) * width]) for rank in range(depth))
        assert ways_of(problem, grid) in kinds
    for grid in found:
        used = [device for row in grid for device in row]
        assert len(set(used)) == len(used) == width * depth


def test_equal_devices_have_one_mapping() -> None:
    cluster = Cluster((server("a", devices(1, 1, 1, 1)),))
    problem = PlanningProblem(UNITS, cluster, PlanRequest(4))
    assert len(all_grids(problem, Outline("gpipe", 4, 1, (1,), 4), 100) or []) == 1
    assert len(all_grids(problem, Outline("gpipe", 2, 1, (1, 1), 4), 100) or []) == 1
    assert all_grids(problem, Outline("gpipe", 1, 1, (1,) * 5, 4), 100) is None


def test_likely_mappings_keep_replicas_together_and_apart() -> None:
    cluster = Cluster((server("a", devices(1, 1)), server("b", devices(1, 1))))
    problem = PlanningProblem(UNITS, cluster, PlanRequest(4))
    grids = list(promising_grids(problem, Outline("gpipe", 2, 1, (1, 1), 2)))
    assert ((0, 2), (1, 3)) in grids  # each replica in a server
    assert ((0, 1), (2, 3)) in grids  # each stage in a server
    assert len(grids) == len(set(grids))


def test_exchanges_leave_alike_devices_where_they_are() -> None:
    cluster = Cluster((server("a", devices(1, 1, 2)),))
    problem = PlanningProblem(UNITS, cluster, PlanRequest(4))
    assert sorted(exchanged(problem, ((0,), (1,)))) == [((0,), (2,)), ((2,), (1,))]


def test_the_bytes_on_a_lane_are_those_of_all_who_cross_it() -> None:
    cluster = Cluster((server("a", devices(1, 1)), server("b", devices(1, 1))))
    problem = PlanningProblem(UNITS, cluster, PlanRequest(4))

    def flows(*pairs: tuple[int, int]) -> list[tuple[int, int, float, int]]:
        return [(*ends, 10.0, 1) for pair in pairs for ends in (pair, pair[::-1])]

    each_server_a_stage = busiest_lane(problem, flows((0, 2), (1, 3)), [])
    assert each_server_a_stage == ("b/net out", 20 / 1e9)
    name, seconds = busiest_lane(problem, flows((0, 1), (2, 3)), [HopBytes((0, 2), 70.0)])
    assert name == "b/bus out"
    assert seconds == pytest.approx((20 + 70) / 1e9)


def best(cluster: Cluster, request: PlanRequest) -> Answer:
    answer = find_plan(UNITS, cluster, request)
    assert isinstance(answer, Answer), str(answer)
    return answer


def test_slow_links_are_crossed_by_as_little_as_can_be() -> None:
    """Of two servers over a slow cable each holds half of the pipeline, not every other stage."""
    fast, slow = devices(1, 1), devices(1, 1)
    cluster = Cluster((server("a", fast, card=1.0), server("b", slow, card=1.0)))
    plan = best(cluster, PlanRequest(8, schedule="2bw", depth=4, width=1)).best.plan
    servers = [name[0].split("/")[0] for name in plan.devices]
    assert sum(a != b for a, b in pairwise(servers)) == 1


def test_a_fast_replica_takes_more_samples() -> None:
    cluster = Cluster((server("a", devices(2, 1)),))
    plan = best(cluster, PlanRequest(6, depth=1, width=2)).best.plan
    assert plan.micro_batch_sizes == (2, 1)
    assert plan.devices == (("a/emulated0", "a/emulated1"),)


def test_a_slow_device_gets_less_work() -> None:
    cluster = Cluster((server("a", devices(1, 0.5, 1)),))
    answer = best(cluster, PlanRequest(8, schedule="2bw", depth=3))
    work = {stage.devices[0]: stage.end - stage.begin for stage in answer.best.forecast.stages}
    assert work["a/emulated1"] == 1


def test_what_is_asked_of_a_plan_is_kept() -> None:
    cluster = Cluster((server("a", devices(1, 1)), server("b", devices(2, 1))))
    request = PlanRequest(
        8,
        synchronous=True,
        pinned={5: "a/emulated0"},
        together=((1, 3),),
        devices=("a/emulated0", "b/emulated0", "b/emulated1"),
        micro_batch=2,
        depth=2,
    )
    for candidate in best(cluster, request).candidates:
        plan = candidate.plan
        used = {name for row in plan.devices for name in row}
        assert used <= set(request.devices)
        assert plan.program(1).rule is Rule.SYNCHRONOUS
        assert not {2, 3} & set(plan.cuts)
        assert set(plan.micro_batch_sizes) == {2}
        assert (plan.num_stages if plan.stage_widths else plan.program(1).num_ranks) == 2
        last = -1 if plan.stage_widths else plan.program(1).rank_of_stage[-1]
        assert "a/emulated0" in plan.devices[last]


def test_the_largest_batch_is_used_where_it_helps() -> None:
    cluster = Cluster((server("a", devices(1, 1)),))
    small = best(cluster, PlanRequest(4, schedule="gpipe", depth=2, micro_batch=1)).best
    large = best(cluster, PlanRequest(4, largest_batch=16, schedule="gpipe", depth=2, micro_batch=1)).best
    assert (small.plan.num_microbatches, large.plan.num_microbatches) == (4, 16)
    assert large.forecast.cost_s_per_sample < small.forecast.cost_s_per_sample


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"depth": 3, "width": 2}, "needs 6 devices"),
        ({"depth": 7}, "needs 7 devices"),
        ({"schedule": "pipedream"}, "does not run pipedream"),
        ({"schedule": "2bw", "synchronous": True}, "delays updates"),
        ({"schedule": "1b1f"}, "There is no schedule"),
        ({"micro_batch": 3}, "not of 3"),
        ({"batch_size": 3, "micro_batch": 2}, "No plan"),
        ({"largest_batch": 2}, "Swap the two"),
        ({"devices": ("a/gpu0",)}, "no device 'a/gpu0'"),
        ({"pinned": {9: "a/emulated0"}}, "0 to 5"),
        ({"pinned": {0: "a/emulated0"}, "devices": ("a/emulated1",)}, "not among the devices"),
        ({"together": ((3, 9),)}, "cannot be kept together"),
        ({"together": ((0, 5),), "depth": 2}, "cannot make 2 stages"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(asked: dict[str, object], word: str) -> None:
    cluster = Cluster((server("a", devices(1, 1, 1)),))
    with pytest.raises(BiremeError, match=word):
        find_plan(UNITS, cluster, PlanRequest(**{"batch_size": 4, **asked}))  # type: ignore[arg-type]  # as given


@pytest.mark.slow
def test_what_fits_nowhere_says_where_and_what_would_help() -> None:
    cluster = Cluster((server("a", devices(1, 1, memory=100)),))
    request = PlanRequest(4, recompute=Recompute.NEVER)
    answer = find_plan(UNITS, cluster, request)
    assert isinstance(answer, NothingFits)
    worst = answer.stages[answer.stage]
    assert answer.missing_bytes == worst.peak_bytes - worst.limit_bytes > 0
    assert answer.device in str(answer)
    assert "recomputation (plan.recompute)" in str(answer)
    assert 'offloading to the host (memory.device = "auto")' in str(answer)
    roomy = Cluster((server("a", devices(1, 1, memory=100 + round(answer.missing_bytes))),))
    assert isinstance(find_plan(UNITS, roomy, request), Answer)
    tight = Cluster((server("a", devices(1, 1, memory=99 + round(answer.missing_bytes))),))
    assert isinstance(find_plan(UNITS, tight, request), NothingFits)


def test_what_fits_nowhere_with_several_stages_on_a_rank_says_so_too() -> None:
    """Once nobody was left to ask: the partition knows the bytes of one stage on each rank alone."""
    cluster = Cluster((server("a", devices(1, 1, memory=100)),))
    request = PlanRequest(4, schedule="interleaved", recompute=Recompute.NEVER)
    answer = find_plan(UNITS, cluster, request)
    assert isinstance(answer, NothingFits)
    assert (answer.schedule, len(answer.stages)) == ("interleaved", 4)
    assert answer.device in str(answer)


def test_a_pipeline_is_mapped_onto_one_server_also_if_a_smaller_one_is_faster() -> None:
    """The devices of the server with the fastest mean came first. A further machine of one device led so to
    pipelines over slow links only, 6 times as slow.
    """
    cluster = Cluster((server("a", devices(0.7, *[1.0] * 5)), server("b", devices(1.0))))
    problem = PlanningProblem(UNITS, cluster, PlanRequest(32))
    grids = promising_grids(problem, Outline("1f1b", 5, 1, (1,), 32))
    assert any({problem.servers[row[0]] for row in grid} == {0} for grid in islice(grids, 2))
