"""`[balance]` of a run: what is refused, what memory allows, runs whose shares follow, from file to JSON."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bireme import balance as slow_stage
from bireme.balance import SlowStage
from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.machines.orders import PHASE
from bireme.plan.forecast import Forecast, StageForecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.runtime.launch import launch as launching_launch
from bireme.runtime.world import World
from bireme.train.data.documents import Cut, DocumentSamples
from bireme.train.data.samples import Tokens
from bireme.train.outcome import Outcome
from bireme.train.plan_search import grown, with_batch_of
from bireme.train.rank_part import RunStart
from bireme.train.run_file import RunFile, load_run_file
from bireme.train.shares import (
    ReplicaNotes,
    as_slow_as_found,
    mode_of,
    sharing_of,
    slowed,
    stage_watch_of,
)
from bireme.train.worker import train_rank
from tests.support.alone import learned_alone
from tests.support.command import bireme
from tests.support.training import losses, metrics, settings, write_run

GIB = 2**30


def run_of(*sets: str) -> RunFile:
    return load_run_file(None, sets)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["balance.mode=always"], "balance.mode"),
        (["balance.mode=start", "plan.width=1"], "plan.width is 1: with one replica it has no effect"),
        (["balance.batch=grow", "plan.width=1"], "plan.width is 1: with one replica it has no effect"),
        (["balance.mode=off", "balance.batch=grow"], "measures nothing"),
        (["balance.mode=off", "balance.replan=true"], "measures nothing"),
        (["balance.batch=grow", "plan.largest_batch=64"], "both choose the size of the batch"),
        (
            ["balance.batch=grow", 'data.private={a = "x"}'],
            "places samples for batches of training.batch_size",
        ),
    ],
)
def test_keys_that_can_have_no_effect_are_refused_in_a_sentence(sets: list[str], words: str) -> None:
    with pytest.raises(BiremeError, match=words):
        run_of(*sets)


def cluster_of(*speeds: float) -> Cluster:
    devices = tuple(Device(f"kind{place}", "cpu", 4 * GIB, speed=speed) for place, speed in enumerate(speeds))
    return Cluster((Server("here", devices),))


def saved_plan(width: int = 2, *, peak_bytes: float = GIB, sizes: tuple[int, ...] = (3, 1)) -> SavedPlan:
    """A plan of two stages over the devices of one server, with what it promises."""
    devices = tuple(tuple(f"here/cpu{replica * 2 + rank}" for replica in range(width)) for rank in range(2))
    stages = tuple(
        StageForecast(begin, begin + 2, row, False, busy_s, peak_bytes, 4.0 * GIB)
        for begin, row, busy_s in ((0, devices[0], 0.3), (2, devices[1], 0.6))
    )
    plan = Plan((2,), 4, "1f1b", width, micro_batch_sizes=sizes, devices=devices)
    return SavedPlan(plan, Forecast(1.0, 4.0 * sum(sizes), 1.0, 0.9, "here/cpu1", stages))


def samples() -> DocumentSamples:
    return Cut(4, "stream", 0).samples(Tokens("tokens", np.arange(80, dtype=np.uint16)))


def test_shares_follow_by_themselves_where_replicas_are_on_unequal_devices() -> None:
    plan = saved_plan().plan
    assert mode_of(run_of(), plan, cluster_of(1, 1, 1, 1)) == "off"
    assert mode_of(run_of(), plan, cluster_of(1, 1, 0.5, 0.5)) == "measured"
    assert mode_of(run_of(), plan, cluster_of(1, 0.5, 1, 0.5)) == "off", "stages differ there, not replicas"
    assert mode_of(run_of("balance.mode=off"), plan, cluster_of(1, 1, 0.5, 0.5)) == "off"


def test_the_stages_of_machines_that_have_joined_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slower than it says is named on the screen of the coordinator."""
    cluster, one = cluster_of(1, 1), saved_plan(1, sizes=(1,)).plan
    assert mode_of(run_of(), one, cluster) == "off"
    monkeypatch.setenv(PHASE, "1")
    assert mode_of(run_of(), one, cluster) == "measured"
    assert mode_of(run_of("balance.mode=off"), one, cluster) == "off"
    assert mode_of(run_of("sync.mode=quorum"), one, cluster) == "off"


