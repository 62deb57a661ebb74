"""Paging over device, host and disk: how good the plans are, and what fits where.

    python benchmarks/tiers.py [--quick] [--json] [--section NAME]

First plans, compared with the best there is: on small traces every plan is tried, and the copies of ours are
at most 5 % more than the fewest in all, and in none more than those of the least recently used. On the
accesses of programs, where nobody can try all plans, ours is compared with the least recently used,
PatrickStar's rule with a trace of the same batches, and fixed places. Copies in both directions are counted,
chunk by chunk.

Then models on machines by their makers' numbers, as `benchmarks/paging/machines.py` says: whether they fit,
seconds a step, and what limits it. Nothing of that is measured. PatrickStar's figures for 8 × V100 are the
sizes that it names as running; we know of no samples per second that it has published for that machine.

Then runs on this machine. A GPT whose training state is 3 GiB trains with the state on a disk, in a process
whose private memory is limited and of which the kernel says what was resident. Its step is compared with the
resident run's and with what the disk takes for the bytes alone. A smaller one trains with an emulated wire to
the host, compared with the simulator. At last whole runs of `bireme train` page, compared with their
predictions. The folder for the disk is made in the current one. `--section` measures a part alone.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process, log
from benchmarks.common.verdicts import Verdict, at_least, at_most, exactly
from benchmarks.paging.exact import fewest_copies
from benchmarks.paging.machines import CASES, LARGEST, largest_row, row_of
from benchmarks.paging.measured import BATCHES, Case, Trained, on_disk, over_a_wire, without_paging
from benchmarks.paging.rivals import fixed_places, least_recently_used, patrickstar
from benchmarks.paging.shared import QUICK_SUBJECT, SUBJECT, row_of_shared, verdicts_of_shared
from benchmarks.paging.traces import program_trace, small_trace
from benchmarks.paging.trained import RUNS, row_of_run, verdicts_of_runs
from bireme.schedule.eviction import Evictions, gaps_of, num_copies, settle

MOST_OVER_FEWEST = 1.05
SMALL, QUICK_SMALL = 400, 60
NUM_CHUNKS, NUM_STEPS = 6, 14
PROGRAMS = (("1f1b", 1), ("1f1b", 4), ("gpipe", 1), ("2bw", 1), ("2bw-fresh", 1))
SHARES = (0.3, 0.5, 0.7)
"""Of what the device would have to hold."""
QUICK_CASES = ("4B", "18B")

CLIP_NORM, MOST_LOSS_OFF = 1.0, 0.01
"""If stages step apart, clipping follows another rule than in the resident run."""
STATE_BYTES, MOST_RESIDENT = 3 * 2**30, 800 * 2**20
"""Of a full run; a smoke run has a tenth of the state."""
QUICK_RESIDENT = 120 * 2**20
"""Of a smoke run, beyond what its process holds before it has a tensor of the model."""
DISK = Case(num_layers=16, width=1024, context=64, samples=2, device_bytes=270_000_000)
QUICK_DISK = Case(num_layers=16, width=320, context=64, samples=4, device_bytes=34_000_000)
WIRE = Case(num_layers=8, width=256, context=64, samples=4, device_bytes=30_000_000)
WIRE_BYTES_PER_S = 50e6


def ours(accesses: list[Any], num_steps: int, capacity: int) -> int:
    gaps = gaps_of(accesses)
    settle(gaps, Evictions(accesses, gaps, num_steps, capacity).leads(0), num_steps)
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
    if not is_quick:
        for case in LARGEST:
            log(f"the largest model on {case.machine.name}, {case.width} replicas")
            rows.append(largest_row(case))
    return Section("Models on machines, simulated", rows)


def on_a_disk(is_quick: bool) -> tuple[Section, list[Verdict]]:
    case, share = (QUICK_DISK, 0.1) if is_quick else (DISK, 1.0)
    rows: list[dict[str, Any]] = []
    found: list[Verdict] = []
    for clip_norm in (CLIP_NORM, None):
        log(f"{case.source} without offloading, clipped at {clip_norm}")
        resident = in_process(without_paging, case, clip_norm)
        for updates in ("agreed", "apart"):
            if (updates, clip_norm) == ("agreed", None):
                continue  # the copies are those of the clipped run
            log(f"{case.source} on a disk, updates {updates}")
            most = None if is_quick else MOST_RESIDENT
            paged = in_process(partial(on_disk, is_apart=updates == "apart"), case, resident, most, clip_norm)
            row = {"model": case.source, "updates": updates, "clip_norm": clip_norm or 0.0}
            rows.append(row | {"state_gib": STATE_BYTES * share / 2**30} | disk_row(resident, paged))
            # The smoke run holds its libraries too, which would be most of it.
            held = paged.resident_bytes - (paged.before_bytes if is_quick else 0)
            most = QUICK_RESIDENT if is_quick else MOST_RESIDENT
            where = f"state on a disk, updates {updates}, {'clipped' if clip_norm else 'not clipped'}"
            off = max(abs(one / other - 1) for one, other in zip(paged.losses, resident.losses, strict=True))
            is_exact = updates == "agreed" or not clip_norm
            found += [
                at_most(f"{where}: MiB resident", held / 2**20, most / 2**20),
                at_most(f"{where}: losses beside the resident run's", off, (1 - is_exact) * MOST_LOSS_OFF),
                *moved_as_predicted(where, paged.moved, case.device_bytes),
            ]
            if updates == "apart":  # else what an update needs cannot travel during backwards
                name = f"{where}: step over the larger of compute and copies"
                found.append(at_most(name, rows[-1]["over_larger"], 1.3))
    return Section("Training state on a disk", rows), found


def disk_row(resident: Trained, paged: Trained) -> dict[str, Any]:
    device, disk = (tier["bytes_moved"] / BATCHES for tier in paged.moved)
    disk_s = device / paged.read_bytes_per_s + disk / paged.write_bytes_per_s
    return {
        "resident_mib": paged.resident_bytes / 2**20,
        "resident_run_s": resident.step_s,
        "step_s": paged.step_s,
        "resident_processor_s": resident.processor_s,
        "processor_s": paged.processor_s,
        "work_s": sum(map(sum, paged.seconds.values())),
        "disk_s": disk_s,
        "over_larger": paged.step_s / max(resident.step_s, disk_s),
        "simulated_s": paged.predicted_s,
        "read_mb_per_s": paged.read_bytes_per_s / 1e6,
        "written_mb_per_s": paged.write_bytes_per_s / 1e6,
        "moved_gb_per_step": (device + disk) / 1e9,
    }


def over_the_wire() -> tuple[Section, list[Verdict]]:
    log(f"{WIRE.source} over an emulated wire")
    found = in_process(over_a_wire, WIRE, WIRE_BYTES_PER_S)
    row = {
        "model": WIRE.source,
        "wire_mb_per_s": WIRE_BYTES_PER_S / 1e6,
        "measured_s": found.step_s,
        "simulated_s": found.predicted_s,
        "moved_mb_per_step": sum(tier["bytes_moved"] for tier in found.moved) / BATCHES / 1e6,
    }
    error = abs(found.predicted_s / found.step_s - 1)
    verdicts = [
        at_most("emulated wire: error of the simulated step", error, 0.05),
        *moved_as_predicted("emulated wire", found.moved, WIRE.device_bytes),
    ]
    return Section("An emulated wire between device and host", [row]), verdicts


def moved_as_predicted(
    where: str, moved: Sequence[Mapping[str, Any]], device_bytes: int
) -> Iterator[Verdict]:
    for tier in moved:
        name = f"{where}: bytes into the {tier['tier']} but for the program's"
        yield exactly(name, float(tier["bytes_moved"] - tier["predicted_bytes_moved"]), 0.0)
    name = f"{where}: device memory over its budget"
    yield at_most(name, moved[0]["peak_bytes"] / device_bytes, 1.0)


def whole_runs(is_quick: bool) -> tuple[Section, list[Verdict]]:
    rows = []
    for run in RUNS[:1] if is_quick else RUNS:
        log(f"bireme train, {run.name}")
        rows.append(row_of_run(run, is_quick=is_quick))
    return Section("Whole runs of bireme train that offload", rows), list(verdicts_of_runs(rows))


def shared(is_quick: bool) -> tuple[Section, list[Verdict]]:
    subject = QUICK_SUBJECT if is_quick else SUBJECT
    log(f"two replicas that share {subject.model} on three tiers")
    row = row_of_shared(subject)
    return Section("Two replicas that share weights on device, host and disk", [row]), [
        *verdicts_of_shared(row)
    ]


def on_small_traces(is_quick: bool) -> tuple[Section, list[Verdict]]:
    section, found = small_traces(QUICK_SMALL if is_quick else SMALL), []
    for row in section.rows:
        where = f"small traces, {row['slots']} slots"
        found.append(at_most(f"{where}: copies over the fewest", row["over_fewest"], MOST_OVER_FEWEST))
        name = f"{where}: traces with more copies than the least recently used"
        found.append(exactly(name, float(row["traces_worse_than_it"]), 0.0))
    return section, found


def on_programs(is_quick: bool) -> tuple[Section, list[Verdict]]:
    section, found = programs(is_quick), []
    for row in section.rows:
        where = f"{row['schedule']}, sweeps of {row['sweep']}, {row['slots']} slots"
        best = min(row["least_recently_used"], row["patrickstar"], row["fixed_places"])
        found.append(at_most(f"{where}: copies over the best of the others", row["ours"] / best, 1.0))
    return section, found


def on_machines(is_quick: bool) -> tuple[Section, list[Verdict]]:
    section = machines(is_quick)
    fits = [
        at_least(f"{row['model']} on {row['machine']}: fits", float(row["fits"]), 1.0) for row in section.rows
    ]
    return section, fits


SECTIONS: dict[str, Callable[[bool], tuple[Section, list[Verdict]]]] = {
    "traces": on_small_traces,
    "programs": on_programs,
    "machines": on_machines,
    "disk": on_a_disk,
    "wire": lambda _is_quick: over_the_wire(),
    "train": whole_runs,
    "shared": shared,
}


def measure(asked: Namespace) -> Findings:
    found = [SECTIONS[name](asked.quick) for name in asked.section or SECTIONS]
    return Findings([one for one, _ in found], [verdict for _, own in found for verdict in own])


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--section", action="append", choices=list(SECTIONS), help="measure this part alone; repeatable"
    )


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        quick="fewer traces, two programs and two models, a tenth of the state, one run",
        options=options,
    )
