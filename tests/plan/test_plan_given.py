"""`bireme plan --file`: the forecast of a given plan, or one sentence that says what is wrong with it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bireme.plan.partition.autopipe import costs_between
from bireme.plan.partition.chain import chain_of
from bireme.plan.plan import Paging, Plan
from bireme.plan.plan_file import write_plan
from bireme.profile.profile import save_profile
from bireme.schedule.budgets import Budgets
from tests.support.command import Result, bireme, with_sets
from tests.support.hand_plans import tiny_profile

Capture = pytest.CaptureFixture[str]
Run = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("remember_plans", "remember_estimates", "brief_searches")

CLUSTER = """
format = 1

[[server]]
count = 2

[[server.device]]
kind = "emulated"
memory_bytes = 1e9
count = 2

[[server.card]]
bytes_per_s = 1e8
"""

BY_HAND = Plan(cuts=(4,), num_microbatches=4, schedule="1f1b")
"""Without devices and sizes."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Run:
    """Runs a verb for a profile of ten units on four devices, with batches of 16 samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    save_profile(tiny_profile(), Path("profile.json"))
    Path("four.toml").write_text(CLUSTER)

    def run(*words: str, verb: str = "plan") -> Result:
        usual = ("cluster.source=four.toml", "training.batch_size=16", "--profile", "profile.json")
        return bireme(capsys, verb, *with_sets([*usual, *words]))

    return run


def test_the_forecast_of_a_found_plan_is_that_of_the_search(run: Run) -> None:
    found = run("--output", "found.json", "--json").document
    # Neither another batch nor constraints of the run file change what the plan is.
    given = run("--file", "found.json", "training.batch_size=64", "plan.depth=1", "--json").document
    differ = {name for name in found if found[name] != given[name]}
    assert differ <= {"planning_s", "num_tried", "candidates", "origin", "notes"}
    assert set(given["notes"]) <= set(found["notes"])
    assert given["fits"]
    assert given["candidates"] == found["candidates"][:1]
    assert given["origin"] == found["origin"] | {"how": "the plan in found.json"}


@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_the_forecast_of_a_plan_takes_from_it_what_its_replicas_share(run: Run, shard: str) -> None:
    """`auto` counted as a shared optimizer, and a plan with shared weights was refused."""
    found = run("--output", "found.json", "--json", f"memory.shard={shard}", "plan.width=2").document
    saved = json.loads(Path("found.json").read_text())
    saved["plan"]["shard"] = shard  # as if the planner had chosen it
    Path("found.json").write_text(json.dumps(saved))
    given = run("--file", "found.json", "--json", "memory.shard=auto").document
    assert given["sync"] == found["sync"]
    assert given["candidates"] == found["candidates"][:1]
    assert given["stages"] == found["stages"]


def test_a_plan_by_hand_gets_the_first_devices_and_equal_micro_batches(run: Run) -> None:
    write_plan(Path("hand.json"), replace(BY_HAND, width=2))
    given = run("--file", "hand.json", "--json").document
    assert given["micro_batch_sizes"] == [2, 2]
    assert [stage["devices"] for stage in given["stages"]] == [
        ["server0/emulated0", "server1/emulated0"],
        ["server0/emulated1", "server1/emulated1"],
    ]
    shown = run("--file", "hand.json").out
    assert "1f1b on 4 devices: 2 stages in each of 2 replicas" in shown
    assert "the plan in hand.json" in shown
    assert "zero-bubble" not in shown  # nothing else was searched


def test_stages_of_unequal_width_by_hand_get_the_first_devices_stage_by_stage(run: Run) -> None:
    write_plan(Path("hand.json"), replace(BY_HAND, stage_widths=(1, 2)))
    given = run("--file", "hand.json", "--json").document
    assert given["stage_widths"] == [1, 2]
    assert [stage["devices"] for stage in given["stages"]] == [
        ["server0/emulated0"],
        ["server0/emulated1", "server1/emulated0"],
    ]


def test_a_plan_whose_stages_step_apart_says_how_they_are_clipped(run: Run) -> None:
    plan = Plan((2, 4, 6), 4, "1f1b", stages_per_rank=4)
    costs = costs_between(chain_of(tiny_profile(), 4), plan.cuts)
    budgets = (Budgets(150_000, None, 0),)
    notes = {}
    for is_apart in (False, True):
        paging = Paging(budgets, costs.sizes(), chunk_bytes=(4096,), updates_apart=is_apart)
        write_plan(Path("hand.json"), replace(plan, paging=paging))
        notes[is_apart] = run("--file", "hand.json", "--json").document["notes"]
    clipped = "each is clipped by the norm of its own gradient, to its share of training.clip_norm = 1,"
    assert [clipped in " ".join(notes[is_apart]) for is_apart in (False, True)] == [False, True]
    unclipped = run("--file", "hand.json", "--json", "training.clip_norm=0").document["notes"]
    assert clipped not in " ".join(unclipped)


def test_a_plan_that_does_not_fit_is_forecast_and_said_not_to_fit(run: Run) -> None:
    Path("four.toml").write_text(CLUSTER.replace("1e9", "2e4"))
    write_plan(Path("hand.json"), BY_HAND)
    given = run("--file", "hand.json", "--json").document
    assert not given["fits"]
    assert given["predicted_batch_s"] > 0
    missing = -min(stage["headroom_bytes"] for stage in given["stages"])
    assert missing > 0
    assert any(note.startswith("The plan does not fit") for note in given["notes"])


def test_what_is_given_can_be_drawn_and_written_again(run: Run) -> None:
    write_plan(Path("hand.json"), BY_HAND)
    run("--file", "hand.json", "--output", "again.json")
    again = json.loads(Path("again.json").read_text())
    assert again["plan"]["devices"] == [["server0/emulated0"], ["server0/emulated1"]]
    assert again["forecast"]["batch_s"] > 0
    drawn = run("--file", "again.json", "--picture", "run.svg", verb="simulate")
    assert drawn.status == 0
    assert Path("run.svg").read_text().startswith("<svg")


def test_the_example_is_forecast(capsys: Capture) -> None:
    folder = Path(__file__).parents[2] / "examples" / "plan"
    words = ["--profile", f"{folder}/profile.json", "--file", f"{folder}/plan.json"]
    sets = with_sets([f"cluster.source={folder}/cluster.toml", "training.batch_size=16"])
    given = bireme(capsys, "plan", *words, *sets, "--json").document
    assert given["fits"]
    assert given["bottleneck"].startswith("lab – home")
    assert any("home/gpu0 are scaled from those on NVIDIA GeForce RTX 3090" in one for one in given["notes"])


def _refuses(result: Result, sentence: str) -> bool:
    return result.status == 2 and not result.out and bool(re.search(sentence, " ".join(result.err.split())))


def _with(**changes: Any) -> str:
    write_plan(Path("hand.json"), replace(BY_HAND, **changes))
    return "hand.json"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuts": (10,)}, r"unit"),
        (
            {"num_microbatches": 5},
            r"5 micro-batches do not divide training.batch_size = 16. Set a multiple of 5",
        ),
        ({"micro_batch_sizes": (3,)}, r"micro-batches of 1, 2, 4 samples, not of 3"),
        ({"devices": (("server0/gpu0",), ("server0/gpu1",))}, r"There is no device 'server0/gpu0'"),
        ({"devices": (("server0/emulated0",),) * 2}, r"puts two ranks on server0/emulated0"),
        ({"schedule": "pipedream"}, r"does not run pipedream"),
        ({"cuts": (1, 2, 3, 4)}, r"is for 5 devices, but the cluster has 4"),
        ({"whole_weights": 2, "width": 2}, r'Set memory.shard = "weights"'),
        ({"sites": 2, "width": 2}, r"Set sync.sites = 2"),
    ],
)
def test_a_wrong_plan_is_one_sentence(run: Run, changes: dict[str, Any], sentence: str) -> None:
    file = _with(**changes)
    assert _refuses(run("--file", file, "--json"), sentence)


def test_a_wrong_file_is_one_sentence(run: Run) -> None:
    assert _refuses(run("--file", "nowhere.json"), "no file nowhere.json")
    Path("bad.json").write_text('{"format": 1, "plan": {"cuts": [4], "schedul": "1f1b"}}')
    assert _refuses(run("--file", "bad.json"), "schedul")
    assert _refuses(run("--file", _with(), "--explain"), "leave out --explain")


@pytest.mark.parametrize("words", ["plan --file nowhere.json", "simulate --file nowhere.json"])
def test_a_wrong_file_is_refused_before_the_model_is_profiled(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: str
) -> None:
    monkeypatch.setattr("bireme.train.captured_run.CapturedRun.of", None)
    assert _refuses(bireme(capsys, *words.split()), "no file nowhere.json")


def test_a_plan_of_another_model_is_refused(run: Run) -> None:
    run("--output", "found.json")
    save_profile(tiny_profile(layers=2), Path("profile.json"))
    assert _refuses(
        run("--file", "found.json"),
        "made for another model.*Its unit 5 is layers.2.attention, but here it is head",
    )
