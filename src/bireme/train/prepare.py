"""What is done before any process starts: check, measure, plan, and write it into the folder of the run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bireme.cluster.cluster_file import save_cluster
from bireme.cluster.machine import num_cores
from bireme.devices import num_accelerators
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.model.units import units_of
from bireme.plan.forecast import Answer
from bireme.plan.hashes import check_plan_fits, planned_units
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import start_of
from bireme.plan.plan_file import SavedPlan, load_plan, saved_plan, write_plan
from bireme.plan.search.search import find_plan
from bireme.plan.wishes import Goal, Wishes
from bireme.profile.here import torch_device
from bireme.profile.profile import Profile
from bireme.profile.profile_file import load_profile, save_profile
from bireme.profile.profiler import profile
from bireme.schedule.rule import Rule
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.companions import Companions
from bireme.train.data.checks import check_sizes
from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RunData
from bireme.train.folder import RunFolder
from bireme.train.going_on import check_goes_on
from bireme.train.machines import Machines, machines_of
from bireme.train.model import RunModel
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile, load_run_file, to_toml
from bireme.train.tracker import check_trackers

__all__ = ["Prepared", "data_of", "prepare", "prepared_again", "wishes_of", "write_prepared"]

LARGEST_MEASURED = 16
"""Samples of the largest micro-batch that is measured unless one is asked for."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start. `answer` and `profile` are None where the plan came from a file."""

    run: RunFile
    machines: Machines
    graph: Graph
    evaluation: Graph
    plan: SavedPlan
    answer: Answer | None
    profile: Profile | None
    data: RunData


def prepare(run: RunFile, progress: Progress) -> Prepared:
    """Make a run ready; every mistake that can be known before it starts is a `BiremeError`."""
    check_trackers(run.log.trackers)
    progress(0.0, "loading the model")
    machines = machines_of(run, num_cuda=num_accelerators(), num_cores=num_cores())
    _check_devices(run, machines)
    sizes = _micro_batches(run)
    model = RunModel.of(run, max(sizes))
    data = data_of(run, model, progress)
    progress(0.0, "capturing the model")
    graph = model.training.graph(sizes[0])
    model.check_loss(graph)
    _check_samples(data, graph)
    evaluation = model.evaluation.graph(sizes[0])
    model.check_documents(graph, evaluation)
    model.check_weights(graph)
    measured, answer = None, None
    if run.plan.file is not None:
        plan = _of_file(Path(run.plan.file), graph, machines)
    else:
        measured = _measured(run, model, machines, sizes, progress)
        answer = _planned(run, measured, machines, progress)
        plan = saved_plan(answer, planned_units(measured))
    return Prepared(run, machines, graph, evaluation, plan, answer, measured, data)


def prepared_again(
    run: RunFile, folder: RunFolder, progress: Progress, checkpoint: Checkpoint | None = None
) -> Prepared:
    """A run that was begun, ready to go on from a checkpoint: with its own plan, unless what that rests on
    was changed.
    """
    check_trackers(run.log.trackers)
    before = load_run_file(folder.run_file)
    if run == before or _rests_on(run) == _rests_on(before):
        progress(0.0, "reading the run")
        machines = machines_of(run, num_cuda=num_accelerators(), num_cores=num_cores())
        measured = load_profile(folder.profile) if folder.profile.is_file() else None
        graph, evaluation = load_graph(folder.graph), load_graph(folder.evaluation_graph)
        data = data_of(run, RunModel.of(run, 1), progress)
        _check_samples(data, graph)
        found = Prepared(run, machines, graph, evaluation, load_plan(folder.plan), None, measured, data)
    else:
        found = prepare(run, progress)
    if checkpoint is not None:
        check_goes_on(checkpoint, run, found.graph, found.data)
    write_prepared(found, folder)
    return found


def _rests_on(run: RunFile) -> tuple[object, ...]:
    """What a plan is made from."""
    return run.model, run.data.length, run.training.batch_size, run.training.optimizer, run.plan, run.cluster


def write_prepared(prepared: Prepared, folder: RunFolder) -> None:
    """Write what the processes of a run read, and what people may want to look up."""
    write_text_atomically(folder.run_file, to_toml(prepared.run))
    write_plan(folder.plan, prepared.plan)
    save_graph(prepared.graph, folder.graph)
    save_graph(prepared.evaluation, folder.evaluation_graph)
    save_cluster(prepared.machines.cluster, folder.cluster)
    if prepared.profile is not None:
        save_profile(prepared.profile, folder.profile)


