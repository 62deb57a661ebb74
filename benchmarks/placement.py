"""What operator placement takes and finds: ideals, lines, devices that need not be contiguous, baselines.

    python -m benchmarks.placement [--quick]

Each case runs in a process of its own, whose peak memory is what is told. Values are in the workloads' own
unit of time; a limit stands beside what has one.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bireme.bench.placement_workloads import (
    Setting,
    inception_like,
    recurrent_like,
    resnet_like,
    transformer_like,
)
from bireme.errors import BiremeError
from bireme.plan.placement.anywhere.search import Anywhere
from bireme.plan.placement.contiguous.dynamic import DynamicProgram
from bireme.plan.placement.contiguous.ideals import lattice_of
from bireme.plan.placement.contiguous.linearised import cut_lines
from bireme.plan.placement.contiguous.search import Contiguous
from bireme.plan.placement.contraction import items_of
from bireme.plan.placement.request import Method, Request
from bireme.plan.placement.solve import solve
from bireme.plan.placement.workload import Edge, Node, Objective, Workload

MIB = 2**20
THROUGHPUT = Objective.THROUGHPUT


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


def ideals_case(shape: tuple[int, int, int]) -> list[str]:
    """How long the exact search takes, all of it, and what it finds beside the cut of lines."""
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
    within = num_pairs(num_branches, length)
    limit = "10 s" if len(lattice) < 25_000 else "60 s"
    return [
        f"{num_branches} × {length}, {devices} devices",
        f"{len(lattice):,}",
        f"{within / 1e6:,.0f}",
        f"{program.num_pairs / 1e6:.1f}",
        f"{seconds:.2f} s",
        limit,
        f"{_peak_bytes() / MIB:.0f} MiB",
        f"{found.value:.2f}",
        f"{line.value / found.value - 1:+.1%}",
    ]


def line_case(length: int) -> list[str]:
    """A graph that is a line, and all that `solve` does about it."""
    workload = branches(1, length, devices=6)
    _warm_up()
    begin = time.perf_counter()
    placement = solve(workload, Request())
    seconds = time.perf_counter() - begin
    limit = "1 s" if length == 2000 else "–"
    return [f"{length:,} nodes", f"{seconds:.2f} s", limit, f"{placement.value:.2f}", placement.method]


def shapes(devices: int, *, is_training: bool) -> dict[str, Workload]:
    """Workloads that look like captured networks."""
    setting = Setting(is_training=is_training, num_accelerators=devices)
    return {
        "transformer, 4 layers": transformer_like(4, setting),
        "inception, 8 blocks": inception_like(8, setting),
        "recurrent, 3 × 6": recurrent_like(3, 6, setting),
        "resnet, 12 blocks": resnet_like(12, setting),
    }


def anywhere_case(case: tuple[str, bool, float]) -> list[str]:
    """Annealing beside the integer program that has ten times its time, from the same start."""
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
    return [
        f"{name}{', training' if is_training else ''}",
        f"{len(anywhere.items)}",
        f"{start.value:.2f}",
        f"{annealed.value:.2f} in {annealed_s:.1f} s",
        f"{solved.value:.2f} in {solved_s:.0f} s",
        f"{annealed.value / solved.value - 1:+.1%}",
        f"{1 - bound / min(annealed.value, solved.value):.1%}",
    ]


def methods_case(case: tuple[str, bool, float]) -> list[str]:
    """The exact split, and what simpler ways make of the same workload, as multiples of it."""
    name, is_training, seconds = case
    workload = shapes(6, is_training=is_training)[name]
    best = solve(workload, Request(time_limit_s=seconds))
    row = [f"{name}{', training' if is_training else ''}", f"{best.value:.2f}", f"{best.gap:.1%}"]
    for method in (Method.DPL, Method.GREEDY, Method.PIPEDREAM, Method.LOCAL_SEARCH, Method.SINGLE):
        try:
            row.append(f"{solve(workload, Request(method=method)).value / best.value:.2f}")
        except BiremeError:
            row.append("does not fit")
    return row


def _warm_up() -> None:
    """Compile what will be timed, or read it from the disk."""
    small = branches(2, 3, devices=2)
    Contiguous(small, THROUGHPUT).best()


def _peak_bytes() -> int:
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _each_alone(work: Callable[[Any], list[str]], cases: list[Any]) -> list[list[str]]:
    """What each case comes to, in a process of its own."""
    rows = []
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(work, (case,)))
    return rows


def _print(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of it, and less time for each search")
    quick = parser.parse_args().quick
    grid = [(2, 70, 6), (3, 26, 6), (2, 140, 6), (3, 33, 6), (2, 199, 8), (3, 33, 3)]
    _print(
        "The exact split (peak memory: 4 GB is the limit)",
        ["branches", "ideals", "million pairs", "of them seen", "time", "limit", "peak", "value", "lines"],
        _each_alone(ideals_case, grid[:3] if quick else [*grid, (3, 60, 6)]),
    )
    _print(
        "Graphs that are a line, from the workload to the placement",
        ["graph", "time", "limit", "value", "method"],
        _each_alone(line_case, [500, 2000] if quick else [500, 2000, 8000]),
    )
    names = list(shapes(2, is_training=False))
    seconds = 10.0 if quick else 60.0
    cases = [(name, is_training, seconds) for is_training in (False, True) for name in names]
    _print(
        "Devices that need not be contiguous (annealing should be as good in a tenth of the time)",
        ["workload", "items", "start", "annealing", "HiGHS", "annealing", "gap"],
        _each_alone(anywhere_case, cases[::2] if quick else cases),
    )
    _print(
        "Contiguous splits, as multiples of the exact one (local search knows no contiguity)",
        ["workload", "exact", "gap", "lines", "greedy", "pipedream", "local search", "one device"],
        _each_alone(methods_case, cases[::2] if quick else cases),
    )


if __name__ == "__main__":
    main()
