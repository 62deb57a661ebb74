"""Preparation before any process starts: check, measure, plan, and write the run's folder."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bireme.cluster.cluster_file import read_cluster, save_cluster
from bireme.cluster.machine import num_cores
from bireme.codec.sum_words import DENSE
from bireme.devices import num_accelerators
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash, load_graph, save_graph
from bireme.model.units import units_of
from bireme.plan.forecast import Answer
from bireme.plan.hashes import check_plan_fits, planned_units
from bireme.plan.homes import check_homes
from bireme.plan.plan_file import SavedPlan, load_plan, saved_plan, write_plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.summary import summarize
from bireme.plan.window_file import write_windows
from bireme.profile.codec_timing import with_codec_rates
from bireme.profile.here import torch_device
from bireme.profile.profile import Profile
from bireme.profile.profile_file import load_profile, save_profile
from bireme.profile.profiler import profile
from bireme.profile.timing import BRIEF, Effort
from bireme.report.plan_document import plan_document, plan_notes, saved_plan_document, sync_document
from bireme.train.base_weights import has_base, keep_base
from bireme.train.capturing import evaluation_beside
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.checkpoint.manifest import RECORD
from bireme.train.chosen_batch import chooses_batch, with_batch, with_batch_of
from bireme.train.data.prepare import RunData
from bireme.train.delay_warmup import plans_of
from bireme.train.early_checks import check_depth, check_devices, check_samples
from bireme.train.folder import RunFolder
from bireme.train.home_data import readers_of
from bireme.train.initial_weights import InitialWeights, remove_initial
from bireme.train.kept_gradients import check_gradient, check_schedule, gradient_document, with_kept_gradients
from bireme.train.link_codecs import check_borders, tell_changed_codecs, with_own_codecs
from bireme.train.machines import Machines, machines_of
from bireme.train.micro_batch_sizes import micro_batches
from bireme.train.model import RunModel
from bireme.train.parallel_profiling import ParallelMeasurer
from bireme.train.plan_search import plan_request_of, planned
from bireme.train.private_census import Census, census_of, check_same_census, load_census, write_census
from bireme.train.recorded_batches import is_recorded
from bireme.train.replica_checks import check_paged, check_replicas, check_tied
from bireme.train.resume_checks import check_same_run
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile, with_model_defaults
from bireme.train.run_file.links import AUTO
from bireme.train.run_length import is_short
from bireme.train.same_data import DataIdentity, data_identity, write_identity
from bireme.train.samples_left import check_none_left
from bireme.train.shares import sharing_of
from bireme.train.tiers_here import check_paging_disk, with_tiers_here
from bireme.train.tracker import check_trackers

__all__ = [
    "PreparedRun",
    "prepare",
    "prepared_again",
    "prepared_before",
    "prepared_document",
    "write_prepared",
    "written_paths",
]


Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start. `answer`, `profile` and the seconds of planning are None where the plan
    came from a file. `census` counts the private samples, as far as they are known here. `initial` are the
    weights that a function of the user makes, for a run that does not resume from a checkpoint.
    """

    run: RunFile
    machines: Machines
    graph: Graph
    evaluation: Graph
    plan: SavedPlan
    answer: Answer | None
    profile: Profile | None
    data: RunData
    identity: DataIdentity
    planning_s: float | None = None
    census: Census = field(default_factory=dict)
    initial: InitialWeights | None = None

    def __post_init__(self) -> None:  # refuses replicas and shares that cannot be
        check_paged(self.run, self.plan.plan)
        check_replicas(self.run, self.plan.plan, self.data.training)
        check_tied(self.run, self.plan.plan, self.graph)
        sharing_of(self.run, self.plan, self.machines.cluster, self.profile, self.data.training)
        check_schedule(self.run, self.plan.plan)


