"""The plan of a run: its model is captured and measured, and the planner searches.

`bireme train` trains by this plan, and `bireme plan`, `profile` and `simulate` show it and what it is made
from.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import device_named
from bireme.cluster.machine import num_cores
from bireme.codec.sum_description import DENSE
from bireme.devices import num_accelerators
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.forecast import Answer
from bireme.plan.plan import check_servers
from bireme.plan.plan_file import check_profile_fits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import timeline_of
from bireme.profile.codec_timing import with_codec_rates
from bireme.profile.control import torch_device
from bireme.profile.profile import Profile, load_profile
from bireme.profile.profiler import profile
from bireme.profile.timing import BRIEF
from bireme.report.plan_document import plan_document, plan_notes, sync_document
from bireme.timeline.timeline import Timeline
from bireme.train.link_codecs import (
    check_boundaries,
    check_gradient,
    gradient_document,
    sums_of,
    sums_of_profile,
    with_kept_gradients,
)
from bireme.train.machines import Machines, machines_of, with_tiers_here
from bireme.train.model import RunModel
from bireme.train.parallel_profiling import ParallelMeasurer
from bireme.train.plan_search import full_request_of, is_short, plan_request_of, planned
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile

Progress = Callable[[float, str], None]

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


# Mistakes of a run that are found before its model is measured: in its devices and its depth.


def planning_machines(run: RunFile, *, computes: bool = True) -> Machines:
    """The machines of a run with what offloading needs; plans for more devices than there are are refused.

    `computes` is as for `machines_of`.
    """
    found = machines_of(run, num_cuda=num_accelerators(), num_cores=num_cores(), computes=computes)
    found = with_tiers_here(run, found)
    _check_devices(run, found.cluster)
    return found


def _check_devices(run: RunFile, cluster: Cluster) -> None:
    check_servers(run.data.private or (), cluster)
    needed, num_devices = (run.plan.depth or 1) * (run.plan.width or 1), cluster.num_devices
    for name in run.plan.devices or ():
        cluster.number_of(name)
    if needed > num_devices:
        remedy = "Plan for fewer devices, or name a larger cluster."
        if run.cluster.source is None:
            remedy = f"Set cluster.workers to {needed}, or plan for fewer devices."
        raise BiremeError(
            f"plan.depth times plan.width is {needed}, but the run has {num_devices} devices: each of them "
            f"is a process. {remedy}"
        )


def _check_depth(run: RunFile, num_units: int) -> None:
    depth = run.plan.depth or 1
    if depth > num_units:
        raise BiremeError(
            f"plan.depth is {depth}, but the model has {num_units} units, and each stage needs one. Set "
            f"plan.depth to {num_units} or less."
        )


# A run whose model is captured, then measured.


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
        machines = planning_machines(run, computes=False)
        progress(0.0, "loading the model")
        sizes = micro_batches(run)
        model = RunModel.of(run, max(sizes))
        if measures:
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
        self, progress: Progress, *, like: str | None = None, is_fresh: bool = False
    ) -> "ProfiledRun":
        """The run with a profile: estimated for a device `like` another one, or else measured here.

        A run that ends soon is measured briefly. With `is_fresh` no earlier measurement counts.
        """
        run, sizes, is_brief = self.run, micro_batches(self.run), is_short(self.run, self.graph)
        _check_depth(run, len(units_of(self.graph)))
        if is_brief and run.plan.micro_batch is None and run.plan.microbatches is None:
            sizes = sizes[::-2]
        if like is not None:
            found = self.estimated(like, sizes)
        else:
            found = self.measured(sizes, progress, is_brief=is_brief, is_fresh=is_fresh)
        return ProfiledRun(run, self.machines, self.graph, found)

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
        request = plan_request_of(run, sums_of(run, self.graph))
        sums = DENSE if request.width == 1 else request.sums.codec
        if not request.codec_words and sums == DENSE:
            return found
        return with_codec_rates(
            found,
            request.codec_words,
            request.value_bytes,
            torch_device(machines.device),
            sums=sums,
            use_cache=not is_fresh,
        )


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A run with its machines and the profile of its model; `graph` is None if the run names no model."""

    run: RunFile
    machines: Machines
    graph: Graph | None
    profile: Profile

    @classmethod
    def of(
        cls,
        run: RunFile,
        progress: Progress,
        *,
        file: Path | None = None,
        like: str | None = None,
        is_fresh: bool = False,
    ) -> "ProfiledRun":
        """The run with the profile in a file, with one that is estimated for a device `like` another, or else
        with one that is measured here as `bireme train` does.

        The file must be of the run's model. If the run names none, it is the model's.
        """
        if run.plan.file is not None:
            raise BiremeError(
                f"plan.file is {run.plan.file}, which is a plan already. Leave it out to search for one: "
                "--set plan.file="
            )
        if file is not None and not names_model(run):
            found = load_profile(file)
            _check_same_optimizer(run, found, file)
            return cls(run, planning_machines(run, computes=False), None, found)
        captured = CapturedRun.of(run, progress, measures=file is None and like is None)
        if file is None:
            return captured.profiled(progress, like=like, is_fresh=is_fresh)
        found = load_profile(file)
        check_profile_fits(found, captured.graph)
        _check_same_optimizer(run, found, file)
        return cls(run, captured.machines, captured.graph, found)

    def planned(self, progress: Progress) -> "PlannedRun":
        """The run with the plans that a search finds; a `BiremeError` if none fits."""
        run, graph, found = self.run, self.graph, self.profile
        _check_depth(run, len(found.units))
        if graph is not None:
            found = with_kept_gradients(run, graph, found)
        sums = sums_of_profile(run, found) if graph is None else sums_of(run, graph)
        request = full_request_of(run, sums, [unit.name for unit in found.units], self.machines.cluster)
        is_brief = graph is not None and is_short(run, graph)
        begin_s = perf_counter()
        answer = planned(found, self.machines.cluster, request, progress, is_brief=is_brief)
        planning_s = perf_counter() - begin_s
        check_boundaries(run, answer.best.plan)
        return PlannedRun(run, self.machines, graph, found, request, answer, planning_s)


def names_model(run: RunFile) -> bool:
    """Whether a run file names its model, and does not leave it to the demonstration."""
    return "source" in run.model.model_fields_set


def _check_same_optimizer(run: RunFile, found: Profile, file: Path) -> None:
    asked = run.training
    if asked.optimizer != found.optimizer and (names_model(run) or "optimizer" in asked.model_fields_set):
        raise BiremeError(
            f"training.optimizer is {asked.optimizer}, but the profile {file} was made with "
            f"{found.optimizer}. Set training.optimizer to that, or make another profile with bireme profile."
        )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with the plans that a search found, and what was asked of them."""

    run: RunFile
    machines: Machines
    graph: Graph | None
    profile: Profile
    request: PlanRequest
    answer: Answer
    planning_s: float

    def timeline(self, num_batches: int) -> Timeline:
        """The first batches under the best plan, by the simulator: of the slowest replica."""
        best = self.answer.best.plan
        return timeline_of(best, self.profile, self.machines.cluster, self.request, num_batches=num_batches)

    def document(self) -> dict[str, Any]:
        """The document of `bireme plan --json` and of a dry run."""
        return {
            **plan_document(self.answer, self.profile, self.planning_s),
            "sync": sync_document(self.request),
            "notes": plan_notes(self.profile, self.machines.cluster),
            "exports": {},
            **({} if self.graph is None else gradient_document(self.run, self.graph)),
        }
