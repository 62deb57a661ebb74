"""Resuming where replicas that died have left samples: they are known, and not forgotten."""

import json
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.sync.coordinator.messages import SamplePlaces
from bireme.train.folder import RunFolder
from bireme.train.resume_checks import check_none_left, left_at
from bireme.train.run_file import RunFile

BATCH = 8


def run_folder(path: Path, *ends: tuple[int, list[list[int]]]) -> RunFolder:
    """With a ledger that has half a line at its end, as a crash leaves it."""
    lines = [
        json.dumps({"kind": "round", "batch": batch, "epoch": 1, "fresh": fresh, "open": left})
        for batch, (fresh, left) in enumerate(ends)
    ]
    (path / "ledger.jsonl").write_text("\n".join([*lines, '{"kind": "rou']))
    return RunFolder(path)


def test_the_ledger_says_what_is_left_before_a_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, (16, [[8, 16]]), (24, [[12, 16], [20, 24]]))

    assert left_at(folder.ledger, 1, BATCH) == (16, (SamplePlaces(8, 16),))
    assert left_at(folder.ledger, 2, BATCH) == (24, (SamplePlaces(12, 16), SamplePlaces(20, 24)))
    assert left_at(folder.ledger, 9, BATCH) == (72, ())


def test_a_mode_that_would_forget_samples_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, (16, [[8, 16]]), (24, [[12, 16], [20, 24]]))
    run = RunFile()
    run = run.model_copy(update={"training": run.training.model_copy(update={"batch_size": BATCH})})
    check_none_left(run, folder, 1)  # what was dealt ahead comes next anyway
    with pytest.raises(BiremeError, match="4 samples before it"):
        check_none_left(run, folder, 2)
    sync = run.sync.model_copy(update={"mode": "quorum"})
    check_none_left(run.model_copy(update={"sync": sync}), folder, 2)
