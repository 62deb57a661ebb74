"""What replicas take from each other on links, and what long batches take, against event simulations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from benchmarks.search import sum_row
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluator import SETTLING, PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import forecast_of, timeline_of
from bireme.schedule.program import Program, Rule
from bireme.simulate.links import ring_share
from bireme.simulate.simulator import Until
from bireme.timeline.timeline import settled_batch_s
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


@dataclass(frozen=True)
class EqualReplicas:
    """Equal replicas on a cluster, `grid[rank][replica]`, and what the stages of each take."""

    cluster: Cluster
    grid: tuple[tuple[int, ...], ...]
    forward_s: Sequence[int]
    backward_s: Sequence[int]
    parameter_bytes: Sequence[int]
    boundary_bytes: Sequence[int]
    update_s: Sequence[int]
    schedule: str
    num_microbatches: int


def cluster_of(
    layout: str, speeds: Sequence[float], width: int, card: Link, bus: Link | None
) -> tuple[Cluster, tuple[tuple[int, ...], ...]]:
    """Devices as fast as their rank, so that all replicas are equal, and where each rank and replica is."""
    depth = len(speeds)
    seats = {place(layout, r, q, depth, width): (r, q) for r in range(depth) for q in range(width)}
    servers, number = list[Server](), dict[tuple[int, int], int]()
    for name in sorted({server for server, _ in seats}):
        slots = sorted(slot for server, slot in seats if server == name)
        for slot in slots:
            number[seats[name, slot]] = len(number)
        own = tuple(Device("any", "emulated", 10**9, speed=speeds[seats[name, slot][0]]) for slot in slots)
        places = tuple(range(len(own)))
        bridges = (Bridge("bus", places, bus),) if bus else ()
        servers.append(Server(f"server{name}", own, bridges, (), (Card("net", places, card),)))
    grid = tuple(tuple(number[rank, replica] for replica in range(width)) for rank in range(depth))
    return Cluster(tuple(servers)), grid


@st.composite
def equal_replicas(draw: st.DrawFn) -> EqualReplicas:
    """On links that may be slow."""
    depth, width = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    layout = draw(st.sampled_from(LAYOUTS))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=depth, max_size=depth))
    bus, net = draw(st.sampled_from([1.0, 4.0, 100.0])), draw(st.sampled_from([0.5, 2.0, 50.0]))
    has_bus, is_full = draw(st.booleans()), draw(st.booleans())
    card = Link(net, 0.5, is_full)

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=depth, max_size=depth))

    return EqualReplicas(
        *cluster_of(layout, speeds, width, card, Link(bus, 0.25, is_full) if has_bus else None),
        forward_s=numbers(1, 9),
        backward_s=numbers(1, 9),
        parameter_bytes=numbers(0, 40),
        boundary_bytes=numbers(0, 9),
        update_s=numbers(0, 3),
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "2bw", "2bw-fresh", "zb-h1"])),
        num_microbatches=draw(st.integers(max(depth, 2), 6)),
    )


def two_replicas_of_three(
    speeds: Sequence[float],
    card: Link,
    *,
    backward_s: Sequence[int],
    parameter_bytes: Sequence[int],
    update_s: Sequence[int],
) -> EqualReplicas:
    """A replica on each of two servers, under 2bw."""
    return EqualReplicas(
        *cluster_of(LAYOUTS[0], speeds, 2, card, None),
        backward_s=backward_s,
        parameter_bytes=parameter_bytes,
        update_s=update_s,
        forward_s=[1, 1, 1],
        boundary_bytes=[0, 0, 0],
        schedule="2bw",
        num_microbatches=3,
    )


SLOW_SUMS = two_replicas_of_three(
    [0.5, 0.5, 0.5],
    Link(0.5, 0.5, full_duplex=True),
    backward_s=[1, 1, 1],
    parameter_bytes=[0, 5, 5],
    update_s=[0, 0, 0],
)
"""The card needs 20 s for the sums of a batch. After the first, batches take 28 s, 18 s, 22 s and so on; the
one in the middle of a window of four is that of 18 s.
"""

LATE_PACE = two_replicas_of_three(
    [0.5, 0.5, 1.0],
    Link(0.5, 0.5, full_duplex=False),
    backward_s=[1, 1, 3],
    parameter_bytes=[0, 0, 2],
    update_s=[0, 0, 1],
)
"""The last rank needs 13 s for a batch. After the first, batches take 14 s, 12 s and then 13 s."""


@examples(60)
@given(equal_replicas())
@example(SLOW_SUMS)
@example(LATE_PACE)
def test_equal_replicas_are_forecast_as_one_event_simulation_of_all_says(case: EqualReplicas) -> None:
    """Or, if a window of so few batches is shorter, as the busiest device or lane says."""
    cluster, grid = case.cluster, case.grid
    depth, width = len(grid), len(grid[0])
    profile = profile_of(
        case.forward_s,
        case.backward_s,
        parameter_bytes=case.parameter_bytes,
        boundary_bytes=case.boundary_bytes,
        update_s=case.update_s,
    )
    plan = Plan(
        cuts=tuple(range(1, depth)),
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        width=width,
        micro_batch_sizes=(1,) * width,
        devices=tuple(tuple(cluster.devices()[one].name for one in row) for row in grid),
    )
    problem = PlanningProblem(profile, cluster, PlanRequest(plan.num_microbatches * width))
    draft = draft_of(plan, cluster)
    costs = costs_between(problem.whole(1), plan.cuts)
    costs = replace(
        costs.in_halves() if draft.splits_backward else costs,
        reduce_bytes=tuple(ring_share(width) * one for one in costs.gradient_bytes),
        rank_speed=tuple(cluster.devices()[row[0]].device.speed for row in grid),
    )

    def together_s(program: Program, until: Until | None = None) -> float:
        return side_by_side_s(program, [costs] * width, cluster, grid, until)

    forecast_s = PlanEvaluator(problem).forecast(draft).batch_s
    window_s = together_s(draft.program())
    if draft.rule is not Rule.SYNCHRONOUS:  # such a forecast goes on until batches take equally long
        ended: list[float] = []
        together_s(draft.program(), lambda ends: ended.__setitem__(slice(None), ends))
        settled_s = settled_batch_s(ended[: draft.program().num_batches - 1])
        if settled_s is None:

            def is_settled(ends: Sequence[float]) -> bool:
                ended[:] = ends
                return settled_batch_s(ends, SETTLING - 1) is not None

            together_s(draft.ungathered_program(SETTLING), is_settled)
            settled_s = settled_batch_s(ended, SETTLING - 1)
        assert settled_s is not None
        window_s = settled_s
    least_s = PlanEvaluator(problem).floor(draft).seconds
    assert forecast_s == pytest.approx(max(window_s, least_s), rel=1e-6)
    if window_s < least_s * (1 - 1e-6):
        assert together_s(plan.program(41)) >= 0.98 * least_s


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

    assert num_instructions(2_000) <= num_instructions(100)


def test_the_timeline_of_a_plan_is_of_its_slowest_replica() -> None:
    """It was the first of the replicas with the busiest device, whatever crossed their links."""
    own = (Device("any", "emulated", 1000),) * 3
    servers = (Server(name, own, cards=(Card("net", (0, 1, 2), Link(1.0)),)) for name in "ab")
    cluster, profile = Cluster((*servers,)), profile_of([1, 1], [2, 2], boundary_bytes=[4, 4])
    grid = ("a/emulated0", "a/emulated1"), ("a/emulated2", "b/emulated0")
    plan = Plan((1,), 8, "1f1b", width=2, micro_batch_sizes=(1, 1), devices=grid)
    request = PlanRequest(16)
    drawn = timeline_of(plan, profile, cluster, request, num_batches=6)
    assert drawn.steady_batch_s == pytest.approx(forecast_of(plan, profile, cluster, request).batch_s)
