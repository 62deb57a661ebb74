"""`bireme train` with replicas that share an optimizer, or weights: losses of a plain run, and resuming."""

import json
from pathlib import Path

import pytest

from bireme.train.run_file import load_run_file
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.training import CUTS, losses, settings, write_run

pytestmark = pytest.mark.slow


def write_plan(folder: Path, width: int) -> Path:
    path = folder / f"plan-of-{width}.json"
    table = {"cuts": CUTS[1], "num_microbatches": 2, "schedule": "2bw", "width": width}
    path.write_text(json.dumps({"format": 1, "plan": table}))
    return path


def test_a_shared_run_is_the_plain_one_and_another_number_of_replicas_resumes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, "2bw", 1)
    common = {"plan__file": write_plan(tmp_path, 2), "cluster__workers": 2, "training__clip_norm": 0}
    plain = settings(**common, training__steps=6, log__name="plain")
    assert bireme(capsys, "train", str(path), "--json", *plain).status == 0
    shared = settings(**common, training__steps=2, memory__shard="optimizer", log__name="shared")
    first = bireme(capsys, "train", str(path), "--json", *shared)
    assert first.status == 0, first.err
    sync = first.document["sync"]
    assert 0 < sync["shared"]["gathered_bytes"] < sync["sent_bytes"]
    assert sync["shared"]["gathered_bytes"] + sync["shared"]["summed_bytes"] == sync["sent_bytes"]
    page = bireme(capsys, "report", str(tmp_path / "runs" / "shared"), "--json").document
    assert page["runs"][0]["shared"] == sync["shared"]
    weights = settings(training__steps=4, training__schedule_steps=2, memory__shard="weights")
    then = bireme(capsys, "resume", str(tmp_path / "runs" / "shared"), "--json", *weights)
    assert then.status == 0, then.err
    expected, found = losses(tmp_path / "runs" / "plain"), losses(tmp_path / "runs" / "shared")
    assert found == {step: expected[step] for step in (1, 2, 3, 4)}

    alone = settings(
        plan__file=write_plan(tmp_path, 1), cluster__workers=1, memory__shard="none", training__steps=6
    )
    more = settings(training__schedule_steps=2)
    second = bireme(capsys, "resume", str(tmp_path / "runs" / "shared"), "--json", *alone, *more)
    assert second.status == 0, second.err
    assert losses(tmp_path / "runs" / "shared") == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(
    not TRY_ALL, reason="threads do the same in tests/runtime/test_engine_part.py and tests/composition"
)
def test_an_adapter_under_muon_is_shared_with_the_weights_below_it_and_summed_through_a_codec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    path = write_run(tmp_path, "2bw", 1)
    common = settings(
        plan__file=write_plan(tmp_path, 2),
        cluster__workers=2,
        training__clip_norm=0,
        training__optimizer="muon",
        training__steps=2,
        model__lora__rank=4,
        model__lora__merge="true",
        export__at_end="false",
    )
    for name, shard in (("plain", "none"), ("shared", "weights")):
        more = settings(memory__shard=shard, log__name=name)
        told = bireme(capsys, "train", str(path), "--json", *common, *more)
        assert told.status == 0, told.err
    assert losses(tmp_path / "runs" / "shared") == losses(tmp_path / "runs" / "plain")
    dense = told.document["sync"]["shared"]["summed_bytes"]
    coded = settings(sync__codec="int4", training__steps=4, training__schedule_steps=2)
    then = bireme(capsys, "resume", str(tmp_path / "runs" / "shared"), "--json", *coded)
    assert then.status == 0, then.err
    assert 0 < then.document["sync"]["shared"]["summed_bytes"] < 0.7 * dense
    assert set(losses(tmp_path / "runs" / "shared")) == {1, 2, 3, 4}


def test_a_run_keeps_what_the_planner_chose_that_its_replicas_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, "2bw", 1)
    plan = json.loads(write_plan(tmp_path, 2).read_text())
    agreed = {"shard": "optimizer", "sync_mode": "allreduce", "sum_codec": "int4"}
    (tmp_path / "chosen.json").write_text(json.dumps(plan | {"plan": plan["plan"] | agreed}))
    auto = {"memory__shard": "auto", "sync__mode": "auto", "sync__codec": "auto"}
    common = {"cluster__workers": 2, "training__steps": 2, "log__name": "own", **auto}
    own = settings(**common, plan__file=tmp_path / "chosen.json")
    first = bireme(capsys, "train", str(path), "--json", *own)
    assert first.status == 0, first.err
    assert first.document["sync"]["shared"]["gathered_bytes"] > 0
    own_run = load_run_file(tmp_path / "runs" / "own" / "run.toml")
    assert (own_run.memory.shard, own_run.sync.mode) == ("optimizer", "allreduce")
    assert own_run.sync.codec == "int4"
    begun = json.loads((tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()[0])
    assert (begun["sync_mode"], begun["sum_codec"]) == ("allreduce", "int4")
    more = settings(training__steps=3, training__schedule_steps=2, **auto)
    then = bireme(capsys, "resume", str(tmp_path / "runs" / "own"), "--json", *more)
    assert then.status == 0, then.err
    assert "a new one is made" not in then.err
    assert then.document["sync"]["shared"]["gathered_bytes"] > 0
    assert load_run_file(tmp_path / "runs" / "own" / "run.toml").sync.codec == "int4"

    searched = settings(
        **common | {"sync__mode": "allreduce"}, plan__file="", plan__width=2, plan__schedule="1f1b"
    )
    dry = bireme(capsys, "train", str(path), "--dry-run", "--json", *searched)
    assert dry.status == 0, dry.err
    assert [one["way"] for one in dry.document["shard_ways"]] == ["none", "optimizer", "weights"]
    chosen = min(
        (one for one in dry.document["shard_ways"] if one["plan"]),
        key=lambda one: one["plan"]["cost_s_per_sample"],
    )
    assert dry.document["sync"].get("shard", "none") == chosen["way"]
    assert any(
        note.startswith(f'memory.shard = "auto" chose "{chosen["way"]}"') for note in dry.document["notes"]
    )
