"""What replicas save by sharing: the memory of a process, predicted and measured.

    python benchmarks/shared_weights.py [--quick] [--json]

Two replicas of a model with much weight and few activations train on this machine: each with everything of
its own, with a shared optimizer, and with shared weights and gradients, with the model in one stage and in
parts. A larger one then trains with a shared optimizer and with shared weights in more parts; of that model
less is the process itself. What is measured is the memory of the processes at its peak, as runs say it at
their end; the prediction is the plan's. Seconds of a step say what sharing costs where the wire is memory.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Row, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_most
from benchmarks.prediction import short, trained
from bireme.plan.plan import Plan
from bireme.plan.search.search import forecast_of
from bireme.train.choices import sums_of
from bireme.train.plan_search import plan_request_of
from bireme.train.prepare import PreparedRun, prepare
from bireme.train.run_file import load_run_file

SECONDS, QUICK_SECONDS = 3.0, 1.0
MOST_MEMORY_ERROR = 0.10
MOST_OF_OPTIMIZER = 0.85
"""What a process may hold with weights shared in parts, of what one holds with a shared optimizer."""


@dataclass(frozen=True, slots=True)
class Way:
    """What replicas share, and into how many parts the model is cut."""

    shard: str
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, what it trains on, and the ways that are compared: the second and the last with each other."""

    model: str
    batch_size: int
    length: int
    ways: tuple[Way, ...]


NONE, OPTIMIZER = Way("none"), Way("optimizer")
SMALL = Subject(
    "gpt:layers=8,width=512,heads=8,vocab=257,context=64",
    8,
    64,
    (NONE, OPTIMIZER, Way("weights"), Way("weights", 4)),
)
LARGE = Subject(
    "gpt:layers=16,width=768,heads=12,vocab=257,context=32",
    4,
    32,
    (NONE, OPTIMIZER, Way("weights", 8), Way("weights", 16)),
)
QUICK = replace(SMALL, model="gpt:layers=4,width=256,heads=4,vocab=257,context=64")


def prepared_run(subject: Subject, way: Way, folder: str) -> PreparedRun:
    """A run of two replicas, with nothing to do but its steps."""
    sets = [
        f"model.source={subject.model}",
        f"memory.shard={way.shard}",
        f"log.folder={folder}",
        "cluster.workers=2",
        "cluster.device=cpu",
        "plan.width=2",
        "plan.depth=1",
        "plan.schedule=1f1b",
        f"training.batch_size={subject.batch_size}",
        f"data.length={subject.length}",
        "log.sample_tokens=0",
        "checkpoint.at_end=false",
        "checkpoint.every_steps=0",
    ]
    prepared = prepare(load_run_file(None, sets), lambda _done, _what: None)
    assert prepared.profile is not None, "a plan that was searched for has one"
    plan = in_parts(prepared.plan.plan, len(prepared.profile.units), way)
    request = plan_request_of(prepared.run, sums_of(prepared.run, prepared.graph), prepared.graph)
    forecast = forecast_of(plan, prepared.profile, prepared.machines.cluster, request)
    return replace(prepared, plan=replace(prepared.plan, plan=plan, forecast=forecast))


def in_parts(plan: Plan, num_units: int, way: Way) -> Plan:
    """The plan with its one stage cut into parts, each of as many units, and one sweep a batch."""
    cuts = tuple(part * num_units // way.parts for part in range(1, way.parts))
    shares_weights = way.shard == "weights"
    return replace(
        plan,
        cuts=cuts,
        recompute=(),
        stages_per_rank=way.parts,
        sweep=plan.num_microbatches if way.parts > 1 else 1,
        whole_weights=min(2, way.parts) if shares_weights else 0,
    )


def row_of(subject: Subject, way: Way, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        prepared = prepared_run(subject, way, folder)
        found = trained(short(prepared, seconds, "run"))
    forecast = prepared.plan.forecast
    assert forecast is not None, "it was made above"
    measured = max(rank["measured_peak_bytes"] or 0 for rank in found["ranks"])
    predicted = max(rank["predicted_peak_bytes"] or 0.0 for rank in found["ranks"])
    return {
        "shared": way.shard,
        "parts": way.parts,
        "predicted_mib": predicted / 2**20,
        "measured_mib": measured / 2**20,
        "measured_to_predicted": measured / predicted,
        "predicted_step_s": forecast.batch_s,
        "measured_step_s": found["measured_batch_s"],
        "gathered_mb_a_step": sum(one.predicted_bytes_moved for one in forecast.tiers) / 1e6,
    }


def verdicts_of(rows: Sequence[Row], which: str = "") -> list[Verdict]:
    """The limits; `which` is what the names of those of another model begin with."""
    found = [
        at_most(
            f"{which}{row['shared']} shared, {row['parts']} parts: error of the predicted memory",
            abs(row["measured_to_predicted"] - 1),
            MOST_MEMORY_ERROR,
        )
        for row in rows
    ]
    optimizer, parts = rows[1], rows[-1]
    share = parts["measured_mib"] / optimizer["measured_mib"]
    what = f"{which}memory with weights shared in parts, of a shared optimizer's"
    return [*found, at_most(what, share, MOST_OF_OPTIMIZER)]


def section_of(subject: Subject, seconds: float) -> Section:
    rows = []
    for way in subject.ways:
        log(f"{subject.model}: sharing {way.shard}, {way.parts} parts")
        rows.append(row_of(subject, way, seconds))
    return Section(f"two replicas of {subject.model} on one machine", rows)


def measure(asked: Namespace) -> Findings:
    if asked.quick:
        quick = section_of(QUICK, QUICK_SECONDS)
        return Findings([quick], verdicts_of(quick.rows))
    small, large = section_of(SMALL, SECONDS), section_of(LARGE, SECONDS)
    return Findings([small, large], [*verdicts_of(small.rows), *verdicts_of(large.rows, "larger model: ")])


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="a smaller model, for less time")
