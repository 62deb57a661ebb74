"""A run whose model is captured to be planned for, and what the model costs: measured here, or estimated.

`bireme train` measures so before it plans, and so do `bireme plan`, `profile` and `simulate`.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import repeat
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TypeVar

import torch

from bireme.cluster.catalogue import device_named
from bireme.cluster.device import NO_ENGINE, EngineCost
from bireme.cluster.machine import num_cores
from bireme.codec.sum_description import DENSE, parse_sum_codec
from bireme.errors import BiremeError, Progress
from bireme.files import scratch_folder
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.penalties import SUMS_TO_TRY
from bireme.plan.plan_file import check_profile_fits
from bireme.profile.codec_timing import with_codec_rates
from bireme.profile.control import (
    Control,
    cache_path,
    cached_figures,
    device_here,
    keep,
    torch_device,
    versions_here,
)
from bireme.profile.estimate import Seconds
from bireme.profile.measuring import BatchEndTimes, Measured, MeasuringJob, measure_units
from bireme.profile.profile import Profile, load_profile
from bireme.profile.profiler import profile
from bireme.profile.timing import BRIEF, waited_s
from bireme.runtime.launch import launch
from bireme.runtime.measuring.batch_end import (
    batch_end_of,
    batch_end_of_next_to_nothing,
    lopsided_graph,
    message_costs,
    wake_costs,
)
from bireme.runtime.microbatches import apportioned
from bireme.runtime.world import World
from bireme.train.choices import check_gradient, sums_of
from bireme.train.data.loader import RankBatches
from bireme.train.data.prepare import RunData
from bireme.train.machines import Machines, planning_machines
from bireme.train.model import RunModel
from bireme.train.outcome import settled_bytes
from bireme.train.plan_search import (
    ProfiledRun,
    check_depth,
    check_devices,
    check_same_optimizer,
    check_searches,
    is_short,
    plan_request_of,
)
from bireme.train.run_data import counted, data_of, with_length_of_data
from bireme.train.run_file import RunFile
from bireme.train.run_file.planning import AUTO

# The sizes of micro-batches that are measured for a run, which are those that its plan may have.

_LARGEST_MEASURED = 16
"""Samples of the largest micro-batch that is measured unless one is asked for."""


def micro_batches(run: RunFile) -> list[int]:
    """The sizes of micro-batches that a plan of this run may have."""
    batch, asked = run.training.batch_size, run.plan
    if asked.micro_batch is not None:
        return [asked.micro_batch]
    if asked.microbatches is not None:
        widths = [asked.width] if asked.width is not None else range(1, batch // asked.microbatches + 1)
        parts = [width * asked.microbatches for width in widths]
        sizes = {batch // one for one in parts if batch % one == 0}
        return sorted(sizes)[-4:] or [1]
    largest = asked.largest_batch
    powers = [1 << power for power in range(min(_LARGEST_MEASURED, largest or batch).bit_length())]
    return powers if largest is not None else [size for size in powers if batch % size == 0]


def is_divided(run: RunFile, width: int, sizes: Collection[int]) -> bool:
    """Whether `width` replicas can divide a batch into micro-batches of one or two of these sizes."""
    batch, asked = run.training.batch_size, run.plan.microbatches
    own = {size * width for size in sizes}
    own |= {
        small * width + (large - small) * num for small in sizes for large in sizes for num in range(width)
    }
    counts = {batch // one for one in own if one > 0 and batch % one == 0}
    return bool(counts if asked is None else counts & {asked})


_MOST_FLOPS = 2e10
"""Of the largest operator in a forward, for each thread on a CPU: about a second of a core. What takes so
long takes no less for each sample if there are more, and minutes to measure.
"""


def sizes_to_measure(run: RunFile, graph: Graph, sizes: Sequence[int], threads: int) -> list[int]:
    """The sizes to measure on a CPU: the two smallest, and those that do not take long; all if these cannot
    divide a batch among the replicas that are asked for.
    """
    flops = max((one.flops for one in graph.operators), default=0.0) / graph.batch
    smallest = sorted(sizes)[:2]
    found = [size for size in sizes if size in smallest or size * flops <= _MOST_FLOPS * threads]
    width = run.plan.width
    return found if width is None or is_divided(run, width, found) else [*sizes]


_UNLIKE = 1.5
"""Times as large as the other share one must be to be measured."""


def shares_by_speed(batch: int, speeds: Sequence[float]) -> set[int]:
    """The samples of each device if all of them share a batch by their speed; none if these are not of two
    sizes, because a plan has no more, or if they are much alike.
    """
    found = set(apportioned(batch, speeds)) if len(speeds) <= batch else set()
    return found if len(found) == 2 and max(found) >= _UNLIKE * min(found) else set()


@dataclass(frozen=True, slots=True)
class CapturedRun:
    """A run with its machines, its model, and the model's graph for training."""

    run: RunFile
    machines: Machines
    model: RunModel
    graph: Graph

    @classmethod
    def of(cls, run: RunFile, progress: Progress, *, measures: bool = True) -> "CapturedRun":
        """Capture the model of a run that is planned, and that this machine may be unable to train.

        Processes that measure hold the data as those of the run do, so with `measures` the data are prepared
        if they fit the model.
        """
        check_searches(run)
        machines = planning_machines(run, computes=False)
        check_devices(run, machines.cluster)
        progress(0.0, "loading the model")
        sizes = micro_batches(run)
        with suppress(BiremeError):  # a model may be planned without its data
            run = with_length_of_data(run, progress)
        model = RunModel.of(run, max(sizes))
        if run.training.epochs is not None:
            run = counted(run, data_of(run, model, progress))
        elif measures:
            with suppress(BiremeError):
                data_of(run, model, progress)
        progress(0.0, "capturing the model")
        graph = model.training.graph(sizes[0])
        model.check_loss(graph)
        check_gradient(run, graph)
        model.check_documents(graph)
        model.check_weights(graph)
        return cls(run, machines, model, graph)

    def profiled(
        self,
        progress: Progress,
        *,
        like: str | None = None,
        is_fresh: bool = False,
        known: Collection[int] = (),
    ) -> ProfiledRun:
        """The run with a profile: estimated for a device `like` another one, or else measured here.

        A run that ends soon is measured briefly. With `is_fresh` no earlier measurement counts. If the sizes
        that are `known` are all that plans need on devices of one speed, there are no others.
        """
        run, sizes, is_brief = self.run, micro_batches(self.run), is_short(self.run, self.graph)
        check_depth(run, len(units_of(self.graph)))
        is_free = run.plan.micro_batch is None and run.plan.microbatches is None
        if is_brief and is_free:
            sizes = sizes[::-2]
        largest, takes_long = max(sizes), is_free and like is None and self.machines.device == "cpu"
        threads = self.machines.threads or 1
        if takes_long:
            sizes = sizes_to_measure(run, self.graph, sizes, threads)
        if known and set(sizes) <= set(known):
            sizes = sorted(known)
        elif is_free and run.plan.largest_batch is None:
            speeds = [placed.device.speed for placed in self.machines.cluster.devices()]
            shares = shares_by_speed(run.training.batch_size, speeds)
            sizes = sorted({*sizes, *(one for one in shares if one <= largest)})
            if takes_long:
                sizes = sizes_to_measure(run, self.graph, sizes, threads)
        if like is not None:
            found = self.estimated(like, sizes)
        else:
            found = self.measured(sizes, progress, is_brief=is_brief, is_fresh=is_fresh)
        return ProfiledRun(run, self.machines.cluster, self.graph, found)

    def with_profile(self, file: Path) -> ProfiledRun:
        """The run with the profile in a file, which must be of its model."""
        found = load_profile(file)
        check_profile_fits(found, self.graph)
        check_same_optimizer(self.run, found, file)
        return ProfiledRun(self.run, self.machines.cluster, self.graph, found)

    def estimated(self, like: str, sizes: Sequence[int], *, halves: bool = True) -> Profile:
        """What the model costs on a device that is described, by its name or file."""
        return profile(
            self.model.training.graph,
            device_named(like),
            sizes,
            examples=self.model.source.example_inputs,
            optimizer=self.run.training.optimizer,
            halves=halves,
        )

    def measured(
        self,
        sizes: Sequence[int],
        progress: Progress,
        *,
        halves: bool = True,
        is_brief: bool = False,
        is_fresh: bool = False,
    ) -> Profile:
        """What the model and the codecs cost on a device of this machine, with as many threads as a process
        of the run has. On a processor the model is measured in as many processes at once as the run has.
        """
        run, machines, before = self.run, self.machines, torch.get_num_threads()
        measurer = None
        if machines.threads is not None:
            torch.set_num_threads(machines.threads)
            if machines.device == "cpu":
                measurer = ParallelMeasurer(
                    run,
                    # Those of the largest machine: they share what this one has, for all we know.
                    num_workers=max(len(one.devices) for one in machines.cluster.servers),
                    num_threads=machines.threads,
                    num_cores=num_cores(),
                )
        try:
            found = profile(
                self.model.training.graph,
                torch_device(machines.device),
                sizes,
                examples=self.model.source.example_inputs,
                optimizer=run.training.optimizer,
                halves=halves,
                effort=BRIEF if is_brief else None,
                use_cache=not is_fresh,
                progress=progress,
                measurer=measurer,
            )
        finally:
            torch.set_num_threads(before)
        request = plan_request_of(run, sums_of(run, self.graph), self.graph)
        tried = [*map(parse_sum_codec, SUMS_TO_TRY)] if run.sync.codec == AUTO else [request.sums.codec]
        sums = [] if request.width == 1 else [one for one in tried if one != DENSE]
        if not request.codec_words and not sums:
            return found
        return with_codec_rates(
            found,
            request.codec_words,
            request.value_bytes,
            torch_device(machines.device),
            sums=sums,
            use_cache=not is_fresh,
        )


