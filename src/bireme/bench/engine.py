"""The benchmark of the engine: everything that is measured, in one run, as one report."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bireme.bench.effort import BenchEffort
from bireme.bench.emulation import EmulationRow, measure_emulated
from bireme.bench.memory import Footprint, MemoryCounts, counts_of, measure_counts, measure_footprint
from bireme.bench.overhead import (
    NUM_RANKS,
    Overhead,
    OverheadTimes,
    measure_overhead,
    overhead_of,
    tiny_graph,
)
from bireme.bench.replicas import Replicas, measure_replicas
from bireme.bench.small_gpt import GptRow, GptTimes, gpt_rows, measure_gpt
from bireme.model.graph import Graph
from bireme.runtime.launch import launch
from bireme.runtime.world import World

__all__ = ["EngineReport", "bench_engine"]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What was measured. Empty or None is what was not asked for."""

    rows: tuple[EmulationRow, ...]
    overhead: Overhead
    counts: MemoryCounts
    gpt: tuple[GptRow, ...]
    footprint: tuple[Footprint, ...]
    replicas: Replicas | None


def bench_engine(effort: BenchEffort) -> EngineReport:
    """Measure the engine; compare it with torch's pipeline runtime, its limits and the simulator."""
    has_proc = Path("/proc/self/status").exists()
    with _patient_threads():
        one, two = launch(_on_two_ranks, NUM_RANKS, effort, tiny_graph(), threads_per_process=1)
        return EngineReport(
            rows=tuple(measure_emulated(effort)),
            overhead=overhead_of(one.overhead, two.overhead),
            counts=counts_of(one.counts, two.counts),
            gpt=tuple(gpt_rows(one.gpt, two.gpt)),
            footprint=tuple(measure_footprint()) if effort.footprint and has_proc else (),
            replicas=measure_replicas() if effort.hosts else None,
        )


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Let OpenMP's threads sleep when they wait, in processes that are started inside.

    Otherwise the one process with two threads, a peer, runs several times slower as soon as anything else
    runs on the machine: a thread that is not running is waited for in circles on the other core.
    """
    name = "OMP_WAIT_POLICY"
    before = os.environ.get(name)
    os.environ[name] = before or "passive"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@dataclass(frozen=True, slots=True)
class _OfTwo:
    """What one of two ranks found."""

    overhead: OverheadTimes
    counts: MemoryCounts
    gpt: list[GptTimes]


def _on_two_ranks(world: World, effort: BenchEffort, graph: Graph) -> _OfTwo:
    return _OfTwo(
        measure_overhead(world, effort, graph), measure_counts(world, effort), measure_gpt(world, effort)
    )
