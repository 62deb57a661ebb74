"""Plans that page: what they promise fits and is right, and where nothing pages everything is as it was."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.made_up.models import profile_of
from bireme.cluster.catalogue import tier_share
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.cluster_file import cluster_text, read_cluster, save_cluster
from bireme.cluster.device import Device, EngineCost
from bireme.errors import BiremeError
from bireme.plan import plan as plans
from bireme.plan.explain import with_single_ways
from bireme.plan.forecast import Answer
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Paging, Plan
from bireme.plan.plan_file import load_plan, read_windows, saved_plan, write_plan, write_windows
from bireme.plan.plan_request import PlanRequest, TierLimits
from bireme.plan.search.draft import Draft
from bireme.plan.search.draft_paging import stage_memory, tier_links_of
from bireme.plan.search.paged_walk import PagedWalk
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, find_resident, forecast_of, timeline_of
from bireme.plan.search.shapes import Outline
from bireme.profile.profile import save_profile
from bireme.report.plan_table import ways_table
from bireme.report.terminal import tiers_table
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets, Cut
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program
from bireme.schedule.residency import keeps_last_gradients
from bireme.schedule.source import LONG
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline
from tests.support.command import bireme, with_sets
from tests.support.hand_plans import tiny_profile

pytestmark = pytest.mark.usefixtures("few_chunks")

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
FAST = Link(1e9)


@cache
def found(memory: TierLimits | None, *, is_small: bool = False) -> Answer:
    asked = request(memory)
    if is_small:
        asked = replace(asked, depth=1, recompute=Recompute.NEVER)
    answer = find_plan(PROFILE, cluster(), asked)
    assert isinstance(answer, Answer)
    return answer


def least_bytes(refusal: BaseException) -> int:
    """The bytes of device memory that a refusal asks for."""
    return int(str(refusal).split("(")[1].split(" bytes)")[0])


def request(memory: TierLimits | None) -> PlanRequest:
    return PlanRequest(4, schedule="1f1b", depth=2, memory=memory)


def cluster() -> Cluster:
    device = Device("any", "emulated", 10**9, host_bytes_per_s=4e9)
    card = Card("net", (0, 1), Link(1e9))
    return Cluster((Server("a", (device, device), cards=(card,), disk_bytes=10**10, disk_bytes_per_s=1e9),))


def hand_paging() -> Paging:
    parts = (64.0,) * 4
    sizes = Sizes(parts, parts, (128.0,) * 4, parts, (8.0,) * 4, (8.0,) * 4, (8.0,) * 4)
    return Paging((Budgets(700), Budgets(700, 600, 10_000)), sizes, chunk_bytes=(64, 64))


def hand_plan() -> Plan:
    return Plan((1, 2, 3), 4, "2bw", stages_per_rank=2, sweep=2, paging=hand_paging())


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


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh", "gpipe"])
def test_any_window_of_a_plan_is_what_it_would_be_if_it_were_planned_alone(schedule: str) -> None:
    plan = replace(hand_plan(), schedule=schedule, sweep=1)
    assert plan.paging is not None
    for num_batches, first_batch in ((3, 1), (3, 5), (13, 0), (13, 1), (16, 7)):
        alone = generate(
            schedule,
            num_stages=4,
            num_microbatches=4,
            num_batches=num_batches,
            stages_per_rank=2,
            first_batch=first_batch,
            timing=UpdateTiming(early=plan.is_early),
        )
        cut = plan.paging.cut(replace(plan, paging=None).program(4))
        assert plan.program(num_batches, first_batch) == plan.paging.paged(alone, cut).fetched(
            plan.paging.ahead
        )


def test_windows_that_are_read_are_those_that_were_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "windows.json", hand_plan()
    asked = [(4, 0), (LONG, 0), (LONG, 1), (30, 9), (3, 0)]
    planned = [plan.program(*window) for window in asked]
    write_windows(path, [plan])
    copies = []

    def counted(self: Paging, program: Program, cut: Cut) -> PagedPrograms:
        copies.append(program.num_batches)
        return paged(self, program, cut)

    paged = Paging.paged
    monkeypatch.setattr(Paging, "paged", counted)
    other = replace(plan, paging=replace(hand_paging(), ahead=2))
    read_windows(path, [other])  # says nothing of it
    plans._remembered.cache_clear()
    read_windows(path, [plan])
    try:
        assert [plan.program(*window) for window in asked] == planned
        assert copies == [3]
    finally:
        plans.KNOWN.clear()
        plans._remembered.cache_clear()


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
    without, with_limits = (
        json.loads((tmp_path / name).read_text()) for name in ("off.json", "allowed.json")
    )
    for one in (without, with_limits):
        del one["origin"]["how"]  # stages of unequal width are not searched if memory may be offloaded
    assert without == with_limits
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
    fast = ways["room for everything"]
    assert fast is not None
    assert fast.forecast.batch_s == whole.forecast.batch_s
    times = [one.forecast.cost_s_per_sample for one in tight.candidates]
    assert times == sorted(times)


@pytest.mark.slow
def test_frozen_weights_page_and_are_never_copied_out(tmp_path: Path) -> None:
    part = {"parameter_bytes": MB, "gradient_bytes": MB, "optimizer_bytes": 2 * MB, "buffer_bytes": 12 * MB}
    units = tuple(replace(unit, **part) for unit in PROFILE.units)  # type: ignore[arg-type]
    asked = replace(request(TierLimits(40 * MB)), depth=1, recompute=Recompute.NEVER)
    with pytest.raises(BiremeError, match="must be at least"):
        find_plan(replace(PROFILE, units=units), cluster(), asked)
    units = tuple(replace(unit, frozen_bytes=12 * MB) for unit in units)
    answer = find_plan(replace(PROFILE, units=units), cluster(), asked)
    assert isinstance(answer, Answer)
    write_plan(tmp_path / "plan.json", answer)
    plan = load_plan(tmp_path / "plan.json").plan
    assert plan == answer.best.plan
    for num_batches in (4, 12):
        program = plan.program(num_batches)
        assert check(program).ok, check(program).problems
        moved = [
            step for step in program.tracks[0] if step.page is not None and step.page.item is Item.FROZEN
        ]
        assert any(step.kind is Kind.FETCH for step in moved)
        assert not any(step.kind is Kind.EVICT and step.page and step.page.is_copied for step in moved)


def test_an_explanation_says_what_each_way_to_save_memory_would_take_alone() -> None:
    asked, answer = request(TierLimits(80 * MB)), found(TierLimits(80 * MB))
    told = with_single_ways(PROFILE, cluster(), asked, answer, find_resident)
    assert told.candidates == answer.candidates
    ways = {way.words: way for way in told.memory_ways}
    names = ("without offloading", "only recomputation", "only more stages", "only smaller micro-batches")
    assert tuple(ways)[:4] == names
    assert tuple(ways)[-1] == "room for everything"
    for words in names:
        assert (ways[words].candidate is None) == bool(ways[words].refusal)
    stages = stage_memory(answer.best.plan, PROFILE, cluster(), asked)
    moved = sum(tier.predicted_bytes_moved for tier in answer.best.forecast.tiers)
    assert sum(sum(one.copied_bytes.values()) for one in stages) == moved > 0
    assert all((one.copies_s > 0) == bool(one.copied_bytes) for one in stages)
    assert all(one.recomputes == (one.stage in answer.best.plan.recompute) for one in stages)
    off = found(None)
    assert stage_memory(off.best.plan, PROFILE, cluster(), asked) == ()
    assert with_single_ways(PROFILE, cluster(), request(None), off, find_resident) is off


@pytest.mark.slow
def test_sweeps_are_found_where_weights_are_most_of_what_is_fetched() -> None:
    """Large weights on a slow wire and small activations: g micro-batches fetch each part once."""
    heavy = profile_of(
        [0.01] * NUM_UNITS,
        [0.02] * NUM_UNITS,
        parameter_bytes=[40 * MB] * NUM_UNITS,
        kept_bytes=[MB] * NUM_UNITS,
        boundary_bytes=[MB] * NUM_UNITS,
        update_s=[0.002] * NUM_UNITS,
    )
    asked = PlanRequest(8, schedule="1f1b", depth=1, width=1, memory=TierLimits(250 * MB))
    answer = find_plan(heavy, cluster(), asked)
    assert isinstance(answer, Answer)
    best = answer.best
    assert best.plan.sweep > 1
    alone = replace(best.plan, sweep=1)
    assert forecast_of(alone, heavy, cluster(), asked).batch_s > best.forecast.batch_s


HEAVY = replace(
    PROFILE,
    units=tuple(replace(unit, parameter_bytes=8 * MB, optimizer_bytes=24 * MB) for unit in PROFILE.units),
)
"""Most of its state is what the optimizer remembers."""


def stepping(where: str, machines: Cluster | None = None, **more: object) -> Answer:
    """A plan for one device, with the optimizer there."""
    asked = replace(request(TierLimits(100 * MB, optimizer=where)), depth=1, width=1, **more)  # type: ignore[arg-type]
    answer = find_plan(HEAVY, machines or cluster(), asked)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.slow
def test_the_optimizer_steps_on_the_host_where_a_batch_takes_less_time(tmp_path: Path) -> None:
    auto, device, host = (stepping(where).best for where in ("auto", "device", "host"))
    assert host.forecast.batch_s < device.forecast.batch_s
    assert auto == host
    for best, on_host in ((device, False), (host, True)):
        assert best.plan.paging is not None
        assert best.plan.paging.host_updates == on_host
        program = best.plan.program(12)
        assert check(program).ok
        moved = {step.page.item for step in program.tracks[0] if step.page is not None}
        assert (Item.OPTIMIZER in moved) != on_host
        write_plan(tmp_path / "plan.json", best)
        assert ("host_updates" in (tmp_path / "plan.json").read_text()) == on_host
        assert load_plan(tmp_path / "plan.json").plan == best.plan


@pytest.mark.slow
def test_stages_that_may_update_apart_do_so_where_it_takes_less_time(tmp_path: Path) -> None:
    agreed = stepping("device").best
    for schedule, device_bytes, may_be in (("1f1b", 100 * MB, True), ("2bw", 200 * MB, False)):
        limits = TierLimits(device_bytes, optimizer="device", updates_apart=True)
        asked = replace(request(limits), depth=1, width=1, schedule=schedule)
        answer = find_plan(HEAVY, cluster(), asked)
        assert isinstance(answer, Answer)
        best = answer.best
        program = best.plan.program(12)
        assert check(program).ok
        assert best.plan.paging is not None
        assert best.plan.paging.updates_apart == may_be
        assert any(step.is_apart for step in program.tracks[0]) == may_be
        assert not may_be or best.forecast.batch_s < agreed.forecast.batch_s
        write_plan(tmp_path / "plan.json", best)
        assert load_plan(tmp_path / "plan.json").plan == best.plan


def test_stages_that_share_weights_are_refused_to_update_apart() -> None:
    tied = tiny_profile(tied="true")
    asked = PlanRequest(4, schedule="1f1b", depth=1, memory=TierLimits(10**5, updates_apart=True))
    with pytest.raises(BiremeError, match=r"several units use tokens\.weight"):
        find_plan(tied, cluster(), asked)


@pytest.mark.slow
def test_where_the_optimizer_cannot_step_on_the_host_it_steps_on_the_device_or_a_wish_is_refused() -> None:
    for machines, schedule, why in (
        (None, "2bw-fresh", "each trial step of 2bw-fresh"),
        (Cluster((Server("a", (Device("card", "cuda", 10**9),)),)), "1f1b", "the plan may use GPUs"),
    ):
        paging = stepping("auto", machines, schedule=schedule).best.plan.paging
        assert paging is not None
        assert not paging.host_updates
        with pytest.raises(BiremeError, match=why):
            stepping("host", machines, schedule=schedule)
    with pytest.raises(BiremeError, match="has no memory to offload to"):
        TierLimits(MB, 0, 10**9, optimizer="host")
    with pytest.raises(BiremeError, match="'disk'"):
        TierLimits(MB, optimizer="disk")


@pytest.mark.slow
def test_below_the_least_budget_the_error_names_a_number_that_fits() -> None:
    with pytest.raises(BiremeError, match="must be at least") as refused:
        found(TierLimits(20 * MB), is_small=True)
    number = least_bytes(refused.value)
    assert found(TierLimits(number), is_small=True).best.plan.paging is not None
    given = rf"\({number} bytes\), and is .* \({number - 1} bytes\)\. Set memory.device to {number} or more\."
    with pytest.raises(BiremeError, match=given) as refused:
        found(TierLimits(number - 1), is_small=True)
    would, _, few = str(refused.value).partition("Not enough alone")
    assert "share the optimizer" in few, "it was tried with all memory of the devices, and would do"
    assert would.endswith("without offloading. ")


@pytest.mark.slow
def test_what_a_rank_sends_lies_beside_the_budget_of_its_device() -> None:
    """The engine's messages counted in it, so that no budget near the least would do."""
    profile = replace(PROFILE, engine=EngineCost(1e-4, 1e-4, 1e-4))
    asked = replace(request(TierLimits(20 * MB)), recompute=Recompute.NEVER)
    with pytest.raises(BiremeError, match="must be at least") as refused:
        find_plan(profile, cluster(), asked)
    number = least_bytes(refused.value)
    answer = find_plan(profile, cluster(), replace(asked, memory=TierLimits(number)))
    assert isinstance(answer, Answer)
    assert answer.best.plan.paging is not None


