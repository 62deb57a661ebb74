"""What a run shows people: paths and commands that can be copied whole, one of a thing and many of it."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bireme.bounds import counted
from bireme.cli.train import _how_to_resume
from bireme.cluster.device import EngineCost
from bireme.machines.orders import PHASE
from bireme.report.train_table import print_summary
from bireme.train.summary import _control

STAGE = {"rank": 0, "predicted_busy_share": None, "busy_share": 0.5}
RANK = {"rank": 0, "predicted_peak_bytes": None, "measured_peak_bytes": 4096}


def shown(run: Path, *, resume: str = "", **values: Any) -> str:
    """The summary of a run of one step, on a terminal that is narrow."""
    document: dict[str, Any] = {
        "steps": 1,
        "run_dir": str(run),
        "predicted_batch_s": None,
        "measured_batch_s": 0.5,
        "predicted_bubble": None,
        "bubble": None,
        "stages": [STAGE, STAGE],
        "ranks": [RANK],
        "control": None,
        "train_loss": 2.0,
        "eval_loss": None,
        "tokens_per_s": None,
        "reason": "signal",
        "warnings": [],
        "sample": "",
    }
    text = io.StringIO()
    print_summary(document | values, Console(file=text, width=60), resume=resume)
    return text.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose path is longer than a line and has a space in it."""
    folder = tmp_path / "a long name" / ("of-a-run" * 12)
    (folder / "model").mkdir(parents=True)
    return folder


def test_paths_and_commands_are_not_broken_and_can_be_pasted(run: Path) -> None:
    lines = shown(run).splitlines()
    assert f"The model is in {run}/model." in lines
    assert f"For a page with all results: bireme report '{run}'" in lines
    resume = f"To resume: bireme resume '{run}'"
    assert f"Stopped (signal). {resume}" in shown(run, resume=resume).splitlines()


def test_a_letter_that_a_terminal_acts_on_is_not_printed(run: Path) -> None:
    """A byte model that has learned little wrote escape sequences into the terminal."""
    assert shown(run, sample="def\x1b[2J\n\tvalue\x0e").endswith("def?[2J\n        value?\n")


def test_the_last_recoveries_of_replicas_are_at_the_end(run: Path) -> None:
    times = {"detect_s": 2.1, "transfer_s": 0.8, "catch_up_s": 1.5}
    recoveries = [{"replica": 1, "step": step, **times} for step in range(10, 50, 10)]
    said = [line for line in shown(run, sync={"recoveries": recoveries}).splitlines() if "is back" in line]
    assert [line.split(":")[0] for line in said] == [
        f"Replica 1 is back at step {one}" for one in (20, 30, 40)
    ]


def test_what_replicas_exchanged_is_beside_what_was_predicted(run: Path) -> None:
    shared = {
        "gathered_bytes": 2**21,
        "predicted_gathered_bytes": 2.0**20,
        "summed_bytes": 2**22,
        "predicted_summed_bytes": None,
    }
    lines = [line.split() for line in shown(run, sync={"shared": shared}).splitlines()]
    assert ["weights", "gathered", "1.00", "MiB", "2.00", "MiB", "+100%", "more"] in lines
    assert ["gradients", "summed", "–", "4.00", "MiB"] in lines


def test_a_model_that_was_not_written_is_not_promised(run: Path) -> None:
    (run / "model").rmdir()
    text = shown(run)
    assert "The model is in" not in text
    assert "no model, because checkpoint.at_end is false" in text


def test_the_last_warnings_are_said_again(run: Path) -> None:
    text = shown(run, warnings=[f"[{number}] went wrong" for number in range(9)])
    assert [line for line in text.splitlines() if "went wrong" in line] == [
        f"Warning: [{number}] went wrong" for number in (6, 7, 8)
    ]


def test_one_is_not_many() -> None:
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert counted(3, "micro-batch") == "3 micro-batches"


def test_a_machine_that_was_slower_than_when_it_profiled_is_named(run: Path) -> None:
    """A step was 15 to 35 % over its prediction, and nobody could tell the machine's part from ours."""
    slow = {"profiled_s": 0.8, "measured_s": 1.0, "speed": 0.8}
    text = shown(run, predicted_batch_s=0.4, control=slow)
    assert "The machine ran at 0.80 of the speed that it was profiled at." in text.splitlines()
    assert "a step at that speed" in text
    same = shown(run, predicted_batch_s=0.4, control={"profiled_s": 1.0, "measured_s": 1.01, "speed": 0.99})
    assert "The machine ran" not in same
    assert same.count("rank 0, memory") == 1


def test_a_run_of_several_machines_is_resumed_by_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _how_to_resume(Path("runs/mine")) == "To resume: bireme resume runs/mine"
    monkeypatch.setenv(PHASE, "2")
    assert "bireme coordinate with --set log.name=mine" in _how_to_resume(Path("runs/mine"))


def test_one_rank_that_waited_for_a_core_makes_no_slow_machine() -> None:
    """Two ranks had a core, the third waited four times as long: the speed was reported as 0.5."""
    prepared: Any = SimpleNamespace(profile=SimpleNamespace(engine=EngineCost(control_s=1.0)))
    outcomes: Any = [
        SimpleNamespace(own=SimpleNamespace(control_s=took_s)) for took_s in (1.0, 4.0, 1.25, None)
    ]
    assert _control(prepared, outcomes) == {"profiled_s": 1.0, "measured_s": 1.25, "speed": 0.8}
