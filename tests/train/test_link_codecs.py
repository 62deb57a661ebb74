"""`[links]`: which codec each batch has, what a run says of its bytes, and what is refused."""

from pathlib import Path
from typing import cast

import pytest

from bireme.codec.description import BoundaryCodecs, LinkCodecs
from bireme.errors import BiremeError
from bireme.plan.forecast import Forecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.train.choices import check_boundaries, idle_codec, link_codecs, with_own_codecs
from bireme.train.run_file import load_run_file
from tests.support.command import bireme
from tests.support.training import settings, write_run

PLAN = Plan((2, 4), 4, "1f1b", codecs=(BoundaryCodecs("int8", "int4"),))
TOPK = "topk:0.25:8"


def codecs(*sets: str) -> LinkCodecs:
    return link_codecs(load_run_file(None, ["training.steps=100", *sets]), PLAN)


def test_without_links_a_run_has_the_codecs_of_its_plan() -> None:
    assert (
        codecs()
        == codecs("links.codec=auto")
        == LinkCodecs.steady((BoundaryCodecs("int8", "int4"), BoundaryCodecs()))
    )
    assert codecs("links.codec=none") == LinkCodecs()


def test_single_boundaries_and_parts_of_a_run_have_codecs_of_their_own() -> None:
    own = '[{boundary = "1-2", forward = "int8"}]'
    found = codecs(
        f"links.codec={TOPK}",
        f"links.boundaries={own}",
        "links.schedule.first_fraction=0.1",
        "links.schedule.first_codec=bf16",
        "links.schedule.last_fraction=0.2",
    )
    words = {
        batch: [found.of(boundary, batch).forward for boundary in (0, 1)] for batch in (0, 9, 10, 79, 80, 99)
    }
    assert words == {
        0: ["bfloat16"] * 2,
        9: ["bfloat16"] * 2,
        10: [TOPK, "int8"],
        79: [TOPK, "int8"],
        80: ["int8"] * 2,
        99: ["int8"] * 2,
    }


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["links.codec=itn8"], "Did you mean 'int8'"),
        (["links.codec=topk:0"], "above 0 and at most 1"),
        (
            ["links.schedule.first_fraction=0.6", "links.schedule.last_fraction=0.6"],
            "more than the whole run",
        ),
        (['links.boundaries=[{boundary = "0-2", forward = "int8"}]'], "two neighboring stages"),
        (
            [f'links.boundaries=[{{boundary = "0-1", forward = "{TOPK}", backward = "int8"}}]'],
            "the same entries",
        ),
    ],
)
def test_wrong_links_are_refused_in_a_sentence(sets: list[str], why: str) -> None:
    with pytest.raises(BiremeError) as raised:
        load_run_file(None, sets)
    assert why in str(raised.value)


def test_a_boundary_that_the_plan_does_not_have_is_refused() -> None:
    run = load_run_file(None, ['links.boundaries=[{boundary = "2-3", forward = "int8"}]'])
    with pytest.raises(BiremeError, match="the plan has 3 stages"):
        check_boundaries(run, PLAN)
    with pytest.raises(BiremeError, match="the plan has one stage, so nothing is sent between stages"):
        check_boundaries(run, Plan((), 2, "1f1b"))


def test_a_codec_without_a_boundary_to_send_over_is_said() -> None:
    alone, run = Plan((), 4, "1f1b"), load_run_file(None, ["links.codec=int8"])
    (sentence,) = idle_codec(run, alone)
    assert "links.codec = int8 has no effect" in sentence
    assert idle_codec(run, PLAN) == ()
    for word in ("none", "auto"):
        assert idle_codec(load_run_file(None, [f"links.codec={word}"]), alone) == ()


def test_a_codec_of_ones_own_is_checked_before_a_run_starts() -> None:
    own = "tests.support.own_codecs"
    run = load_run_file(None, [f"links.codec={own}:Zipped"])
    check_boundaries(run, PLAN)
    assert str(link_codecs(run, PLAN).of(0, 0).choice(forward=True)) == f"{own}:Zipped"
    with pytest.raises(BiremeError, match="hides a NaN"):
        check_boundaries(load_run_file(None, [f"links.codec={own}:Hiding"]), PLAN)


def test_what_a_plan_file_promises_is_left_out_where_the_run_has_other_codecs() -> None:
    saved = SavedPlan(PLAN, forecast=cast(Forecast, object()))
    assert with_own_codecs(saved, load_run_file(None, [])) is saved
    for word in ("none", TOPK):
        assert with_own_codecs(saved, load_run_file(None, [f"links.codec={word}"])).forecast is None


@pytest.mark.slow
def test_a_run_says_what_it_sent_and_goes_on_with_another_codec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, "1f1b")
    done = bireme(capsys, "train", str(path), *settings(training__steps=4, links__codec="int8"), "--json")
    document = done.document
    (link,) = document["links"]
    assert link.keys() == {"from_stage", "to_stage", "forward", "backward", "raw_bytes", "sent_bytes"}
    assert (link["from_stage"], link["to_stage"]) == (0, 1)
    assert link["forward"] == link["backward"] == "int8"
    assert 0 < link["sent_bytes"] < link["raw_bytes"] / 3
    assert document["eval_loss"] == pytest.approx(document["eval_loss_through_codecs"], rel=1e-2)
    ending = {"links__schedule__last_fraction": 0.3, "links__schedule__last_codec": "int5"}
    more = settings(training__steps=6, training__schedule_steps=4, links__codec=TOPK, **ending)
    again = bireme(capsys, "resume", str(tmp_path / "runs" / "run"), *more, "--json")
    assert again.status == 0, again.err
    assert "from int8 to topk:0.25:8, from step 5 on int5" in again.err
    assert again.document["links"][0]["forward"] == TOPK
