"""Whole runs of `bireme train` that page, compared with their predictions: seconds a step, and bytes.

A run is planned within a device memory that it does not fit, from a profile that is measured here, and
trained several times for a few seconds. As in `benchmarks/prediction.py`, a step is what a run says at its
end, and the prediction is divided by the speed that the control had in that run.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.common.verdicts import Spread, Verdict, at_most, exactly
from benchmarks.prediction import short, trained
from bireme.errors import BiremeError
from bireme.train.prepare import PreparedRun, prepare
from bireme.train.run_file import load_run_file

__all__ = ["RUNS", "Run", "row_of_run", "verdicts_of_runs"]

MOST_ERROR = 0.05
"""Of the seconds of a step."""
NUM_RUNS, QUICK_RUNS = 5, 1
SECONDS, QUICK_SECONDS = 6.0, 2.0
"""Of the steps of a run, as predicted."""


@dataclass(frozen=True, slots=True)
class Run:
    """A model, its workers, and what each may use of its device; what does not fit is paged to the host, or
    to a disk alone.
    """

    name: str
    model: str
    workers: int
    device: str
    to_disk: bool = False

    def prepared(self, folder: str) -> PreparedRun:
        """A run as people ask for it, with nothing to do but its steps."""
        sets = [
            f"model.source={self.model}",
            f"cluster.workers={self.workers}",
            "cluster.device=cpu",
            f"memory.device={self.device}",
            f"log.folder={folder}",
            "log.sample_tokens=0",
            "checkpoint.at_end=false",
            "checkpoint.every_steps=0",
        ]
        if self.to_disk:
            sets += [f"memory.disk={folder}", "memory.host=0"]
        found = prepare(load_run_file(None, sets), lambda _done, _what: None)
        if found.plan.plan.paging is None:
            raise BiremeError(
                f"{self.name} fits {self.device} without offloading. Give it less device memory."
            )
        return found


RUNS = (
    Run("demonstration", "gpt:layers=4,width=128,heads=4,vocab=257,context=128", 2, "8MB"),
    Run("narrow", "gpt:layers=6,width=64,heads=2,vocab=257,context=128", 2, "3MB"),
    Run("wide, on a disk", "gpt:layers=2,width=320,heads=5,vocab=257,context=128", 1, "30MB", to_disk=True),
)


def row_of_run(run: Run, *, is_quick: bool) -> dict[str, Any]:
    """What was predicted and measured of a run."""
    num_runs, seconds = (QUICK_RUNS, QUICK_SECONDS) if is_quick else (NUM_RUNS, SECONDS)
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        prepared = run.prepared(folder)
        found = [trained(short(prepared, seconds, f"run-{number}")) for number in range(num_runs)]
    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    assert forecast is not None, "a plan that was searched for has one"
    measured = [one["measured_batch_s"] or 0.0 for one in found]
    speeds = [1.0 if one["control"] is None else one["control"]["speed"] for one in found]
    return {
        "run": run.name,
        "workers": run.workers,
        "device_memory": run.device,
        "schedule": plan.schedule,
        "parts": plan.stages_per_rank or 1,
        "sweep": plan.sweep,
        "recomputed": len(plan.recompute),
        "planning_s": prepared.planning_s or 0.0,
        "predicted_s": forecast.batch_s,
        "measured_s": Spread.of(measured),
        "speed": Spread.of(speeds),
        "measured_to_predicted": Spread.of(
            [one * speed / forecast.batch_s for one, speed in zip(measured, speeds, strict=True)]
        ),
        "predicted_mb_a_step": sum(tier.predicted_bytes_moved for tier in forecast.tiers) / 1e6,
        "program_mb_a_step": _moved(found, "predicted_bytes_moved"),
        "moved_mb_a_step": _moved(found, "bytes_moved"),
        "peak_to_budget": max(
            tier["peak_bytes"] / tier["budget_bytes"]
            for one in found
            for tier in one["tiers"]
            if tier["tier"] == "device" and tier["budget_bytes"]
        ),
    }


def _moved(found: Sequence[dict[str, Any]], what: str) -> float:
    """Megabytes a step that went into all tiers of all ranks, in the mean over the runs."""
    moved = sum(tier[what] for one in found for tier in one["tiers"])
    return float(moved / sum(one["steps"] for one in found) / 1e6)


def verdicts_of_runs(rows: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """The limits of whole runs."""
    for row in rows:
        where = f"bireme train, {row['run']}"
        off = abs(row["measured_to_predicted"].median - 1)
        yield at_most(f"{where}: a step, error of the prediction at the machine's speed", off, MOST_ERROR)
        beyond = row["moved_mb_a_step"] - row["program_mb_a_step"]
        yield exactly(f"{where}: bytes moved but for the program's", beyond, 0.0)
        yield at_most(f"{where}: device memory over its budget", row["peak_to_budget"], 1.0)