def test_memory_limits_shares_and_a_batch_that_it_cannot_hold_is_refused() -> None:
    cluster, run = cluster_of(1, 1, 1, 1), run_of("balance.mode=measured", "training.batch_size=16")
    sharing = sharing_of(run, saved_plan(), cluster, None, samples())
    assert sharing is not None
    assert sharing.first == (12, 4)
    assert sharing.limits.least == (4, 4)
    # A quarter of the memory holds micro-batches of 3 and 1, so it holds four times as many samples.
    assert sharing.limits.most == (16, 16)
    tight = sharing_of(run, saved_plan(peak_bytes=3.0 * GIB), cluster, None, samples())
    assert tight is not None
    assert tight.limits.most == (16, 4)
    larger = run_of("balance.mode=measured", "training.batch_size=64")
    with pytest.raises(BiremeError, match=r"holds 32 samples of a batch \(24, 8\).* is 64"):
        sharing_of(larger, saved_plan(peak_bytes=1.9 * GIB, sizes=(3, 1)), cluster, None, samples())


def test_one_replica_has_no_shares_but_its_stages_are_watched() -> None:
    saved = saved_plan(1, sizes=(4,))
    sharing = sharing_of(run_of("balance.mode=measured"), saved, cluster_of(1, 1), None, samples())
    assert sharing is not None
    assert sharing.policy is None
    with pytest.raises(BiremeError, match="has no effect: the plan has one replica"):
        sharing_of(run_of("balance.mode=start"), saved, cluster_of(1, 1), None, samples())


def test_a_slow_stage_is_known_by_what_was_planned_for_its_own_device() -> None:
    cluster, saved = cluster_of(1, 1, 0.5, 0.5), saved_plan(sizes=(2, 1))
    watch = stage_watch_of(saved.plan, cluster, [0.01, 0.02])
    assert watch is not None
    as_planned = [0.3, 0.6, 0.3, 0.6]  # the second replica has half the samples and half the speed
    assert [watch.note((8, 4), as_planned) for _ in range(40)] == [None] * 40
    found = [one for _ in range(40) if (one := watch.note((8, 4), [0.3, 0.6, 0.3, 1.8]))]
    assert [(one.rank, round(one.times)) for one in found] == [(3, 3)]
    slower = slowed(cluster, saved.plan, found[0])
    assert [one.device.speed for one in slower.devices()] == pytest.approx([1, 1, 0.5, 0.5 / found[0].times])
    assert stage_watch_of(saved.plan, cluster, None) is None
    assert isinstance(found[0], SlowStage)


