"""A codec for sums over replicas in predictions: fewer bytes on the link, and what is kept in memory."""

from dataclasses import replace
from io import StringIO
from typing import Literal

import pytest
from rich.console import Console

from bireme.cluster.cluster import Card, Cluster, Link, Server, Switch
from bireme.cluster.device import Device
from bireme.codec.description import CodecRate
from bireme.codec.sum_description import DENSE_SUMS, SiteRounds, SumCost, parse_sum_codec, sum_cost
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, Forecast
from bireme.plan.penalties import STUDIED_SUMS, SumSteps, sum_steps
from bireme.plan.plan import Plan
from bireme.plan.plan_request import AUTO, SHARDS, Goal, PlanRequest, TierLimits
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.optimizers import moments_share
from bireme.profile.profile import Profile
from bireme.report.plan_table import print_plan
from bireme.schedule.program import Rule
from bireme.train.choices import rounds_of, sums_of_profile
from bireme.train.plan_search import plan_request_of
from bireme.train.run_file import RunFile
from tests.support.command import bireme
from tests.support.hand_plans import tiny_profile
from tests.support.tiny_profiles import gpt

SLOW = 1.25e6


def cluster(kind: Literal["cpu", "cuda"] = "cuda") -> Cluster:
    """Two machines with a device each, and a slow link."""
    device = Device("small", kind, memory_bytes=2**30)
    card = Card("card", (0,), Link(SLOW, 0.0))
    return Cluster(tuple(Server(name, (device,), cards=(card,)) for name in ("one", "other")))


def forecast(
    codec: str,
    schedule: str = "1f1b",
    kind: Literal["cpu", "cuda"] = "cuda",
    rates: tuple[CodecRate, ...] = (),
    rounds: SiteRounds | None = None,
    copied_share: float = 0.0,
    profile: Profile | None = None,
    shard: str = "none",
) -> Forecast:
    devices = tuple(device.name for device in cluster(kind).devices())
    plan = Plan((), 4, schedule, width=2, micro_batch_sizes=(1, 1), devices=(devices,))
    request = PlanRequest(
        batch_size=8, sums=cost(codec), rounds=rounds, copied_share=copied_share, shard=shard
    )
    return forecast_of(plan, replace(profile or tiny_profile(), codecs=rates), cluster(kind), request)


def slow() -> Profile:
    """The profile with backwards that take long."""
    units = tiny_profile().units
    long = [[replace(cost, backward_s=2e-3) for cost in unit.costs] for unit in units]
    costly = tuple(replace(unit, costs=tuple(costs)) for unit, costs in zip(units, long, strict=True))
    return replace(tiny_profile(), units=costly)


def gradient_s() -> float:
    """The seconds of all gradients on the link."""
    return sum(unit.gradient_bytes for unit in tiny_profile().units) / SLOW


def cost(codec: str) -> SumCost:
    return sum_cost(parse_sum_codec(codec), [(1000, 1000)])


def test_a_step_over_a_slow_link_takes_as_long_as_the_bytes_that_are_sent() -> None:
    dense = forecast("none")
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    assert dense.batch_s > 0.9 * gradients / SLOW
    for codec in ("int8", "int2", "threshold:0.01:50", "lowrank:4"):
        saved_s = dense.batch_s - forecast(codec).batch_s
        assert saved_s == pytest.approx((1 - cost(codec).hop_share(2)) * gradients / SLOW, rel=0.05), codec


