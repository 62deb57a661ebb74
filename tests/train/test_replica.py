"""A rank of a replica that may die, as the loop of a run sees it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bireme.documents import read_json_lines
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.stores import HashStore
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Incarnation
from bireme.train import worker
from bireme.train.checkpoint.checkpoint import newest_good
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome, RankOutcome
from bireme.train.rank_part import RunStart
from bireme.train.replica import LeaderLog, LeaderWriter
from bireme.train.run_file import RunFile
from bireme.train.run_log import RunLog
from bireme.train.worker import train_replica
from tests.support.checkpoints import META, ignore, snapshot_of, steps_in


def test_a_replica_that_is_started_again_needs_no_checkpoint_that_may_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[RunStart] = []
    monkeypatch.setattr(worker, "train_rank", lambda _world, start, _seat: found.append(start))
    start = RunStart(Path("run"), Path("run/checkpoints/step-10"), None, False, {})
    for life in range(2):
        train_replica(
            cast(World, None), ReplicaOrder(Incarnation(1, life), (), "", 10.0, 0.0, is_empty=life > 0), start
        )

    assert [one.checkpoint for one in found] == [start.checkpoint, None]


def test_replicas_that_lead_in_turns_write_into_one_folder(tmp_path: Path) -> None:
    warnings: list[str] = []

    def make(_number: int) -> CheckpointWriter:
        return CheckpointWriter(
            tmp_path, 0, 1, HashStore(), on_event=ignore, resumed_from=newest_good(tmp_path)
        )

    replicas = [LeaderWriter(tmp_path, make, warnings.append) for _ in range(2)]
    for step in (10, 20, 30):
        leader = step // 10 % 2
        replicas[1 - leader].close()
        replicas[leader].save(snapshot_of(0, step), META)
        replicas[leader].wait()
    for one in replicas:
        one.close()

    assert (steps_in(tmp_path), warnings) == ([20, 30], [])


def test_who_takes_over_the_log_adds_the_lines_that_the_last_writer_could_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run = RunFile.model_validate({"format": 1})

    def make() -> RunLog:
        return RunLog(RunFolder(tmp_path), run, {}, is_shown=False)

    replicas = [cast(Any, SimpleNamespace(speaks=speaks)) for speaks in (True, False)]
    logs = [LeaderLog(make, one, path) for one in replicas]
    logs[0].begin(0)
    for step in range(1, 4):
        logs[0].tell("train", step, loss=step)
        logs[1].tell("train", step, loss=step)
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st')  # all that a killed process has left of a line
    for step in range(4, 7):
        logs[1].tell("train", step, loss=step)
    logs[1].tell("recovery", 6, replica=0, detect_s=None, transfer_s=0.5, catch_up_s=2.0)
    logs[1].tell("evaluation", 6, loss=0.5)
    logs[1].tell("warning", 6, text="of no interest to others")
    replicas[1].speaks = True
    logs[1].tell("train", 7, loss=7)

    lines = read_json_lines(path, start="start").records.values()
    assert [(one["kind"], one["step"], one.get("loss")) for one in lines] == [
        ("start", 0, None),
        *(("train", step, step) for step in range(1, 7)),
        ("recovery", 6, None),
        ("evaluation", 6, 0.5),
        ("train", 7, 7),
    ]


def test_the_end_of_a_run_is_written_once() -> None:
    """A replica that has waited until who led was gone leads then too."""
    ended: list[Outcome] = []
    log = cast(RunLog, SimpleNamespace(end=ended.append))
    outcome = Outcome(4, "finished", None, None, None, None, None, 0, 4, RankOutcome(0, None, None))
    for leads in (True, False):
        own = LeaderLog(lambda: log, cast(Any, SimpleNamespace(speaks=True)), Path())
        own.end(replace(outcome, leads=leads))

    assert ended == [outcome]
