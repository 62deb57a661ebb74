"""One process of a run: make its part of the pipeline, load a checkpoint, run the loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from bireme.balance import Shares, grown_shares, shares_by_times
from bireme.cluster.cluster_file import read_cluster
from bireme.documents import get_ready
from bireme.errors import BiremeError, Tell
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph
from bireme.model.weights import Weights
from bireme.plan.plan_file import SavedPlan, load_plan, read_windows
from bireme.profile.profile import Profile
from bireme.report.timeline_document import write_recorded
from bireme.runtime.balancer import Sharing
from bireme.runtime.exchange.for_others import KEPT_BYTES
from bireme.runtime.measuring.batch_end import replica_times
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from bireme.runtime.stores import PrefixStore, Store
from bireme.runtime.world import World
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good, open_checkpoint, step_after
from bireme.train.checkpoint.writer import LEAST_KEPT, CheckpointEvent, CheckpointWriter
from bireme.train.choices import link_codecs
from bireme.train.data.prepare import find_place
from bireme.train.data.samples import Samples
from bireme.train.folder import RunFolder
from bireme.train.loop import Loop, ScheduleSwitch
from bireme.train.model import RunModel, placeholders, with_rest
from bireme.train.outcome import MemoryUsed, Outcome, Stops
from bireme.train.plan_search import flush_twin, grown, plans_of
from bireme.train.rank_part import RankPart, RunStart
from bireme.train.replica import AveragingReplica, LeaderLog, LeaderWriter, Replica
from bireme.train.run_checkpoints import checkpoint_of
from bireme.train.run_data import ReadableData, data_of, readable_data
from bireme.train.run_file import RunFile
from bireme.train.run_file.tables import Training, rate_factor
from bireme.train.run_log import RunLog
from bireme.train.shares import (
    measures_first,
    mode_of,
    sample_seconds,
    sharing_of,
    stage_watch_of,
)

# The optimizer of a run, as its file asks for it.


def optimizer_of(training: Training) -> OptimizerFactory:
    """Makes the optimizers of the parameters that it is given."""
    return named_optimizer(
        training.optimizer,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=training.betas,
        momentum=training.momentum,
        rest_lr=training.rest_learning_rate,
    )


# The pipeline of a rank, from its run file and its plan; two of them if the run has a delay warm-up.


def _pipelines_of(part: RankPart, saved: SavedPlan, step: int) -> tuple[Pipeline, ScheduleSwitch | None]:
    """The pipeline for the steps after `step`, and the schedule switch, if there is one."""
    first_delayed_step = part.start.first_delayed_step
    twin = flush_twin(saved.plan) if step < first_delayed_step else None
    if twin is None:
        return _pipeline(part, saved), None
    return _pipeline(part, replace(saved, plan=twin)), ScheduleSwitch(
        first_delayed_step, lambda: _pipeline(part, saved)
    )


def _pipeline(part: RankPart, plan: SavedPlan) -> Pipeline:
    run, world, graph = part.run, part.world, load_graph(part.folder.graph)
    lr, averaging = rate_factor(run.training), None
    if isinstance(part.member, AveragingReplica):
        lr, averaging = part.member.rate(lr), part.member.averaging
    return Pipeline(
        graph,
        plan,
        world,
        weights=_weights(part, graph),
        optimizer=optimizer_of(run.training),
        settings=PipelineSettings(
            evaluation=load_graph(part.folder.evaluation_graph),
            clip_norm=run.training.clip_norm or None,
            lr=lr,
            seed=run.training.seed,
            device=world.device,
            bank_dtype=torch.bfloat16 if run.model.dtype == "bfloat16" else None,
            compile=run.model.compile,
            sharing=_sharing(part, plan),
            reads_apart=bool(part.start.census),
            sum_codec=run.sync.codec,
            gradient=run.training.gradient,
            gradient_of=run.training.gradient_of,
            codecs=link_codecs(run, plan.plan),
            shard=run.memory.shard,
            paging=PagingSettings(None if run.memory.disk is None else Path(run.memory.disk)),
            agreement=None if part.member is None else part.member.agreement,
            averaging=averaging,
        ),
    )


def _weights(part: RankPart, graph: Graph) -> Weights:
    """The weights to make the stages with. If a checkpoint or another replica gives them later, a function of
    the user is not called for them again, and only the weights of the base are made or read from its folder.
    """
    model, blank = part.model, placeholders(graph)
    if not part.start.resumes and (part.order is None or not part.order.is_empty):
        return model.weights(graph, kept=part.folder.initial if model.is_made else None)
    if model.is_made:
        return blank
    base, given = part.in_base(graph), model.weights(graph)
    states = (*graph.parameters, *graph.buffers)
    later = {one.name for one in states if one.persistent and one.name not in base}
    return with_rest(lambda names: blank([name for name in names if name in later]), given)


def _sharing(part: RankPart, saved: SavedPlan) -> Sharing | None:
    """How batches are shared out; None if shares never change."""
    if part.member is not None or mode_of(part.run, saved.plan, part.cluster) == "off":
        return None
    return sharing_of(part.run, saved, part.cluster, part.profile, part.samples)


# The shares that a run begins with, measured by all ranks on their own devices before the first step.


def _measured_shares(pipeline: Pipeline, run: RunFile, samples: Samples) -> Shares:
    """The shares that follow the measured speeds; their sum is the batch, which may have grown.

    All ranks call it, and find the same.
    """
    assert pipeline.balancer is not None, "who measures shares shares out"
    limits, m = pipeline.balancer.limits, pipeline.plan.source.num_microbatches
    most = [share // m for share in limits.most]
    sizes = [1 << power for power in range(max(most).bit_length())]

    def rows(size: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        numbers = [number % len(samples) for number in range(size)]
        return samples.take(numbers, tuple(names)) if names else {}

    times = replica_times(pipeline, rows, sizes, most)
    if run.balance.batch == "grow":
        return grown_shares(m, times, limits)
    first = pipeline.balancer.balance.shares
    return shares_by_times(first, m, times, limits, margin=run.balance.margin)


ALL = 10**9

get_ready(Graph, SavedPlan, Profile)  # which every rank reads, as a copy of a process that has imported this


def train_replica(world: World, order: ReplicaOrder, start: RunStart) -> Outcome:
    """Train as one rank of a replica that may die, whose ranks are the world.

    One that is started after others have trained gets all from them. What the run was resumed from may be
    deleted by then.
    """
    if order.life.life:
        RunFolder(start.folder).check_recorded()
    if order.is_empty:
        start = replace(start, checkpoint=None, copies=None, passed_over=())
    return train_rank(world, start, order)


def train_rank(world: World, start: RunStart, order: ReplicaOrder | None = None) -> Outcome:
    """Train as one rank of a world, until the end or until all are asked to stop."""
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    folder = RunFolder.of(start.folder)
    run = folder.load_run()
    # From here on, so that a signal while the model is made stops the run in order.
    with (stops := _stops(run, world, order)).listening():
        model = RunModel.of(run, run.plan.micro_batch or 1)
        data = data_of(run, model)
        if (resumed := _checkpoint(start)) is not None:
            step = resumed.manifest.step
            find_place(data, run.data.seed, step * run.training.batch_size, is_shown=not world.rank)
        memory = MemoryUsed(world.device)
        return _trained(RankPart(world, start, folder, run, model, data, memory, stops, order=order))


def _stops(run: RunFile, world: World, order: ReplicaOrder | None) -> Stops:
    if world.rank:
        return Stops()
    limit_s = run.training.time_limit_s
    if limit_s is not None and order is not None and order.life.life:
        limit_s -= monotonic() - order.began_s  # the run's time, not that of this start of a replica
    return Stops(limit_s, run.checkpoint.every_s)


def _trained(part: RankPart) -> Outcome:
    world, folder = part.world, part.folder
    checkpoint = _checkpoint(part.start)
    saved = load_plan(folder.plan)
    part = replace(part, home=_home(part, saved))
    step = step_after(checkpoint)
    read_windows(folder.windows, plans_of(part.run, saved))
    if part.order is not None:
        part, saved = _as_member(part, part.order, saved)
    if part.member is not None:
        step = part.member.begin(step)
    pipeline, later = _pipelines_of(part, saved, step)
    if checkpoint is None and measures_first(part.run, saved.plan, part.cluster):
        shares = _measured_shares(pipeline, part.run, part.data.training)
        if part.run.balance.batch == "grow":
            pipeline.close()
            del pipeline
            part = _grown(part, saved, sum(shares))
            pipeline, later = _pipelines_of(part, saved, step)
        pipeline.begin_with(shares)
    log = _log(part) if world.rank == 0 else None
    if checkpoint is not None:
        pipeline.restore(checkpoint.snapshot())
    if isinstance(part.member, AveragingReplica):
        part.member.join(pipeline)
    watch = None  # what tells slow stages, where busy seconds are known
    if pipeline.balancer is not None:
        watch = stage_watch_of(saved.plan, part.cluster, sample_seconds(saved.plan, part.profile))
    loop: Loop | None = None

    def note(event: CheckpointEvent) -> None:
        if loop is not None:
            loop.note_checkpoint(event)

    def warn(text: str) -> None:
        if loop is not None:
            loop.warn(text)

    with _writer(part, checkpoint, note, warn) as writer:
        loop = Loop(
            part,
            pipeline,
            writer,
            log=log,
            later=later,
            watch=watch,
        )
        del pipeline  # the loop may have another one later, and no room for two
        if isinstance(part.member, Replica):
            loop.join()
        if log is not None:
            log.begin(loop.step)
        outcome = loop.go()
    if log is not None:
        if loop.timeline is not None and outcome.leads:
            with suppress(BiremeError):  # a full disk takes a picture, not the run
                write_recorded(loop.timeline, folder.measured_timeline)
        log.end(outcome)
    loop.pipeline.close()
    if part.member is not None:
        part.member.leave()
    return outcome


def _writer(
    part: RankPart,
    checkpoint: Checkpoint | None,
    note: Callable[[CheckpointEvent], None],
    warn: Tell,
) -> CheckpointWriter | LeaderWriter:
    """What writes the checkpoints of a run, which goes on from one if there is one."""
    world, run = part.world, part.run
    folder, machines = part.folder.checkpoints(run), part.start.machines
    replica = 0 if part.order is None else part.order.life.replica
    place = None if machines is None else machines.place_of(replica, world.rank)

    def opened(resumed_from: Checkpoint | None, store: Store) -> CheckpointWriter:
        return CheckpointWriter(
            folder,
            world.rank,
            world.size,
            store,
            keep=max(LEAST_KEPT, run.checkpoint.keep) if run.checkpoint.keep else ALL,
            on_event=note,
            resumed_from=resumed_from,
            record=None if world.rank else part.folder.recorded(),
            place=place,
        )

    def newest() -> Checkpoint | None:
        try:
            return newest_good(folder)
        except BiremeError:  # all are lost with the machines that had them
            if place is None:
                raise
            return None

    if part.member is not None:
        return LeaderWriter(
            folder,
            lambda number: opened(newest(), PrefixStore(f"writer {number}", world.store)),
            warn,
        )
    if part.start.copies is not None:  # which are no checkpoint in the folder
        checkpoint = None if world.rank else newest_good(folder)
    return opened(checkpoint, world.store)


def _as_member(part: RankPart, order: ReplicaOrder, saved: SavedPlan) -> tuple[RankPart, SavedPlan]:
    """The part of a replica that may die, or of a site of several, and the plan of it alone."""
    plan = saved.plan
    member = _member(part, order, saved)
    width = plan.width // part.run.sync.num_sites(plan.width)
    own = slice(order.life.replica * width, (order.life.replica + 1) * width)
    alone = replace(
        plan,
        width=width,
        sites=1,
        devices=tuple(names[own] for names in plan.devices),
        micro_batch_sizes=() if width == 1 else plan.micro_batch_sizes[own],
        updates_early=plan.is_early,
    )
    return replace(part, member=member), replace(saved, plan=alone)


def _kept_bytes(part: RankPart, saved: SavedPlan, replica: int) -> int:
    """What sums for replicas that heal may take: on a processor they share the memory that the plan has."""
    if saved.forecast is None or part.world.device.type != "cpu":
        return KEPT_BYTES
    replica_in_site, pipeline_rank = divmod(part.world.rank, saved.plan.source.num_ranks)
    stages = saved.plan.program(1).stages_of(pipeline_rank)
    stage = saved.forecast.stages[stages[0]]
    width = saved.plan.width // part.run.sync.num_sites(saved.plan.width)
    _, peak_bytes, limit_bytes = list(stage.bytes_of_devices())[replica * width + replica_in_site]
    return min(KEPT_BYTES, max(int(limit_bytes - peak_bytes), 0)) if limit_bytes else KEPT_BYTES


def _member(part: RankPart, order: ReplicaOrder, saved: SavedPlan) -> Replica | AveragingReplica:
    plan = saved.plan
    rebuilt = part.in_base(load_graph(part.folder.graph))
    num_sites = part.run.sync.num_sites(plan.width)
    if part.run.sync.averages:
        return AveragingReplica(part.world, order, part.run, num_sites, rebuilt=rebuilt)
    balances = mode_of(part.run, plan, part.cluster) == "measured"
    width = plan.width // num_sites
    spare = width * plan.num_microbatches * (2 if plan.source.num_sliced else 1)
    return Replica(
        part.world,
        order,
        part.run,
        num_sites,
        spare=spare,
        balances=balances,
        rebuilt=rebuilt,
        kept_bytes=_kept_bytes(part, saved, order.life.replica),
    )


def _log(part: RankPart) -> RunLog | LeaderLog:
    def make() -> RunLog:
        return RunLog(part.folder, part.run, part.start.words, is_shown=part.start.is_shown)

    return make() if part.member is None else LeaderLog(make, part.member, part.folder.metrics)


def _grown(part: RankPart, saved: SavedPlan, batch_size: int) -> RankPart:
    """The run with the batch that its replicas are fast enough for, which its folder remembers."""
    run = grown(part.run, batch_size)
    if part.world.rank == 0:
        part.folder.write_run(run)
        part.folder.record()
    part = replace(part, run=run)
    return replace(part, home=_home(part, saved))


def _home(part: RankPart, saved: SavedPlan) -> ReadableData | None:
    """What this rank reads where some samples are private."""
    if not part.start.census:
        return None
    graph, cluster = load_graph(part.folder.graph), read_cluster(part.folder.cluster)
    replica = 0 if part.order is None else part.order.life.replica
    return readable_data(
        part.run,
        part.model,
        graph,
        part.data.training,
        part.start.census,
        saved.plan,
        cluster,
        replica * saved.plan.source.num_ranks + part.world.rank,
    )


def _checkpoint(start: RunStart) -> Checkpoint | None:
    """What the run goes on from, which was found whole before any process started."""
    if start.copies is not None:
        return checkpoint_of(start.copies, start.copies.shards())
    if start.checkpoint is None:
        return None
    return replace(open_checkpoint(start.checkpoint), passed_over=start.passed_over, holders=start.holders)