def prepare(run: RunFile, progress: Progress, *, is_alone: bool = True, begins: bool = True) -> PreparedRun:
    """Make a run ready; every mistake that can be known before it starts is a `BiremeError`.

    With `is_alone` all servers are this machine, which reads their private samples too. A run that `begins`
    has no checkpoint, and needs the weights that a function of the user makes.
    """
    check_trackers(run.log.trackers)
    run = with_model_defaults(run)  # a run file made in Python has not got them yet
    given = None if run.plan.file is None else load_plan(Path(run.plan.file))
    progress(0.0, "loading the model")
    machines = with_tiers_here(run, _machines(run))
    check_devices(run, machines)
    sizes = micro_batches(run)
    model = RunModel.of(run, max(sizes))
    with evaluation_beside(model, max(sizes), sizes[0]) as evaluation_of:
        data = data_of(run, model, progress)
        progress(0.0, "capturing the model")
        graph = model.training.graph(sizes[0])
        model.check_loss(graph)
        check_samples(data, graph)
        evaluation = evaluation_of(graph)
    check_gradient(run, graph)
    model.check_documents(graph, evaluation)
    model.check_weights(graph)
    initial = _initial(model, graph, progress) if begins else None
    owners = sorted(run.data.private or ())
    census = census_of(run, model, graph, data, owners if is_alone else ())
    if given is not None:
        plan = with_own_codecs(_checked(given, f"{run.plan.file}", graph, machines), run)
        check_homes(plan.plan, machines.cluster, readers_of(graph), owners)
        check_paging_disk(run, plan.plan)
        identity = data_identity(run, data)
        known = data, identity, None, census, initial
        return PreparedRun(run, machines, graph, evaluation, plan, None, None, *known)
    check_depth(run, graph)
    is_brief = is_short(run, graph)
    if is_brief and run.plan.micro_batch is None and run.plan.microbatches is None:
        sizes = sizes[::-2]
    found = _measured(run, model, machines, sizes, progress, is_brief=is_brief)
    measured = _with_codecs(with_kept_gradients(run, graph, found), plan_request_of(run, graph), machines)
    begin_s = perf_counter()
    answer = planned(run, graph, measured, machines, progress, is_brief=is_brief)
    planning_s = perf_counter() - begin_s
    plan = saved_plan(answer, planned_units(measured))
    check_borders(run, plan.plan)
    if run.plan.largest_batch is not None:
        run = with_batch(run, summarize(answer.best).batch_size)
        data = data_of(run, model, progress)
    identity = data_identity(run, data)
    last = identity, planning_s, census, initial
    return PreparedRun(run, machines, graph, evaluation, plan, answer, measured, data, *last)


def _initial(model: RunModel, graph: Graph, progress: Progress) -> InitialWeights | None:
    """The weights that a function of the user makes; None if they come from elsewhere."""
    if model.is_made:
        progress(0.0, "making the model's weights")
    return model.initial_weights(graph)


def prepared_again(
    run: RunFile,
    folder: RunFolder,
    progress: Progress,
    checkpoint: Checkpoint | None,
    tell: Callable[[str], None],
    *,
    is_alone: bool = True,
) -> PreparedRun:
    """A run that was begun, ready to go on from a checkpoint: with its own plan, unless what that rests on
    was changed. `tell` is for sentences to people; `is_alone` is as for `prepare`.
    """
    check_trackers(run.log.trackers)
    if chooses_batch(run):  # a launcher that starts a run again gives the file it began with
        run = with_batch_of(run, folder.load_run())
    progress(0.0, "reading the run")
    if _keeps_plan(run, folder):
        found = prepared_before(run, folder, progress, is_alone=is_alone, begins=checkpoint is None)
    else:
        tell("What the plan was made from has changed, so a new one is made.")
        found = prepare(run, progress, is_alone=is_alone, begins=checkpoint is None)
    check_borders(run, found.plan.plan)
    if checkpoint is not None:
        if is_alone:
            check_same_census(load_census(folder.private), found.census, str(folder.path), tell)
        check_none_left(run, folder, checkpoint.manifest.step)
        tell_changed_codecs(run, found.plan.plan, folder, tell)
        check_same_run(checkpoint, folder, run, found.graph, found.data, found.identity, tell)
    write_prepared(found, folder, checkpoint)
    return found


