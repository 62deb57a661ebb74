"""A run whose replicas may die goes on by itself when all of them are lost, and after it was suspended."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.killing.session import living
from bireme.errors import BiremeError
from bireme.runtime.board import RankFailed
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train import launching
from bireme.train.checkpoint.checkpoint import step_after
from bireme.train.data.placing import NUM_PROBES
from bireme.train.folder import RunFolder
from tests.support.training import Gate, running, settings, write_run

KILLED = RankFailed(1, None, "its process was killed by signal 9 (SIGKILL).")


def _ended(
    monkeypatch: pytest.MonkeyPatch,
    folder: RunFolder,
    ends: Sequence[tuple[Exception | None, int]],
    restarts: int = 3,
) -> tuple[object, list[int]]:
    """How a run ends, and the steps that it was started from. `ends` has the error of each start, and the
    step of the newest checkpoint after it.
    """
    left, starts, newest = list(ends), list[int](), [0]

    def run(
        _prepared: object, _folder: object, checkpoint: Any, *_more: object, **_words: object
    ) -> list[str]:
        starts.append(step_after(checkpoint))
        error, newest[0] = left.pop(0)
        if error is not None:
            raise error
        return ["done"]

    monkeypatch.setattr(launching, "_run", run)
    monkeypatch.setattr(
        launching,
        "newest_state",
        lambda _path, _keepers, _run: (
            SimpleNamespace(manifest=SimpleNamespace(step=newest[0]), copies=None) if newest[0] else None,
            0,
        ),
    )
    prepared: Any = SimpleNamespace(run=SimpleNamespace(checkpoint=SimpleNamespace(folder="checkpoints")))
    try:
        return launching._run_through(prepared, folder, None, is_shown=False, restarts=restarts), starts
    except (BiremeError, RankFailed) as error:
        return error, starts


def test_a_run_restarts_from_its_newest_checkpoint_and_counts_only_restarts_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = [(KILLED, 0), (KILLED, 4), (KILLED, 4), (KILLED, 4), (KILLED, 8), (None, 12)]
    assert _ended(monkeypatch, RunFolder(tmp_path), ends) == (["done"], [0, 0, 4, 4, 4, 8])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert (
        "killed by signal 9 (SIGKILL). The run continues from its beginning (restart 1 of at most 3"
        in said[0]
    )
    assert "The run continues after step 4 (restart 1 of at most 3" in said[1]


def test_a_run_gives_up_with_its_true_cause_after_restarts_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = RankFailed(0, None, "the fourth.")
    ends = [(KILLED, 4), (KILLED, 4), (KILLED, 4), (cause, 4)]
    assert _ended(monkeypatch, RunFolder(tmp_path), ends) == (cause, [0, 4, 4, 4])
    assert _ended(monkeypatch, RunFolder(tmp_path), [(KILLED, 4)], restarts=0) == (KILLED, [0])


def test_a_mistake_of_the_user_is_not_tried_again_before_anything_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mistake = RunFolder(tmp_path), BiremeError("data.source is not there.")
    folder.ledger.write_text("{}\n")
    assert _ended(monkeypatch, folder, [(mistake, 0)]) == (mistake, [0])


@pytest.mark.slow
@pytest.mark.long
def test_a_run_survives_being_suspended_and_the_death_of_all_its_replicas_at_once(tmp_path: Path) -> None:
    more = settings(sync__mode="diloco", sync__diloco_every=4, sync__lease_s=2, training__steps=24)
    path = write_run(tmp_path, "1f1b", 1, width=2, data="tests.support.paced_samples:gated")
    run = tmp_path / "runs" / "run"
    gate = Gate(tmp_path / "gate", NUM_PROBES + 40)
    with running(run, "train", str(path), *more, "--json", gate=gate) as train:
        train.wait_for_step(4)
        group = living(train.process.pid)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in group:
                os.kill(pid, number)
            time.sleep(5.0 if number is signal.SIGSTOP else 0.0)  # longer than the lease
        gate.let_in(24)
        train.wait_for_words("checkpoint, ")
        for pid in train.ranks:
            os.kill(pid, signal.SIGKILL)
        train.wait_for_words("The run continues after step")
        gate.let_in(10**6)
        ended = train.ended()
    assert ended.status == 0
    assert ended.document["steps"] == 24
    checked = check_ledger(run / "ledger.jsonl")
    assert checked.is_whole, checked
    assert (run / "model" / "model.safetensors").is_file()