def test_a_new_phase_plans_with_the_speeds_that_the_run_has_found(tmp_path: Path) -> None:
    """Those that the phase before was planned with, and the stages that are slow by the end of its log."""
    cluster, plan, log = cluster_of(1, 1, 1, 1), saved_plan(sizes=(1, 1)).plan, tmp_path / "metrics.jsonl"

    def tell(kind: str, step: int, **values: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    tell("start", 0)
    watch = stage_watch_of(plan, cluster, [0.01, 0.02])
    notes = ReplicaNotes(watch, tell, may_replan=False, is_weighed=True)
    result: Any = SimpleNamespace(shares=(4, 4), batch=7, busy_s=[0.1, 0.2, 0.1, 0.8])
    said = [text for _ in range(slow_stage.LONG) if (text := notes.note(result, plan.source))]
    assert said[0].startswith(f"Stage 1 on {plan.process_devices[3]} (replica 1, rank 3) takes ")
    assert said[0].endswith("is weighed once that has lasted for elastic.patience_s.")
    before = cluster_of(1, 0.5, 1, 1)
    speeds = [one.device.speed for one in as_slow_as_found(cluster, before, plan, log).devices()]
    assert speeds == pytest.approx([1, 0.5, 1, 0.25])
    for _ in range(slow_stage.LONG):
        notes.note(SimpleNamespace(shares=(4, 4), batch=8, busy_s=[0.1, 0.2, 0.1, 0.2]), plan.source)  # type: ignore[arg-type]
    assert as_slow_as_found(cluster, before, plan, log) == before
    assert as_slow_as_found(cluster, cluster, plan, tmp_path / "none") == cluster


def test_a_grown_batch_takes_the_learning_rate_along_and_is_kept_from_then_on() -> None:
    run = run_of("balance.batch=grow", "training.batch_size=16", "training.warmup_fraction=0.0")
    after = grown(run, 40)
    assert after.training.batch_size == 40
    assert after.training.learning_rate == pytest.approx(2.5 * run.training.learning_rate)
    assert after.training.num_warmup_steps == round(0.05 * run.training.steps)
    assert after.balance.batch == "keep"
    assert with_batch_of(run, after) == after


REPLICAS = {"cuts": [], "num_microbatches": 2, "schedule": "1f1b", "width": 2}


def write_replicas(folder: Path) -> list[str]:
    """The settings of a run with two replicas of one stage."""
    plan = folder / "replicas.json"
    plan.write_text(json.dumps({"format": 1, "plan": REPLICAS}))
    return settings(plan__file=plan, cluster__workers=2)


def manifest(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text()
    )
    return found


@pytest.mark.slow
def test_a_run_whose_shares_follow_learns_what_one_process_does_and_resumes_with_its_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = write_run(tmp_path), tmp_path / "runs" / "run"
    # A margin that any scatter passes, so that shares do change.
    words = [*write_replicas(tmp_path), *settings(balance__mode="measured", balance__margin=0.0)]
    words += settings(balance__every_steps=1, training__steps=8)
    assert bireme(capsys, "train", str(path), *words).status == 0
    result = bireme(capsys, "resume", str(run), "--set", "training.steps=12", "--json")
    assert result.status == 0, result.err
    shares = result.document["shares"]
    assert shares[0] == {"step": 0, "shares": [4, 4]}
    assert all(sum(one["shares"]) == 8 and min(one["shares"]) >= 2 for one in shares)
    assert [one["step"] for one in shares] == sorted({one["step"] for one in shares})
    assert metrics(run, "shares")[0]["shares"] == [4, 4]
    assert losses(run) == pytest.approx(learned_alone(), rel=1e-4)
    assert sum(manifest(run, 8)["extra"]["shares"]["shares"]) == 8


def with_impatient_watch(world: World, start: RunStart) -> Outcome:
    """A rank of a run that takes the slower of two stages for one that has become slow, and soon."""
    slow_stage.LONG, slow_stage.SLOW = 3, 1.0
    return train_rank(world, start)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_with_a_slow_stage_goes_on_with_a_new_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_function: object, *words: Any, **more: Any) -> list[Outcome]:
        return launching_launch(with_impatient_watch, *words, **more)

    monkeypatch.setattr("bireme.train.launching.launch", launch)
    plan = settings(plan__file="", plan__schedule="1f1b", plan__depth=2, plan__micro_batch=4)
    asked = settings(balance__mode="measured", balance__replan="true")
    result = bireme(capsys, "train", str(write_run(tmp_path)), *plan, *asked, "--json")
    assert result.status == 0, result.err
    assert result.document["steps"] == 12
    run = tmp_path / "runs" / "run"
    assert metrics(run, "start")[0]["step"] == 0
    assert len(metrics(run, "start")) == 2
    assert [line["reason"] for line in metrics(run, "stop")] == ["new plan", "finished"]
    assert any("a new plan could save up to" in line["text"] for line in metrics(run, "warning"))
    assert sorted(losses(run)) == list(range(1, 13))


@pytest.mark.slow
def test_a_batch_grows_to_what_the_replicas_were_measured_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    words = [*write_replicas(tmp_path), *settings(balance__mode="start", balance__batch="grow")]
    result = bireme(capsys, "train", str(path), *words, "--steps", "3", "--json")
    assert result.status == 0, result.err
    (first,) = result.document["shares"]
    after = load_run_file(tmp_path / "runs" / "run" / "run.toml")
    assert after.training.batch_size == sum(first["shares"])
    assert after.balance.batch == "keep"
    assert after.training.learning_rate == pytest.approx(0.01 * after.training.batch_size / 8)
