"""Preparation before any process starts: check, measure, plan, and write the run's folder."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bireme.capabilities import refuse_excluded, used_by
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash, read_cluster, save_cluster
from bireme.cluster.machine import available_bytes, num_cores
from bireme.errors import BiremeError, Progress, Tell
from bireme.files import scratch_folder
from bireme.model.capture import in_evaluation
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash, load_graph, save_graph
from bireme.model.units import units_of
from bireme.plan.forecast import Answer, summarize
from bireme.plan.plan import Plan, check_homes
from bireme.plan.plan_file import (
    SavedPlan,
    check_plan_fits,
    load_plan,
    planned_units,
    profile_hash,
    saved_plan,
    write_plan,
    write_windows,
)
from bireme.profile.profile import Profile, load_profile, save_profile
from bireme.report.plan_document import apart_note, saved_plan_document, sync_document
from bireme.runtime.layout import layout_of, used_by_plan
from bireme.runtime.processes import Process, has_server, start_process
from bireme.train.captured_run import CapturedRun, micro_batches
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.checkpoint.manifest import RECORD
from bireme.train.choices import (
    check_boundaries,
    check_gradient,
    gradient_document,
    sums_of,
    tell_changed_codecs,
    with_agreement,
    with_choices,
    with_choices_of,
    with_own_codecs,
)
from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RunData, check_sizes
from bireme.train.folder import RunFolder
from bireme.train.machines import Machines, check_paging_disk, machines_here, planning_machines
from bireme.train.model import InitialWeights, RunModel, remove_initial
from bireme.train.plan_search import (
    PlannedRun,
    ProfiledRun,
    check_devices,
    chooses_batch,
    fused_loss_note,
    is_recorded,
    plan_request_of,
    plans_of,
    with_batch,
    with_batch_of,
)
from bireme.train.resume_checks import (
    DataIdentity,
    base_folder,
    check_none_left,
    check_same_run,
    data_identity,
    keep_base,
    write_identity,
)
from bireme.train.run_data import (
    Census,
    census_of,
    check_same_census,
    counted,
    data_of,
    load_census,
    readers_of,
    with_length_of_data,
    write_census,
)
from bireme.train.run_file import RunFile, with_model_defaults
from bireme.train.run_file.checks import check_sites, value_of
from bireme.train.run_file.planning import AUTO
from bireme.train.run_log import check_trackers
from bireme.train.shares import sharing_of

# Mistakes of a run that are found before its model is measured: in its samples.


def _check_samples(data: RunData, graph: Graph) -> None:
    """Samples that the captured model cannot take are found here, and not by a rank."""
    for what, samples in (("training", data.training), ("evaluation", data.evaluation)):
        for one in () if samples is None else sources_of(samples).values():
            check_sizes(one, graph.inputs, what, is_text=data.is_text)


# The model of a run captured for evaluation, while the process that prepares the run does other work.
#
# Most models are the same program in training and in evaluation, and are captured once. The two captures of
# others take as long as each other and need nothing of each other: a copy of this process makes one of them,
# where the copy has a core. That is for the first model of a process: what torch prepares at its first
# capture the copy prepares too, and later captures here need it no more.

_LEAST_CORES = 2
"""With one the two captures would only take turns."""

_earlier = count()
"""How often this process has come to capture a model."""


@contextmanager
def evaluation_beside(model: RunModel, largest: int, batch: int) -> Iterator[Callable[[Graph], Graph]]:
    """Begin to capture the model in evaluation mode for `batch` samples, if it is another program then.

    Gives the way to have that graph from the one in training mode. `largest` are the samples of its example
    inputs. What goes wrong in the copy is tried here once more, so that errors are the model's own.
    """
    is_known = model.evaluation.knows(batch)
    dropouts = None if is_known else model.dropouts()
    if dropouts is not None:
        yield lambda graph: in_evaluation(graph, dropouts) or model.evaluation.graph(batch)
        return
    if is_known or next(_earlier) or not has_server() or num_cores() < _LEAST_CORES:
        yield lambda graph: model.evaluation.graph(batch)
        return
    process, talk = start_process("bireme capture", _capture, model.run, largest, batch)

    def found(graph: Graph) -> Graph:
        try:
            captured: Graph | None = talk.recv()
        except (EOFError, OSError):
            captured = None
        return captured or model.evaluation.graph(batch)

    with talk:
        try:
            yield found
        finally:
            process.close()


def _capture(talk: Connection, run: RunFile, largest: int, batch: int) -> None:
    torch.set_num_threads(1)
    try:
        found = RunModel.of(run, largest).evaluation.graph(batch)
    except Exception:  # the process that asked tries again, and finds out
        found = None
    talk.send(found)


# Whether the replicas of a run can go on without each other: known before anything starts.


def check_plan(run: RunFile, plan: Plan, graph: Graph) -> None:
    """Refuse a plan, as one from a file may be, that does not go with what the run asks for."""
    mode, program = run.sync.mode, plan.by_program
    if mode != "allreduce" and plan.width < 2 and (mode != "quorum" or run.memory.copies == 0):
        copies = "" if mode != "quorum" else ", or leave out memory.copies = 0"
        raise BiremeError(
            f'sync.mode is "{mode}", but the plan has one replica, so none is left if it dies. Set '
            f'plan.width to 2 or more, or use sync.mode = "allreduce"{copies}.'
        )
    if run.sync.sites is not None:
        check_sites(run.sync.sites, plan.width)
    if plan.sites > 1 and plan.sites != run.sync.sites:
        raise BiremeError(
            f"In the plan replicas are in {plan.sites} sites, but sync.sites is {run.sync.sites}. Set "
            f"sync.sites = {plan.sites}, or use a plan that was made without sites."
        )
    if plan.whole_weights and run.memory.shard != "weights":
        raise BiremeError(
            f"In the plan replicas share weights (whole_weights = {plan.whole_weights}), but memory.shard is "
            f'"{run.memory.shard}". Set memory.shard = "weights", or use a plan that was made without it.'
        )
    layout = layout_of(graph, units_of(graph), program, 0, program.num_ranks)
    used = used_by_plan(program.source, layout, offloads=plan.paging is not None)
    refuse_excluded(used_by(partial(value_of, run)) | used)


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
        check_plan(self.run, self.plan.plan, self.graph)
        sharing_of(self.run, self.plan, self.machines.cluster, self.profile, self.data.training)


def prepare(
    run: RunFile,
    progress: Progress,
    *,
    is_alone: bool = True,
    begins: bool = True,
    before: RunFolder | None = None,
    is_depth_free: bool = False,
) -> PreparedRun:
    """Make a run ready; every mistake that can be known before it starts is a `BiremeError`.

    With `is_alone` all servers are this machine, which reads their private samples too. A run that `begins`
    has no checkpoint, and needs the weights that a function of the user makes. `before` is the folder of a
    phase before this one, whose model is not captured again, and which may have the plan. If the user
    gave no depth (`is_depth_free`), it is at most the number of units.
    """
    check_trackers(run.log.trackers)
    run = with_model_defaults(run)  # a run file made in Python has not got them yet
    given = None if run.plan.file is None else load_plan(Path(run.plan.file))
    progress(0.0, "loading the model")
    machines = planning_machines(run)
    check_devices(run, machines.cluster)
    sizes = micro_batches(run)
    run = with_length_of_data(run, progress)
    model = RunModel.of(run, max(sizes))
    if before is not None and _is_captured_as(run, before.load_run()):
        model.training.know(load_graph(before.graph))
        model.evaluation.know(load_graph(before.evaluation_graph))
    with evaluation_beside(model, max(sizes), sizes[0]) as evaluation_of:
        data = data_of(run, model, progress)
        run = counted(run, data)
        progress(0.0, "capturing the model")
        graph = model.training.graph(sizes[0])
        model.check_loss(graph)
        _check_samples(data, graph)
        evaluation = evaluation_of(graph)
    if is_depth_free and run.plan.depth is not None:
        run = run.with_keys("plan", depth=min(run.plan.depth, len(units_of(graph))))
    check_gradient(run, graph)
    model.check_documents(graph, evaluation)
    model.check_weights(graph)
    initial = model.initial_weights(graph, progress) if begins else None
    owners = sorted(run.data.private or ())
    census = census_of(run, model, graph, data, owners if is_alone else ())
    answer = measured = planning_s = None
    if given is not None:
        plan = with_own_codecs(_checked(given, f"{run.plan.file}", graph, machines), run)
        run = with_choices(run, plan.plan)
        check_homes(plan.plan, machines.cluster, readers_of(graph), owners)
        check_paging_disk(run, plan.plan)
    else:
        known = () if before is None else sizes_before(before, machines.cluster)
        profiled = CapturedRun(run, machines, model, graph).profiled(progress, known=known)
        ahead, measured = None if before is None else plan_made_ahead(before, profiled), profiled.profile
        if ahead is not None:
            check_boundaries(run, ahead.plan)
            plan, run = ahead, with_choices(run, ahead.plan)
        else:
            found = profiled.planned(progress)
            run, answer, measured, planning_s = found.run, found.answer, found.profile, found.planning_s
            plan = saved_plan(answer, planned_units(measured))
            if run.plan.largest_batch is not None:
                run = with_batch(run, summarize(answer.best).batch_size)
                data = data_of(run, model, progress)
    more = data, data_identity(run, data), planning_s, census, initial
    return PreparedRun(run, machines, graph, evaluation, plan, answer, measured, *more)


def sizes_before(before: RunFolder, cluster: Cluster) -> Collection[int]:
    """The micro-batches that a phase before this one has measured, if it had no fewer devices: its profile
    still counts after a loss, and with it the plans that were made ahead.
    """
    with suppress(BiremeError, OSError):
        if cluster.num_devices <= read_cluster(before.cluster).num_devices:
            return load_profile(before.profile).micro_batches
    return ()


def _is_captured_as(run: RunFile, before: RunFile) -> bool:
    """Whether the model of a run is captured as that of a phase before it."""

    def settings(one: RunFile) -> tuple[object, ...]:
        return one.model, one.data.length, one.data.packing, one.training.gradient_form

    return settings(run) == settings(with_model_defaults(before))


def prepared_again(
    run: RunFile,
    folder: RunFolder,
    progress: Progress,
    checkpoint: Checkpoint | None,
    tell: Tell,
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
    begun = folder.load_run()
    chosen = with_choices_of(run, begun)
    run = with_agreement(run, begun.sync.mode, begun.sync.codec)  # kept also if the plan is made anew
    if _keeps_plan(chosen, folder):
        found = prepared_before(chosen, folder, progress, is_alone=is_alone, begins=checkpoint is None)
    else:
        tell("What the plan was made from has changed, so a new one is made.")
        found = prepare(run, progress, is_alone=is_alone, begins=checkpoint is None)
    run = found.run
    check_boundaries(run, found.plan.plan)
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
    machines = machines_here(run)
    measured = load_profile(folder.profile) if folder.profile.is_file() else None
    graph, evaluation = load_graph(folder.graph), load_graph(folder.evaluation_graph)
    model, plan = RunModel.of(run, 1), load_plan(folder.plan)
    check_paging_disk(run, plan.plan)
    if plan.plan.paging is not None:  # with the speeds that it was planned with
        machines = replace(machines, cluster=read_cluster(folder.cluster))
    data = data_of(run, model, progress)
    _check_samples(data, graph)
    census = census_of(run, model, graph, data, sorted(run.data.private or ()) if is_alone else ())
    identity = data_identity(run, data)
    initial = model.initial_weights(graph, progress) if begins else None
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
        run.model.fused_loss,
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
    found, known = machines_here(run), read_cluster(folder.cluster)
    try:
        old = machines_here(before)
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
        folder.base: base_folder(run) is not None,
        folder.private: bool(prepared.census),
        folder.path / RECORD: True,
        folder.metrics: True,
        folder.ledger: run.sync.mode != "allreduce",
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
    run, graph, answer, profile = prepared.run, prepared.graph, prepared.answer, prepared.profile
    request = plan_request_of(run, sums_of(run, graph), graph)
    if answer is None or profile is None or prepared.planning_s is None:
        names = [unit.name for unit in units_of(graph)]
        found = saved_plan_document(run.model.source, prepared.plan, names, run.training.batch_size)
        notes = apart_note(prepared.plan.plan, run.training.clip_norm) + fused_loss_note(run, graph)
        own = {"sync": sync_document(request), "notes": notes, "exports": {}}
        return found | own | gradient_document(run, graph)
    return PlannedRun(
        run, prepared.machines.cluster, graph, profile, request, answer, prepared.planning_s
    ).document()


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


# Plans for the losses that a run of `bireme coordinate` is likely to have: of one machine, whichever it is.
#
# Rank 0 has another process make them while it trains, one after the other and with the lowest priority. They
# lie in the folder of the run on that machine. A phase that follows takes its plan from there if it is for
# the same run, devices and profile. If that machine is lost, the phase that follows plans by itself.

_MOST_PLANS = 16
"""Losses that are planned for, at most."""
_LEAST_FREE_BYTES = 1 << 30
"""Without that much free memory no plan is made ahead: a process that plans takes about 0.2 GiB."""
_IDLE = 19
"""The lowest priority of Linux: about 1 % of a core that other processes want."""

AfterLoss = tuple[RunFile, Cluster | None]
"""A run as it would be without a machine: its settings, and its devices as rank 0 gathers them."""


def plan_ahead(folder: RunFolder, losses: Sequence[AfterLoss]) -> Process | None:
    """A process that makes plans for these losses; it ends when it is closed. None if there is nothing to do,
    or too little memory.
    """
    if not losses or not folder.profile.is_file() or available_bytes() < _LEAST_FREE_BYTES:
        return None
    process, talk = start_process("bireme plans", _plan_ahead, folder.path, [*losses][:_MOST_PLANS])
    talk.close()
    return process


def may_plan_ahead(run: RunFile) -> bool:
    """Whether plans of a run depend on its settings, its devices and its profile alone."""
    is_free = run.plan.file is None and not chooses_batch(run) and not run.data.private
    return is_free and not run.memory.is_on


def plan_made_ahead(folder: RunFolder, wanted: ProfiledRun) -> SavedPlan | None:
    """The plan that was made ahead for this run, cluster and profile."""
    with suppress(BiremeError, OSError):
        return load_plan(_path_of(folder, wanted))
    return None


def make_plan(folder: RunFolder, wanted: ProfiledRun) -> None:
    """Make a plan, and keep it in the folder of the run. If none fits, nothing is kept."""
    path = _path_of(folder, wanted)
    if path.is_file():
        return
    with suppress(BiremeError):
        found = wanted.planned(lambda _done, _what: None)
        path.parent.mkdir(exist_ok=True)
        write_plan(path, saved_plan(found.answer, planned_units(found.profile)))


def _path_of(folder: RunFolder, wanted: ProfiledRun) -> Path:
    run = wanted.run
    tables = run.model_dump(mode="json", exclude={"log"})
    del tables["cluster"]["source"]  # the file of a cluster, which counts by its content
    words = [tables, cluster_hash(wanted.cluster), profile_hash(wanted.profile)]
    digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]
    return folder.path / "plans" / f"{digest}.json"


def _plan_ahead(talk: Connection, path: Path, losses: Sequence[AfterLoss]) -> None:
    talk.close()
    os.nice(_IDLE)
    folder = RunFolder(path)
    graph, profile = load_graph(folder.graph), load_profile(folder.profile)
    for asked, cluster in losses:
        run = with_model_defaults(asked)
        with suppress(BiremeError), scratch_folder() as scratch:
            if cluster is not None and run.cluster.source is None:
                file = Path(scratch) / "cluster.toml"
                save_cluster(cluster, file)
                run = run.with_keys("cluster", source=str(file))
            machines = planning_machines(run, computes=False)
            make_plan(folder, ProfiledRun(run, machines.cluster, graph, profile))
