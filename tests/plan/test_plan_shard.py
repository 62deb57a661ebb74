"""Replicas that share an optimizer, in predictions: less memory, shorter steps, other bytes on the link."""

from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.codec.sum_description import SiteRounds, SumCost, parse_sum_codec
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Forecast, NothingFits
from bireme.plan.partition.loads import holdings
from bireme.plan.plan import Plan
from bireme.plan.plan_file import load_plan, write_plan
from bireme.plan.plan_request import AUTO, SHARDS, PlanRequest, TierLimits
from bireme.plan.search.paged_walk import PagedWalk
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import Profile
from bireme.report.plan_document import plan_document, shard_note
from bireme.report.plan_table import print_plan
from bireme.sync.slices import part_sum_bytes
from tests.support.hand_plans import tiny_profile

SLOW = 1.25e6
WIDTH = 3
DEVICES = tuple(f"s{place}/gpu0" for place in range(WIDTH))


@cache
def profile_of_much() -> Profile:
    """Of a model of which much is remembered: a part less of it outweighs what sums in parts take."""
    found = tiny_profile()
    return replace(
        found, units=tuple(replace(one, optimizer_bytes=4 * one.optimizer_bytes) for one in found.units)
    )


def cluster(memory_bytes: int = 2**30, num_servers: int = WIDTH) -> Cluster:
    """Machines with a device each, and slow links."""
    device = Device("small", "cuda", memory_bytes=memory_bytes)
    card = Card("card", (0,), Link(SLOW, 0.0))
    return Cluster(tuple(Server(f"s{place}", (device,), cards=(card,)) for place in range(num_servers)))


def forecast(shard: str, schedule: str = "1f1b") -> Forecast:
    devices = (tuple(f"s{place}/gpu0" for place in range(WIDTH)),)
    plan = Plan((), 4, schedule, width=WIDTH, micro_batch_sizes=(1,) * WIDTH, devices=devices)
    plan = replace(plan, updates_halfway=shard != "none" and schedule == "2bw")
    return forecast_of(plan, profile_of_much(), cluster(), PlanRequest(batch_size=4 * WIDTH, shard=shard))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_each_replica_is_predicted_to_keep_its_part_only(schedule: str) -> None:
    units = profile_of_much().units
    shared = sum(unit.optimizer_bytes for unit in units)
    if schedule == "2bw-fresh":  # the newest weights lie apart from the trial versions
        shared += sum(unit.parameter_bytes for unit in units)
    plain, own = (forecast(shard, schedule).stages[0].peak_bytes for shard in ("none", "optimizer"))
    beside = part_sum_bytes(sum(unit.gradient_bytes for unit in units), WIDTH)
    assert beside > 0
    assert plain - own == pytest.approx((1 - 1 / WIDTH) * shared - beside, abs=1.0)


def test_sums_and_weights_are_predicted_to_travel_once_each_and_steps_to_be_shorter() -> None:
    units = profile_of_much().units
    parameters, gradients = (
        sum(getattr(u, f"{what}_bytes") for u in units) for what in ("parameter", "gradient")
    )
    update_s = sum(unit.update_s for unit in units)
    for schedule, num_bytes in (("1f1b", gradients + parameters), ("2bw-fresh", 2 * gradients + parameters)):
        plain, own = forecast("none", schedule), forecast("optimizer", schedule)
        more_s = (WIDTH - 1) / WIDTH * (num_bytes - 2 * gradients) / SLOW
        saved_s = (1 - 1 / WIDTH) * update_s
        assert own.batch_s - plain.batch_s == pytest.approx(more_s - saved_s, abs=0.02 * plain.batch_s)
        device, replicas = own.tiers
        share = (WIDTH - 1) / WIDTH
        assert device.predicted_bytes_moved == pytest.approx(share * parameters)
        assert replicas.predicted_bytes_moved == pytest.approx(share * (num_bytes - parameters))
        assert not plain.tiers