def test_parts_of_dense_and_of_coded_sums_are_two_messages_late() -> None:
    latency_s = 0.02
    servers = tuple(
        replace(server, name=f"{name}-{server.name}") for name in "ab" for server in cluster("cpu").servers
    )
    late = replace(cluster("cpu"), servers=servers, switch=Switch(latency_s=latency_s))
    found: dict[str, float] = {}
    for codec in ("int4", "none"):
        devices = tuple(device.name for device in late.devices())
        plan = Plan((), 4, "1f1b", width=4, micro_batch_sizes=(1,) * 4, devices=(devices,))
        profile = replace(tiny_profile(), codecs=(CodecRate("int4 in sums", 0.0, 0.0, 0.0, 0.0),))
        for one in (late, replace(late, switch=None)):
            request = PlanRequest(batch_size=16, sums=cost(codec))
            batch_s = forecast_of(plan, profile, one, request).batch_s
            found[codec] = abs(found.get(codec, 0.0) - batch_s)
    # Before the update all agree, each by a message to all.
    assert found["none"] == pytest.approx((2 + 1) * latency_s)
    assert found["int4"] == pytest.approx((2 + 1) * latency_s)


@pytest.mark.parametrize("codec", ["int4", "threshold:0.01:50", "lowrank:4"])
def test_to_encode_and_decode_takes_the_seconds_that_were_measured(codec: str) -> None:
    encode_s, decode_s = 3e-6, 1e-6
    rate = CodecRate(f"{codec} in sums", encode_s, decode_s, encode_s, decode_s)
    entries = sum(unit.gradient_bytes for unit in tiny_profile().units) / 4
    slow, quick = (
        forecast(codec, rates=(replace(rate, encode_s=one, decode_s=other),))
        for one, other in ((encode_s, decode_s), (0.0, 0.0))
    )
    assert slow.batch_s - quick.batch_s == pytest.approx(entries * (encode_s + 2 * decode_s))


def test_the_steps_of_a_codec_count_where_there_are_sums_and_loss_matters() -> None:
    found = forecast("lowrank:4")
    assert found.sum_penalty == found.penalty == STUDIED_SUMS["adamw"]["lowrank:4"].steps
    assert found.cost_s_per_sample == found.penalty / found.samples_per_s
    assert forecast("none").penalty == 1
    request = PlanRequest(batch_size=8, sums=cost("lowrank:4"))
    assert request.sum_penalty(1, "adamw") == 1
    assert request.sum_penalty(2, "muon") == STUDIED_SUMS["muon"]["lowrank:4"].steps
    assert replace(request, goal=Goal.THROUGHPUT).sum_penalty(2, "adamw") == 1


def test_a_batch_of_the_delay_warm_up_waits_for_its_sums() -> None:
    found, request = forecast("none", "2bw-fresh"), PlanRequest(batch_size=8, sums=cost("none"))
    without = request.penalty(Rule.FRESH, tiny_profile().optimizer, 1, 4, width=2)
    late_s = found.stages[0].busy_s + gradient_s() - found.batch_s
    assert late_s > 0
    warmup = 1 + request.delay_warmup_share * late_s / found.batch_s
    assert found.penalty == pytest.approx(without * warmup, rel=0.01)


def test_a_shared_optimizer_s_sums_cross_during_the_last_part_of_the_last_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bireme.sync.slices._LEAST_BUCKET_BYTES", 2**10)
    monkeypatch.setattr("bireme.sync.slices._NUM_BUCKETS", 64)
    late, early = (forecast("none", kind=kind, profile=slow(), shard="optimizer") for kind in ("cuda", "cpu"))
    backward_s = sum(unit.costs[0].backward_s for unit in slow().units)
    # A quarter of the bytes begins when a quarter of the backward is left.
    assert late.batch_s - early.batch_s == pytest.approx(0.25 * min(backward_s, gradient_s()), rel=0.1)
    coded = (forecast("int8", kind=kind, profile=slow(), shard="optimizer") for kind in ("cuda", "cpu"))
    assert len({one.batch_s for one in coded}) == 1


def test_what_crosses_during_the_last_backward_of_the_delay_warm_up_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bireme.sync.slices._LEAST_BUCKET_BYTES", 2**10)
    profile, request = slow(), PlanRequest(batch_size=8, sums=cost("none"))
    late, flush = (forecast("none", one, "cpu", profile=profile) for one in ("2bw-fresh", "1f1b"))
    without = request.penalty(Rule.FRESH, profile.optimizer, 1, 4, width=2)
    warmup = 1 + request.delay_warmup_share * (flush.batch_s - late.batch_s) / late.batch_s
    assert late.penalty == pytest.approx(without * warmup, rel=0.005)
    assert late.penalty < forecast("none", "2bw-fresh", profile=profile).penalty / 1.03


