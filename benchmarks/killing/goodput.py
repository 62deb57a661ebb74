"""How much a run trains while a replica is killed every 30 seconds, in the engine.

Each sample takes its time, as on a device that is so slow, so replicas on few cores train at the same time
as on machines of their own. The run trains in peace first; that is what the rest is compared with.
"""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.killing.mortal_run import MortalRun, mortal_run

__all__ = ["Kills", "goodput_row"]

SPREAD = 0.618034


@dataclass(frozen=True, slots=True)
class Kills:
    """Replicas of two stages with batches of `batch_s`, of which one is killed every so many seconds."""

    replicas: int
    batch_s: float
    calm_s: float
    every_s: float
    num: int
    lease_s: float
    samples: int = 16


def goodput_row(asked: Kills) -> dict[str, Any]:
    """One run. A death is known at once, as the launcher sees it."""
    with (
        TemporaryDirectory() as folder,
        mortal_run(
            Path(folder),
            asked.replicas,
            2,
            "1f1b",
            lease_s=asked.lease_s,
            pace_s=asked.batch_s / asked.samples,
            samples=asked.samples,
        ) as run,
    ):
        run.wait_until_whole(asked.replicas)
        began_s, begun = time.time(), len(run.rounds)
        _watch(run, began_s + asked.calm_s)
        calm = _samples(run, begun) / asked.calm_s
        first, first_s = len(run.rounds), time.time()
        nexts, wholes = list[float](), list[float]()
        for number in range(asked.num):
            replica, began = number % asked.replicas, len(run.rounds)
            run.order(replica, number // asked.replicas % 2, (number + 1) * SPREAD % 1, signal.SIGKILL)
            hit = run.hit()
            others = run.wait_for_others(replica, began)
            whole = run.wait_until_whole(asked.replicas, after=run.rounds.index(others))
            nexts.append(others.at_s - hit.at_s)
            wholes.append(whole.at_s - hit.at_s)
            _watch(run, first_s + (number + 1) * asked.every_s)
        killed = _samples(run, first) / (time.time() - first_s)
        run.stop()
        end = run.ended()
    return {
        "replicas": f"{asked.replicas} of 2",
        "schedule": "1f1b",
        "mode": "quorum",
        "measured": "engine",
        "lease_s": asked.lease_s,
        "kills": asked.num,
        "batch_s": asked.replicas * asked.samples / calm,
        "goodput": killed / calm,
        "samples_redone": end.document["sync"]["samples_redone"],
        "median_to_next_batch_s": median(nexts),
        "longest_to_next_batch_s": max(nexts),
        "median_to_full_strength_s": median(wholes),
    }


def _watch(run: MortalRun, until_s: float) -> None:
    """Read the ledger until that time."""
    while time.time() < until_s:
        run.read()
        time.sleep(0.05)


def _samples(run: MortalRun, begin: int) -> int:
    return sum(one.num_samples for one in run.rounds[begin:])
