"""`sync.mode = "groups"` and `"diloco"` with real processes, from the run file to the document."""

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from bireme.cli import train
from bireme.report.page.run import read_run
from bireme.runtime.board import RunFailed
from bireme.train import launching
from bireme.train.folder import RunFolder
from bireme.train.prepare import PreparedRun
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.training import losses, running, settings, steps_of_checkpoints, write_run

WIDTH = 2
STEPS, BATCH = 12, 8
UNTIED = "gpt:layers=2,width=16,heads=2,vocab=257,context=32,tied=false"
TIED = "gpt:layers=2,width=16,heads=2,vocab=257,context=32"


PACED = "tests.support.paced_samples:paced"
PACE_S = 0.03
PACED_STEPS = 300
"""They take much longer than a replica takes to come back. If the run ends, it was waited for in vain."""


def write_averaging(
    folder: Path,
    mode: str,
    schedule: str,
    depth: int,
    data: str = "",
    *,
    model: str = UNTIED,
    num_ranks: int | None = None,
    **more: object,
) -> Path:
    """A run file of two replicas, each of so many stages on so many ranks."""
    path = write_run(folder, schedule, depth, model=model, data=data)
    plan = folder / f"plan-{schedule}-{depth}.json"
    document = json.loads(plan.read_text())
    document["plan"]["width"] = WIDTH
    plan.write_text(json.dumps(document))
    text = path.read_text().replace(f"workers = {depth}", f"workers = {(num_ranks or depth) * WIDTH}")
    keys = "".join(f"{name} = {value}\n" for name, value in more.items())
    path.write_text(f'{steady(text, mode)}\n[sync]\nmode = "{mode}"\n{keys}')
    return path


