"""The pace of plans whose batches overlap is that of a long run, however late batches settle."""

from collections.abc import Sequence

import pytest

from benchmarks.made_up.models import profile_of
from benchmarks.search import flowing_error
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search import draft
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import forecast_of, timeline_of
from bireme.schedule.catalogue import generate
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import settled_batch_s
from tests.support.extent import draws


def servers(count: int, bytes_per_s: float, *, first: float = 1.0) -> Cluster:
    """Of one device each, the first with this speed."""
    card = (Card("card", (0,), Link(bytes_per_s, 0.0)),)
    devices = [Device("any", "emulated", 2**40, speed=1.0 if place else first) for place in range(count)]
    return Cluster(tuple(Server(f"s{place}", (one,), cards=card) for place, one in enumerate(devices)))


@pytest.mark.parametrize(
    ("schedule", "width", "cuts", "sizes", "bytes_per_s"),
    [
        # Every second batch is short, because messages are late: two batches together take equally long.
        ("2bw-fresh", 1, (1,), (610_000, 234_000), 22e6),
        # The sum takes longer than the work of a batch, which shows in the third batch only.
        ("2bw", 3, (), (0, 0), 5e7),
    ],
)
def test_the_pace_is_that_of_a_long_run(
    schedule: str, width: int, cuts: Sequence[int], sizes: Sequence[int], bytes_per_s: float
) -> None:
    forward_s = [0.0186, 0.0097, 0.0115]
    profile = profile_of(
        forward_s,
        [2 * one for one in forward_s],
        parameter_bytes=[6_742_729, 26_265_096, 2_928_656],
        boundary_bytes=[*sizes, 0],
        update_s=[0.001] * 3,
    )
    depth, num_microbatches = len(cuts) + 1, 3 if width == 1 else 2
    plan = Plan(
        tuple(cuts),
        num_microbatches,
        schedule,
        width=width,
        micro_batch_sizes=(1,) * width,
        devices=tuple(tuple(f"s{s * width + r}/emulated0" for r in range(width)) for s in range(depth)),
    )
    cluster, request = servers(depth * width, bytes_per_s), PlanRequest(num_microbatches * width)
    ends = timeline_of(plan, profile, cluster, request, num_batches=41).batch_end_s()
    long_run_s = (ends[39] - ends[19]) / 20
    assert forecast_of(plan, profile, cluster, request).batch_s == pytest.approx(long_run_s, rel=1e-3)
    assert ends[2] - ends[1] != pytest.approx(long_run_s, rel=2e-3)  # the usual window is too short


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"])
def test_forecasts_of_random_plans_are_near_a_long_run(schedule: str) -> None:
    late = 151  # under 2bw-fresh its batches settle after more than five
    assert max(abs(flowing_error(seed, schedule)) for seed in (*range(draws(20, 20)), late)) < 0.01


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"])
@pytest.mark.parametrize(("sums", "is_shorter"), [(0.3, True), (1.5, False)])
def test_a_much_shorter_batch_shows_that_a_device_is_busy_all_the_time(
    schedule: str, sums: float, is_shorter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums take this share of the work of the slowest device. If they take longer, the whole batch is
    simulated.
    """
    count, bytes_per_s = 48, 1e8
    profile = profile_of(
        [0.01] * 2,
        [0.02] * 2,
        parameter_bytes=[round(sums * count * 0.06 * bytes_per_s)] * 2,
        boundary_bytes=[10**5, 0],
        update_s=[0.001] * 2,
    )
    names = [f"s{place}/emulated0" for place in range(4)]
    devices = (tuple(names[:2]), tuple(names[2:]))
    plan = Plan((1,), count, schedule, width=2, micro_batch_sizes=(1, 1), devices=devices)
    cluster, found = servers(4, bytes_per_s, first=0.5), list[tuple[float, list[float], int]]()
    for large in (1, 10**9):
        monkeypatch.setattr(draft, "_LARGE", large)
        evaluator = PlanEvaluator(PlanningProblem(profile, cluster, PlanRequest(2 * count)))
        forecast = evaluator.forecast(draft.draft_of(plan, cluster))
        peaks = [stage.peak_bytes for stage in forecast.stages]
        found.append((forecast.batch_s, peaks, evaluator.num_instructions))
    (short_s, short_peaks, few), (whole_s, whole_peaks, many) = found
    assert short_s == pytest.approx(whole_s, rel=1e-9)
    assert short_peaks == whole_peaks
    assert (few < many) == is_shorter


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh", "1f1b"])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_clock_that_stops_has_shown_what_it_would_have_shown(schedule: str, num_batches: int) -> None:
    program = generate(schedule, num_stages=3, num_microbatches=4, num_batches=6)
    costs = Costs.per_stage(3, forward_s=1, backward_s=2, message_bytes=1, reduce_s=5)
    network = Links(1.0).network(program)
    whole = simulate(program, costs, network, agree=True)
    stopped = simulate(program, costs, network, agree=True, until=lambda ends: len(ends) == num_batches)
    assert stopped.batch_end_s() == whole.batch_end_s()[:num_batches]
    assert len(stopped.ranks[0].end_s) < len(whole.ranks[0].end_s)
    for before, after in zip(stopped.ranks, whole.ranks, strict=True):
        assert before.end_s == after.end_s[: len(before.end_s)]


@pytest.mark.parametrize(
    ("spans", "most", "settled"),
    [
        ([5, 4], 9, None),
        ([5, 4, 4.001], 9, 4.001),
        ([5, 4, 4.01], 9, None),
        ([9, 3, 5, 3, 5], 9, 4),
        ([9, 3, 5, 4, 5], 9, None),
        ([9, 3, 5, 4, 6], 6, 5),
        ([], 1, None),
    ],
)
def test_batches_settle_alone_or_in_pairs(spans: Sequence[float], most: int, settled: float | None) -> None:
    ends = [1.0]
    for span in spans:
        ends.append(ends[-1] + span)
    found = settled_batch_s(ends, most)
    assert found == (None if settled is None else pytest.approx(settled))
