"""What the search finds is the best there is: brute force over every plan of small problems says so."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.bounds import EQUAL
from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device, EngineCost
from bireme.compiled import COMPILER_BYTES, LEAST_COMPILED
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Forecast, PlanKind
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of, timeline_of
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from tests.support.extent import examples
from tests.support.planning import small_clusters, small_profiles

NAMES = [name for name, schedule in SCHEDULES.items() if schedule.rule is not Rule.STASHED]


def kind_of(plan: Plan) -> PlanKind:
    return PlanKind.of(plan.schedule, plan.num_stages, plan.width)


def every_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Iterator[Plan]:
    """All plans, written down with nothing of the search: whatever `Plan` takes is one.

    Updates come early where the problem says that this costs no time.
    """
    problem: PlanningProblem | None = None
    names = [device.name for device in cluster.devices()]
    num_units = len(profile.units)
    schedules = NAMES if request.schedule == "auto" else [request.schedule]
    for width, ranks in product(range(1, len(names) + 1), repeat=2):
        if width * ranks > len(names):
            continue
        for sizes in product(profile.micro_batches, repeat=width):
            m, left = divmod(request.batch_size, sum(sizes))
            if left or m == 0:
                continue
            for name in schedules:
                if name == "1f1b-sliced" and any(size % 2 for size in sizes):
                    continue
                hides_sums = width > 1 and SCHEDULES[name].rule is not Rule.SYNCHRONOUS
                if ranks == 1 and request.schedule == "auto" and name != "sequential" and not hides_sums:
                    continue  # without a pipeline there is nothing to schedule
                for parts in {"interleaved": (2, 4), "zbv": (2,)}.get(name, (1,)):
                    if parts > 1 and ranks == 1:
                        continue
                    problem = problem or PlanningProblem(profile, cluster, request)
                    early = problem.updates_early(name, ranks, sizes)
                    yield from _cut_every_way(
                        name, ranks, parts, sizes, m, names, num_units, request.recompute, early=early
                    )


def _cut_every_way(
    name: str,
    ranks: int,
    parts: int,
    sizes: tuple[int, ...],
    m: int,
    names: list[str],
    num_units: int,
    recompute: Recompute,
    *,
    early: bool,
) -> Iterator[Plan]:
    stages = ranks * parts
    every_set = [some for count in range(stages + 1) for some in combinations(range(stages), count)]
    sets = {Recompute.NEVER: every_set[:1], Recompute.ALWAYS: every_set[-1:]}.get(recompute, every_set)
    slices: list[int | None] = [*range(1, min(stages, m) + 1)] if name == "1f1b-sliced" else [None]
    ahead: Sequence[int]
    ahead = range(max(m - stages + 1, 0) + 1) if name in ("1f1b", "2bw", "2bw-fresh") and stages > 1 else [0]
    for order in permutations(names, ranks * len(sizes)):
        grid = tuple(tuple(order[rank * len(sizes) : (rank + 1) * len(sizes)]) for rank in range(ranks))
        if len(set(sizes)) == 1 and list(grid[0]) != sorted(grid[0]):
            continue  # replicas that are alike have no order
        for cuts, again, num_sliced, lookahead in product(
            combinations(range(1, num_units), stages - 1), sets, slices, ahead
        ):
            try:
                yield Plan(
                    cuts=cuts,
                    num_microbatches=m,
                    schedule=name,
                    width=len(sizes),
                    stages_per_rank=parts if parts > 1 else None,
                    num_sliced=num_sliced,
                    lookahead=lookahead,
                    recompute=again,
                    micro_batch_sizes=sizes,
                    devices=grid,
                    updates_early=early,
                )
            except BiremeError:
                continue  # the schedule does not run in this shape


def fits(forecast: Forecast) -> bool:
    return all(stage.peak_bytes <= stage.limit_bytes for stage in forecast.stages)


def least_costs(profile: Profile, cluster: Cluster, request: PlanRequest) -> dict[PlanKind, float]:
    """The least cost of every kind, by brute force."""
    found: dict[PlanKind, float] = {}
    evaluator = PlanEvaluator(PlanningProblem(profile, cluster, request))
    for plan in every_plan(profile, cluster, request):
        forecast = evaluator.forecast(draft_of(plan, cluster))
        if fits(forecast):
            kind = kind_of(plan)
            found[kind] = min(found.get(kind, math.inf), forecast.cost_s_per_sample)
    return found


def check(profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
    """The search finds the best of every kind, and nothing where nothing fits."""
    try:
        answer = find_plan(profile, cluster, request)
    except BiremeError:
        assert not any(every_plan(profile, cluster, request))
        return
    least = least_costs(profile, cluster, request)
    if not isinstance(answer, Answer):
        assert not least
        assert answer.missing_bytes > 0
        return
    assume(answer.origin.how.startswith("all "))
    found: dict[PlanKind, float] = {}
    for candidate in answer.candidates:
        assert candidate.forecast.fits
        again = forecast_of(candidate.plan, profile, cluster, request)
        assert again == candidate.forecast
        kind = kind_of(candidate.plan)
        found[kind] = min(found.get(kind, math.inf), candidate.forecast.cost_s_per_sample)
    assert found == pytest.approx(least, rel=1e-9)
    costs = [candidate.forecast.cost_s_per_sample for candidate in answer.candidates]
    assert costs == sorted(costs)


@examples(80, suppress_health_check=list(HealthCheck))
@given(
    small_profiles(most_units=4),
    small_clusters(most_devices=2),
    st.sampled_from(NAMES),
    st.sampled_from([2, 4]),
    st.sampled_from(Recompute),
)
def test_the_plan_is_that_of_brute_force(
    profile: Profile, cluster: Cluster, name: str, batch_size: int, recompute: Recompute
) -> None:
    check(profile, cluster, PlanRequest(batch_size, schedule=name, recompute=recompute))


@pytest.mark.slow
@examples(200, suppress_health_check=list(HealthCheck))
@given(
    small_profiles(most_units=4),
    small_clusters(most_devices=3),
    st.sampled_from(["1f1b", "2bw", "2bw-fresh", "gpipe", "zb-h1", "sequential", "zbv", "interleaved"]),
    st.sampled_from([3, 4, 6]),
    st.sampled_from([Recompute.NEVER, Recompute.WHERE_NEEDED]),
)
def test_so_it_is_with_three_devices(
    profile: Profile, cluster: Cluster, name: str, batch_size: int, recompute: Recompute
) -> None:
    request = PlanRequest(batch_size, schedule=name, recompute=recompute, stage_widths=EQUAL)
    check(profile, cluster, request)


@pytest.mark.slow
@examples(60, suppress_health_check=list(HealthCheck))
@given(small_profiles(most_units=4), small_clusters(most_devices=2), st.sampled_from([2, 4]))
def test_so_it_is_with_all_schedules_at_once(profile: Profile, cluster: Cluster, batch_size: int) -> None:
    check(profile, cluster, PlanRequest(batch_size))


def test_a_plan_can_be_seen_as_it_will_run() -> None:
    profile = profile_of([0.01, 0.02, 0.015, 0.01], [0.02, 0.04, 0.03, 0.02], sizes=(1, 2))
    cluster = Cluster((Server("one", (Device("cpu", "cpu", 2**34),) * 2),))
    request = PlanRequest(batch_size=8, depth=2, schedule="2bw")
    answer = find_plan(profile, cluster, request)
    assert isinstance(answer, Answer)
    timeline = timeline_of(answer.best.plan, profile, cluster, request, num_batches=12)
    assert timeline.program.num_batches == 12
    assert timeline.steady_batch_s == pytest.approx(answer.best.forecast.batch_s, rel=0.01)


# --- for a run that is over soon


@pytest.mark.slow
def test_a_brief_search_simulates_less_and_still_offers_every_kind() -> None:
    """Eight steps of a tiny model waited for half a minute of planning."""
    units = 5
    profile = profile_of(
        [3, 5, 2, 4, 6],
        [6, 9, 4, 8, 11],
        sizes=(1, 2),
        parameter_bytes=[10] * units,
        kept_bytes=[5] * units,
        boundary_bytes=[2] * units,
        update_s=[1] * units,
    )
    # Where the engine takes as much as the model, as it does of a tiny one, bounds rule little out.
    profile = replace(profile, engine=EngineCost(instruction_s=2.0, send_s=4.0, take_s=2.0, late_s=5.0))
    cluster = Cluster((Server("here", (Device("any", "emulated", 10_000),) * 2),))
    request = PlanRequest(batch_size=4)
    full = find_plan(profile, cluster, request)
    brief = find_plan(profile, cluster, request, is_brief=True)
    assert isinstance(full, Answer)
    assert isinstance(brief, Answer)
    assert "as the run is short" in brief.origin.how
    assert brief.num_tried < full.num_tried
    kinds = [{kind_of(one.plan) for one in answer.candidates} for answer in (full, brief)]
    assert kinds[0] == kinds[1]
    assert brief.best.forecast.cost_s_per_sample <= 1.2 * full.best.forecast.cost_s_per_sample


@pytest.mark.parametrize(
    ("schedule", "optimizer", "shard", "compiling"),
    [
        ("2bw-fresh", "adamw", "none", [1]),
        ("2bw-fresh", "adamw", "optimizer", []),
        ("2bw-fresh", "muon", "none", []),
        ("2bw", "adamw", "none", []),
    ],
)
def test_a_stage_whose_trial_steps_are_compiled_holds_a_compiler(
    schedule: str, optimizer: str, shard: str, compiling: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a stage that is small, and none that is small in each of the replicas that share it."""
    few, many = 4 * (LEAST_COMPILED - 1), 4 * LEAST_COMPILED
    profile = profile_of([1, 1], [2, 2], parameter_bytes=[few, many])
    profile = replace(profile, optimizer=optimizer, device_kind="cpu", engine=EngineCost(1e-4, 1e-4, 1e-4))
    width = 1 if shard == "none" else 2
    cluster = Cluster((Server("here", (Device("any", "emulated", 2**40),) * 2 * width),))
    request = PlanRequest(
        2 * width, schedule=schedule, depth=2, width=width, micro_batch=1, shard=shard, stage_widths=EQUAL
    )

    def peaks(has_numba: bool) -> list[float]:
        monkeypatch.setattr("bireme.plan.search.problem.IS_COMPILED", has_numba)
        answer = find_plan(profile, cluster, request)
        assert isinstance(answer, Answer)
        return [stage.peak_bytes for stage in answer.best.forecast.stages]

    more = [one - other for one, other in zip(peaks(True), peaks(False), strict=True)]
    assert more == [COMPILER_BYTES if stage in compiling else 0 for stage in range(2)]


@pytest.mark.slow
@examples(60, suppress_health_check=list(HealthCheck))
@given(small_profiles(most_units=4), small_clusters(most_devices=3), st.data())
def test_another_device_makes_no_plan_infeasible_and_none_slower(
    profile: Profile, cluster: Cluster, data: st.DataObject
) -> None:
    names = [placed.name for placed in cluster.devices()]
    some = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    request = PlanRequest(2, schedule=data.draw(st.sampled_from(["1f1b", "2bw"])))
    try:
        fewer = find_plan(profile, cluster, replace(request, devices=tuple(some)), advises=False)
    except BiremeError:
        return
    if isinstance(fewer, Answer):
        all_devices = find_plan(profile, cluster, request)
        assert isinstance(all_devices, Answer)
        least = fewer.best.forecast.cost_s_per_sample
        assert all_devices.best.forecast.cost_s_per_sample <= least * (1 + 1e-9)