def steady(text: str, mode: str) -> str:
    """A run file with a rate at which losses fall: outer steps with momentum go several times as far as the
    drift, so at the usual rate losses jump.
    """
    assert "learning_rate = 0.01\n" in text
    return text.replace("learning_rate = 0.01\n", "learning_rate = 0.002\n") if mode == "diloco" else text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "schedule", "depth", "more"),
    [
        ("groups", "2bw-fresh", 1, {"connect_every": 2, "average_optimizer": "true"}),
        ("diloco", "1f1b", 1, {"diloco_every": 2, "diloco_fragments": 2}),
    ],
)
def test_replicas_that_average_weights_train_each_sample_once_and_go_on_from_a_checkpoint(
    mode: str,
    schedule: str,
    depth: int,
    more: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, run = write_averaging(tmp_path, mode, schedule, depth, **more), tmp_path / "runs" / "run"
    first = bireme(capsys, "train", str(path), "--json")
    assert first.status == 0, first.err
    document = json.loads(first.out)

    assert (document["steps"], document["reason"], document["checkpoint"]) == (STEPS, "finished", STEPS)
    assert steps_of_checkpoints(run)[-1] == STEPS
    sync = document["sync"]
    assert (sync["mode"], sync["samples_committed"], sync["samples_redone"]) == (mode, STEPS * BATCH, 0)
    assert sync["sent_bytes"] > 0
    assert document["membership"] == [{"step": 0, "members": [0, 1]}]
    found = losses(run)
    assert found[max(found)] < found[min(found)]
    measured = read_run(run).measured
    assert measured is not None
    assert measured.program.average_lag == (0 if mode == "groups" else 1)

    again = bireme(capsys, "resume", str(run), "--set", f"training.steps={STEPS + 4}", "--json")
    assert again.status == 0, again.err
    assert json.loads(again.out)["steps"] == STEPS + 4
    checked = bireme(capsys, "ledger", str(run), "--json")
    ledger = json.loads(checked.out)
    assert (checked.status, ledger["ok"]) == (0, True)
    assert ledger["samples_committed"] == (STEPS + 4) * BATCH
    assert ledger["samples_open"] == 0


SEVERAL: list[tuple[str, str, dict[str, Any]]] = [
    ("diloco", "interleaved", {"diloco_every": 2, "average_optimizer": "true"}),
    ("groups", "zbv", {"connect_every": 2}),
    ("diloco", "2bw", {"diloco_every": 2, "diloco_fragments": 2}),
    ("quorum", "zbv", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "schedule", "more"), SEVERAL if TRY_ALL else SEVERAL[:1])
def test_replicas_with_tied_weights_or_several_stages_on_a_rank_train_each_sample_once(
    mode: str,
    schedule: str,
    more: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tied weights of replicas that die: the test of kills below."""
    depth = 2 if schedule == "2bw" else 4
    path = write_averaging(tmp_path, mode, schedule, depth, model=TIED, num_ranks=2, **more)
    trained = bireme(capsys, "train", str(path), "--json")
    assert trained.status == 0, trained.err
    document = json.loads(trained.out)

    assert (document["steps"], document["reason"]) == (STEPS, "finished")
    assert document["sync"]["samples_committed"] == STEPS * BATCH
    found = losses(tmp_path / "runs" / "run")
    assert found[max(found)] < found[min(found)]


@pytest.mark.slow
def test_with_balance_off_replicas_that_average_weights_train_as_many_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_averaging(tmp_path, "groups", "1f1b", 1)
    trained = bireme(capsys, "train", str(path), *settings(balance__mode="off"), "--json")
    assert trained.status == 0, trained.err

    lines = [
        json.loads(line) for line in (tmp_path / "runs" / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    counted = {0: 0, 1: 0}
    for line in lines:
        for member, own in zip(line.get("members", ()), line.get("samples", ()), strict=True):
            counted[member] += sum(end - begin for begin, end in own)
    assert counted == dict.fromkeys(range(WIDTH), STEPS * BATCH // WIDTH)


DEATHS = [("diloco", 2, 0), ("groups", 2, 0), ("diloco", 2, 1)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mode", "depth", "killed"), DEATHS if TRY_ALL else DEATHS[:1])
def test_a_replica_that_is_killed_comes_back_and_no_sample_counts_twice(
    mode: str, depth: int, killed: int, tmp_path: Path
) -> None:
    """By default it is the one that leads, of which the first rank is killed. Ranks share weights. With
    groups a replica over two hosts loses a rank in `test_train_spanning_replicas.py`.
    """
    path, run = write_averaging(tmp_path, mode, "1f1b", depth, PACED, model=TIED), tmp_path / "runs" / "run"
    more = settings(training__steps=PACED_STEPS, cluster__timeout_s=16)
    with running(run, "train", str(path), *more, "--json", pace_s=PACE_S) as started:
        started.wait_for_step(4)
        os.kill(started.ranks[killed * depth], signal.SIGKILL)
        started.wait_for_words(f"Replica {killed} is back")
        os.kill(started.process.pid, signal.SIGTERM)
        ended = started.ended()
    document = ended.document
    assert f"Replica {killed} ended: rank {killed * depth}, its process was killed by signal 9" in ended.err

    assert document["reason"] == "signal"
    assert document["checkpoint"] == document["steps"]
    assert document["sync"]["epochs"] >= 3
    (recovery,) = document["sync"]["recoveries"]
    assert recovery["replica"] == killed
    assert min(recovery[part] for part in ("detect_s", "transfer_s", "catch_up_s")) >= 0
    assert f"Replica {killed} is back at step {recovery['step']}: its loss was noticed after" in ended.err
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["kind"] == "round"]
    places = [place for line in rounds for own in line["samples"] for one in own for place in range(*one)]
    assert len(set(places)) == len(places) == document["sync"]["samples_committed"]
    left = {place for begin, end in rounds[-1]["open"] for place in range(begin, end)}
    assert set(places) | left == set(range(rounds[-1]["fresh"]))


def test_what_averages_do_not_go_with_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_averaging(tmp_path, "groups", "1f1b", 1)
    for more, words in (
        (settings(sync__diloco_every=4), "sync.diloco_every is 4"),
        (settings(sync__grace_s=2), "sync.grace_s is 2"),
        (settings(sync__mode="quorum", sync__average_optimizer="true"), "sync.average_optimizer is True"),
        (settings(balance__mode="start"), 'balance.mode is "start"'),
        (
            settings(sync__mode="diloco", sync__diloco_every=2, sync__diloco_overlap=3),
            "sync.diloco_overlap is 3",
        ),
    ):
        result = bireme(capsys, "train", str(path), *more)
        assert result.status == 2
        assert words in result.err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_go_on_ends_with_status_1_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RunFailed("The coordinator has ended.")

    monkeypatch.setattr(train, "show_prepared", lambda *_, **__: None)
    monkeypatch.setattr(launching, "start", lost)
    with pytest.raises(typer.Exit) as ended:
        train.run_to_end(cast(PreparedRun, None), RunFolder(tmp_path), None, as_json=True)

    assert ended.value.exit_code == 1
    assert f"The coordinator has ended.\nTo resume: bireme resume {tmp_path}" in capsys.readouterr().err
