"""Training compared with its prediction: the seconds of a step and the memory of each process.

    python benchmarks/prediction.py [--quick] [--json]

Three models are planned and trained as `bireme train` does it, with two and with three workers, on two cores:
the demonstration, a narrow model of many units, and a wide one of few. Each is profiled once, and trained
five times for a few seconds. A step is what a run says at its end, in the median; the prediction is divided
by the speed that the control had in that run, for a shared machine is not always as fast as when it profiled.
Memory is the most that was resident of each process.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Spread, Verdict, at_most
from bireme.train.folder import RunFolder
from bireme.train.launching import start
from bireme.train.prepare import PreparedRun, prepare, write_prepared
from bireme.train.run_file import RunFile

NUM_CORES = 2
MODELS = {
    "demonstration": RunFile().model.source,
    "narrow": "gpt:layers=6,width=64,heads=2,vocab=257,context=128",
    "wide": "gpt:layers=2,width=320,heads=5,vocab=257,context=128",
}
WORKERS = (2, 3)
NUM_RUNS, QUICK_RUNS = 5, 1
SECONDS, QUICK_SECONDS = 4.0, 2.0
"""Of the steps of a run, as predicted."""
LEAST_STEPS, MOST_STEPS = 12, 200
MOST_ERROR, MOST_MEMORY_ERROR = 0.08, 0.10


def stolen_s() -> tuple[float, float]:
    """Of all cores so far: the time that the machine gave to others, and all time."""
    numbers = [
        float(one) for one in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]
    ]
    return numbers[7], sum(numbers)


def prepared_run(model: str, workers: int, folder: str) -> PreparedRun:
    """A run as people ask for it, with nothing to do but its steps."""
    run = RunFile()
    changed = run.model_copy(
        update={
            "model": run.model.model_copy(update={"source": model}),
            "cluster": run.cluster.model_copy(update={"workers": workers, "device": "cpu"}),
            "log": run.log.model_copy(update={"folder": folder, "sample_tokens": 0}),
            "checkpoint": run.checkpoint.model_copy(update={"at_end": False, "every_steps": 0}),
        }
    )
    return prepare(changed, lambda _done, _what: None)


def short(prepared: PreparedRun, seconds: float, name: str) -> PreparedRun:
    """The same plan for a few seconds, under its own schedule from the first step on."""
    run, forecast = prepared.run, prepared.plan.forecast
    assert forecast is not None, "a plan that was searched for has one"
    steps = min(max(LEAST_STEPS, round(seconds / forecast.batch_s)), MOST_STEPS)
    training = {"steps": steps, "evaluate_every": 0, "warmup_fraction": 0.0}
    plan = {"delay_warmup_fraction": 0.0, "delay_warmup_steps": None}
    changed = run.model_copy(
        update={
            "training": run.training.model_copy(update=training),
            "plan": run.plan.model_copy(update=plan),
            "log": run.log.model_copy(update={"name": name}),
        }
    )
    return replace(prepared, run=changed)


def trained(prepared: PreparedRun) -> dict[str, Any]:
    folder = RunFolder.new(prepared.run, datetime.now())
    write_prepared(prepared, folder)
    return start(prepared, folder, None, is_shown=False).summary


def row_of(name: str, workers: int, num_runs: int, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        prepared = prepared_run(MODELS[name], workers, folder)
        runs, stolen = [], []
        for number in range(num_runs):
            before = stolen_s()
            runs.append(trained(short(prepared, seconds, f"run-{number}")))
            after = stolen_s()
            stolen.append((after[0] - before[0]) / (after[1] - before[1]))
    predicted_s = runs[0]["predicted_batch_s"] or 0.0
    speeds = [1.0 if one["control"] is None else one["control"]["speed"] for one in runs]
    measured = [one["measured_batch_s"] or 0.0 for one in runs]
    peaks = [
        (rank["measured_peak_bytes"] or 0) / (rank["predicted_peak_bytes"] or 1)
        for one in runs
        for rank in one["ranks"]
    ]
    return {
        "model": name,
        "workers": workers,
        "schedule": runs[0]["schedule"],
        "micro_batches": prepared.plan.plan.num_microbatches,
        "predicted_s": predicted_s,
        "measured_s": Spread.of(measured),
        "speed": Spread.of(speeds),
        "measured_to_predicted": Spread.of(
            [one_s * speed / predicted_s for one_s, speed in zip(measured, speeds, strict=True)]
        ),
        "predicted_peak_bytes": max(rank["predicted_peak_bytes"] or 0.0 for rank in runs[0]["ranks"]),
        "peak_to_predicted": Spread.of(peaks),
        "stolen_share": median(stolen),
    }


def verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    for row in rows:
        where = f"{row['model']}, {row['workers']} workers"
        off = abs(row["measured_to_predicted"].median - 1)
        yield at_most(f"{where}: a step, error of the prediction at the machine's speed", off, MOST_ERROR)
        peaks = row["peak_to_predicted"]
        worst = max(abs(peaks.least - 1), abs(peaks.greatest - 1))
        yield at_most(f"{where}: peak memory, error of the worst process", worst, MOST_MEMORY_ERROR)


def measure(asked: Namespace) -> Findings:
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    os.sched_setaffinity(0, cores)
    rows = []
    for name in ("demonstration",) if asked.quick else MODELS:
        for workers in WORKERS:
            log(f"{name}, {workers} workers")
            num_runs, seconds = (QUICK_RUNS, QUICK_SECONDS) if asked.quick else (NUM_RUNS, SECONDS)
            rows.append(row_of(name, workers, num_runs, seconds))
    title = f"A step and the memory of a process, on {len(cores)} cores"
    return Findings([Section(title, rows)], list(verdicts(rows)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="the demonstration alone, one short run each")
