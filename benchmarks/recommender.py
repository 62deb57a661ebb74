"""A recommender in two stages and two replicas: what it loses and how many bytes it saves, codec by codec.

    python benchmarks/recommender.py [--quick] [--json] [--steps 400] [--seeds 2]

The model and its made-up clicks are those of `examples/recommender.py`: embedding tables in the first stage,
all pairs of their vectors and a network in the second, two replicas of both, Adagrad. Thresholding was
published for this kind of model (DCT, Gupta et al. 2021): 20 times fewer entries of activations on a
boundary, and 100 times fewer of gradients in sums. The last rows ask for just these shares, the first for
more. `topk` of the example begins after a part with all entries in few bits. `int4` is what longer runs
should take.

AUC is the chance that a clicked sample is ranked above one that was not, on samples that nobody trained on.
Bytes are as they are sent, places, scales and masks included, over all ranks and the whole run. The best AUC
that a model can have is that of the chances which the clicks were drawn by; the title of the table says it.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.recommender import (
    NUM_REPLICAS,
    THRESHOLD,
    TOPK,
    Clicks,
    Trained,
    recommender,
    together,
    train,
)

import bireme
from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least

TOPK_A_QUARTER, FOUR_BITS = "topk:0.25:8", "int4"
PUBLISHED_TOPK, PUBLISHED_THRESHOLD = "topk:0.05:8", "threshold:0.01:50"
WAYS = (
    ("none", "none"),
    (TOPK_A_QUARTER, "none"),
    ("none", THRESHOLD),
    (TOPK_A_QUARTER, THRESHOLD),
    (TOPK, "none"),
    (TOPK, THRESHOLD),
    (FOUR_BITS, "none"),
    (FOUR_BITS, THRESHOLD),
    (PUBLISHED_TOPK, "none"),
    ("none", PUBLISHED_THRESHOLD),
    (PUBLISHED_TOPK, PUBLISHED_THRESHOLD),
)
"""The codecs of the boundary and of the sums."""
QUICK_STEPS, QUICK_WAYS = 20, (WAYS[0], (TOPK, THRESHOLD))
MOST_LOST_AUC = 0.01


def measure(asked: Namespace) -> Findings:
    steps = QUICK_STEPS if asked.quick else asked.steps
    seeds, ways = (range(1), QUICK_WAYS) if asked.quick else (range(asked.seeds), WAYS)
    graph = recommender()
    rows = []
    for way in ways:
        log(f"boundary {way[0]}, sums {way[1]}")
        found = [
            together(
                bireme.launch(
                    train, 2 * NUM_REPLICAS, graph, *way, steps, seed, threads_per_process=1, timeout_s=300.0
                )
            )
            for seed in seeds
        ]
        rows.append(_row(found))
    for row in rows:
        row["auc_over_dense"] = row["auc"] - rows[0]["auc"]
    best = fmean(Clicks(seed).best_auc() for seed in seeds)
    title = f"{steps} steps, {len(seeds)} seeds, best AUC {best:.4f}"
    return Findings([Section(title, rows)], _verdicts(rows))


def _row(found: list[Trained]) -> dict[str, Any]:
    return {
        "boundary": found[0].boundary,
        "sums": found[0].sums,
        "auc": fmean(one.auc for one in found),
        "boundary_bytes": round(fmean(one.boundary_bytes for one in found)),
        "boundary_times_fewer": fmean(one.raw_boundary_bytes / one.boundary_bytes for one in found),
        "sum_bytes": round(fmean(one.sum_bytes for one in found)),
        "sum_times_fewer": fmean(one.raw_sum_bytes / one.sum_bytes for one in found),
    }


def _verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    found = [
        at_least(
            f"AUC with {row['boundary']} on the boundary and {row['sums']} in sums, less that of dense",
            row["auc_over_dense"],
            -MOST_LOST_AUC,
        )
        for row in rows[1:]
    ]
    of_boundary = {row["boundary"]: row["boundary_times_fewer"] for row in rows}
    of_sums = {row["sums"]: row["sum_times_fewer"] for row in rows}
    limits = {
        TOPK_A_QUARTER: 9.0,
        FOUR_BITS: 7.0,
        THRESHOLD: 30.0,
        TOPK: 20.0,
        PUBLISHED_TOPK: 20.0,
        PUBLISHED_THRESHOLD: 60.0,
    }
    for codec, times in (of_boundary | of_sums).items():
        if codec in limits:
            found.append(at_least(f"times fewer bytes of {codec}", times, limits[codec]))
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each way")


if __name__ == "__main__":
    benchmark(__doc__, measure, quick=f"{QUICK_STEPS} steps, dense and both codecs", options=options)