def test_a_codec_that_was_not_studied_costs_as_the_next_coarser_one_of_its_kind() -> None:
    def steps(word: str) -> SumSteps:
        return sum_steps(parse_sum_codec(word), "sgd")

    studied = STUDIED_SUMS["adamw"]
    assert steps("int3") == steps("int4") == steps("int6") == studied["int8"]  # fewer than these is chance
    assert steps("lowrank:6") == studied["lowrank:4"]
    assert steps("threshold:0.05:20") == studied["threshold:0.01:50"]
    assert steps("int1") == SumSteps(studied["int2"].steps, is_at_least=True)
    assert steps("lowrank:1") == SumSteps(studied["lowrank:4"].steps, is_at_least=True)


@pytest.mark.parametrize(
    ("word", "told"), [("int2", "takes 1.09 steps"), ("int1", "takes at least 1.09 steps"), ("none", None)]
)
def test_a_plan_says_what_its_sums_go_through_and_what_that_costs(word: str, told: str | None) -> None:
    request = PlanRequest(batch_size=8, depth=1, width=2, schedule="1f1b", sums=cost(word))
    found = find_plan(tiny_profile(), cluster(), request)
    assert isinstance(found, Answer)
    out = StringIO()
    console = Console(file=out, width=200)
    print_plan(found, tiny_profile(), 1.0, console, sums=request.sums.codec)
    text = out.getvalue()
    assert ("Sums over the replicas" in text) == (told is not None)
    assert told is None or f"go through {word}. That {told} for one." in text


def test_what_a_codec_keeps_is_counted() -> None:
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    dense, kept = forecast("none").stages[0], forecast("threshold:0.01:50").stages[0]
    assert kept.peak_bytes - dense.peak_bytes == pytest.approx(2 * gradients)
    assert forecast("int8").stages[0].peak_bytes == dense.peak_bytes


@pytest.mark.parametrize(("kind", "num_copies"), [("cpu", 2), ("cuda", 0)])
def test_an_average_of_the_optimizers_state_is_sent_and_kept_along_with_the_weights(
    kind: Literal["cpu", "cuda"], num_copies: int
) -> None:
    """What it takes is on the host, which is the device of a processor."""
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    state = gpt(2).parameters
    moments = moments_share(state, "adamw")
    assert moments == 2.0
    assert moments_share(state, "sgd") == 1.0 < moments_share(state, "muon") < 2.0
    averages = SiteRounds(averages=True, kept_share=0.0)
    with_state = replace(averages, state_share=moments, kept_share=2 * moments)
    plain, averaged = (forecast("none", kind=kind, rounds=one) for one in (averages, with_state))
    assert averaged.batch_s - plain.batch_s == pytest.approx(moments * gradients / SLOW, rel=0.05)
    more_bytes = averaged.stages[0].peak_bytes - plain.stages[0].peak_bytes
    assert more_bytes == pytest.approx(num_copies * moments * gradients)


@pytest.mark.parametrize(("kind", "num_copies"), [("cpu", 2), ("cuda", 0)])
def test_the_sums_that_replicas_which_may_die_keep_are_counted_where_they_lie(
    kind: Literal["cpu", "cuda"], num_copies: int
) -> None:
    """Runs with quorum took 12 MiB more than was predicted, of 334 MiB."""
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    dense, quorum = (forecast("none", kind=kind, rounds=one) for one in (None, SiteRounds()))
    assert quorum.batch_s == dense.batch_s
    more_bytes = quorum.stages[0].peak_bytes - dense.stages[0].peak_bytes
    assert more_bytes == pytest.approx(num_copies * gradients)
    run = RunFile.model_validate({"format": 1, "sync": {"mode": "quorum"}})
    assert rounds_of(run, gpt(2)) == SiteRounds()


