"""How far a phase has come, as a machine reads it in the log of the run."""

import json
from pathlib import Path

from bireme.machines.phases import PhaseProgress
from bireme.train.joined_processes import _LogTail
from bireme.train.run_file import load_run_file
from tests.support.training import settings


def test_lines_of_earlier_phases_that_come_late_are_not_of_this_one(tmp_path: Path) -> None:
    """A machine with a folder of its own has no log when it begins, and copies all lines of the others."""
    path = tmp_path / "run.toml"
    path.write_text(f'format = 1\n[log]\nfolder = "{tmp_path}"\nname = "run"\n')
    log = _LogTail(load_run_file(path, settings(model__source="gpt:layers=1", data__source="x")[1::2]))
    log.begin()
    (tmp_path / "run").mkdir()
    lines = [
        {"kind": "start", "phase": 1, "step": 0, "time_s": 0.0},
        *({"kind": "train", "step": step, "time_s": float(step)} for step in (1, 2, 3)),
    ]
    later = [
        {"kind": "start", "phase": 2, "step": 3, "time_s": 10.0},
        *({"kind": "train", "step": step, "time_s": 10.0 + 2 * step} for step in (4, 5, 6)),
    ]
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert log.progress(2) is None
    with metrics.open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in later)
    assert log.progress(2) == PhaseProgress(2, 3, 6, 2.0)
