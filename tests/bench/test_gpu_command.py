"""`make gpu` where there is no GPU, and what it makes of steps that fail, hang or talk nonsense."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu import machine
from benchmarks.on_gpu.document import BEGINNING, markdown, verdicts
from benchmarks.on_gpu.machine import ROOT, NotReady, Python, python_for
from benchmarks.on_gpu.steps import Outcome, Step, _rows, run_step, steps_for
from bireme.devices import num_accelerators
from tests.support.patience import patience_s

HERE = Python(sys.executable, "2.13.0", 1, ())
ROWS = '[{"rank": 0, "predicted_peak_bytes": 100, "measured_peak_bytes": 130}]'


def step(code: str, limit_s: float = 60.0) -> Step:
    return Step("card", "A step", limit_s, ("-c", code), _rows)


@pytest.mark.slow
@pytest.mark.skipif(num_accelerators() > 0, reason="there is a GPU, and make gpu would measure it")
def test_without_a_gpu_it_says_so_in_a_sentence_and_touches_nothing() -> None:
    script = ROOT / "benchmarks" / "gpu.py"
    told = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=patience_s()
    )
    assert told.returncode == 2
    assert not told.stdout
    assert told.stderr.count("\n") == 1
    assert told.stderr.startswith("There is no GPU here")
    assert not machine.VENV.exists()


def test_what_fails_is_written_down_and_what_worked_stays() -> None:
    outcomes = [
        run_step(step(f"print('a warning'); print('{ROWS}')"), HERE, 60.0),
        run_step(step("raise SystemExit('no kernel image is available')"), HERE, 60.0),
        run_step(step("print('nothing that rows could be read from')"), HERE, 60.0),
        run_step(step("import time; time.sleep(100)", limit_s=0.5), HERE, 60.0),
        run_step(step(""), HERE, 0.0),
    ]
    written = markdown({"GPUs": "one"}, outcomes)
    assert [bool(one.error) for one in outcomes] == [False, True, True, True, True]
    for words in ("no kernel image", "cannot be read", "did not end within", "no time left", "130"):
        assert words in written
    judged = verdicts(outcomes)
    assert [one["ok"] for one in judged] == [True, False, False, False, False, False]
    assert "peak memory" in judged[1]["name"]


def test_the_steps_fit_into_the_time_there_is() -> None:
    """The last ones are those to do without."""
    names = [one.name for one in steps_for(2, quick=False)]
    assert names[:2] == ["tests", "card"]
    assert {"cards", "peer"} <= set(names)
    assert not {"cards", "peer"} & {one.name for one in steps_for(1, quick=False)}
    assert sum(one.limit_s for one in steps_for(1, quick=False)) < 24 * 60


@pytest.mark.parametrize("own", ["2.11.0+cu130", "2.4.0+cu121", None])
def test_a_torch_that_sees_the_gpu_is_kept(
    own: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(machine, "VENV", tmp_path)
    monkeypatch.setattr(machine, "_run", lambda command, _limit_s: commands.append(command))
    monkeypatch.setattr(
        machine,
        "look",
        lambda path: Python(path, own, int(own is not None), ("pydantic",) if path == sys.executable else ()),
    )
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    if own is None or own.startswith("2.4"):
        with pytest.raises(NotReady, match="make gpu TORCH_INDEX=URL"):
            python_for(10.0)
    else:
        assert python_for(10.0).path == str(tmp_path / "bin" / "python")
    pins = (tmp_path / "constraints.txt").read_text()
    keeps = own == "2.11.0+cu130"
    assert ("torch==2.11.0+cu130" in pins) == keeps
    assert ("--system-site-packages" in commands[0]) == keeps


def test_the_page_says_what_it_is_before_anybody_has_run_it() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text().startswith(BEGINNING)
    assert "no figures" in markdown(None, [Outcome("a", "b", 0.0)])
