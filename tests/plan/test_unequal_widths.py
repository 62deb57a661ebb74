"""Stages of unequal width: the search finds the best plan, and forecasts of such plans are right."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import HealthCheck, assume, example, given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from benchmarks.made_up.vgg16 import MICRO_BATCH, PUBLISHED, cluster_a, vgg16
from bireme.bounds import parse_stage_widths
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Forecast, NothingFits
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of, shares_by_speed
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of
from bireme.plan.search.stage_widths import BatchShape, DeviceOrder, StageCosts, Widths, cut_for
from bireme.profile.profile import KindProfile, Profile, Rates, UnitWork
from bireme.schedule.program import Rule
from tests.support.extent import examples
from tests.support.planning import small_clusters, small_profiles

SCHEDULES = ["1f1b", "gpipe", "2bw"]


def alone(*speeds: float, memory_bytes: int = 10_000, bytes_per_s: float = 1e3) -> Cluster:
    """Servers of one device each."""
    return apart([Device("any", "emulated", memory_bytes, speed=speed) for speed in speeds], bytes_per_s)


def together(*speeds: float, memory_bytes: int = 60) -> Cluster:
    """A server of these devices, which share a card."""
    devices = tuple(Device("any", "emulated", memory_bytes, speed=speed) for speed in speeds)
    return Cluster((Server("s", devices, cards=(Card("net", tuple(range(len(devices))), Link(0.5, 0.5)),)),))


def apart(devices: Sequence[Device], bytes_per_s: float = 1e3) -> Cluster:
    """Servers of one of these devices each."""
    card = (Card("net", (0,), Link(bytes_per_s, 0.0)),)
    return Cluster(tuple(Server(f"s{place}", (one,), cards=card) for place, one in enumerate(devices)))


def fits(forecast: Forecast) -> bool:
    return all(stage.peak_bytes <= stage.limit_bytes for stage in forecast.stages)


def every_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Iterator[Plan]:
    """All plans of unequal widths, written down with nothing of the search but the shares."""
    devices = cluster.devices()
    names = [placed.name for placed in devices]
    speeds = {placed.name: placed.device.speed for placed in devices}
    num_units = len(profile.units)
    for widths in (
        widths
        for depth in range(2, num_units + 1)
        for widths in product(range(1, len(names) + 1), repeat=depth)
        if sum(widths) <= len(names) and len(set(widths)) > 1
    ):
        ends = [sum(widths[: place + 1]) for place in range(len(widths))]
        grids = {
            tuple(tuple(sorted(order[begin:end])) for begin, end in pairwise([0, *ends]))
            for order in permutations(names, sum(widths))
        }
        stages = range(len(widths))
        sets = [some for count in range(len(widths) + 1) for some in combinations(stages, count)]
        for size, cuts in product(profile.micro_batches, combinations(range(1, num_units), len(stages) - 1)):
            count = request.batch_size // size
            if request.batch_size % size or max(widths) > count:
                continue
            for grid, recompute, ahead in product(sorted(grids), sets, range(count + 1)):
                shares = tuple(shares_by_speed([speeds[name] for name in row], count) for row in grid)
                plan = (
                    Plan(
                        cuts,
                        count,
                        request.schedule,
                        lookahead=ahead,
                        recompute=recompute,
                        micro_batch_sizes=(size,),
                        stage_widths=widths,
                        stage_shares=shares,
                        devices=grid,
                    )
                    if _runs(request.schedule, len(stages), count, shares, ahead)
                    else None
                )
                if plan is not None:
                    yield plan


def _runs(schedule: str, depth: int, count: int, shares: tuple[tuple[int, ...], ...], ahead: int) -> bool:
    try:
        Plan(
            tuple(range(1, depth)),
            count,
            schedule,
            lookahead=ahead,
            stage_widths=tuple(map(len, shares)),
            stage_shares=shares,
        ).program(1)
    except BiremeError:
        return False
    return True


# --- shares


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=3), st.integers(0, 9))
def test_shares_end_as_early_as_any(speeds: list[float], more: int) -> None:
    count = len(speeds) + more
    shares = shares_by_speed(speeds, count)
    assert sum(shares) == count
    assert min(shares) >= 1

    def end(given: tuple[int, ...]) -> float:
        return max(share / speed for share, speed in zip(given, speeds, strict=True))

    others = (one for one in product(range(1, count + 1), repeat=len(speeds)) if sum(one) == count)
    assert end(shares) == min(map(end, others))
    assert shares_by_speed(shares, count) == shares


def test_equal_devices_have_equal_shares_and_the_first_take_the_rest() -> None:
    assert shares_by_speed([1.0] * 3, 11) == (4, 4, 3)
    assert shares_by_speed([2.0, 1.0], 300) == (200, 100)


# --- the forecast


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [4, 24])
def test_widths_that_are_equal_take_as_long_as_replicas(schedule: str, count: int) -> None:
    """Two replicas that are pipelines of their own do what two stages of two ranks each do."""
    profile = profile_of(
        [3, 2, 4],
        [5, 4, 6],
        parameter_bytes=[40, 30, 20],
        kept_bytes=[10] * 3,
        boundary_bytes=[30] * 3,
        update_s=[1] * 3,
    )
    cluster = alone(1.0, 1.0, 1.0, 1.0, bytes_per_s=40.0)
    names = [placed.name for placed in cluster.devices()]
    plan = Plan(
        (2,),
        count // 2,
        schedule,
        width=2,
        micro_batch_sizes=(1, 1),
        devices=(tuple(names[:2]), tuple(names[2:])),
    )
    wide = replace(plan, num_microbatches=count, width=1, micro_batch_sizes=(1,), stage_widths=(2, 2))
    request = PlanRequest(count)
    one, other = (forecast_of(each, profile, cluster, request) for each in (plan, wide))
    assert other.batch_s == pytest.approx(one.batch_s, rel=1e-9)
    assert other.busy_share == pytest.approx(one.busy_share)
    assert [stage.device_peak_bytes for stage in other.stages] == [
        stage.device_peak_bytes for stage in one.stages
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 0.5)])
def test_a_long_batch_is_estimated_from_two_shorter_ones(schedule: str, speeds: tuple[float, ...]) -> None:
    profile = profile_of(
        [3, 2, 4], [5, 4, 6], parameter_bytes=[40, 30, 20], kept_bytes=[1] * 3, boundary_bytes=[30] * 3
    )
    cluster = alone(*speeds, bytes_per_s=20.0)
    names = [placed.name for placed in cluster.devices()]
    count = 121
    plan = Plan(
        (2,),
        count,
        schedule,
        micro_batch_sizes=(1,),
        stage_widths=(3, 1),
        stage_shares=(shares_by_speed(speeds[:3], count), (count,)),
        devices=(tuple(names[:3]), (names[3],)),
    )
    problem = PlanningProblem(profile, cluster, PlanRequest(count))
    evaluator = PlanEvaluator(problem)
    draft = draft_of(plan, cluster)
    shortened = draft.shortened(0)
    assert shortened is not None
    for one in shortened:
        assert all(sum(share) == one.outline.num_microbatches for share in one.shares)
    whole = evaluator.timeline(draft, draft.program()).steady_batch_s
    assert evaluator.forecast(draft).batch_s == pytest.approx(whole, rel=0.03)


# --- the search


def answered(profile: Profile, cluster: Cluster, request: PlanRequest) -> Answer | None:
    try:
        found = find_plan(profile, cluster, request, advises=False)
    except BiremeError:
        return None
    return found if isinstance(found, Answer) else None


@pytest.mark.slow
@examples(40, 12, suppress_health_check=list(HealthCheck))
# A stage on the slow device and one of the fast devices: the one before it in their order is better.
@example(profile_of([1, 1], [1, 1], update_s=[0, 1]), together(1.0, 0.5, 1.0), "1f1b", 2)
@given(
    small_profiles(most_units=3),
    small_clusters(most_devices=3),
    st.sampled_from(SCHEDULES),
    st.sampled_from([2, 4]),
)
def test_the_plan_of_unequal_widths_is_that_of_brute_force(
    profile: Profile, cluster: Cluster, schedule: str, batch_size: int
) -> None:
    request = PlanRequest(batch_size, schedule=schedule)
    assume(cluster.num_devices == 3 and len(profile.units) > 1)
    evaluator = PlanEvaluator(PlanningProblem(profile, cluster, request))
    least: dict[tuple[int, ...], float] = {}
    for plan in every_plan(profile, cluster, request):
        draft = draft_of(plan, cluster)
        forecast = evaluator.forecast(draft)
        assert evaluator.least_s(draft) <= forecast.batch_s * (1 + 1e-9)
        if fits(forecast):
            known = least.get(plan.stage_widths, math.inf)
            least[plan.stage_widths] = min(known, forecast.cost_s_per_sample)
    for widths in ((2, 1), (1, 2)):
        answer = answered(profile, cluster, replace(request, stage_widths=widths))
        assert (answer is not None) == (widths in least)
        if answer is not None:
            assert "all plans of unequal widths" in answer.origin.how
            assert answer.best.plan.stage_widths == widths
            assert answer.best.forecast.cost_s_per_sample == pytest.approx(least[widths], rel=1e-9)
            assert forecast_of(answer.best.plan, profile, cluster, request) == answer.best.forecast
    free = answered(profile, cluster, request)
    if free is not None:
        assert free.best.forecast.cost_s_per_sample <= min(least.values(), default=math.inf) * (1 + 1e-9)


@pytest.mark.slow
def test_vgg16_is_planned_as_published() -> None:
    """PipeDream's 15-1: the convolutions on 15 devices, the fully connected layers on one. Asked for by all
    that it specifies, the plan is found again.
    """
    profile, cluster = vgg16(), cluster_a()
    request = PlanRequest(30 * MICRO_BATCH, schedule="1f1b", depth=2, lookahead=False)
    answer = answered(profile, cluster, request)
    assert answer is not None
    plan = answer.best.plan
    assert plan.stage_widths == PUBLISHED
    assert plan.cuts == (13,)
    assert plan.shares == ((2,) * 15, (30,))
    equal = next(one for one in answer.candidates if not one.plan.stage_widths)
    assert equal.forecast.batch_s > 1.2 * answer.best.forecast.batch_s
    again = answered(profile, cluster, replace(request, stage_widths=PUBLISHED, micro_batch=MICRO_BATCH))
    assert again is not None
    assert again.best == answer.best
    assert forecast_of(plan, profile, cluster, request) == answer.best.forecast


def test_messages_to_a_stage_of_one_device_cross_the_card_of_its_server() -> None:
    """They were counted as if the cards of all four servers carried them, or PCIe, so the cut was put before
    the last pooling, where messages are four times as large.
    """
    profile = vgg16()
    cluster = cluster_a().with_links(
        lambda _, group: replace(group.link, bytes_per_s=group.link.bytes_per_s * 0.57)
    )
    request = PlanRequest(30 * MICRO_BATCH, schedule="2bw", stage_widths=PUBLISHED)
    answer = answered(profile, cluster, request)
    assert answer is not None
    assert answer.best.plan.cuts == (13,)


def test_stages_of_unequal_width_share_by_speed_and_may_run_again() -> None:
    profile = profile_of(
        [4, 4, 4, 1], [8, 8, 8, 2], parameter_bytes=[10, 10, 10, 400], kept_bytes=[90, 90, 90, 10]
    )
    cluster = alone(2.0, 1.0, 1.0, memory_bytes=2_000, bytes_per_s=50.0)
    answer = answered(profile, cluster, PlanRequest(12, schedule="1f1b", stage_widths=(2, 1)))
    assert answer is not None
    plan = answer.best.plan
    speeds = {placed.name: placed.device.speed for placed in cluster.devices()}
    for names, share in zip(plan.devices, plan.shares, strict=True):
        assert share == shares_by_speed([speeds[name] for name in names], 12)
    tight = alone(2.0, 1.0, 1.0, memory_bytes=1_700, bytes_per_s=50.0)
    again = answered(profile, tight, PlanRequest(12, schedule="gpipe", stage_widths=(2, 1)))
    assert again is not None
    assert again.best.plan.recompute
    never = replace(PlanRequest(12, schedule="gpipe", stage_widths=(2, 1)), recompute=Recompute.NEVER)
    assert answered(profile, tight, never) is None


TIGHT = profile_of([4, 4, 4, 1], [8, 8, 8, 2], parameter_bytes=[10, 10, 10, 400], kept_bytes=[90, 90, 90, 10])


def test_a_search_of_all_simulates_the_most_promising_plans_alone() -> None:
    """In the order in which they are made 328 plans are simulated, in the order of their bounds 32."""
    cluster = alone(2.0, 1.0, 1.0, memory_bytes=1_700, bytes_per_s=50.0)
    answer = answered(TIGHT, cluster, PlanRequest(12, stage_widths=(2, 1)))
    assert answer is not None
    assert "all plans of unequal widths" in answer.origin.how
    assert answer.num_tried <= 40


def test_widths_that_are_not_searched_in_full_are_searched_on_fewer_devices() -> None:
    request = PlanRequest(6, schedule="1f1b", stage_widths=(2, 1))
    answer = answered(TIGHT, alone(2.0, 1.5, 1.0, 0.7), request)
    assert answer is not None
    assert not answer.is_exhaustive
    assert "1 subsets of the devices searched" in answer.origin.how


@pytest.mark.parametrize(("num_devices", "widths"), [(3, (2, 1)), (10, (9, 1))])
def test_widths_that_do_not_fit_lack_memory(num_devices: int, widths: tuple[int, ...]) -> None:
    """Also if the dynamic program finds none that fits."""
    cluster = alone(*[1.0] * num_devices, memory_bytes=100)
    found = find_plan(TIGHT, cluster, PlanRequest(12, stage_widths=widths))
    assert isinstance(found, NothingFits)
    assert "which has only 100 B" in str(found)
    assert " What would make one fit: 1.47 KiB more on each of " in found.advice
    assert "Not enough" not in found.advice


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("is_named", [False, True])
def test_one_or_two_devices_have_no_stages_of_unequal_width(num_devices: int, *, is_named: bool) -> None:
    cluster = alone(*[1.0] * (3 if is_named else num_devices))
    names = [placed.name for placed in cluster.devices()][:num_devices]
    request = PlanRequest(8, devices=tuple(names) if is_named else ())
    answer = answered(TIGHT, cluster, request)
    assert answer is not None
    assert "unequal" not in answer.origin.how
    words = f"No plan with stage widths 2-1 is possible: its stages need 3 devices, but {num_devices} may be"
    with pytest.raises(BiremeError, match=words):
        find_plan(TIGHT, cluster, replace(request, stage_widths=(2, 1)))


def test_work_of_unlike_devices_is_counted_with_their_usual_speeds() -> None:
    """A kind of devices whose passes take twice as long and whose updates take five times as long."""
    base = profile_of([1, 2, 3], [2, 4, 5], parameter_bytes=[8] * 3, update_s=[4] * 3)
    odd = replace(
        base,
        units=tuple(
            replace(
                unit,
                update_s=5 * unit.update_s,
                costs=tuple(
                    replace(cost, forward_s=2 * cost.forward_s, backward_s=2 * cost.backward_s)
                    for cost in unit.costs
                ),
            )
            for unit in base.units
        ),
    )
    profile = replace(base, kinds=(KindProfile("odd", odd),))
    devices = [Device(name, "cuda", 2**40) for name in ("usual", "odd", "usual")]
    cluster = apart(devices)
    names = [placed.name for placed in cluster.devices()]
    plan = Plan(
        (2,),
        4,
        "1f1b",
        micro_batch_sizes=(1,),
        stage_widths=(1, 2),
        stage_shares=((4,), (1, 3)),
        devices=((names[0],), (names[1], names[2])),
    )
    found = forecast_of(plan, profile, cluster, PlanRequest(4))
    assert [stage.busy_s for stage in found.stages] == pytest.approx([4 * 9 + 8, max(2 * 8 + 20, 3 * 8 + 4)])
    row = DeviceOrder(PlanningProblem(profile, cluster, PlanRequest(4)), (0, 1))
    assert [row.replicas(place, place + 1, 4).update_s for place in (0, 1)] == pytest.approx([1, 5])


def test_devices_that_are_scaled_by_rates_update_at_the_speed_of_their_memory() -> None:
    work = UnitWork(flops=10**12, product_bytes=10**6, other_bytes=0, num_calls=1)
    base = profile_of([1.0, 1.0], [2.0, 2.0], update_s=[0.5, 0.5])
    units = tuple(replace(unit, costs=(replace(unit.costs[0], work=work),)) for unit in base.units)
    profile = replace(base, units=units, device_kind="cuda", rates=Rates("float32", 1e12, 1e11))
    devices = [Device("one", "cuda", 2**34, 1e11, 1e12, 2e12), Device("two", "cuda", 2**34, 3e11, 4e12, 8e12)]
    cluster = apart(devices)
    problem = PlanningProblem(profile, cluster, PlanRequest(4))
    assert [one.compute for one in problem.usual_resource_speeds] == pytest.approx([1, 4])
    assert [one.memory for one in problem.usual_resource_speeds] == pytest.approx([1, 3])


@pytest.mark.slow
def test_equal_devices_and_units_are_not_simulated_with_unequal_widths() -> None:
    """If equal widths are the best possible, no plan of unequal widths is simulated."""
    profile = profile_of([0.01] * 16, [0.02] * 16, boundary_bytes=[10**6] * 16)
    answer = answered(profile, cluster_a(), PlanRequest(64, schedule="1f1b", lookahead=False))
    assert answer is not None
    assert "0 plans of unequal widths simulated" in answer.origin.how


# --- the dynamic program


@examples(60)
@example(profile_of([1] * 4, [2] * 4), [1.0] * 4, "1f1b", 8)  # equal widths are the best on all devices
@given(
    small_profiles(most_units=5),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=5),
    st.sampled_from(SCHEDULES[::2]),
    st.integers(6, 9),
)
def test_the_dynamic_program_finds_the_least_greatest_cost(
    profile: Profile, speeds: list[float], schedule: str, count: int
) -> None:
    problem = PlanningProblem(profile, alone(*speeds, bytes_per_s=10.0), PlanRequest(count))
    shape = BatchShape(schedule, problem.sizes[0], count)
    rule = Rule.SYNCHRONOUS if schedule == "1f1b" else Rule.DELAYED
    costs = StageCosts(problem.merged(shape.size, 1, rule), rule, Recompute.WHERE_NEEDED)
    row = DeviceOrder(problem, range(len(speeds)))
    most = min(problem.num_units, len(speeds) - 1)
    for depth in range(2, most + 1):
        best = Widths(row, costs, shape, most).best(depth)
        found = {
            widths: cut_for(problem, row, costs, shape, widths)
            for widths in product(range(1, len(speeds)), repeat=depth)
            if sum(widths) <= len(speeds) and len(set(widths)) > 1
        }
        greatest = {widths: one.greatest_s for widths, one in found.items() if one is not None}
        assert (best is None) == (not greatest)
        if best is not None:
            assert greatest[best] == pytest.approx(min(greatest.values()))


# --- what is asked


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"stage_widths": (2, 2)}, "Set depth = 2 and width = 2 instead"),
        ({"stage_widths": (2, 0)}, "each stage has one replica or more"),
        ({"stage_widths": (2, 1), "depth": 3}, "are of 2 stages, but the depth is 3"),
        ({"stage_widths": (2, 1), "width": 2}, "the width of all stages is 2. Leave out the width"),
        ({"stage_widths": (2, 1), "schedule": "zb-h1"}, "zb-h1 runs stages of equal width only"),
        ({"stage_widths": (2, 1), "shard": "optimizer"}, "only stages of equal width share memory"),
        ({"stage_widths": "3,1"}, "such as 3-1"),
    ],
)
def test_widths_that_cannot_be_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(BiremeError, match=words):
        PlanRequest(8, **asked)  # type: ignore[arg-type]  # named as in `PlanRequest`


def test_widths_are_written_as_their_papers_write_them() -> None:
    assert parse_stage_widths("15-1") == (15, 1)
    assert parse_stage_widths(" Equal ") == "equal"
    with pytest.raises(BiremeError, match="Use any, equal, or the replicas of each stage"):
        parse_stage_widths("15-x")


def test_widths_for_more_devices_than_there_are_make_no_plan() -> None:
    with pytest.raises(BiremeError, match="No plan with stage widths 4-1"):
        find_plan(profile_of([1, 1], [1, 1]), alone(1.0, 1.0, 1.0), PlanRequest(8, stage_widths=(4, 1)))