def _check_devices(run: RunFile, machines: Machines) -> None:
    """A plan for more devices than there are is refused before anything is measured."""
    needed, num_devices = (run.plan.depth or 1) * (run.plan.width or 1), machines.cluster.num_devices
    if needed > num_devices:
        remedy = "Plan for fewer devices, or name a larger cluster."
        if run.cluster.source is None:
            remedy = f"Set cluster.workers to {needed}, or plan for fewer devices."
        raise BiremeError(
            f"plan.depth times plan.width is {needed}, and the run has {num_devices} devices: each of them "
            f"is a process. {remedy}"
        )


def _check_samples(data: RunData, graph: Graph) -> None:
    """Samples that the captured model cannot take are found here, and not by a rank."""
    for what, samples in (("training", data.training), ("evaluation", data.evaluation)):
        for one in () if samples is None else sources_of(samples).values():
            check_sizes(one, graph.inputs, what, is_text=data.is_text)


def _of_file(path: Path, graph: Graph, machines: Machines) -> SavedPlan:
    """A plan that somebody made, which must be one for this model and no more devices than there are."""
    found, units = load_plan(path), units_of(graph)
    if found.origin is not None:
        check_plan_fits(found.origin, graph, found.units)
    for stage in range(found.plan.num_stages):
        found.plan.units_of(stage, len(units))
    num_ranks, num_devices = found.plan.num_ranks, machines.cluster.num_devices
    if num_ranks > num_devices:
        raise BiremeError(
            f"The plan in {path} is for {num_ranks} devices, and the run has {num_devices}. Set "
            f"cluster.workers to {num_ranks}, or name the cluster that it was made for in cluster.source."
        )
    return found


def _micro_batches(run: RunFile) -> list[int]:
    """The sizes of micro-batches that a plan of this run may have."""
    batch, asked = run.training.batch_size, run.plan
    if asked.micro_batch is not None:
        return [asked.micro_batch]
    if asked.microbatches is not None:
        widths = [asked.width] if asked.width is not None else range(1, batch // asked.microbatches + 1)
        sizes = {batch // (width * asked.microbatches) for width in widths if _divides(width, run)}
        return sorted(sizes)[-4:] or [1]
    most = min(LARGEST_MEASURED, batch)
    return [size for power in range(most.bit_length()) if batch % (size := 1 << power) == 0]


def _divides(width: int, run: RunFile) -> bool:
    assert run.plan.microbatches is not None
    return run.training.batch_size % (width * run.plan.microbatches) == 0


def _measured(
    run: RunFile, model: RunModel, machines: Machines, sizes: list[int], progress: Progress
) -> Profile:
    """What the model costs on a device of this machine, with as many threads as a process will have.

    On a processor it is measured in as many processes at once as there will be.
    """
    before = torch.get_num_threads()
    measurer = None
    if machines.threads is not None:
        torch.set_num_threads(machines.threads)
        if machines.device == "cpu":
            measurer = Companions(
                run,
                num_workers=machines.workers_here,
                num_threads=machines.threads,
                num_cores=num_cores(),
            )
    try:
        return profile(
            model.training.graph,
            torch_device(machines.device),
            sizes,
            examples=model.source.example_inputs,
            optimizer=run.training.optimizer,
            halves=True,
            progress=progress,
            measurer=measurer,
        )
    finally:
        torch.set_num_threads(before)


def wishes_of(run: RunFile) -> Wishes:
    """What a run file asks of a plan."""
    asked = run.plan
    penalties = {Rule.DELAYED: asked.penalties.delayed, Rule.FRESH: asked.penalties.fresh}
    return Wishes(
        batch_size=run.training.batch_size,
        schedule=asked.schedule,
        synchronous=asked.synchronous,
        goal=Goal(asked.objective),
        penalties={rule: steps for rule, steps in penalties.items() if steps is not None},
        start=_start(run),
        depth=asked.depth,
        width=asked.width,
        micro_batch=asked.micro_batch,
        recompute=Recompute(asked.recompute.replace("-", " ")),
        lookahead=asked.lookahead,
    )


def _start(run: RunFile) -> float | None:
    """The share of the run without delayed updates; None leaves it to what a plan does by itself."""
    steps = run.training.steps
    asked = run.plan.num_delay_warmup_steps(steps)
    if asked is not None:
        return asked / steps
    return start_of(steps, run.training.num_warmup_steps) if run.plan.schedule == "auto" else None


def _planned(run: RunFile, measured: Profile, machines: Machines, progress: Progress) -> Answer:
    wishes = wishes_of(run)
    if run.plan.depth is None and run.plan.width is None and run.cluster.source is None:
        # On this machine alone a run shows the pipeline; who wants replicas says so.
        wishes = replace(wishes, depth=min(machines.cluster.num_devices, len(measured.units)))
    found = find_plan(measured, machines.cluster, wishes, progress=lambda done: progress(done, "planning"))
    if not isinstance(found, Answer):
        raise BiremeError(str(found))
    return found
