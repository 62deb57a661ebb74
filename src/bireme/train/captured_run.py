"""A run whose model is captured to be planned for, and what the model costs: measured here, or estimated.

`bireme train` measures so before it plans, and so do `bireme plan`, `profile` and `simulate`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from bireme.cluster.catalogue import device_named
from bireme.cluster.machine import num_cores
from bireme.codec.sum_description import DENSE, parse_sum_codec
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.penalties import SUMS_TO_TRY
from bireme.plan.plan_file import check_profile_fits
from bireme.profile.codec_timing import with_codec_rates
from bireme.profile.control import torch_device
from bireme.profile.profile import Profile, load_profile
from bireme.profile.profiler import profile
from bireme.profile.timing import BRIEF
from bireme.train.link_codecs import check_gradient, sums_of
from bireme.train.machines import Machines, planning_machines
from bireme.train.model import RunModel
from bireme.train.parallel_profiling import ParallelMeasurer
from bireme.train.plan_search import (
    ProfiledRun,
    Progress,
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
        sizes = {batch // (width * asked.microbatches) for width in widths if _divides(width, run)}
        return sorted(sizes)[-4:] or [1]
    largest = asked.largest_batch
    powers = [1 << power for power in range(min(_LARGEST_MEASURED, largest or batch).bit_length())]
    return powers if largest is not None else [size for size in powers if batch % size == 0]


def _divides(width: int, run: RunFile) -> bool:
    assert run.plan.microbatches is not None
    return run.training.batch_size % (width * run.plan.microbatches) == 0


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

    def profiled(self, progress: Progress, *, like: str | None = None, is_fresh: bool = False) -> ProfiledRun:
        """The run with a profile: estimated for a device `like` another one, or else measured here.

        A run that ends soon is measured briefly. With `is_fresh` no earlier measurement counts.
        """
        run, sizes, is_brief = self.run, micro_batches(self.run), is_short(self.run, self.graph)
        check_depth(run, len(units_of(self.graph)))
        if is_brief and run.plan.micro_batch is None and run.plan.microbatches is None:
            sizes = sizes[::-2]
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
                    num_workers=machines.workers_here,
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