@pytest.mark.parametrize("shard", SHARDS)
def test_if_the_planner_chooses_sites_send_as_they_would_if_the_run_had_chosen(shard: str) -> None:
    """Sites that share nothing counted as if each of their replicas sent a part."""
    sync = {"mode": "groups", "sites": 2, "average_optimizer": True}
    asked, chosen = (
        RunFile.model_validate({"format": 1, "sync": sync, "memory": {"shard": one}}) for one in (AUTO, shard)
    )
    request = plan_request_of(asked, DENSE_SUMS, gpt(2))
    assert request.sharing(shard) == plan_request_of(chosen, DENSE_SUMS, gpt(2))


@pytest.mark.parametrize(("kind", "num_copies"), [("cpu", 1), ("cuda", 0)])
def test_second_copies_are_counted_where_they_lie(kind: Literal["cpu", "cuda"], num_copies: int) -> None:
    """Two versions of weights and two moments, on this host and on the next one."""
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    run = RunFile.model_validate({"format": 1, "sync": {"mode": "quorum"}, "plan": {"width": 1}})
    share = plan_request_of(run, DENSE_SUMS, gpt(2)).copied_share
    assert share == 2 * 2 * 3
    plain, copied = (forecast("none", kind=kind, copied_share=one) for one in (0.0, share))
    assert copied.batch_s == plain.batch_s
    more_bytes = copied.stages[0].peak_bytes - plain.stages[0].peak_bytes
    assert more_bytes == pytest.approx(num_copies * share * gradients)


@pytest.mark.parametrize(("beside", "share"), [(0.0, 12.0), (0.99, 12.0), (1.01, 0.0)])
def test_second_copies_take_nothing_of_what_is_given_to_each_process_if_they_fit_beside_it(
    beside: float, share: float
) -> None:
    """A replica on processors with copies fitted no memory that held one without copies, though they lie in a
    process of their own.
    """
    plain = PlanRequest(batch_size=8, copied_share=12.0)
    whole = PlanningProblem(tiny_profile(), cluster("cpu"), plain)
    assert whole.copied_bytes == 12.0 * sum(one.gradient_bytes for one in tiny_profile().units)
    device_bytes = int(min(whole.room) - beside * whole.copied_bytes)
    problem = PlanningProblem(tiny_profile(), cluster("cpu"), replace(plain, memory=TierLimits(device_bytes)))
    assert problem.kept_share(1) == share


def test_partitioners_count_what_a_codec_keeps_where_there_are_replicas() -> None:
    request = PlanRequest(batch_size=8, sums=cost("threshold:0.01:50"))
    problem = PlanningProblem(tiny_profile(), cluster(), request)
    one, two = (problem.merged(1, width).bytes for width in (1, 2))
    assert (two.optimizer - one.optimizer).tolist() == (2 * one.gradient).tolist()
    assert (two.gradient == one.gradient).all()


def test_sums_that_depend_on_the_model_s_shapes_need_the_model() -> None:
    """Without it a profile has only the bytes of each unit's gradients."""
    known = tiny_profile()
    run = RunFile.model_validate({"sync": {"codec": "int8"}})
    found = sums_of_profile(run, known)
    assert (str(found.codec), found.message_share < 1) == ("int8", True)
    for table, key, value in (
        ("sync", "codec", "lowrank:2"),
        ("training", "gradient", "principal:2"),
    ):
        asked = RunFile.model_validate({table: {key: value}})
        with pytest.raises(BiremeError, match=f"{table}.{key} is {value}.*Name the model too"):
            sums_of_profile(asked, known)


def test_a_wrong_codec_is_refused_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "plan", "--set", "sync.codec=int0")
    assert result.status == 2
    assert "lowrank:RANK" in result.err
