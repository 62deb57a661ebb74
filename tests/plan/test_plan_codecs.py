"""Codecs in plans: counted in bytes and steps, chosen by time to loss, kept in the file."""

from dataclasses import replace
from pathlib import Path

import pytest

from bireme.cluster.cluster import Card, Cluster, Link, Server, Switch
from bireme.cluster.device import Device
from bireme.codec.description import BoundaryCodecs, CodecPhase, CodecRate, LinkCodecs
from bireme.errors import BiremeError
from bireme.plan.codec_costs import coded
from bireme.plan.forecast import Answer
from bireme.plan.penalties import EXCESSES, codec_steps
from bireme.plan.plan import Plan
from bireme.plan.plan_file import load_plan, write_plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import forecast_of
from bireme.report.plan_document import plan_document
from bireme.simulate.costs import Costs
from tests.support.hand_plans import tiny_profile
from tests.support.remembered import find_plan_once

pytestmark = pytest.mark.slow

WISHES = PlanRequest(4, depth=2, width=1, schedule="1f1b", codec="auto")


def two_servers(bytes_per_s: float) -> Cluster:
    """Two equal devices, each in a server of its own."""
    device = Device("a device", "emulated", 2**30)
    card = (Card("card", (0,), Link(bytes_per_s)),)
    return Cluster((Server("one", (device,), cards=card), Server("two", (device,), cards=card)), Switch())


def found(cluster: Cluster, request: PlanRequest = WISHES) -> Answer:
    answer = find_plan_once(tiny_profile(2), cluster, request)
    assert isinstance(answer, Answer)
    return answer


def test_the_planner_takes_codecs_where_links_are_slow_and_none_where_they_are_fast() -> None:
    slow, fast = found(two_servers(1e6)), found(two_servers(1e15))
    assert slow.best.plan.codecs
    assert slow.best.forecast.codec_penalty > 1
    without = next(one for one in slow.candidates if not one.plan.codecs)
    assert slow.best.forecast.cost_s_per_sample < without.forecast.cost_s_per_sample
    assert slow.best.forecast.batch_s < without.forecast.batch_s / 1.5
    assert fast.best == found(two_servers(1e15), replace(WISHES, codec="none")).best
    document = plan_document(slow, tiny_profile(2), 0.0)
    assert document["codecs"][0].keys() == {"from_stage", "to_stage", "forward", "backward"}
    assert document["codec_penalty"] == slow.best.forecast.codec_penalty


def test_within_one_server_nothing_is_tried() -> None:
    device = Device("a device", "emulated", 2**30)
    one = Cluster((Server("one", (device, device)),))
    auto, none = (found(one, replace(WISHES, codec=word)) for word in ("auto", "none"))
    assert auto == none


def test_a_plan_keeps_its_codecs_in_its_file_and_promises_the_same_again(tmp_path: Path) -> None:
    cluster = two_servers(1e6)
    best = found(cluster).best
    write_plan(tmp_path / "plan.json", best)
    again = load_plan(tmp_path / "plan.json")
    assert again.plan == best.plan
    assert again.forecast == best.forecast
    assert forecast_of(again.plan, tiny_profile(2), cluster, replace(WISHES, codec="none")) == best.forecast


def test_single_boundaries_have_codecs_of_their_own_in_predictions() -> None:
    cluster, bare = two_servers(1e6), replace(WISHES, codec="none")
    codecs = BoundaryCodecs("int8", "int4")
    single = found(cluster, replace(bare, boundaries=((0, codecs),))).best
    plain = found(cluster, bare).best
    assert single.plan.codecs == (codecs,)
    assert not plain.plan.codecs
    assert single.forecast.batch_s < plain.forecast.batch_s / 1.5
    assert single.forecast.codec_penalty == codec_steps([codecs], "adamw", has_ending=False)
    assert found(cluster, replace(WISHES, boundaries=((0, codecs),))).best.plan.codecs == (codecs,)


