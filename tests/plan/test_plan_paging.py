"""Plans that page: what they promise fits and is right, and where nothing pages everything is as it was."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Cluster
from bireme.cluster.device import Device
from bireme.cluster.links import Card, Link
from bireme.cluster.server import Server
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer
from bireme.plan.paging import Paging
from bireme.plan.plan import Plan
from bireme.plan.plan_file import load_plan, saved_plan, write_plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan, timeline_of
from bireme.plan.tier_limits import TierLimits
from bireme.schedule.budgets import Budgets
from bireme.schedule.checker import check
from bireme.schedule.residency import Sizes

MB = 10**6
NUM_UNITS = 4
PROFILE = profile_of(
    [0.01] * NUM_UNITS,
    [0.02] * NUM_UNITS,
    parameter_bytes=[8 * MB] * NUM_UNITS,
    kept_bytes=[6 * MB] * NUM_UNITS,
    boundary_bytes=[MB] * NUM_UNITS,
    update_s=[0.002] * NUM_UNITS,
)
ROOM = TierLimits(10**9)


@cache
def found(memory: TierLimits | None, memory_bytes: int = 10**9) -> Answer:
    answer = find_plan(PROFILE, cluster(memory_bytes), request(memory))
    assert isinstance(answer, Answer)
    return answer


def request(memory: TierLimits | None) -> PlanRequest:
    return PlanRequest(4, schedule="1f1b", depth=2, memory=memory)


def cluster(memory_bytes: int = 10**9) -> Cluster:
    device = Device("any", "emulated", memory_bytes, host_bytes_per_s=4e9)
    card = Card("net", (0, 1), Link(1e9))
    return Cluster((Server("a", (device, device), cards=(card,), disk_bytes=10**10, disk_bytes_per_s=1e9),))


def hand_plan() -> Plan:
    parts = (64.0,) * 4
    sizes = Sizes(parts, parts, (128.0,) * 4, parts, (8.0,) * 4, (8.0,) * 4, (8.0,) * 4)
    paging = Paging((Budgets(700), Budgets(700, 600, 10_000)), sizes, chunk_bytes=(64, 64))
    return Plan((1, 2, 3), 4, "2bw", stages_per_rank=2, sweep=2, paging=paging)


def test_a_plan_that_pages_is_read_as_it_was_written_and_its_programs_are_right(tmp_path: Path) -> None:
    plan = hand_plan()
    write_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json").plan == plan
    for num_batches in (2, 4, 12):
        program = plan.program(num_batches)
        assert check(program).ok, check(program).problems
        # Windows of any length have the same chunks and capacities, so that arenas need not change.
        for rank, tiers in enumerate(plan.program(4).tiers):
            now = program.tiers_of(rank)
            assert now is not None
            assert tiers is not None
            assert replace(now, begin={}) == replace(tiers, begin={})
    assert len(program.tracks[1]) > len(replace(plan, paging=None).program(12).tracks[1])


def test_paging_of_other_stages_or_ranks_is_refused() -> None:
    plan = hand_plan()
    assert plan.paging is not None
    with pytest.raises(BiremeError, match="2 ranks"):
        replace(plan, paging=replace(plan.paging, budgets=plan.paging.budgets[:1]))
    with pytest.raises(BiremeError, match="stages"):
        replace(plan, cuts=(1,), stages_per_rank=1)


def test_where_everything_fits_the_plan_file_has_no_word_of_paging(tmp_path: Path) -> None:
    off, allowed = found(None), found(TierLimits())
    write_plan(tmp_path / "off.json", off)
    write_plan(tmp_path / "allowed.json", allowed)
    assert (tmp_path / "off.json").read_bytes() == (tmp_path / "allowed.json").read_bytes()
    plain = json.loads((tmp_path / "off.json").read_text())
    assert not {"paging", "sweep"} & plain["plan"].keys()
    assert "tiers" not in plain["forecast"]


def test_a_plan_within_a_budget_pages_no_faster_than_with_room_and_keeps_within_it() -> None:
    whole, tight = found(None).best, found(TierLimits(80 * MB))
    best = tight.best
    assert best.plan.paging is not None
    assert best.forecast.batch_s >= whole.forecast.batch_s * (1 - 1e-9)
    assert check(best.plan.program(10)).ok
    for tier in best.forecast.tiers:
        if tier.tier == "device":
            assert tier.budget_bytes == 80 * MB
        if tier.budget_bytes is not None:
            assert tier.peak_bytes <= tier.budget_bytes
        assert tier.predicted_bytes_moved > 0
    timeline = timeline_of(best.plan, PROFILE, cluster(), request(TierLimits(80 * MB)), num_batches=10)
    assert timeline.steady_batch_s == pytest.approx(best.forecast.batch_s)
    ways = {way.words: way.candidate for way in tight.memory_ways}
    fast = ways["with room for everything"]
    assert fast is not None
    assert fast.forecast.batch_s == whole.forecast.batch_s
    times = [one.forecast.cost_s_per_sample for one in tight.candidates]
    assert times == sorted(times)


def test_below_the_least_budget_the_number_that_would_do_is_told_and_does() -> None:
    with pytest.raises(BiremeError, match="must be at least") as refused:
        found(TierLimits(20 * MB))
    number = int(str(refused.value).split("at least ")[1].split()[0])
    assert found(TierLimits(number)).best.plan.paging is not None
    with pytest.raises(BiremeError, match="at least"):
        found(TierLimits(number - 1))


def test_a_host_too_small_overflows_to_the_disk_or_is_refused_with_a_number() -> None:
    with pytest.raises(BiremeError, match="host memory"):
        found(TierLimits(70 * MB, 10 * MB))
    answer = found(TierLimits(70 * MB, 10 * MB, 10**10))
    tiers = {tier.tier: tier for tier in answer.best.forecast.tiers if tier.rank == 0}
    assert tiers["disk"].peak_bytes > 0
    assert tiers["host"].peak_bytes <= 10 * MB
    assert answer.best.forecast.bottleneck in {"a/emulated0's disk", "a/emulated1's disk"}


def test_saved_plans_with_paging_name_their_tiers() -> None:
    saved = saved_plan(found(TierLimits(80 * MB)))
    assert saved.forecast is not None
    assert {tier.tier for tier in saved.forecast.tiers} == {"device", "host"}
