"""What replicas take from each other on links, and what long batches take, against event simulations."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from benchmarks.search import sum_row
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import forecast_of, timeline_of
from bireme.simulate.links import ring_share
from tests.support.extent import examples
from tests.support.side_by_side import side_by_side_s

LAYOUTS = ("a replica on each server", "a rank on each server", "ranks on servers in turn")


def place(layout: str, rank: int, replica: int, depth: int, width: int) -> tuple[int, int]:
    """The server and the slot of a rank of a replica."""
    match layout:
        case "a replica on each server":
            return replica, rank
        case "a rank on each server":
            return rank, replica
    return (replica + rank) % width, rank


@st.composite
def equal_replicas(draw: st.DrawFn) -> tuple[Cluster, tuple[tuple[int, ...], ...]]:
    """Devices as fast as their rank, so that all replicas are equal, on links that may be slow."""
    depth, width = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    layout = draw(st.sampled_from(LAYOUTS))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=depth, max_size=depth))
    bus, net = draw(st.sampled_from([1.0, 4.0, 100.0])), draw(st.sampled_from([0.5, 2.0, 50.0]))
    has_bus, is_full = draw(st.booleans()), draw(st.booleans())
    seats = {place(layout, r, q, depth, width): (r, q) for r in range(depth) for q in range(width)}
    servers, number = list[Server](), dict[tuple[int, int], int]()
    for name in sorted({server for server, _ in seats}):
        slots = sorted(slot for server, slot in seats if server == name)
        for slot in slots:
            number[seats[name, slot]] = len(number)
        own = tuple(Device("any", "emulated", 10**9, speed=speeds[seats[name, slot][0]]) for slot in slots)
        places = tuple(range(len(own)))
        bridges = (Bridge("bus", places, Link(bus, 0.25, is_full)),) if has_bus else ()
        cards = (Card("net", places, Link(net, 0.5, is_full)),)
        servers.append(Server(f"server{name}", own, bridges, (), cards))
    grid = tuple(tuple(number[rank, replica] for replica in range(width)) for rank in range(depth))
    return Cluster(tuple(servers)), grid


@examples(60)
@given(equal_replicas(), st.data())
def test_equal_replicas_are_forecast_as_one_event_simulation_of_all_says(
    place: tuple[Cluster, tuple[tuple[int, ...], ...]], data: st.DataObject
) -> None:
    cluster, grid = place
    depth, width = len(grid), len(grid[0])

    def numbers(least: int, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(least, most), min_size=depth, max_size=depth))

    profile = profile_of(
        numbers(1, 9),
        numbers(1, 9),
        parameter_bytes=numbers(0, 40),
        boundary_bytes=numbers(0, 9),
        update_s=numbers(0, 3),
    )
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "2bw", "2bw-fresh", "zb-h1"]))
    plan = Plan(
        cuts=tuple(range(1, depth)),
        num_microbatches=data.draw(st.integers(max(depth, 2), 6)),
        schedule=schedule,
        width=width,
        micro_batch_sizes=(1,) * width,
        devices=tuple(tuple(cluster.devices()[one].name for one in row) for row in grid),
    )
    request = PlanRequest(plan.num_microbatches * width)
    draft = draft_of(plan, cluster)
    costs = costs_between(PlanningProblem(profile, cluster, request).whole(1), plan.cuts)
    costs = replace(
        costs.in_halves() if draft.splits_backward else costs,
        reduce_bytes=tuple(ring_share(width) * one for one in costs.gradient_bytes),
        rank_speed=tuple(cluster.devices()[row[0]].device.speed for row in grid),
    )
    together_s = side_by_side_s(draft.program(), [costs] * width, cluster, grid)
    assert forecast_of(plan, profile, cluster, request).batch_s == pytest.approx(together_s, rel=1e-6)


@pytest.mark.parametrize("num_microbatches", [4, 32, 256])
def test_a_sum_after_the_drain_is_not_slowed_by_the_messages_of_the_batch(num_microbatches: int) -> None:
    """A ring of 1 s was once forecast as 3 s, in proportion to the micro-batches before it."""
    # The sum of the last stage meets its last message, of 0.01 s.
    assert 1.0 <= sum_row(num_microbatches)["sum_s"] <= 1.01 + 1e-9


# --- batches of many micro-batches


def long_plan(schedule: str, num_microbatches: int, lookahead: int = 0, width: int = 1) -> Plan:
    """Three unequal stages in a row, of so many replicas."""
    names = [placed.name for placed in six_servers(4.0, 0.5).devices()]
    return Plan(
        cuts=(1, 2),
        num_microbatches=num_microbatches,
        schedule=schedule,
        lookahead=lookahead,
        micro_batch_sizes=(1,) * width,
        width=width,
        devices=tuple(tuple(names[rank * width : (rank + 1) * width]) for rank in range(3)),
    )


def six_servers(bytes_per_s: float, latency_s: float) -> Cluster:
    card = (Card("net", (0,), Link(bytes_per_s, latency_s)),)
    return Cluster(tuple(Server(f"s{n}", (Device("any", "emulated", 10**9),), cards=card) for n in range(6)))


@examples(80)
@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.sampled_from([1.0, 4.0, 100.0]),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from(["1f1b", "gpipe", "2bw", "2bw-fresh", "zb-h1"]),
    st.sampled_from([0, 2]),
    st.integers(1, 2),
    st.sampled_from([0, 10, 100]),
)
def test_a_long_batch_is_estimated_as_it_is_simulated(
    seconds: list[int],
    boundaries: list[int],
    bytes_per_s: float,
    latency_s: float,
    schedule: str,
    lookahead: int,
    width: int,
    parameter_bytes: int,
) -> None:
    profile = profile_of(
        seconds[:3], seconds[3:], boundary_bytes=boundaries, parameter_bytes=[parameter_bytes] * 3
    )
    cluster = six_servers(bytes_per_s, latency_s)
    plan = long_plan(schedule, 60, lookahead if schedule in ("1f1b", "2bw", "2bw-fresh") else 0, width)
    request = PlanRequest(60 * width)
    simulated = timeline_of(plan, profile, cluster, request, num_batches=4)
    estimated_s = forecast_of(plan, profile, cluster, request).batch_s
    assert estimated_s == pytest.approx(simulated.steady_batch_s, rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "zb-h1"])
def test_a_longer_batch_is_no_more_to_simulate(schedule: str) -> None:
    profile = profile_of([1, 2, 3], [2, 4, 6], boundary_bytes=[1, 1, 0])

    def num_instructions(num_microbatches: int) -> int:
        cluster = six_servers(4.0, 0.5)
        evaluator = PlanEvaluator(PlanningProblem(profile, cluster, PlanRequest(num_microbatches)))
        evaluator.forecast(draft_of(long_plan(schedule, num_microbatches), cluster))
        return evaluator.num_instructions

    assert num_instructions(2_000) == num_instructions(100)
