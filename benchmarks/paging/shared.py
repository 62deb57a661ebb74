"""Replicas that share weights and offload what each of them owns, as `bireme train` plans and runs them.

A GPT trains on two replicas of one stage. The planner cuts the stage into parts within the budgets of device,
host and disk. The same plan with room for everything then trains on the same samples. Losses are compared to
the last bit, bytes with those of the program, and the peak of each tier with its budget.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.common.verdicts import Verdict, at_most, exactly
from bireme.errors import BiremeError
from bireme.plan.search.search import forecast_of
from bireme.report.page.metrics import read_metrics
from bireme.train.choices import sums_of
from bireme.train.folder import RunFolder
from bireme.train.launching import start
from bireme.train.plan_search import plan_request_of
from bireme.train.prepare import PreparedRun, prepare, write_prepared
from bireme.train.run_file import load_run_file

__all__ = ["QUICK_SUBJECT", "SUBJECT", "Subject", "row_of_shared", "verdicts_of_shared"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the budgets of each of its two replicas, in bytes."""

    model: str
    length: int
    device_bytes: int
    host_bytes: int
    steps: int

    def prepared(self, folder: str) -> PreparedRun:
        """Its run within the budgets, with nothing to do but its steps."""
        sets = [
            f"model.source={self.model}",
            'model.dtype="float32"',
            "memory.shard=weights",
            f"memory.device={self.device_bytes}",
            f"memory.host={self.host_bytes}",
            f"memory.disk={folder}",
            "cluster.workers=2",
            "cluster.device=cpu",
            "plan.width=2",
            "plan.depth=1",
            "plan.schedule=1f1b",
            "training.batch_size=4",
            f"training.steps={self.steps}",
            "training.evaluate_every=0",
            f"data.length={self.length}",
            f"log.folder={folder}",
            "log.every_steps=1",
            "log.sample_tokens=0",
            "checkpoint.at_end=false",
            "checkpoint.every_steps=0",
        ]
        prepared = prepare(load_run_file(None, sets), lambda _done, _what: None)
        if prepared.plan.plan.paging is None:
            raise BiremeError(
                f"{self.model} fits {self.device_bytes} bytes without offloading. Give it less."
            )
        return prepared


SUBJECT = Subject(
    "gpt:layers=16,width=1024,heads=8,vocab=257,context=64,tied=false", 64, 300_000_000, 400_000_000, 5
)
QUICK_SUBJECT = Subject(
    "gpt:layers=16,width=320,heads=5,vocab=257,context=64,tied=false", 64, 30_000_000, 40_000_000, 5
)
"""A tenth of the state and of the budgets."""
WIRES = ("gathered", "summed")


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that is over, and the loss of each of its steps."""

    summary: dict[str, Any]
    losses: tuple[float, ...]


def ran(prepared: PreparedRun) -> Ran:
    folder = RunFolder.new(prepared.run, datetime.now())
    write_prepared(prepared, folder)
    summary = start(prepared, folder, None, is_shown=False).summary
    return Ran(summary, tuple(read_metrics(folder.metrics).training.loss))


def with_room(prepared: PreparedRun) -> PreparedRun:
    """The same plan with all of its memory on the device."""
    assert prepared.profile is not None, "a plan that was searched for has one"
    plan = replace(prepared.plan.plan, paging=None)
    memory = prepared.run.memory.model_copy(update={"device": None, "host": "auto", "disk": None})
    run = prepared.run.model_copy(update={"memory": memory})
    request = plan_request_of(run, sums_of(run, prepared.graph), prepared.graph)
    forecast = forecast_of(plan, prepared.profile, prepared.machines.cluster, request)
    return replace(prepared, run=run, plan=replace(prepared.plan, plan=plan, forecast=forecast))


def row_of_shared(subject: Subject) -> dict[str, Any]:
    """What the planner chose, and both runs."""
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        prepared = subject.prepared(folder)
        offloaded = ran(prepared)
        resident = ran(with_room(prepared))
    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    assert forecast is not None, "a plan that was searched for has one"
    summary, tiers = offloaded.summary, offloaded.summary["tiers"]
    shared = summary["sync"]["shared"]
    row: dict[str, Any] = {
        "model": subject.model,
        "parts": plan.stages_per_rank or 1,
        "whole": plan.whole_weights,
        "sweep": plan.sweep,
        "micro_batches": plan.num_microbatches,
        "recomputed": len(plan.recompute),
        "steps": summary["steps"],
        "predicted_s": forecast.batch_s,
        "step_s": summary["measured_batch_s"],
        "resident_run_s": resident.summary["measured_batch_s"],
        "equal_losses": sum(
            one == other for one, other in zip(offloaded.losses, resident.losses, strict=True)
        ),
        "last_loss": offloaded.losses[-1],
    }
    for tier in ("device", "host", "disk"):
        own = [one for one in tiers if one["tier"] == tier]
        budgets = [one["peak_bytes"] / one["budget_bytes"] for one in own if one["budget_bytes"]]
        row[f"{tier}_peak_to_budget"] = max(budgets, default=0.0)
        row[f"{tier}_mb_a_step"] = sum(one["bytes_moved"] for one in own) / summary["steps"] / 1e6
        row[f"{tier}_bytes_beyond_program"] = sum(
            abs(one["bytes_moved"] - one["predicted_bytes_moved"]) for one in own
        )
    for wire in WIRES:
        sent, predicted = shared[f"{wire}_bytes"], shared[f"predicted_{wire}_bytes"]
        row[f"{wire}_mb_a_step"] = sent / summary["steps"] / 1e6
        row[f"{wire}_to_predicted"] = sent / predicted
    return row


def verdicts_of_shared(row: dict[str, Any]) -> Iterator[Verdict]:
    """The limits."""
    where = "shared weights on three tiers"
    yield exactly(f"{where}: losses as in the resident run", row["equal_losses"], row["steps"])
    for tier in ("device", "host", "disk"):
        yield at_most(f"{where}: {tier} memory over its budget", row[f"{tier}_peak_to_budget"], 1.0)
        name = f"{where}: bytes into the {tier} but for the program's"
        yield exactly(name, float(row[f"{tier}_bytes_beyond_program"]), 0.0)
    for wire in WIRES:
        off = abs(row[f"{wire}_to_predicted"] - 1)
        yield at_most(f"{where}: bytes {wire}, error of the prediction", off, MOST_ERROR)


MOST_ERROR = 0.01