# Profiling under the load of training: as many processes at once, of the same kind.
#
# A core is slower while its neighbors compute, and a process that trains is not the one that plans: it has a
# watch, a store, threads of its own. So the units of a model are timed in processes that `launch` starts as
# it starts those of the run, all at once; but never more than there are cores for, since ranks that share
# cores are the simulator's business. The same processes find out what the engine takes for an instruction and
# a message, and what a process holds before it has a tensor of the model.

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
        self._cores_short = num_cores if num_workers * num_threads > num_cores else 0
        """The cores, if the run wants more of them than there are."""
        self._counts_threads = num_threads == 1 < num_workers and num_workers >= num_cores
        """Whether threads beside the ranks take cores from them. Processor time does not tell them from those
        of operators with several threads, which leave gaps for them.
        """

    @property
    def circumstances(self) -> tuple[object, ...]:
        """How many compute at once, whether there will be messages, cores that are too few, and the samples
        that are read for a batch if that takes the cores of ranks.
        """
        read = self._run.training.batch_size if self._counts_threads else 0
        return "companions", self._at_once, min(self._num_workers, 2), self._cores_short, read

    def __call__(self, job: MeasuringJob, progress: Progress) -> Measured:
        """Do a job."""
        size = max(self._at_once, min(self._num_workers, 2))
        progress(0.0, f"starting {size} processes to measure")
        own = (device_here(job.device), versions_here(), self._num_threads, size, job.optimizer)
        shared = [one for unit in job.first.units for one in job.first.tied(unit, job.optimizer)]
        is_tied = any(one.gradient_bytes for one in shared)
        kept = cache_path([*own, *self.circumstances, _rounded(job.message_bytes), is_tied], "engines")
        known = cached_figures(kept, EngineCost)
        with scratch_folder() as folder, _followed(Path(folder, "progress"), progress) as path:
            found = launch(
                _measure,
                size,
                self._run,
                job,
                self._at_once,
                self._counts_threads,
                known or lopsided_graph(size, is_tied=is_tied),
                path,
                timeout_s=self._run.cluster.timeout_s,
                threads_per_process=self._num_threads,
            )
        there = [one for one in found if one is not None]
        measured = mean_of([one.measured for one in there])
        if known is None and measured.engine is not None and self._cores_short:
            share, most_s = wake_costs(self._cores_short)
            engine = replace(measured.engine, wake_share=share, wake_s=most_s)
            measured = replace(measured, engine=engine)
        if known is None and measured.engine is not None and all(one.was_quiet for one in there):
            keep(kept, asdict(measured.engine))
        return measured


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
    world: World,
    run: RunFile,
    job: MeasuringJob,
    at_once: int,
    counts_threads: bool,
    engine: EngineCost | Graph,
    path: Path,
) -> _Found | None:
    """Measure as one of several; None from a process that there is no core for.

    What is known of the engine is not measured again; else `engine` is a lopsided model to find it out with.
    The memory of a process is: it is what this one has at its end, when it has run the engine and all units
    and has given their tensors back.
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
    costs = engine if isinstance(engine, EngineCost) else NO_ENGINE
    if isinstance(engine, Graph) and world.size > 1:
        with _reading(run, data if counts_threads else None) as reads:
            size = _rounded(job.message_bytes)
            costs = message_costs(world, engine, size, reads, counts_threads=counts_threads)
    was_quiet = waited_s() - waited_before_s < _QUIET_SHARE * (perf_counter() - began_s)
    if world.rank >= at_once:
        return None
    control = Control()
    seconds = measure_units(job, lambda done, what: tell(_UNITS_SHARE * done, what), in_turns=control.time)
    tell(_UNITS_SHARE, "measuring the end of a batch")
    first = job.first
    alone = BatchEndTimes(costs.reduce_s, costs.update_s, costs.trial_s)
    if isinstance(engine, Graph):
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


@contextmanager
def _reading(run: RunFile, data: RunData | None) -> Iterator[Iterator[object]]:
    """Batches that are read as ranks of the run read them. It gives None for each if other processes make
    them or they come from a network: that takes no core of a rank.
    """
    known = data.training if data is not None and not run.data.private else None
    if data is None or known is None or not (known.is_quick and known.is_columnar):
        yield repeat(None)
        return
    # No more ahead than settling batches take: what is read beside others counts for them.
    size, ahead = max(run.training.batch_size // (run.plan.width or 1), 1), min(run.data.prefetch, 2)
    with RankBatches(known, data.order(run.data.seed), size, prefetch=ahead) as batches:
        yield iter(batches)


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
