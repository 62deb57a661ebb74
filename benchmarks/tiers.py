"""Paging over device, host and disk: how good the plans are, and what fits where.

    python benchmarks/tiers.py [--quick] [--json]

Plans beside the best there is: on small traces every plan is tried, and the copies of ours are at most 5 %
more than the fewest in all, and in none more than those of the least recently used. On the accesses of
programs, where nobody can try all plans, ours is beside the least recently used, PatrickStar's rule with a
trace of the same batches, and fixed places. Copies in both directions are counted, chunk by chunk.

Then models on machines by their makers' numbers, as `benchmarks/paging/machines.py` says: whether they fit,
seconds a step, and what limits it. Nothing of that is measured. PatrickStar's figures for 8 × V100 are the
sizes that it names as running; we know of no samples per second that it has published for that machine.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.paging.exact import fewest_copies
from benchmarks.paging.machines import CASES, row_of
from benchmarks.paging.rivals import fixed_places, least_recently_used, patrickstar
from benchmarks.paging.traces import program_trace, small_trace
from bireme.bench.document import Verdict, at_least, at_most, exactly
from bireme.schedule.eviction import decide, gaps_of, num_copies, settle

MOST_OVER_FEWEST = 1.05
SMALL, QUICK_SMALL = 400, 60
NUM_CHUNKS, NUM_STEPS = 6, 14
PROGRAMS = (("1f1b", 1), ("1f1b", 4), ("gpipe", 1), ("2bw", 1), ("2bw-fresh", 1))
SHARES = (0.3, 0.5, 0.7)
"""Of what the device would have to hold."""
QUICK_CASES = ("4B", "18B")


def ours(accesses: list[Any], num_steps: int, capacity: int) -> int:
    gaps = gaps_of(accesses)
    settle(gaps, decide(accesses, gaps, num_steps, capacity, 0), num_steps)
    return num_copies(gaps)


def small_traces(number: int) -> Section:
    rows = []
    for capacity in (2, 3, 4):
        found = []
        for seed in range(number):
            accesses = small_trace(seed, NUM_CHUNKS, NUM_STEPS)
            found.append(
                (
                    ours(accesses, NUM_STEPS, capacity),
                    fewest_copies(accesses, NUM_STEPS, capacity),
                    least_recently_used(accesses, capacity),
                    patrickstar(accesses, capacity),
                )
            )
        sums = [sum(column) for column in zip(*found, strict=True)]
        rows.append(
            {
                "slots": capacity,
                "traces": number,
                "ours": sums[0],
                "fewest": sums[1],
                "over_fewest": sums[0] / sums[1],
                "worst_trace_over_fewest": max(one[0] - one[1] for one in found),
                "least_recently_used": sums[2],
                "traces_worse_than_it": sum(one[0] > one[2] for one in found),
                "patrickstar": sums[3],
            }
        )
    return Section(f"Small traces: {NUM_CHUNKS} chunks, {NUM_STEPS} steps; copies in all", rows)


def programs(is_quick: bool) -> Section:
    rows = []
    for name, sweep in PROGRAMS[:2] if is_quick else PROGRAMS:
        accesses, num_steps, most = program_trace(name, sweep)
        for share in SHARES:
            capacity = int(share * most)
            log(f"{name}, sweeps of {sweep}, {capacity} slots")
            rows.append(
                {
                    "schedule": name,
                    "sweep": sweep,
                    "slots": capacity,
                    "of_chunks": most,
                    "ours": ours(accesses, num_steps, capacity),
                    "least_recently_used": least_recently_used(accesses, capacity),
                    "patrickstar": patrickstar(accesses, capacity),
                    "fixed_places": fixed_places(accesses),
                }
            )
    return Section("Programs: one rank of 8 parts, 8 micro-batches, 3 batches; copies in all", rows)


def machines(is_quick: bool) -> Section:
    rows = []
    for case in CASES:
        if not is_quick or case.model.name in QUICK_CASES:
            log(f"{case.model.name} on {case.machine.name}")
            rows.append(row_of(case))
    return Section("Models on machines, simulated", rows)


def verdicts(small: Section, large: Section, fits: Section) -> Iterator[Verdict]:
    for row in small.rows:
        where = f"small traces, {row['slots']} slots"
        yield at_most(f"{where}: copies over the fewest", row["over_fewest"], MOST_OVER_FEWEST)
        name = f"{where}: traces with more copies than the least recently used"
        yield exactly(name, float(row["traces_worse_than_it"]), 0.0)
    for row in large.rows:
        where = f"{row['schedule']}, sweeps of {row['sweep']}, {row['slots']} slots"
        best = min(row["least_recently_used"], row["patrickstar"], row["fixed_places"])
        yield at_most(f"{where}: copies over the best of the others", row["ours"] / best, 1.0)
    for row in fits.rows:
        yield at_least(f"{row['model']} on {row['machine']}: fits", float(row["fits"]), 1.0)


def measure(asked: Namespace) -> Findings:
    small = small_traces(QUICK_SMALL if asked.quick else SMALL)
    large = programs(asked.quick)
    fits = machines(asked.quick)
    return Findings([small, large, fits], list(verdicts(small, large, fits)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="fewer traces, two programs and two models")
