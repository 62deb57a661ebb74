"""Profiling under the load of training: as many processes at once, of the same kind.

A core is slower while its neighbors compute, and a process that trains is not the one that plans: it has a
watch, a store, threads of its own. So the units of a model are timed in processes that `launch` starts as it
starts those of the run, all at once; but never more than there are cores for, since ranks that share cores
are the simulator's business. The same processes find out what the engine takes for an instruction and a
message, and what a process holds before it has a tensor of the model.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TypeVar

from bireme.cluster.device import NO_ENGINE, EngineCost
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.profile.control import (
    Control,
    cache_path,
    cached_figures,
    device_here,
    keep,
    versions_here,
)
from bireme.profile.measuring import BatchEndTimes, Measured, MeasuringJob, Progress, measure_units
from bireme.profile.timing import Seconds, waited_s
from bireme.runtime.launch import launch
from bireme.runtime.measuring.batch_end import (
    batch_end_of,
    batch_end_of_next_to_nothing,
    lopsided_graph,
    message_costs,
)
from bireme.runtime.world import World
from bireme.train.model import RunModel
from bireme.train.outcome import settled_bytes
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile

_Figures = TypeVar("_Figures")

LOOK_S = 0.2
"""How often to check their progress."""

_QUIET_SHARE = 0.05
"""Of the time that a process may wait for a core, and what it measures is still as good on another day."""

_UNITS_SHARE = 0.9
"""Of the work that timing units is, as the progress tells it."""


class ParallelMeasurer:
    """Measures jobs for a run of `num_workers` processes with so many threads, on so many cores."""

    def __init__(self, run: RunFile, *, num_workers: int, num_threads: int, num_cores: int) -> None:
        self._run = run
        self._num_threads = num_threads
        self._num_workers = num_workers
        self._at_once = max(1, min(num_workers, num_cores // num_threads))

    @property
    def circumstances(self) -> tuple[object, ...]:
        """How many compute at once, and whether there will be messages."""
        return "companions", self._at_once, min(self._num_workers, 2)

    def __call__(self, job: MeasuringJob, progress: Progress) -> Measured:
        """Do a job."""
        size = max(self._at_once, min(self._num_workers, 2))
        progress(0.0, f"starting {size} processes to measure")
        own = (device_here(job.device), versions_here(), self._num_threads, size, job.optimizer)
        large_bytes = _rounded(job.message_bytes)
        kept = cache_path([*own, *self.circumstances, large_bytes], "engines")
        known = cached_figures(kept, EngineCost)
        with TemporaryDirectory() as folder, _followed(Path(folder, "progress"), progress) as path:
            found = launch(
                _measure,
                size,
                self._run,
                job,
                self._at_once,
                known or _Unknown(lopsided_graph(size), large_bytes),
                path,
                timeout_s=self._run.cluster.timeout_s,
                threads_per_process=self._num_threads,
            )
        there = [one for one in found if one is not None]
        measured = mean_of([one.measured for one in there])
        if known is None and measured.engine is not None and all(one.was_quiet for one in there):
            keep(kept, asdict(measured.engine))
        return measured


@dataclass(frozen=True, slots=True)
class _Unknown:
    """How to find out what the engine takes: with this model, and messages of so many bytes."""

    lopsided: Graph
    large_bytes: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What a process measured, and whether it had a core nearly all the time while the engine ran in it: else
    what was found of the engine is good for now and not for later.
    """

    measured: Measured
    was_quiet: bool


def _rounded(num_bytes: int) -> int:
    """A power of four that is not less: costs grow evenly with the bytes, so one serves many models."""
    return 1 << 2 * math.ceil(math.log(max(num_bytes, 1), 4))


def _measure(
    world: World, run: RunFile, job: MeasuringJob, at_once: int, engine: EngineCost | _Unknown, path: Path
) -> _Found | None:
    """Measure as one of several; None from a process that there is no core for.

    What is known of the engine is not measured again, but for the memory of a process: that is what this one
    has at its end, when it has run the engine and all units and has given their tensors back.
    """

    def tell(done: float, what: str) -> None:
        if world.rank == 0:
            path.write_text(f"{done} {what}", encoding="utf-8")

    tell(0.0, "measuring messages")
    # What a process of the run has, too, before it has its part of the pipeline.
    model, data = RunModel.of(run, 1), None
    with suppress(BiremeError):  # a run that is only planned may have no data that fit its model
        data = data_of(run, model)
    began_s, waited_before_s = perf_counter(), waited_s()
    if isinstance(engine, EngineCost):
        costs = engine
    else:
        costs = message_costs(world, engine.lopsided, engine.large_bytes) if world.size > 1 else NO_ENGINE
    was_quiet = waited_s() - waited_before_s < _QUIET_SHARE * (perf_counter() - began_s)
    if world.rank >= at_once:
        return None
    control = Control()
    seconds = measure_units(job, lambda done, what: tell(_UNITS_SHARE * done, what), in_turns=control.time)
    tell(_UNITS_SHARE, "measuring the end of a batch")
    first = job.first
    alone = BatchEndTimes(costs.reduce_s, costs.update_s, costs.trial_s)
    if costs is not engine:
        alone = batch_end_of_next_to_nothing(job.optimizer)
    ends = {
        index: batch_end_of(first.graph, first.units[index], job.optimizer, job.effort.num_least).beyond(
            alone
        )
        for index in first.distinct
    }
    costs = replace(
        costs,
        reduce_s=alone.reduce_s,
        update_s=alone.update_s,
        trial_s=alone.trial_s,
        control_s=control.median_s,
        num_processes=at_once,
        process_bytes=settled_bytes(),
    )
    del model, data  # not before
    return _Found(Measured(seconds, ends, costs), was_quiet)


def mean_of(found: Sequence[Measured]) -> Measured:
    """The mean of what all processes measured."""
    first = found[0]
    engines = [one.engine for one in found if one.engine is not None]
    return Measured(
        {
            size: {index: _mean(Seconds, [one.seconds[size][index] for one in found]) for index in own}
            for size, own in first.seconds.items()
        },
        {index: _mean(BatchEndTimes, [one.ends[index] for one in found]) for index in first.ends},
        replace(
            _mean(EngineCost, engines),
            process_bytes=max(one.process_bytes for one in engines),
            num_processes=engines[0].num_processes,
        ),
    )


def _mean(kind: Callable[..., _Figures], found: Sequence[_Figures]) -> _Figures:
    """The mean over processes; None if one of them has no figure."""
    values: dict[str, float | None] = {}
    for field in fields(found[0]):  # type: ignore[arg-type]  # all of them are data classes
        own = [getattr(one, field.name) for one in found]
        values[field.name] = None if None in own else fmean(own)
    return kind(**values)


@contextmanager
def _followed(path: Path, progress: Progress) -> Iterator[Path]:
    """Tell on what another process writes into a file of its progress."""
    is_over = threading.Event()

    def follow() -> None:
        before = ""
        while not is_over.wait(LOOK_S):
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            done, _, what = text.partition(" ")
            if what and text != before:
                progress(float(done), what)
                before = text

    thread = threading.Thread(target=follow, name="bireme progress", daemon=True)
    thread.start()
    try:
        yield path
    finally:
        is_over.set()
        thread.join()
