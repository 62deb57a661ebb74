"""`sync.sites` with real processes: two sites of two replicas that share an optimizer, DiLoCo and quorum."""

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.killing.mortal_run import losses_of_one_process
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.checkpoint.checkpoint import newest_good
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.training import CUTS, losses, running, settings, write_run
from tests.train.test_train_averaging import PACE_S, PACED, PACED_STEPS, STEPS, UNTIED, steady
from tests.train.test_train_replica_hosts import rounds_of, wait_for_members
from tests.train.test_train_spanning_replicas import Hosts

pytestmark = pytest.mark.slow

BATCH = 8


def write_sites(
    folder: Path, shard: str, data: str = "", *, width: int = 4, mode: str = "diloco", depth: int = 1
) -> Path:
    """A run file of replicas of so many stages in two sites."""
    path = write_run(folder, "2bw", depth, model=UNTIED, data=data)
    table = {"cuts": CUTS[depth], "num_microbatches": 2, "schedule": "2bw", "width": width}
    plan = folder / "plan-of-sites.json"
    plan.write_text(json.dumps({"format": 1, "plan": table}))
    text = path.read_text().replace(f"workers = {depth}", f"workers = {depth * width}")
    text = text.replace(f'file = "{folder}/plan-2bw-{depth}.json"', f'file = "{plan}"')
    every = "diloco_every = 2\n" if mode == "diloco" else ""
    keys = f'mode = "{mode}"\nsites = 2\n{every}\n[memory]\nshard = "{shard}"\n'
    path.write_text(f"{steady(text, mode)}\n[sync]\n{keys}")
    return path


@pytest.mark.parametrize(
    ("shard", "mode"),
    [("optimizer", "quorum"), *([("optimizer", "diloco"), ("weights", "diloco")] if TRY_ALL else [])],
)
def test_sites_train_each_sample_once_and_go_on_from_a_checkpoint(
    shard: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And as sites of one replica, where what the codec has not sent of pieces is lost."""
    path, run = write_sites(tmp_path, shard, mode=mode), tmp_path / "runs" / "run"
    codec = settings(sync__codec="int2" if shard == "optimizer" else "none")
    first = bireme(capsys, "train", str(path), "--json", *codec)
    assert first.status == 0, first.err
    document = json.loads(first.out)
    assert (document["steps"], document["reason"], document["checkpoint"]) == (STEPS, "finished", STEPS)
    sync = document["sync"]
    assert (sync["samples_committed"], sync["samples_redone"]) == (STEPS * BATCH, 0)
    assert document["membership"] == [{"step": 0, "members": [0, 1]}]
    assert 0 < sync["shared"]["gathered_bytes"] < sync["sent_bytes"]
    found = losses(run)
    assert found[max(found)] < found[min(found)]

    again = bireme(capsys, "resume", str(run), "--set", f"training.steps={STEPS + 4}", "--json")
    assert again.status == 0, again.err
    assert json.loads(again.out)["steps"] == STEPS + 4
    checked = bireme(capsys, "ledger", str(run), "--json")
    assert (checked.status, json.loads(checked.out)["ok"]) == (0, True)
    if mode == "quorum":
        assert any(name.startswith("feedback/0-of-2/") for name in saved_names(run))
        write_sites(tmp_path, shard, mode=mode, width=2)
        more = settings(training__steps=STEPS + 6, cluster__workers=2)
        narrower = bireme(capsys, "resume", str(run), *more, "--json")
        assert narrower.status == 0, narrower.err
        assert narrower.document["steps"] == STEPS + 6


@pytest.mark.skipif(
    not TRY_ALL, reason="launchers start a site again as they do any replica: BIREME_TESTS=all"
)
@pytest.mark.long
@pytest.mark.parametrize("mode", ["diloco", "quorum"])
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_site_of_which_a_rank_is_killed_comes_back_as_a_whole(
    shard: str, mode: str, tmp_path: Path
) -> None:
    path, run = write_sites(tmp_path, shard, PACED, mode=mode), tmp_path / "runs" / "run"
    more = settings(training__steps=PACED_STEPS, cluster__timeout_s=16)
    with running(run, "train", str(path), *more, "--json", pace_s=PACE_S) as started:
        started.wait_for_step(4)
        os.kill(started.ranks[3], signal.SIGKILL)
        started.wait_for_words("Replica 1 is back")
        os.kill(started.process.pid, signal.SIGTERM)
        ended = started.ended()
    assert ended.document["reason"] == "signal"
    assert ended.document["sync"]["epochs"] >= 3
    assert check_ledger(run / "ledger.jsonl").is_whole


@pytest.mark.skipif(not TRY_ALL, reason="two hosts for a quarter of a minute: BIREME_TESTS=all")
@pytest.mark.long
def test_a_site_over_two_hosts_comes_back_as_a_whole_when_a_rank_on_one_of_them_dies(tmp_path: Path) -> None:
    """Four hosts of one device. Inside a site gradients are summed between its two hosts, each of which has a
    part of the optimizer's state.
    """
    more = settings(training__steps=5000, training__optimizer="sgd", training__learning_rate=0.003)
    more += settings(checkpoint__every_steps=0, sync__sites=2, memory__shard="optimizer")
    with ExitStack() as stack:
        run_hosts = Hosts(tmp_path, "quorum", stack, more, depth=1)
        first, _, third, fourth = run_hosts.launchers.values()
        wait_for_members(first, 0, 1)
        (rank,) = fourth.ranks
        os.kill(rank, signal.SIGKILL)
        for one in (third, fourth):
            one.wait_for_words("Replica 1 is back after")
        wait_for_members(first, 0, 1)
        os.kill(first.process.pid, signal.SIGTERM)
        ended = [one.ended() for one in run_hosts.launchers.values()]

    assert [one.status for one in ended] == [0, 0, 0, 0], ended
    assert {(0, 1), (0,)} <= {tuple(line["members"]) for line in rounds_of(run_hosts.run)}
    assert check_ledger(run_hosts.run / "ledger.jsonl").is_whole
    expected = losses_of_one_process(run_hosts.run)
    for step, loss in losses(run_hosts.run).items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-3), step


def saved_names(run: Path) -> set[str]:
    """The names of all tensors in the newest checkpoint."""
    newest = newest_good(run / "checkpoints")
    assert newest is not None
    return {*newest.snapshot().tensors}


@pytest.mark.skipif(not TRY_ALL, reason="threads do the same in tests/runtime/test_quorum_sites.py")
def test_quorum_of_sites_of_pipelines_learns_what_one_pipeline_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight processes, against one pipeline of two."""
    path = write_sites(tmp_path / "sites", "optimizer", mode="quorum", depth=2)
    other = write_run(tmp_path / "alone", "2bw", 2, model=UNTIED)
    for one in (path, other):
        result = bireme(capsys, "train", str(one), "--json")
        assert result.status == 0, result.err
    found, wanted = (losses(tmp_path / name / "runs" / "run") for name in ("sites", "alone"))
    assert found == pytest.approx(wanted, rel=1e-5)


def test_sites_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sites(tmp_path, "optimizer", width=3)
    for more, words in (
        ((), "sync.sites is 2, but there are 3 replicas (plan.width)"),
        (settings(sync__mode="allreduce", sync__diloco_every=50), "sync.sites is 2"),
        (settings(sync__sites=1), "sync.sites"),
        (
            settings(sync__mode="quorum", sync__diloco_every=50, memory__shard="none"),
            "replicas that keep all of their state can die one by one",
        ),
    ):
        result = bireme(capsys, "train", str(path), *more)
        assert (result.status, words in result.err) == (2, True), result.err