def prepared_before(
    run: RunFile, folder: RunFolder, progress: Progress, *, is_alone: bool = True, begins: bool = False
) -> PreparedRun:
    """A run that was begun, as what its folder holds says it was prepared. `begins` is as for `prepare`."""
    machines = _machines(run)
    measured = load_profile(folder.profile) if folder.profile.is_file() else None
    graph, evaluation = load_graph(folder.graph), load_graph(folder.evaluation_graph)
    model, plan = RunModel.of(run, 1), load_plan(folder.plan)
    check_paging_disk(run, plan.plan)
    if plan.plan.paging is not None:  # with the speeds that it was planned with
        machines = replace(machines, cluster=read_cluster(folder.cluster))
    data = data_of(run, model, progress)
    check_samples(data, graph)
    census = census_of(run, model, graph, data, sorted(run.data.private or ()) if is_alone else ())
    identity = data_identity(run, data)
    initial = _initial(model, graph, progress) if begins else None
    known = data, identity, None, census, initial
    return PreparedRun(run, machines, graph, evaluation, plan, None, measured, *known)


def _keeps_plan(run: RunFile, folder: RunFolder) -> bool:
    """Whether the plan in a run's folder is still one for the run: nothing that it was made from changed."""
    before = folder.load_run()
    if run == before:
        return True
    return (
        _planned_from(run) == _planned_from(before)
        and _has_same_devices(run, before, folder)
        and _has_same_model(run, before, folder)
    )


def _planned_from(run: RunFile) -> tuple[object, ...]:
    """What a plan is made from, but for the model and the devices."""
    return (
        run.plan,
        run.model.dtype,
        run.model.loss,
        run.data.length,
        sorted(run.data.private or ()),
        run.training.batch_size,
        run.training.optimizer,
        run.training.gradient_form,
        run.links.codec == AUTO,
        run.memory.model_copy(update={"disk": bool(run.memory.disk)}),
    )


def _has_same_devices(run: RunFile, before: RunFile, folder: RunFolder) -> bool:
    """Whether a run has the devices that it had, however they are written."""
    timeless = {"timeout_s": before.cluster.timeout_s}
    if run.cluster.model_copy(update=timeless) == before.cluster:
        return True
    found, known = _machines(run), read_cluster(folder.cluster)
    try:
        old = _machines(before)
    except BiremeError:
        return False  # what it had is not there any more
    is_same = found.cluster == known
    if run.cluster.source is None and before.cluster.source is None:
        is_same = found.cluster.num_devices == known.num_devices
    return is_same and (found.device, found.backend, found.threads) == (old.device, old.backend, old.threads)


def _has_same_model(run: RunFile, before: RunFile, folder: RunFolder) -> bool:
    """Whether a model that is named otherwise, as after it was moved, is the one that was planned for."""
    if run.model.source == before.model.source:
        return True
    known = load_graph(folder.graph)
    found = RunModel.of(run, known.batch).training.graph(known.batch)
    return graph_hash(found) == graph_hash(known)


def _machines(run: RunFile) -> Machines:
    return machines_of(run, num_cuda=num_accelerators(), num_cores=num_cores())


def write_prepared(prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None = None) -> None:
    """Write what the processes of a run read, and what people may want to look up; then the record of it."""
    if prepared.initial is not None:
        prepared.initial.write(folder.initial)
    elif checkpoint is not None:
        remove_initial(folder.initial)
    keep_base(folder.base, prepared.run, None if checkpoint is None else checkpoint.manifest)
    folder.write_run(prepared.run)
    write_windows(folder.windows, plans_of(prepared.run, prepared.plan))
    write_plan(folder.plan, prepared.plan)
    save_graph(prepared.graph, folder.graph)
    save_graph(prepared.evaluation, folder.evaluation_graph)
    save_cluster(prepared.machines.cluster, folder.cluster)
    write_identity(folder.data, prepared.identity)
    write_census(folder.private, prepared.census)
    if prepared.profile is not None:
        save_profile(prepared.profile, folder.profile)
    folder.record()