def test_a_profile_says_how_long_codecs_take() -> None:
    cluster, asked = two_servers(1e15), replace(WISHES, codec="int8", depth=2)

    def batch_s(*rates: CodecRate) -> float:
        answer = find_plan_once(replace(tiny_profile(2), codecs=rates), cluster, asked)
        assert isinstance(answer, Answer)
        return answer.best.forecast.batch_s

    slow = CodecRate("int8", 1.0, 1.0, 1.0, 1.0)
    assert batch_s(CodecRate("int8", 0.0, 0.0, 0.0, 0.0)) < batch_s() < batch_s(slow)
    assert batch_s(replace(slow, codec="int4")) == batch_s()
    assert replace(asked, boundaries=((0, BoundaryCodecs("topk:0.250:8", "topk:0.25:4")),)).codec_words == (
        "int8",
        "topk:0.25:8",
        "topk:0.25:4",
    )


def test_masks_are_kept_on_both_sides_of_a_boundary_for_each_micro_batch() -> None:
    """One bit a value: 4,096 values of two bytes over the first boundary, half as many over the second."""
    bare = Costs.per_stage(
        3, forward_s=1, backward_s=1, message_bytes=(8192, 4096, 0), stash_bytes=10_000, input_bytes=5_000
    )
    topk, few = BoundaryCodecs("topk:0.25:8", "topk:0.25:4"), BoundaryCodecs("int4", "int4")
    kept = coded(bare, (topk, topk), value_bytes=2)
    assert kept.stash_bytes == (10_512, 10_768, 10_256)
    assert kept.input_bytes == (5_512, 5_768, 5_256)  # what a stage has that is recomputed
    assert coded(bare, (few, few), value_bytes=2).stash_bytes == bare.stash_bytes
    assert coded(bare, (BoundaryCodecs(), BoundaryCodecs()), value_bytes=2) is bare


def test_the_worst_boundary_counts_and_codecs_with_less_loss_cost_less() -> None:
    fine, few = BoundaryCodecs("int8", "int8"), BoundaryCodecs("topk:0.25:8", "topk:0.25:8")

    def steps(*boundaries: BoundaryCodecs, optimizer: str = "adamw", has_ending: bool = False) -> float:
        return codec_steps(boundaries, optimizer, has_ending=has_ending)

    assert steps() == steps(BoundaryCodecs()) == 1.0
    assert steps(fine, few) == steps(few)
    assert 1 < steps(fine) < steps(few, has_ending=True) < steps(few)
    assert steps(BoundaryCodecs("int8", "int4")) < steps(BoundaryCodecs("int4", "int4"))
    assert steps(few) < steps(few, optimizer="muon")
    assert steps(fine) == steps(fine, optimizer="muon")
    assert all(one.ended <= one.bare for one in EXCESSES.values())


def test_codecs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BiremeError, match="the same entries"):
        BoundaryCodecs("topk:0.25:8", "int8")
    with pytest.raises(BiremeError, match="codecs for 2 boundaries; 2 stages have 1"):
        Plan((4,), 4, "1f1b", codecs=(BoundaryCodecs(), BoundaryCodecs()))


def test_the_codec_of_a_batch_follows_from_its_number() -> None:
    first, later = BoundaryCodecs("int8", "int8"), BoundaryCodecs("topk:0.25:8", "topk:0.25:8")
    codecs = LinkCodecs((CodecPhase(0, (first, first)), CodecPhase(10, (later, later))))
    assert [codecs.of(1, batch) for batch in (0, 9, 10, 99)] == [first, first, later, later]
    assert codecs.of(5, 0) == BoundaryCodecs()
    assert codecs.held(3) == LinkCodecs.steady((first, first))
    assert codecs.between((0, 0, 1)).of(0, 0) == BoundaryCodecs()
    assert codecs.between((0, 0, 1)).of(1, 0) == first
