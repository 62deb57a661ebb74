"""DiLoCo between two sites of two stages each: bytes and loss of each codec of the drift, against dense.

    python benchmarks/diloco.py [--quick] [--json] [--steps 300] [--seeds 3] [--every 10]

Each row is `bireme train` with four processes and real sockets: a GPT with a tied head on the sources of
Python's standard library, AdamW, 16 samples a step. `loss` is on text that was held out, of the exported
model. Bytes are those of all ranks for agreement between the sites, as they are sent; `times_fewer` compares
them with the same averages without a codec. The peer is the same model with gradients summed in every batch.
The same seeds make the same weights and the same order of samples in all rows.
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most
from bireme.errors import BiremeError

EVERY_BATCH = "allreduce"
CODECS = ("none", "int8", "int4", "threshold:0.05:10")
LIMIT = "int4"
QUICK_STEPS = 40
MODEL = "gpt:layers=4,width=96,heads=4,vocab=257,context=128,tied=true"


def measure(asked: Namespace) -> Findings:
    steps = QUICK_STEPS if asked.quick else asked.steps
    seeds = range(1 if asked.quick else asked.seeds)
    names = (EVERY_BATCH, *asked.codecs)
    of = {name: [_trained(name, steps, asked.every, seed) for seed in seeds] for name in names}
    rows = [_row(name, of[name], of["none"]) for name in names]
    title = f"two sites of two stages, a round every {asked.every} batches, {steps} steps, {len(seeds)} seeds"
    has_verdicts = not asked.quick and LIMIT in names
    return Findings([Section(title, rows)], _verdicts(rows) if has_verdicts else [])


def _row(name: str, own: list[dict[str, Any]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [one["eval_loss"] for one in own]
    over = [one["eval_loss"] / other["eval_loss"] for one, other in zip(own, dense, strict=True)]
    sent = fmean(one["sync"]["sent_bytes"] for one in own)
    return {
        "codec": name,
        "loss": fmean(losses),
        "least_loss": min(losses),
        "greatest_loss": max(losses),
        "loss_over_dense": fmean(over),
        "sent_bytes": sent,
        "times_fewer": fmean(one["sync"]["raw_bytes"] for one in own) / sent,
    }


def _verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    of = {row["codec"]: row for row in rows}
    return [
        at_most(f"loss of {LIMIT} over dense", of[LIMIT]["loss_over_dense"], 1.01),
        at_least(f"times fewer bytes of {LIMIT}", of[LIMIT]["times_fewer"], 3.0),
    ]


def _trained(name: str, steps: int, every: int, seed: int) -> dict[str, Any]:
    """The document of a run."""
    sets = {
        "model.source": MODEL,
        "model.seed": seed,
        "data.seed": seed,
        "training.steps": steps,
        "training.batch_size": 16,
        "training.learning_rate": 2e-3,
        "plan.schedule": "1f1b",
        "plan.depth": 2,
        "plan.width": 2,
        "plan.microbatches": 2,
        "cluster.workers": 4,
        "checkpoint.every_steps": 0,
        "export.at_end": "false",
    }
    if name == EVERY_BATCH:
        sets["sync.mode"] = "allreduce"
    else:
        sets |= {"sync.mode": "diloco", "sync.diloco_every": every, "sync.codec": name}
    log(f"{name}, seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--set={key}={value}" for key, value in sets.items()]
        done = subprocess.run(
            [sys.executable, "-m", "bireme", "train", "--json", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise BiremeError(f"The run with {name} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="batches of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each codec")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="of drifts; none is among them")
    parser.add_argument("--every", type=int, default=10, help="batches between two rounds")


if __name__ == "__main__":
    benchmark(__doc__, measure, quick=f"{QUICK_STEPS} steps, one seed", options=options)