def written_paths(prepared: PreparedRun, folder: RunFolder) -> list[Path]:
    """What a new run leaves in its folder, as far as that is known before it begins."""
    run, log, is_planned = prepared.run, prepared.run.log, prepared.profile is not None
    saves = bool(run.checkpoint.every_steps or run.checkpoint.every_s or run.checkpoint.at_end)
    known = {
        folder.run_file: True,
        folder.plan: True,
        folder.windows: any(plan.paging is not None for plan in plans_of(run, prepared.plan)),
        folder.profile: is_planned,
        folder.cluster: True,
        folder.graph: True,
        folder.evaluation_graph: True,
        folder.data: True,
        folder.base: has_base(run),
        folder.private: bool(prepared.census),
        folder.path / RECORD: True,
        folder.metrics: True,
        folder.ledger: run.sync.mode != "all",
        folder.path / "tensorboard": log.tensorboard,
        folder.path / "wandb": log.wandb,
        folder.predicted_timeline: is_planned,
        folder.measured_timeline: is_recorded(run, prepared.plan),
        folder.checkpoints(run): saves,
        folder.model: saves and run.export.at_end,
        folder.summary: True,
    }
    return [path for path, is_written in known.items() if is_written]


def prepared_document(prepared: PreparedRun) -> dict[str, Any]:
    """The plan of a run in the words of `bireme plan --json`."""
    sync = sync_document(plan_request_of(prepared.run, prepared.graph))
    kept = gradient_document(prepared.run, prepared.graph)
    if prepared.answer is None or prepared.profile is None or prepared.planning_s is None:
        names = [unit.name for unit in units_of(prepared.graph)]
        run = prepared.run
        found = saved_plan_document(run.model.source, prepared.plan, names, run.training.batch_size)
        return found | {"sync": sync, "notes": [], "exports": {}} | kept
    found = plan_document(prepared.answer, prepared.profile, prepared.planning_s)
    notes = plan_notes(prepared.profile, prepared.machines.cluster)
    return found | {"sync": sync, "notes": notes, "exports": {}} | kept


def _checked(found: SavedPlan, path: str, graph: Graph, machines: Machines) -> SavedPlan:
    """A plan from a file, which must be one for this model and no more devices than there are."""
    units = units_of(graph)
    if found.origin is not None:
        check_plan_fits(found.origin, graph, found.units)
    for stage in range(found.plan.num_stages):
        found.plan.units_of(stage, len(units))
    num_ranks, num_devices = found.plan.num_ranks, machines.cluster.num_devices
    if num_ranks > num_devices:
        raise BiremeError(
            f"The plan in {path} is for {num_ranks} devices, but the run has {num_devices}. Set "
            f"cluster.workers to {num_ranks}, or set cluster.source to the cluster it was made for."
        )
    return found


def _with_codecs(measured: Profile, request: PlanRequest, machines: Machines) -> Profile:
    """With what the codecs of the run take on a device of this machine."""
    sums = DENSE if request.width == 1 else request.sums.codec
    if not request.codec_words and sums == DENSE:
        return measured
    device = torch_device(machines.device)
    return with_codec_rates(measured, request.codec_words, request.value_bytes, device, sums=sums)


def _measured(
    run: RunFile,
    model: RunModel,
    machines: Machines,
    sizes: list[int],
    progress: Progress,
    *,
    is_brief: bool,
) -> Profile:
    """What the model costs on a device of this machine, with as many threads as a process will have.

    On a processor it is measured in as many processes at once as there will be.
    """
    before = torch.get_num_threads()
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
        return profile(
            model.training.graph,
            torch_device(machines.device),
            sizes,
            examples=model.source.example_inputs,
            optimizer=run.training.optimizer,
            halves=True,
            effort=BRIEF if is_brief else Effort(),
            progress=progress,
            measurer=measurer,
        )
    finally:
        torch.set_num_threads(before)