def test_a_plan_that_fits_only_shared_is_found_and_says_so(tmp_path: Path) -> None:
    profile = profile_of_much()
    request = PlanRequest(batch_size=4 * WIDTH, schedule="2bw", width=WIDTH, micro_batch=1)
    plain, own = forecast("none", "2bw").stages[0], forecast("optimizer", "2bw").stages[0]
    between = cluster(int(plain.peak_bytes + own.peak_bytes) // 2)
    assert not isinstance(find_plan(profile, between, request), Answer)
    found = find_plan(profile, between, replace(request, shard="optimizer"))
    assert isinstance(found, Answer)
    assert found.best.plan.updates_halfway
    write_plan(tmp_path / "plan.json", found)
    assert load_plan(tmp_path / "plan.json").plan == found.best.plan
    write_plan(tmp_path / "plain.json", replace(found.best.plan, updates_halfway=False))
    assert "updates_halfway" not in (tmp_path / "plain.json").read_text()


def gathered_forecast(
    parts: int, whole_weights: int, sweep: int = 1, profile: Profile | None = None
) -> Forecast:
    devices = (tuple(f"s{place}/gpu0" for place in range(WIDTH)),)
    plan = Plan(
        tuple(range(1, parts)),
        4,
        "1f1b",
        width=WIDTH,
        stages_per_rank=parts,
        sweep=sweep,
        micro_batch_sizes=(1,) * WIDTH,
        devices=devices,
        whole_weights=whole_weights,
    )
    shard = "weights" if whole_weights else "optimizer"
    request = PlanRequest(batch_size=4 * WIDTH, shard=shard)
    return forecast_of(plan, profile or profile_of_much(), cluster(), request)


def test_shared_weights_are_predicted_to_be_whole_a_few_at_a_time() -> None:
    """Weights and sums are there as parts, and besides those of the largest stage that is computed on."""
    units = profile_of_much().units
    parts = len(units)
    own, shared = (gathered_forecast(parts, whole).stages[0].peak_bytes for whole in (0, 1))
    state = sum(unit.parameter_bytes + unit.gradient_bytes for unit in units)
    whole = max(unit.parameter_bytes + unit.gradient_bytes for unit in units)
    assert shared <= own - (1 - 1 / WIDTH) * state + whole + 1
    assert gathered_forecast(parts, 2).stages[0].peak_bytes > shared


def test_gathers_and_sums_are_predicted_to_take_their_bytes_on_the_links() -> None:
    units = profile_of_much().units
    one, swept = gathered_forecast(2, 1), gathered_forecast(2, 1, sweep=4)
    device, replicas = swept.tiers
    cut = [units[:1], units[1:]]
    weights, gradients = (
        [sum(getattr(unit, f"{what}_bytes") for unit in own) for own in cut]
        for what in ("parameter", "gradient")
    )
    # Forward through both, and back: the last part is whole already, and the first one is at the next batch.
    share = (WIDTH - 1) / WIDTH
    assert device.predicted_bytes_moved == pytest.approx(share * (2 * weights[0] + weights[1]))
    assert replicas.predicted_bytes_moved == pytest.approx(share * sum(gradients))
    assert one.tiers[0].predicted_bytes_moved > device.predicted_bytes_moved
    assert swept.batch_s < one.batch_s
    assert swept.batch_s >= (device.predicted_bytes_moved + replicas.predicted_bytes_moved) / SLOW


def test_gradients_that_stages_share_are_predicted_to_be_summed_once_a_batch() -> None:
    """They were predicted to be summed in parts, with the others."""
    tied = tiny_profile(tied="true")
    alone = replace(tied, units=tuple(replace(unit, tied=()) for unit in tied.units))
    found, without = (gathered_forecast(2, 1, profile=one) for one in (tied, alone))
    (num_bytes,) = {held.gradient_bytes for unit in tied.units for held in unit.tied if held.gradient_bytes}
    less = without.tiers[1].predicted_bytes_moved - found.tiers[1].predicted_bytes_moved
    # Each of two stages summed them after each of four micro-batches.
    assert less == pytest.approx((2 * 4 - 2) * (WIDTH - 1) / WIDTH * num_bytes)
    assert found.tiers[0].predicted_bytes_moved == without.tiers[0].predicted_bytes_moved
    assert found.batch_s < without.batch_s


def test_stages_that_delay_updates_share_weights() -> None:
    """How few micro-batches would show all was asked of a batch of one, which they cannot have."""
    request = PlanRequest(
        batch_size=8 * WIDTH, schedule="2bw", width=WIDTH, depth=2, micro_batch=1, shard="weights"
    )
    found = find_plan(tiny_profile(), cluster(num_servers=2 * WIDTH), request)
    assert isinstance(found, Answer)
    assert found.best.plan.whole_weights


def test_a_plan_that_fits_only_with_shared_weights_is_found_and_says_so(tmp_path: Path) -> None:
    profile = profile_of_much()
    request = PlanRequest(
        batch_size=4 * WIDTH, schedule="1f1b", width=WIDTH, micro_batch=1, shard="optimizer"
    )
    parts = len(profile.units)
    peaks = [gathered_forecast(parts, whole).stages[0].peak_bytes for whole in (0, 2)]
    between = cluster(int(sum(peaks)) // 2)
    assert not isinstance(find_plan(profile, between, request), Answer)
    found = find_plan(profile, between, replace(request, shard="weights"))
    assert isinstance(found, Answer)
    assert found.best.plan.whole_weights
    assert found.best.plan.num_stages > 1
    console = Console(file=StringIO(), width=120)
    print_plan(found, profile, 1.0, console)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "whole at a time" in shown
    assert any(line.split()[:1] == ["replicas"] for line in shown.splitlines())  # a row of the tiers
    write_plan(tmp_path / "plan.json", found)
    assert load_plan(tmp_path / "plan.json").plan == found.best.plan


@pytest.mark.parametrize("fits", ["none", "optimizer", "weights"])
def test_what_replicas_share_is_chosen_by_the_time_of_what_fits(fits: str, tmp_path: Path) -> None:
    profile = profile_of_much()
    request = PlanRequest(batch_size=4 * WIDTH, schedule="1f1b", width=WIDTH, micro_batch=1)
    parts = len(profile.units)
    peaks = [
        forecast("none").stages[0].peak_bytes,
        gathered_forecast(parts, 0).stages[0].peak_bytes,
        gathered_forecast(parts, 2).stages[0].peak_bytes,
    ]
    place = SHARDS.index(fits)
    rooms = [2**30, (peaks[0] + peaks[1]) // 2, (peaks[1] + peaks[2]) // 2]
    machines = cluster(int(rooms[place]))
    each = {one: find_plan(profile, machines, request.sharing(one), advises=False) for one in SHARDS}
    costs = {
        one: found.best.forecast.cost_s_per_sample for one, found in each.items() if isinstance(found, Answer)
    }
    assert tuple(costs) == SHARDS[place:]
    answer = find_plan(profile, machines, request.sharing(AUTO))
    assert isinstance(answer, Answer)
    assert answer.best.plan.shard == min(costs, key=costs.__getitem__)
    assert answer.best.forecast.cost_s_per_sample == min(costs.values())
    assert [way.words for way in answer.shard_ways if way.candidate] == [*costs]
    assert all("needs" in way.refusal for way in answer.shard_ways if way.candidate is None)
    (note,) = shard_note(answer)
    assert note.startswith(f'memory.shard = "auto" chose "{answer.best.plan.shard}"')
    assert note.count("is not possible") == place
    write_plan(tmp_path / "plan.json", answer)
    assert load_plan(tmp_path / "plan.json").plan == answer.best.plan
    assert [one["way"] for one in plan_document(answer, profile, 0.0)["shard_ways"]] == [*SHARDS]


def test_of_what_replicas_may_share_excluded_choices_are_passed_over() -> None:
    profile = profile_of_much()
    asked = PlanRequest(batch_size=4 * WIDTH, schedule="1f1b", width=WIDTH, micro_batch=1, shard=AUTO)
    answer = find_plan(profile, cluster(), replace(asked, whole_backwards=True))
    assert isinstance(answer, Answer)
    assert answer.best.plan.shard == "none"
    refused = [way for way in answer.shard_ways if way.candidate is None]
    assert [way.words for way in refused] == ["optimizer", "weights"]
    assert all("principal components" in way.refusal for way in refused)
    nothing, none = (
        find_plan(profile, cluster(memory_bytes=1), one) for one in (asked, asked.sharing("none"))
    )
    assert isinstance(nothing, NothingFits)
    assert nothing == none
    assert nothing.advice
    alone = find_plan(profile, cluster(), replace(asked, width=None, depth=WIDTH))
    assert isinstance(alone, Answer)
    assert (alone.best.plan.shard, alone.shard_ways) == ("none", ())


def test_what_replicas_may_share_depends_on_how_they_agree() -> None:
    asked = PlanRequest(batch_size=8, shard=AUTO)
    assert asked.shards == SHARDS
    assert replace(asked, width=1).shards == ("none",)
    quorum, averages = SiteRounds(), SiteRounds(averages=True)
    assert replace(asked, rounds=quorum).shards == replace(asked, rounds=averages).shards == ("none",)
    assert replace(asked, rounds=quorum, sites=2).shards == ("optimizer", "weights")
    assert replace(asked, rounds=averages, sites=2).shards == SHARDS
    assert replace(asked, rounds=averages, sites=2).sharing("weights").rounds == replace(
        averages, in_parts=True
    )
    assert replace(asked, rounds=averages, sites=2).sharing("none").rounds == averages


def test_drafts_that_room_for_everything_would_not_make_faster_are_not_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = profile_of_much()
    peak = gathered_forecast(len(profile.units), 2).stages[0].peak_bytes
    limits = TierLimits(int(1.2 * peak))
    asked = PlanRequest(4 * WIDTH, schedule="1f1b", width=WIDTH, shard="weights", memory=limits)
    few = find_plan(profile, cluster(), asked, is_brief=True)
    monkeypatch.setattr(PagedWalk, "cost_with_room", lambda *_: 0.0)
    many = find_plan(profile, cluster(), asked, is_brief=True)
    assert isinstance(few, Answer)
    assert isinstance(many, Answer)
    assert few.best == many.best
    assert few.num_tried < many.num_tried


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(BiremeError, match="'gradients'"):
        PlanRequest(batch_size=4, shard="gradients")
    with pytest.raises(BiremeError, match="replicas share the weights, and the schedule is"):
        PlanningProblem(
            profile_of_much(), cluster(), PlanRequest(batch_size=4, shard="weights", schedule="2bw-fresh")
        )
    with pytest.raises(BiremeError, match="principal components"):
        PlanRequest(batch_size=4, shard="optimizer", whole_backwards=True)


def test_of_whole_matrices_one_replica_is_predicted_to_keep_the_largest_more() -> None:
    units = profile_of_much().units
    kept = sum(unit.optimizer_bytes for unit in units)
    muon = replace(profile_of_much(), optimizer="muon")
    plan = Plan((), 4, "1f1b", width=WIDTH, micro_batch_sizes=(1,) * WIDTH, devices=(DEVICES,))
    peaks = {
        num_bytes: forecast_of(
            plan, muon, cluster(), PlanRequest(4 * WIDTH, shard="optimizer", whole_bytes=num_bytes)
        )
        .stages[0]
        .peak_bytes
        for num_bytes in (1, kept // 10, 2 * kept)
    }
    least, some, all_of_it = peaks.values()
    assert some - least == pytest.approx((1 - 1 / WIDTH) * (kept // 10), abs=2.0)
    assert all_of_it - least == pytest.approx((1 - 1 / WIDTH) * kept, abs=2.0)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_residuals_of_a_codec_are_predicted_to_be_kept_whole_by_each_replica(shard: str) -> None:
    """And messages to take less of the link than gradients."""
    gradients = sum(unit.gradient_bytes for unit in profile_of_much().units)
    whole_weights = 2 if shard == "weights" else 0
    plan = Plan(
        (),
        4,
        "1f1b",
        width=WIDTH,
        micro_batch_sizes=(1,) * WIDTH,
        devices=(DEVICES,),
        whole_weights=whole_weights,
    )
    plain, coded = (
        forecast_of(plan, profile_of_much(), cluster(), PlanRequest(4 * WIDTH, shard=shard, sums=sums))
        for sums in (SumCost(), SumCost(parse_sum_codec("int2"), message_share=0.1, kept_share=2.0))
    )
    assert coded.stages[0].peak_bytes - plain.stages[0].peak_bytes == pytest.approx(2 * gradients, abs=2.0)
    (weights, sums), (same, fewer) = (
        [tier.predicted_bytes_moved for tier in one.tiers] for one in (plain, coded)
    )
    assert same == weights
    assert fewer == pytest.approx(0.1 * sums)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_replicas_are_predicted_to_share_within_their_site_only(shard: str, tmp_path: Path) -> None:
    """Where each site is one replica, nothing is shared, and no part of a sum is sent apart."""
    plan = Plan(
        (),
        4,
        "1f1b",
        width=WIDTH,
        micro_batch_sizes=(1,) * WIDTH,
        devices=(DEVICES,),
        whole_weights=2 if shard == "weights" else 0,
        sites=WIDTH,
    )
    request = PlanRequest(4 * WIDTH, shard=shard, sites=WIDTH)
    found = forecast_of(plan, profile_of_much(), cluster(), request)
    assert found.stages[0].peak_bytes == forecast("none").stages[0].peak_bytes
    write_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json").plan == plan
    with pytest.raises(BiremeError, match="3 replicas for 2 sites"):
        replace(plan, sites=2)
    asked = PlanRequest(batch_size=12, schedule="1f1b", depth=1, shard=shard, sites=2)
    alone = find_plan(profile_of_much(), cluster(), asked)
    assert isinstance(alone, Answer)
    assert (alone.best.plan.width, alone.best.plan.sites) == (2, 2)


def test_weights_that_do_not_learn_are_predicted_to_be_shared_and_gathered_too() -> None:
    profile = profile_of_much()
    units = tuple(
        replace(one, buffer_bytes=one.buffer_bytes + 9000, frozen_bytes=9000) for one in profile.units
    )
    parts = len(units)
    plain, own = (
        gathered_forecast(parts, 1, profile=one) for one in (profile, replace(profile, units=units))
    )
    more = own.stages[0].peak_bytes - plain.stages[0].peak_bytes
    assert more == pytest.approx(9000 * parts / WIDTH + 9000, abs=2.0)
    times = own.tiers[0].predicted_bytes_moved - plain.tiers[0].predicted_bytes_moved
    gathers = plain.tiers[0].predicted_bytes_moved / sum(unit.parameter_bytes for unit in units)
    assert times == pytest.approx(gathers * 9000 * parts, rel=0.3)


def test_with_master_weights_fresh_updates_keep_no_other_copy_of_the_newest_weights() -> None:
    weights = sum(unit.parameter_bytes for unit in profile_of_much().units)
    plan = Plan((), 4, "2bw-fresh", micro_batch_sizes=(1,), devices=(("s0/gpu0",),))
    apart, masters = (
        forecast_of(plan, replace(profile_of_much(), master_weights=one), cluster(), PlanRequest(4))
        .stages[0]
        .peak_bytes
        for one in (False, True)
    )
    assert apart - masters == weights
    versions = [
        max(moment.version for moment in holdings("2bw-fresh", 2, 4, has_masters=one)[0])
        for one in (False, True)
    ]
    assert versions == [3.0, 2.0]
