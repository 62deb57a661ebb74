"""The steps of `make gpu`: each a process of its own with its own limit, so that none takes another along."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.machine import ROOT, Python, environment

__all__ = ["Outcome", "Step", "run_step", "steps_for"]

ERROR_LINES = 12


@dataclass(frozen=True, slots=True)
class Step:
    """What to run, for so long at most. `read` makes rows from what the process printed."""

    name: str
    title: str
    limit_s: float
    arguments: tuple[str, ...]
    read: Callable[[str], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: rows, and what went wrong if anything did."""

    name: str
    title: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def steps_for(num_gpus: int, *, quick: bool) -> list[Step]:
    """The steps on a machine with so many GPUs, the more telling ones first."""
    work = ("-m", "benchmarks.on_gpu.work")
    more = ("--quick",) if quick else ()
    found = [
        Step("tests", "Tests marked for a GPU", 240.0, ("-m", "pytest", "-q", "-m", "gpu"), _tests),
        Step("card", "A GPT that fills one GPU", 270.0, (*work, "card", *more), _rows),
        Step(
            "capabilities",
            "Every capability, on a GPU and on the CPU",
            300.0,
            (*work, "capabilities", *more),
            _rows,
        ),
        Step("units", "Instructions, predicted and measured", 120.0, (*work, "units", *more), _rows),
        Step("demonstration", "The demonstration", 200.0, _demonstration(num_gpus, quick=quick), _summary),
        Step("loop", "One rank compared with a plain loop", 90.0, (*work, "loop", *more), _rows),
    ]
    if num_gpus > 1:
        found += [
            Step("cards", "A GPT over several GPUs", 200.0, (*work, "cards", *more), _rows),
            Step("peer", "Two GPUs compared with torch's runtime", 120.0, (*work, "peer", *more), _rows),
        ]
    emulated = ("benchmarks/engine.py", "--quick", "--json")
    return [*found, Step("engine", "The engine's benchmark on emulated devices", 120.0, emulated, _document)]


def run_step(step: Step, python: Python, limit_s: float) -> Outcome:
    """Run a step for so long at most, and never longer than its own limit."""
    limit_s = min(limit_s, step.limit_s)
    begin = time.monotonic()
    if limit_s <= 0:
        return Outcome(step.name, step.title, 0.0, error="There was no time left for it.")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            [python.path, *step.arguments],
            stdout=out,
            stderr=told,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        error = ""
        try:
            status = process.wait(limit_s)
            error = f"It ended with status {status}." if status else ""
        except subprocess.TimeoutExpired:
            error = f"It did not end within {limit_s:.0f} s."
        finally:
            _end(process)
        printed, lines = _text(out), _text(told).splitlines()
    seconds = time.monotonic() - begin
    try:
        rows = step.read(printed)
    except (ValueError, KeyError, IndexError) as wrong:
        rows = []
        error = error or f"What it printed cannot be read: {wrong!r}."
    if error:
        error = "\n".join([error, *lines[-ERROR_LINES:]])
    return Outcome(step.name, step.title, seconds, rows, error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no process of the step running."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _demonstration(num_gpus: int, *, quick: bool) -> tuple[str, ...]:
    """`bireme train` as it is; on one GPU two ranks share it, for which messages go through the host."""
    folder = Path(tempfile.gettempdir()) / "bireme-gpu-runs"
    changes = [f"log.folder={folder}", "cluster.device=cuda"]
    changes += ["cluster.backend=gloo", "cluster.workers=2"] if num_gpus == 1 else []
    changes += ["training.steps=60"] if quick else []
    return ("-m", "bireme", "train", "--json", *(word for one in changes for word in ("--set", one)))


def _rows(printed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed.strip().splitlines()[-1])
    return found


def _document(printed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed)["rows"]
    return [{key: value for key, value in row.items() if not isinstance(value, list)} for row in found]


def _summary(printed: str) -> list[dict[str, Any]]:
    """Of a run, each stage with what holds for all."""
    told = json.loads(printed)
    return [
        {
            "stage": place,
            "predicted_peak_bytes": stage["predicted_peak_bytes"],
            "measured_peak_bytes": stage["measured_peak_bytes"],
            "predicted_step_s": told["predicted_batch_s"],
            "measured_step_s": told["measured_batch_s"],
            "train_loss": told["train_loss"],
            "tokens_per_s": told["tokens_per_s"],
        }
        for place, stage in enumerate(told["stages"])
    ]


def _tests(printed: str) -> list[dict[str, Any]]:
    """The last line's counts, and the tests that failed."""
    lines = printed.strip().splitlines()
    rows: list[dict[str, Any]] = [{"outcome": lines[-1].strip("= ")}]
    return rows + [{"outcome": line} for line in lines if line.startswith(("FAILED", "ERROR"))]