@pytest.mark.slow
def test_a_device_and_a_host_too_small_for_an_equal_part_make_no_plan_infeasible() -> None:
    """Three unlike machines were refused, although the largest of them trained the model alone."""
    large = Server("large", (Device("any", "emulated", 60 * MB, speed=0.5),), host_memory_bytes=200 * MB)
    small = Server("small", (Device("any", "emulated", 12 * MB, speed=2.0),), host_memory_bytes=MB)
    asked = PlanRequest(4, memory=TierLimits())
    servers = [replace(one, cards=(Card("net", (0,), FAST),)) for one in (small, large)]
    alone = find_plan(PROFILE, Cluster((servers[1],)), asked)
    both = find_plan(PROFILE, Cluster(tuple(servers)), asked)
    assert isinstance(alone, Answer)
    assert isinstance(both, Answer)
    assert both.best.forecast.batch_s <= alone.best.forecast.batch_s * (1 + 1e-9)


def test_copies_are_planned_once_for_drafts_whose_state_exceeds_all_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for three unlike machines spent most of its time on plans that no tier could hold."""
    planned: list[Program] = []
    paged = Paging.paged

    def counted(self: Paging, program: Program, cut: Cut) -> PagedPrograms:
        planned.append(program)
        return paged(self, program, cut)

    monkeypatch.setattr(Paging, "paged", counted)
    problem = PlanningProblem(PROFILE, cluster(), request(TierLimits(60 * MB, 2 * MB)))
    walk = PagedWalk(problem, is_brief=False)
    seed = Draft(Outline("1f1b", 2, 1, (1,), 4), ((0,), (1,)), (len(PROFILE.units) // 2,))
    assert not walk.can_fit(seed)
    assert len(planned) == 1
    with pytest.raises(BiremeError, match=r"at least .* \(\d+ bytes\)"):
        raise walk.refusal()


def test_a_host_too_small_overflows_to_the_disk_or_is_refused_with_a_number() -> None:
    with pytest.raises(BiremeError, match=r"at least .* \(\d+ bytes\)"):
        found(TierLimits(70 * MB, 2 * MB))
    answer = found(TierLimits(70 * MB, 5 * MB, 10**10))
    tiers = {tier.tier: tier for tier in answer.best.forecast.tiers if tier.rank == 0}
    assert tiers["disk"].peak_bytes > 0
    assert tiers["host"].peak_bytes <= 5 * MB


def test_the_tables_of_paging_are_whole_at_80_columns() -> None:
    answer = found(TierLimits(70 * MB, 5 * MB, 10**10))
    console = Console(file=StringIO(), width=80)
    best = answer.best
    assert best.plan.paging is not None
    for table in (tiers_table(best.forecast.tiers, best.plan.paging.chunk_bytes), ways_table(answer)):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_saved_plans_with_paging_name_their_tiers() -> None:
    saved = saved_plan(found(TierLimits(80 * MB)))
    assert saved.forecast is not None
    assert {tier.tier for tier in saved.forecast.tiers} == {"device", "host"}


def test_devices_share_their_server_and_makers_figures_stand_in_for_what_is_not_said() -> None:
    card, chip = Device("card", "cuda", 10**9), Device("chip", "cpu", 10**9, bytes_per_s=30e9)
    servers = (
        Server(
            "a", (card,) * 4, (Bridge("pcie", (0, 1), Link(12e9)),), cards=(Card("net", (0, 1, 2, 3), FAST),)
        ),
        Server("b", (chip,), cards=(Card("net", (0,), FAST),), host_memory_bytes=8 * MB, disk_bytes=6 * MB),
    )
    both = Cluster(servers)
    assert tier_share(both, 0, (0, 1, 2)).host_bytes_per_s == 6e9  # two on one bridge
    assert tier_share(both, 0, (0, 2)).host_bytes_per_s == 12e9
    alone = tier_share(both, 2, (0, 2))
    assert (alone.host_bytes, alone.disk_bytes) == (None, None)
    assert alone.host_bytes_per_s == 15.75e9 * 0.8  # PCIe 3.0 x16, of which four fifths arrive
    assert alone.disk_bytes_per_s == 3.3e9 * 0.8 / 2
    own = tier_share(both, 4, (4,))
    assert (own.host_bytes, own.disk_bytes, own.host_bytes_per_s) == (8 * MB, 6 * MB, 10e9)


@pytest.mark.parametrize(
    ("server", "used", "share"),
    [
        ({}, 2, 1.0),
        ({"num_cores": 3}, 2, 0.5),
        ({}, 1, 0.0),
        ({"devices": (Device("chip", "cpu", 10**9),) * 2}, 2, 0.0),
    ],
    ids=["as many cores as devices", "a core to spare", "a device to spare", "cores not known"],
)
def test_copies_take_time_from_work_where_devices_compute_on_all_cores(
    server: dict[str, Any], used: int, share: float
) -> None:
    """Where a server says its cores device by device, copies were planned as if they had their own."""
    chip = Device("chip", "cpu", 10**9, num_cores=1)
    problem = PlanningProblem(
        PROFILE, Cluster((Server("a", **{"devices": (chip, chip)} | server),)), request(None)
    )
    links = tier_links_of(problem, tuple((device,) for device in range(used)), 0)
    assert [one.core_share for one in links] == [share] * used


def test_a_cluster_file_keeps_what_devices_can_page_to_and_is_what_it_was_without(tmp_path: Path) -> None:
    first, *others = cluster().servers
    devices = tuple(replace(one, copy_s=2.5e-5, chunk_s=1.5e-5) for one in first.devices)
    known = Cluster((replace(first, devices=devices), *others))
    save_cluster(known, tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == known
    text = cluster_text(Cluster((Server("a", (Device("any", "emulated", 10**9),)),)))
    assert "disk" not in text
    assert "host" not in text


def test_the_command_says_what_each_tier_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(PROFILE, tmp_path / "profile.json")
    save_cluster(cluster(), tmp_path / "cluster.toml")
    files = ("--profile", f"{tmp_path}/profile.json", f"cluster.source={tmp_path}/cluster.toml")
    shape = ("training.batch_size=4", "plan.schedule=1f1b", "plan.depth=2")
    words = with_sets(["plan", *files, *shape])
    document = bireme(capsys, *words, "--set", "memory.device=80MB", "--json").document
    keys = {"rank", "tier", "budget_bytes", "peak_bytes", "predicted_bytes_moved", "waited_s"}
    keys |= {"gathered_bytes"}
    assert all(row.keys() == keys for row in document["tiers"])
    assert {row["tier"] for row in document["tiers"]} == {"device", "host"}
    assert document["memory_ways"][0]["way"] == "without offloading"
    assert "tiers" not in bireme(capsys, *words, "--json").document
    refused = bireme(capsys, *words, "--set", "memory.disk=/nowhere")
    assert refused.status == 2
    assert "memory.device is not" in refused.err


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize("device_bytes", [500, 800])
def test_sums_of_a_plan_that_offloads_begin_as_early_as_is_predicted(
    schedule: str, device_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin before the last backward ends: no gradient leaves the device between it and the update."""
    seen = list[tuple[Program, Costs]]()

    def simulated(program: Program, costs: Costs, *rest: Any, **more: Any) -> Timeline:
        seen.append((program, costs))
        return simulate(program, costs, *rest, **more)

    monkeypatch.setattr("bireme.plan.search.evaluator.simulate", simulated)
    devices = tuple(Device("any", "cpu", 10**9, host_bytes_per_s=4e9) for _ in range(2))
    both = Cluster((Server("a", devices, cards=(Card("net", (0, 1), FAST),)),))
    names = (tuple(one.name for one in both.devices()),)
    budgets = (Budgets(device_bytes, 10_000),)
    paging = replace(hand_paging(), budgets=budgets, chunk_bytes=(64,), is_summed=True)
    plan = Plan((1, 2, 3), 4, schedule, stages_per_rank=4, width=2, micro_batch_sizes=(1, 1), devices=names)
    asked = PlanRequest(8, schedule=schedule, depth=1, width=2, memory=TierLimits(device_bytes))
    for one in (plan, replace(plan, paging=paging)):
        forecast_of(one, PROFILE, both, asked)
    (_, resident), (program, paged) = seen
    assert program.moves_memory
    assert keeps_last_gradients(program, 0)
    assert all(share > 0 for share in paged.early_share)
    assert paged.early_share == resident.early_share
    apart = replace(plan, paging=replace(paging, is_summed=False))
    assert not keeps_last_gradients(apart.program(LONG), 0)
