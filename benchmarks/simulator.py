"""How fast programs are made, proved and simulated, compared with torch's dry run of the same schedule.

    python benchmarks/simulator.py [--quick] [--json]

The peer is the dry run of torch.distributed.pipelining: it puts in communication and goes through the same
schedule in unit steps, without links, memory or versions. The two are measured in turn, A B A B, and the
median of the ratios is quoted with its least and greatest.
"""

import gc
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process
from benchmarks.common.verdicts import Spread, at_least, at_most, exactly, ratios, resident_bytes
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import check
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate

LEAST_RATE = 150_000
"""Instructions a second that the simulator must reach on one core."""
MOST_MAKE_S, MOST_MAKE_MIB = 5.0, 300.0
"""Of a window of 1,000 batches, in a process of its own."""
MOST_HELP_S = 0.3
MIB = 2**20


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def simulation_rates(repeats: int, batches: int) -> Section:
    rows = []
    for name in SCHEDULES:
        for kind, links in (("own", Links(1e9)), ("shared", Links(1e9, full_duplex=False))):
            if kind == "shared" and name not in ("2bw", "interleaved"):
                continue
            once, twice = (
                generate(name, num_stages=8, num_microbatches=32, num_batches=n)
                for n in (batches, 2 * batches)
            )
            rates, growth = [], []
            for _ in range(repeats):
                first, second = (simulated_s(program, links) for program in (once, twice))
                rates.append(once.num_instructions / first)
                growth.append(second / first)
            rows.append(
                {
                    "schedule": name,
                    "links": kind,
                    "instructions": once.num_instructions,
                    "instructions_per_s": Spread.of(rates),
                    "time_of_twice_the_batches": Spread.of(growth),
                }
            )
    return Section("Simulator, 8 stages, 32 micro-batches", rows)


def simulated_s(program: Program, links: Links) -> float:
    costs = Costs.per_stage(
        program.num_stages,
        forward_s=0.01,
        backward_s=0.02,
        message_bytes=1e6,
        weight_bytes=1e9,
        stash_bytes=1e8,
    )
    network = links.network(program)
    return seconds(partial(simulate, program, costs, network))


def compared_with_torch(repeats: int) -> Section:
    from benchmarks.engine_bench.contenders import torch_dry_run  # here, so that the rest runs without torch

    rows = []
    for name, m in (("1f1b", 64), ("gpipe", 64), ("interleaved", 64), ("zb-h1", 64)):
        ours, theirs = [], []
        dry_run = torch_dry_run(generate(name, num_stages=8, num_microbatches=m))
        for _ in range(repeats):
            ours.append(made_and_simulated_s(name, m))
            theirs.append(seconds(dry_run))
        rows.append(
            {
                "schedule": name,
                "stages": 8,
                "microbatches": m,
                "ours_ms": Spread.of(ours).median * 1e3,
                "torch_ms": Spread.of(theirs).median * 1e3,
                "torch_over_ours": ratios(ours, theirs),
            }
        )
    return Section("One batch: ours (made, lowered, simulated with links and memory), torch's dry run", rows)


def made_and_simulated_s(name: str, m: int) -> float:
    begin = time.perf_counter()
    program = generate(name, num_stages=8, num_microbatches=m)
    return time.perf_counter() - begin + simulated_s(program, Links(1e9))


def long_window(name: str) -> dict[str, object]:
    """In a process of its own."""
    begin = time.perf_counter()
    program = generate(name, num_stages=16, num_microbatches=64, num_batches=1000)
    made_s = time.perf_counter() - begin
    return {
        "schedule": name,
        "instructions": program.num_instructions,
        "made_s": made_s,
        "peak_resident_mib": resident_bytes("VmHWM") / MIB,
    }


def proofs(batches: int) -> Section:
    rows = []
    for name in ("1f1b", "2bw", "2bw-fresh"):
        program = generate(name, num_stages=16, num_microbatches=64, num_batches=batches)
        rate = program.num_instructions / seconds(partial(check, program))
        rows.append({"schedule": name, "instructions": program.num_instructions, "instructions_per_s": rate})
    return Section(f"Checker, 16 stages, 64 micro-batches, {batches} batches", rows)


def help_text(repeats: int) -> Section:
    """`bireme --help`, in fresh processes, and whether it loads torch."""
    command = [sys.executable, "-X", "importtime", "-m", "bireme", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    plain = partial(
        subprocess.run, [sys.executable, "-m", "bireme", "--help"], capture_output=True, check=True
    )
    taken = Spread.of(seconds(plain) for _ in range(repeats))
    loads_torch = any(line.rpartition("|")[2].strip() == "torch" for line in imported.splitlines())
    return Section("bireme --help", [{"help_s": taken, "loads_torch": loads_torch}])


def measure(asked: Namespace) -> Findings:
    repeats, batches = (3, 10) if asked.quick else (7, 40)
    windows = [in_process(long_window, name) for name in ("1f1b", "2bw", "2bw-fresh", "zbv")]
    long = Section("Long windows: 1,000 batches × 64 micro-batches × 16 stages", windows)
    told = help_text(repeats)
    rates = simulation_rates(repeats, batches)
    verdicts = [
        *(at_most(f"{row['schedule']}: seconds to make it", row["made_s"], MOST_MAKE_S) for row in long.rows),
        *(
            at_most(f"{row['schedule']}: MiB to make it", row["peak_resident_mib"], MOST_MAKE_MIB)
            for row in long.rows
        ),
        *(
            at_least(
                f"{row['schedule']}, {row['links']} links: instructions simulated a second",
                row["instructions_per_s"].median,
                LEAST_RATE,
            )
            for row in rates.rows
        ),
        at_most("bireme --help: seconds", told.rows[0]["help_s"].median, MOST_HELP_S),
        exactly("bireme --help: times torch is loaded", float(told.rows[0]["loads_torch"]), 0.0),
    ]
    return Findings([long, rates, proofs(batches), compared_with_torch(repeats), told], verdicts)


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="fewer repeats and shorter windows")
