"""How fast programs are made, proved and simulated, beside torch's own dry run of the same schedule.

    python benchmarks/simulator.py [--quick]

The peer is the dry run of torch.distributed.pipelining: it puts in communication and goes through the same
schedule in unit steps, without links, memory or versions. The two are measured in turn, A B A B, and the
median of the ratios is quoted with its least and greatest.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import check
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate

LEAST_RATE = 150_000
"""Instructions a second that the simulator must reach on one core."""

GENERATE = """
import time
from pathlib import Path
from bireme.schedule.catalogue import generate
begin = time.perf_counter()
program = generate({name!r}, num_stages=16, num_microbatches=64, num_batches=1000)
taken = time.perf_counter() - begin
status = Path("/proc/self/status").read_text()
peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
print(program.num_instructions, taken, peak_kib / 1024)
"""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(figures: list[float]) -> "Spread":
        return Spread(statistics.median(figures), min(figures), max(figures))

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def simulation_rates(repeats: int, batches: int, console: Console) -> None:
    table = Table(title="Simulator, 8 stages, 32 micro-batches", title_justify="left", box=None)
    for heading in ("schedule", "links", "instructions", "instructions/s", "limit", "twice the batches"):
        table.add_column(heading, justify="left" if heading in ("schedule", "links") else "right")
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
            table.add_row(
                name,
                kind,
                f"{once.num_instructions:,}",
                Spread.of(rates).show(",.0f"),
                f"≥ {LEAST_RATE:,}",
                Spread.of(growth).show(".2f") + "×",
            )
    console.print(table)


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


def beside_torch(repeats: int, console: Console) -> None:
    from bireme.runtime.torch_pipelining import (
        torch_dry_run,  # here, so that the rest is measured without torch
    )

    table = Table(
        title="One batch: ours (made, lowered, simulated with links and memory) and torch's dry run",
        title_justify="left",
        box=None,
    )
    for heading in ("schedule", "stages", "micro-batches", "ours", "torch", "torch / ours"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name, m in (("1f1b", 64), ("gpipe", 64), ("interleaved", 64), ("zb-h1", 64)):
        ours, theirs, ratios = [], [], []
        dry_run = torch_dry_run(generate(name, num_stages=8, num_microbatches=m, lowered=False))
        for _ in range(repeats):
            ours.append(made_and_simulated_s(name, m))
            theirs.append(seconds(dry_run))
            ratios.append(theirs[-1] / ours[-1])
        table.add_row(
            name,
            "8",
            str(m),
            f"{statistics.median(ours) * 1e3:.1f} ms",
            f"{statistics.median(theirs) * 1e3:.1f} ms",
            Spread.of(ratios).show(".2f") + "×",
        )
    console.print(table)


def made_and_simulated_s(name: str, m: int) -> float:
    begin = time.perf_counter()
    program = generate(name, num_stages=8, num_microbatches=m)
    return time.perf_counter() - begin + simulated_s(program, Links(1e9))


def long_windows(console: Console) -> None:
    table = Table(
        title="Long windows: 1,000 batches × 64 micro-batches × 16 stages", title_justify="left", box=None
    )
    for heading in ("schedule", "instructions", "made in", "limit", "peak resident set", "limit"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name in ("1f1b", "2bw", "2bw-fresh", "zbv"):
        code = GENERATE.format(name=name)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        count, taken, peak = map(float, done.stdout.split())
        table.add_row(name, f"{count:,.0f}", f"{taken:.2f} s", "≤ 5 s", f"{peak:.0f} MiB", "≤ 300 MiB")
    console.print(table)


def proofs(console: Console) -> None:
    table = Table(title="Checker, 16 stages, 64 micro-batches, 40 batches", title_justify="left", box=None)
    for heading in ("schedule", "instructions", "instructions/s"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name in ("1f1b", "2bw", "2bw-fresh"):
        program = generate(name, num_stages=16, num_microbatches=64, num_batches=40)
        rate = program.num_instructions / seconds(partial(check, program))
        table.add_row(name, f"{program.num_instructions:,}", f"{rate:,.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and shorter windows")
    quick = parser.parse_args().quick
    console = Console(width=120)
    long_windows(console)
    console.print()
    simulation_rates(3 if quick else 7, 10 if quick else 40, console)
    console.print()
    proofs(console)
    console.print()
    beside_torch(3 if quick else 9, console)


if __name__ == "__main__":
    main()
