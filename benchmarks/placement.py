"""What operator placement takes and finds: ideals, lines, devices that need not be contiguous, baselines.

    python benchmarks/placement.py [--quick] [--json]

Each case runs in a process of its own, whose peak memory is what is told. Values are in the workloads' own
unit of time; what has a limit is shown with it.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process
from benchmarks.common.verdicts import Verdict, at_most, resident_bytes
from benchmarks.made_up.graphs import (
    Setting,
    inception_like,
    recurrent_like,
    resnet_like,
    transformer_like,
)
from benchmarks.placers.local_search import local_search
from benchmarks.placers.simple import pipedream, single
from bireme.errors import BiremeError
from bireme.placement.contiguous import Contiguous, cut_lines
from bireme.placement.contraction import Items, Weightless, items_of
from bireme.placement.ideals import DynamicProgram, lattice_of
from bireme.placement.solve import Anywhere, solve
from bireme.placement.workload import Edge, Method, Node, Objective, Request, Workload

MIB = 2**20
THROUGHPUT = Objective.THROUGHPUT
GRID = ((2, 70, 6), (3, 26, 6), (2, 140, 6), (3, 33, 6), (2, 199, 8), (3, 33, 3), (3, 60, 6))
"""Branches, their length, and devices."""
MOST_MILLION_PAIRS = 1_000
"""No time was promised for more."""

Row = dict[str, Any]

METHODS: dict[str, Callable[[Workload], float]] = {
    "dpl": lambda workload: solve(workload, Request(method=Method.DPL)).value,
    "greedy": lambda workload: solve(workload, Request(method=Method.GREEDY)).value,
    "pipedream": lambda workload: pipedream(workload, THROUGHPUT)[0].value,
    "local-search": lambda workload: local_search(_pieces(workload, contiguous=False), THROUGHPUT).value,
    "single": lambda workload: single(_pieces(workload, contiguous=True), THROUGHPUT).value,
}
"""The values of simpler ways than the exact one."""


def branches(num_branches: int, length: int, *, devices: int, moving: float = 1.0) -> Workload:
    """Chains side by side: (length + 1) ** branches ideals."""
    random = Random(num_branches * length)
    nodes, edges = [], []
    for branch in range(num_branches):
        for place in range(length):
            number = branch * length + place
            nodes.append(Node(number, random.uniform(0.5, 5.0), 50.0))
            if place:
                edges.append(Edge(number - 1, number, random.uniform(0.0, 2.0) * moving))
    return Workload(tuple(nodes), tuple(edges), devices, 1, 1e12)


def num_pairs(num_branches: int, length: int) -> int:
    """How many pairs of ideals lie in each other, each with itself too."""
    found: int = ((length + 1) * (length + 2) // 2) ** num_branches
    return found


def ideals_case(shape: tuple[int, int, int]) -> Row:
    """How long the exact search takes, all of it, and what it finds compared with the cut of lines."""
    num_branches, length, devices = shape
    workload = branches(num_branches, length, devices=devices)
    _warm_up()
    begin = time.perf_counter()
    items = items_of(workload, contiguous=True)
    lattice = lattice_of(items, 1_000_000)
    assert lattice is not None
    line = cut_lines(items, THROUGHPUT)
    program = DynamicProgram(items, lattice)
    found = program.best(THROUGHPUT, line.where)
    seconds = time.perf_counter() - begin
    assert found is not None
    return {
        "branches": f"{num_branches} × {length}, {devices} devices",
        "ideals": len(lattice),
        "million_pairs": num_pairs(num_branches, length) / 1e6,
        "million_pairs_seen": program.num_pairs / 1e6,
        "seconds": seconds,
        "peak_resident_mib": resident_bytes("VmHWM") / MIB,
        "value": found.value,
        "lines_above_it": line.value / found.value - 1,
    }


def line_case(length: int) -> Row:
    """A graph that is a line, and all that `solve` does about it."""
    workload = branches(1, length, devices=6)
    _warm_up()
    begin = time.perf_counter()
    placement = solve(workload, Request())
    seconds = time.perf_counter() - begin
    return {"nodes": length, "seconds": seconds, "value": placement.value, "method": placement.method}


def shapes(devices: int, *, is_training: bool) -> dict[str, Workload]:
    """Workloads that look like captured networks."""
    setting = Setting(is_training=is_training, num_accelerators=devices)
    return {
        "transformer, 4 layers": transformer_like(4, setting),
        "inception, 8 blocks": inception_like(8, setting),
        "recurrent, 3 × 6": recurrent_like(3, 6, setting),
        "resnet, 12 blocks": resnet_like(12, setting),
    }


def anywhere_case(case: tuple[str, bool, float]) -> Row:
    """Annealing, and the integer program with ten times its time, from the same start."""
    name, is_training, seconds = case
    workload = shapes(6, is_training=is_training)[name]
    _warm_up()
    split = Contiguous(workload, THROUGHPUT).best_of_lines()
    anywhere = Anywhere(workload, THROUGHPUT, split)
    start = anywhere.start()
    assert start is not None
    anywhere.annealed(start, 5.0, num_moves=1000)  # compiled
    begin = time.perf_counter()
    annealed = anywhere.annealed(start, seconds / 10)
    annealed_s = time.perf_counter() - begin
    begin = time.perf_counter()
    solved = anywhere.solved(start, seconds)
    solved_s = time.perf_counter() - begin
    bound = max(solved.lower_bound, annealed.lower_bound)
    return {
        "workload": f"{name}{', training' if is_training else ''}",
        "items": len(anywhere.items),
        "start": start.value,
        "annealed": annealed.value,
        "annealed_s": annealed_s,
        "solved": solved.value,
        "solved_s": solved_s,
        "annealed_over_solved": annealed.value / solved.value,
        "gap": 1 - bound / min(annealed.value, solved.value),
    }


def methods_case(case: tuple[str, bool, float]) -> Row:
    """The exact split, and what simpler ways make of the same workload, as multiples of it."""
    name, is_training, seconds = case
    workload = shapes(6, is_training=is_training)[name]
    best = solve(workload, Request(time_limit_s=seconds))
    row: Row = {
        "workload": f"{name}{', training' if is_training else ''}",
        "exact": best.value,
        "gap": best.gap,
    }
    for name, found in METHODS.items():
        try:
            row[name] = found(workload) / best.value
        except BiremeError:
            row[name] = None  # does not fit
    return row


def _pieces(workload: Workload, *, contiguous: bool) -> Items:
    return items_of(workload, contiguous=contiguous, weightless=Weightless.STAY)


def _warm_up() -> None:
    """Compile what will be timed, or read it from the disk."""
    small = branches(2, 3, devices=2)
    Contiguous(small, THROUGHPUT).best()


def verdicts(ideals: Sequence[Row], lines: Sequence[Row], anywhere: Sequence[Row]) -> Iterator[Verdict]:
    for row in ideals:
        if row["million_pairs"] < MOST_MILLION_PAIRS:
            most_s = 10.0 if row["ideals"] < 25_000 else 60.0
            yield at_most(f"{row['branches']}: seconds", row["seconds"], most_s)
        yield at_most(f"{row['branches']}: peak resident MiB", row["peak_resident_mib"], 4e9 / MIB)
    for row in lines:
        if row["nodes"] == 2000:
            yield at_most("a line of 2,000 nodes: seconds", row["seconds"], 1.0)
    for row in anywhere:
        name = f"{row['workload']}: annealing over HiGHS with ten times its seconds"
        yield at_most(name, row["annealed_over_solved"], 1.0)


def measure(asked: Namespace) -> Findings:
    """Each case in a process of its own."""
    quick = asked.quick
    grid = GRID[:2] if quick else GRID
    seconds = 3.0 if quick else 60.0
    names = list(shapes(2, is_training=False))
    cases = [(name, is_training, seconds) for is_training in (False, True) for name in names]
    chosen = cases[:1] if quick else cases
    ideals = [in_process(ideals_case, shape) for shape in grid]
    lines = [in_process(line_case, length) for length in ((500, 2000) if quick else (500, 2000, 8000))]
    anywhere = [in_process(anywhere_case, case) for case in chosen]
    methods = [in_process(methods_case, case) for case in chosen]
    return Findings(
        [
            Section("The exact split", ideals),
            Section("Graphs that are a line, from the workload to the placement", lines),
            Section("Devices that need not be contiguous", anywhere),
            Section("Contiguous splits, as multiples of the exact one (local search knows no such)", methods),
        ],
        list(verdicts(ideals, lines, anywhere)),
    )


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="the smallest cases, and three seconds for a search")
