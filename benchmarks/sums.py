"""Sums of gradients over two replicas on a slow link: seconds, bytes and loss of each codec, and of torch's.

    python benchmarks/sums.py [--quick] [--json] [--mbit 100] [--steps 300] [--seeds 1]

Two processes train a small GPT on the sources of Python's standard library, 16 samples a step, AdamW. They
talk through a network namespace whose loopback device is shaped to the rate of the link, so seconds are those
of real bytes; this needs Linux, root, and the programs unshare, ip and tc. The peers are torch's own
DistributedDataParallel, as it is and with its PowerSGD hook at the rank of ours (warm start and error
feedback, as is its default). Both begin after equally many steps with whole gradients, which count neither
for seconds nor for bytes.

Bytes are those that the network device has sent, headers and all, of both replicas together; `times_fewer`
compares what the engine's sums sent with what they would have sent as they are. `loss` is on text that was
held out. One seed tells differences of a percent from noise no better than a coin.
"""

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most
from benchmarks.sum_codecs.contender import TORCH_DENSE, TORCH_POWER_SGD
from bireme.errors import BiremeError

ROOT = Path(__file__).resolve().parent.parent
RANK = 4
LOWRANK, POWER_SGD = f"lowrank:{RANK}", f"{TORCH_POWER_SGD}:{RANK}"
THRESHOLD = "threshold:0.01:50"
CODECS = ("none", "int8", "int4", "int2", THRESHOLD, LOWRANK, TORCH_DENSE, POWER_SGD)
QUICK_STEPS = 20


def measure(asked: Namespace) -> Findings:
    steps = QUICK_STEPS if asked.quick else asked.steps
    rows = _run(asked.mbit, range(asked.seeds), steps)
    of = {codec: [row for row in rows if row["codec"] == codec] for codec in CODECS}
    means = [_mean(of[codec], of["none"]) for codec in CODECS]
    return Findings(
        [Section(f"two replicas, {asked.mbit:g} Mbit/s each way, {steps} steps", means)], _verdicts(means)
    )


def _mean(rows: list[dict[str, Any]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds, and what it is of the dense one's."""
    times = [row["times_fewer"] for row in rows if row["times_fewer"] is not None]
    return {
        "codec": rows[0]["codec"],
        "steps": rows[0]["steps"],
        "loss": fmean(row["loss"] for row in rows),
        "loss_over_dense": fmean(row["loss"] for row in rows) / fmean(row["loss"] for row in dense),
        "step_s": fmean(row["step_s"] for row in rows),
        "seconds_over_dense": fmean(row["step_s"] for row in rows) / fmean(row["step_s"] for row in dense),
        "processor_s": fmean(row["processor_s"] for row in rows),
        "network_bytes_per_step": fmean(row["network_bytes"] for row in rows),
        "times_fewer": fmean(times) if times else None,
    }


def _verdicts(means: list[dict[str, Any]]) -> list[Verdict]:
    of = {row["codec"]: row for row in means}
    ours, theirs = of[LOWRANK], of[POWER_SGD]
    num_bytes = "network_bytes_per_step"
    return [
        at_most(f"loss of {LOWRANK} over that of torch's hook", ours["loss"] / theirs["loss"], 1.0),
        at_most(f"bytes of {LOWRANK} over those of torch's hook", ours[num_bytes] / theirs[num_bytes], 1.0),
        at_most("loss of int8 over dense", of["int8"]["loss_over_dense"], 1.005),
        at_most("loss of int4 over dense", of["int4"]["loss_over_dense"], 1.01),
        at_least("times fewer bytes of int8", of["int8"]["times_fewer"], 3.5),
        at_least("times fewer bytes of int4", of["int4"]["times_fewer"], 6.5),
        at_least(f"times fewer bytes of {THRESHOLD}", of[THRESHOLD]["times_fewer"], 40.0),
        *(
            at_most(f"seconds of {codec} over dense", of[codec]["seconds_over_dense"], 1.0)
            for codec in ("int8", "int4", THRESHOLD, LOWRANK)
        ),
    ]


def _run(mbit: float, seeds: range, steps: int) -> list[dict[str, Any]]:
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid():
        raise BiremeError(
            "This benchmark shapes a network of its own, which needs Linux, root, and the programs unshare, "
            f"ip and tc. Here {'is no ' + ', '.join(missing) if missing else 'you are not root'}."
        )
    log("each contender trains in turn")
    words = [f"{mbit:g}", ",".join(map(str, seeds)), str(steps), *CODECS]
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "benchmarks.sum_codecs.inside", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode:
        raise BiremeError("A contender has failed; what it said is above.")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, list)
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the link, each way (Mbit/s)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each contender")


if __name__ == "__main__":
    benchmark(__doc__, measure, quick=f"{QUICK_STEPS} steps", options=options)
