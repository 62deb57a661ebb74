"""Codecs of sums and agreements that the planner chooses, by time to the same loss."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.codec.sum_description import SiteRounds, parse_sum_codec, sum_cost
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer
from bireme.plan.penalties import BOTH_CODED, SUMS_TO_TRY, sum_steps
from bireme.plan.plan_file import load_plan, write_plan
from bireme.plan.plan_request import AUTO, Goal, PlanRequest, SyncChoice
from bireme.plan.search.search import find_plan
from bireme.report.plan_document import Explanation, plan_document, ways_note
from bireme.report.plan_table import print_explanation
from bireme.schedule.program import Rule
from bireme.train.choices import sync_choices, with_agreement, with_choices
from bireme.train.run_file import RunFile, load_run_file, to_toml
from tests.support.extent import examples
from tests.support.hand_plans import tiny_profile
from tests.support.tiny_profiles import gpt

SUMS = tuple(SyncChoice(sum_cost(parse_sum_codec(word), [(1000, 1000)])) for word in ("none", *SUMS_TO_TRY))
GROUPS = SyncChoice(rounds=SiteRounds(averages=True, connect_every=10))
DILOCO = SyncChoice(rounds=SiteRounds(averages=True, every=50, lag=1))
ALL = (*SUMS, GROUPS, DILOCO)
WIDE = PlanRequest(8, depth=1, width=2, sync_choices=ALL)
FEW = replace(WIDE, sync_choices=tuple(one for one in ALL if one.sums.codec.rank == 0))
SLOWEST, SLOW, FAST = 1e2, 1e8, 1e13
RATES = (SLOWEST, 1e6, SLOW, FAST)


def cluster(bytes_per_s: float, count: int = 2) -> Cluster:
    """Machines with a device each."""
    device, card = Device("small", "cuda", memory_bytes=2**30), Card("card", (0,), Link(bytes_per_s))
    names = ("one", "other", "third", "fourth")[:count]
    return Cluster(tuple(Server(name, (device,), cards=(card,)) for name in names))


def found(bytes_per_s: float, request: PlanRequest = WIDE, optimizer: str = "adamw") -> Answer:
    count = max(request.least_devices, 2)
    answer = find_plan(replace(tiny_profile(2), optimizer=optimizer), cluster(bytes_per_s, count), request)
    assert isinstance(answer, Answer)
    return answer


def chosen(answer: Answer) -> tuple[str, str]:
    return answer.best.plan.sync_mode, answer.best.plan.sum_codec


def refusals(answer: Answer) -> dict[tuple[str, str], str]:
    return {(way.mode, way.sum_codec): way.refusal for way in answer.ways if way.candidate is None}


def test_the_slower_the_link_the_fewer_bytes_are_chosen() -> None:
    assert chosen(found(FAST)) == ("allreduce", "none")
    assert chosen(found(SLOW, FEW)) == ("allreduce", "int4")
    assert chosen(found(SLOWEST, FEW)) == ("diloco", "none")
    assert chosen(found(SLOWEST)) == ("allreduce", "lowrank:4")


@given(rate=st.sampled_from(RATES), sums=st.sets(st.sampled_from(ALL[1:])), other=st.sampled_from(ALL[1:]))
@examples(12)
def test_another_way_never_makes_the_choice_slower(
    rate: float, sums: set[SyncChoice], other: SyncChoice
) -> None:
    few, more = (
        found(rate, replace(WIDE, sync_choices=(ALL[0], *[one for one in ALL[1:] if one in some]))).best
        for some in (sums, sums | {other})
    )
    assert more.forecast.cost_s_per_sample <= few.forecast.cost_s_per_sample


DEEP = PlanRequest(4, depth=2, width=1, schedule="1f1b", codec=AUTO, sync_choices=ALL)


@pytest.mark.parametrize(("rate", "asked"), [*((rate, WIDE) for rate in RATES), (SLOWEST, FEW), (1e6, DEEP)])
def test_to_ask_for_what_was_chosen_gives_the_same_forecast(rate: float, asked: PlanRequest) -> None:
    answer = found(rate, asked)
    best = answer.best
    assert bool(best.plan.codecs) == (asked is DEEP)
    fixed = replace(
        asked.chosen(*chosen(answer)),
        codec=best.plan.codecs[0].forward if best.plan.codecs else "none",
        schedule=best.plan.schedule,
        delay_warmup=asked.delay_warmup_share,
    )
    assert found(rate, fixed).best.forecast == best.forecast


def test_a_step_counts_as_often_as_the_study_says() -> None:
    answer = found(SLOWEST)
    ways = {(way.mode, way.sum_codec): way.candidate for way in answer.ways}
    diloco, lowrank = ways["diloco", "none"], ways["allreduce", "lowrank:4"]
    assert diloco is not None
    assert lowrank is not None
    assert diloco.forecast.agreement_penalty == 1.97
    assert lowrank.forecast.sum_penalty == sum_steps(parse_sum_codec("lowrank:4"), "adamw").steps
    rushed = found(SLOWEST, replace(WIDE, goal=Goal.THROUGHPUT))
    assert {way.candidate.forecast.penalty for way in rushed.ways if way.candidate} == {1.0}


@pytest.mark.parametrize(
    ("changed", "words", "optimizer", "refused"),
    [
        ({}, "with sgd", "sgd", ALL[1:]),
        ({"codec": "int8"}, "beside codecs of boundaries", "adamw", (GROUPS, DILOCO)),
        ({"schedule": "2bw"}, "under 2bw", "adamw", (GROUPS, DILOCO)),
        ({"whole_backwards": True}, "with principal components", "adamw", ALL[1:]),
        ({"shard": "optimizer"}, "share state", "adamw", (GROUPS, DILOCO)),
        ({"depth": 2, "width": 1, "schedule": "1f1b"}, "no other to agree with", "adamw", ALL[1:]),
    ],
)
def test_what_the_study_has_no_figure_of_is_not_proposed_and_said(
    changed: dict[str, Any], words: str, optimizer: str, refused: tuple[SyncChoice, ...]
) -> None:
    answer = found(1e5, replace(WIDE, **changed), optimizer)
    said = {one: why for one, why in refusals(answer).items() if words in why}
    assert said.keys() == {(one.mode, str(one.sums.codec)) for one in refused}
    assert any(words in note for note in ways_note(answer)[1:])


@pytest.mark.slow
def test_steps_of_delayed_updates_and_of_both_kinds_of_codecs_multiply() -> None:
    (best, *_) = [
        one
        for one in found(SLOW).candidates
        if one.plan.source.rule is Rule.FRESH and one.plan.sum_codec == "int2"
    ]
    rule = WIDE.penalty(Rule.FRESH, "adamw", 1, best.plan.num_microbatches, width=2)
    warmup = best.forecast.penalty / (rule * best.forecast.sum_penalty)
    assert 1.0 < warmup <= 1 + WIDE.delay_warmup_share  # at most as long again: compute, then sums
    both = found(1e6, replace(DEEP, width=2, batch_size=8, sync_choices=(SUMS[0], SUMS[3])))
    (one,) = [way for way in both.ways if (way.codecs, way.sum_codec) == ("int8", "int2")]
    assert one.candidate is not None
    forecast = one.candidate.forecast
    assert forecast.penalty == pytest.approx(forecast.codec_penalty * forecast.sum_penalty)
    (alone,) = [way.candidate for way in both.ways if (way.codecs, way.sum_codec) == ("int8", "none")]
    assert alone is not None
    assert forecast.codec_penalty == pytest.approx(BOTH_CODED * alone.forecast.codec_penalty)
    assert 1.0 < forecast.codec_penalty < forecast.sum_penalty


def test_averages_through_a_codec_or_with_other_settings_are_not_proposed() -> None:
    coded, other = replace(DILOCO, sums=SUMS[1].sums), replace(GROUPS, unstudied="with other settings")
    late = replace(DILOCO, rounds=SiteRounds(averages=True, every=60, lag=1))
    answer = found(SLOWEST, replace(WIDE, sync_choices=(ALL[0], coded, other, late)))
    assert chosen(answer) == ("allreduce", "none")
    assert sorted(refusals(answer).values()) == [
        "No plan of several replicas whose steps the study knows is among the best.",
        "The study has no figure of diloco with codecs.",
        "The study has no figure of groups with other settings.",
    ]


def test_a_way_whose_steps_alone_cost_more_is_not_searched() -> None:
    fast = found(FAST)
    assert "Its steps alone" in refusals(fast)["diloco", "none"]
    assert ("diloco", "none") not in refusals(found(SLOWEST))


def test_a_way_that_finds_no_plan_says_why() -> None:
    lone = replace(WIDE, devices=("one/gpu0",), depth=None, width=None)
    answer = found(SLOW, lone)
    assert chosen(answer) == ("allreduce", "none")
    assert refusals(answer).keys() == {(one.mode, str(one.sums.codec)) for one in ALL[1:]}


def test_the_choice_is_in_the_plan_s_file_in_its_document_and_in_the_explanation(tmp_path: Path) -> None:
    answer, profile = found(SLOWEST), tiny_profile(2)
    write_plan(tmp_path / "plan.json", answer)
    assert load_plan(tmp_path / "plan.json").plan == answer.best.plan
    document = plan_document(answer, profile, 0.0)
    first, *others = document["ways"]
    assert (first["sync_mode"], first["sum_codec"], first["codecs"]) == ("allreduce", "lowrank:4", "none")
    assert first["plan"]["cost_s_per_sample"] == document["cost_s_per_sample"]
    times = [one["time_to_loss_s"] for one in (first, *others) if one["plan"]]
    assert times == sorted(times)
    # Half of the slowest link's gradients would cross twice; a ring of two sends all of them.
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    dense = next(one for one in others if (one["sync_mode"], one["sum_codec"]) == ("allreduce", "none"))
    assert dense["link_bytes"] == pytest.approx(gradients)
    assert document["agreement_penalty"] == 1.0
    (note, *_) = ways_note(answer)
    assert note.startswith("The planner chose allreduce with lowrank:4 in sums: ")
    assert " Next best is " in note
    console = Console(file=StringIO(), width=100)
    print_explanation(answer, Explanation((), (), ()), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in shown for words in ("lowrank:4 sums", "int2 sums", "to a loss"))


AUTOMATIC = {"sync": {"mode": AUTO, "codec": AUTO}}


def run(**sync: Any) -> RunFile:
    return RunFile.model_validate({"sync": AUTOMATIC["sync"] | sync})


def test_a_run_leaves_its_mode_and_its_codec_to_the_planner_or_one_of_them() -> None:
    def ways(one: RunFile, *, has_graph: bool = True) -> list[tuple[str, str]]:
        found = sync_choices(one, gpt(2) if has_graph else None, tiny_profile(2))
        return [(way.mode, str(way.sums.codec)) for way in found]

    sums = [("allreduce", word) for word in ("none", *SUMS_TO_TRY)]
    averages = [("groups", "none"), ("diloco", "none")]
    assert ways(run()) == [*sums, *averages]
    assert ways(run(), has_graph=False) == [*sums[:-1], *averages]
    assert ways(run(mode="quorum")) == [("quorum", word) for _, word in sums]
    assert ways(run(codec="int8")) == [("allreduce", "int8"), ("groups", "int8"), ("diloco", "int8")]
    assert ways(run(mode="allreduce", codec="none")) == []


def test_settings_of_diloco_that_the_study_lacks_are_named() -> None:
    def whys(one: RunFile) -> list[str]:
        return [way.unstudied for way in sync_choices(one, gpt(2), tiny_profile(2)) if way.rounds]

    assert whys(run()) == ["", ""]
    assert whys(run(diloco_fragments=2)) == ["", "with sync.diloco_fragments = 2"]
    assert whys(run(average_optimizer=True)) == ["with sync.average_optimizer"] * 2
    replans = RunFile.model_validate(AUTOMATIC | {"balance": {"replan": True}})
    assert whys(replans) == ["with shares of a batch that [balance] sets"] * 2


@pytest.mark.parametrize(
    ("mode", "kept"), [("allreduce", []), ("groups", ["lease_s"]), ("diloco", ["lease_s", "diloco_every"])]
)
def test_a_run_keeps_the_choice_and_the_keys_that_it_uses(mode: str, kept: list[str], tmp_path: Path) -> None:
    asked = run(lease_s=3.0, diloco_every=100)
    plan = replace(found(SLOW).best.plan, sync_mode=mode, sum_codec="none")
    own = with_choices(asked, plan)
    (tmp_path / "run.toml").write_text(to_toml(own))
    again = load_run_file(tmp_path / "run.toml")
    assert (again.sync.mode, again.sync.codec) == (mode, "none")
    usual = RunFile().sync
    changed = [
        name for name in ("lease_s", "diloco_every") if getattr(again.sync, name) != getattr(usual, name)
    ]
    assert changed == kept
    assert with_agreement(own, "diloco", "int8") == own
    plain = with_choices(asked, replace(plan, sync_mode="", sum_codec=""))
    assert (plain.sync.mode, plain.sync.codec) == ("allreduce", "none")


def test_sites_need_a_mode_that_is_named() -> None:
    with pytest.raises(BiremeError, match=r"sync\.sites is 2, but sync\.mode is \"auto\""):
        run(sites=2)
