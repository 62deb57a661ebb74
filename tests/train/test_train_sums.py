"""Runs whose replicas sum through a codec: what is sent, what is said, and how they resume."""

import json
from pathlib import Path

import pytest

from tests.support.command import bireme
from tests.support.training import CUTS, losses, settings, write_run

pytestmark = pytest.mark.slow


def write_replicas(folder: Path) -> Path:
    """A run of two replicas of one stage."""
    path = write_run(folder, "1f1b", 1)
    plan = folder / "plan-1f1b-1.json"
    table = {"cuts": CUTS[1], "num_microbatches": 2, "schedule": "1f1b", "width": 2}
    plan.write_text(json.dumps({"format": 1, "plan": table}))
    path.write_text(path.read_text().replace("workers = 1", "workers = 2"))
    return path


def test_a_run_says_what_its_sums_sent_and_resumes_with_another_codec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_replicas(tmp_path)
    coded = settings(sync__codec="threshold:0.02:5", training__steps=4)
    first = bireme(capsys, "train", str(path), "--json", *coded)
    assert first.status == 0, first.err
    sync = first.document["sync"]
    assert 0 < 5 * sync["sent_bytes"] < sync["raw_bytes"]

    run = tmp_path / "runs" / "run"
    more = settings(
        sync__codec="int8",
        training__steps=6,
        training__schedule_steps=4,
        training__gradient="principal:2",
    )
    second = bireme(capsys, "resume", str(run), "--json", *more)
    assert second.status == 0, second.err
    assert "sync.codec = threshold:0.02:5 before and go through int8 now" in second.err
    assert "is dropped" in second.err
    assert "training.gradient = whole before, and with principal:2 now" in second.err
    kept = second.document["gradient"]
    assert 0 < kept["kept_bytes"] < kept["whole_bytes"]
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
