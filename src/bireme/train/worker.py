"""One process of a run: make its part of the pipeline, load a checkpoint, run the loop."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bireme.cluster.cluster_file import read_cluster
from bireme.errors import BiremeError
from bireme.model.graph_file import graph_hash, load_graph
from bireme.plan.plan_file import SavedPlan, load_plan
from bireme.profile.control import Control
from bireme.report.page.recorded import write_recorded
from bireme.runtime.optimizers import OptimizerFactory, named_optimizer
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.train.checkpoint.checkpoint import Checkpoint, open_checkpoint
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.data.notes import data_notes
from bireme.train.data.place import find_place
from bireme.train.data.prepare import RunData
from bireme.train.delay_warmup import first_delayed_step, flush_twin
from bireme.train.folder import RunFolder
from bireme.train.home_data import HomeData, home_data
from bireme.train.loop import Loop, ScheduleSwitch
from bireme.train.memory_used import MemoryUsed
from bireme.train.metrics import Metrics
from bireme.train.mlflow_tracker import MLflow
from bireme.train.model import RunModel
from bireme.train.outcome import Outcome
from bireme.train.private_census import Census
from bireme.train.rates import rate_factor
from bireme.train.resume_checks import run_conditions
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile
from bireme.train.same_data import DataIdentity, data_identity, load_identity
from bireme.train.screen import Screen
from bireme.train.stops import Stops
from bireme.train.tensorboard import TensorBoard
from bireme.train.tracker import Tracker
from bireme.train.wandb_tracker import WandB

__all__ = ["Start", "train_rank"]

LEAST_KEPT = 2
"""The newest checkpoint may turn out to be damaged when it is needed."""

ALL = 10**9


@dataclass(frozen=True, slots=True)
class Start:
    """Which run, from which checkpoint if any, and what the processes are told beside what its folder says.

    `is_shown` lets rank 0 speak of its steps; `words` are the first values of its log. `passed_over` are the
    damaged checkpoints after the one to resume from. `census` counts the private samples of all servers.
    """

    folder: Path
    checkpoint: Path | None
    threads: int | None
    is_shown: bool
    words: dict[str, Any]
    passed_over: tuple[Path, ...] = ()
    census: Census = field(default_factory=dict)


def train_rank(world: World, start: Start) -> Outcome:
    """Train as one rank of a world, until the end or until all are asked to stop."""
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    folder = RunFolder.of(start.folder)
    run = folder.load_run()
    # From here on, so that who is told to stop while it makes its model does not just die.
    with (stops := _stops(run, world)).listening():
        model = RunModel.of(run, run.plan.micro_batch or 1)
        data = data_of(run, model)
        if start.checkpoint is not None:
            step = open_checkpoint(start.checkpoint).manifest.step
            find_place(data, run.data.seed, step * run.training.batch_size, is_shown=not world.rank)
        with MemoryUsed(world.device) as memory:
            return _trained(_Part(world, start, folder, run, model, data), memory, stops)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank has before it has a pipeline."""

    world: World
    start: Start
    folder: RunFolder
    run: RunFile
    model: RunModel
    data: RunData


def _stops(run: RunFile, world: World) -> Stops:
    return Stops() if world.rank else Stops(run.training.time_limit_s, run.checkpoint.every_s)


def _trained(part: _Part, memory: MemoryUsed, stops: Stops) -> Outcome:
    world, folder, run = part.world, part.folder, part.run
    checkpoint = _checkpoint(part.start)
    saved = load_plan(folder.plan)
    begin, step = first_delayed_step(run, saved), 0
    if checkpoint is not None:
        step = checkpoint.manifest.step
        if checkpoint.manifest.schedule == saved.plan.schedule:
            begin = min(begin, step)  # a run that was made longer does not go back
    pipeline, later = _pipelines(part, saved, step=step, first_delayed_step=begin)
    log = _Log(world, folder, run, part.start) if world.rank == 0 else None
    if checkpoint is not None:
        pipeline.restore(checkpoint.snapshot())
    home = _home(part, saved)
    loop: Loop | None = None
    writer = CheckpointWriter(
        folder.checkpoints(run),
        world.rank,
        world.size,
        world.store,
        keep=max(LEAST_KEPT, run.checkpoint.keep) if run.checkpoint.keep else ALL,
        on_event=lambda event: None if loop is None else loop.note_checkpoint(event),
        resumed_from=checkpoint,
    )
    with writer:
        loop = Loop(
            run,
            pipeline,
            part.data,
            writer,
            _meta(part, pipeline),
            tell=_silent if log is None else log.tell,
            memory=memory,
            rank_bytes=_Shared(world),
            stops=stops,
            control=_control(part),
            later=later,
            first_delayed_step=begin,
            notes=() if log is None else data_notes(part.data),
            home=home,
        )
        del pipeline  # the loop may have another one later, and no room for two
        if log is not None:
            log.begin(loop.step)
        outcome = loop.go()
    if log is not None:
        if loop.timeline is not None:
            with suppress(BiremeError):  # a full disk takes a picture, not the run
                write_recorded(loop.timeline, folder.measured_timeline)
        log.end(outcome)
    loop.pipeline.close()
    return outcome


def _home(part: _Part, saved: SavedPlan) -> HomeData | None:
    """What this rank reads where some samples are private."""
    if not part.start.census:
        return None
    graph, cluster = load_graph(part.folder.graph), read_cluster(part.folder.cluster)
    return home_data(
        part.run,
        part.model,
        graph,
        part.data.training,
        part.start.census,
        saved.plan,
        cluster,
        part.world.rank,
    )


def _control(part: _Part) -> Control | None:
    """What is timed in turns with training on a processor. That ranks share its cores is predicted."""
    if part.world.device.type != "cpu":
        return None
    servers = read_cluster(part.folder.cluster).servers
    return Control(counts_waits=not any(server.num_cores for server in servers))


def _checkpoint(start: Start) -> Checkpoint | None:
    """What the run goes on from, which was found whole before any process started."""
    if start.checkpoint is None:
        return None
    return replace(open_checkpoint(start.checkpoint), passed_over=start.passed_over)


def _pipelines(
    part: _Part, saved: SavedPlan, *, step: int, first_delayed_step: int
) -> tuple[Pipeline, ScheduleSwitch | None]:
    """The pipeline for the steps after `step`, and the schedule switch, if there is one."""
    twin = flush_twin(saved.plan) if step < first_delayed_step else None
    if twin is None:
        return _pipeline(part, saved), None
    return _pipeline(part, replace(saved, plan=twin)), ScheduleSwitch(
        first_delayed_step, lambda: _pipeline(part, saved)
    )


def _pipeline(part: _Part, plan: SavedPlan) -> Pipeline:
    run, world, graph = part.run, part.world, load_graph(part.folder.graph)
    return Pipeline(
        graph,
        plan,
        world,
        weights=part.model.weights(graph),
        optimizer=_optimizer(run),
        evaluation=load_graph(part.folder.evaluation_graph),
        clip_norm=run.training.clip_norm or None,
        lr=rate_factor(run.training),
        seed=run.training.seed,
        device=world.device,
        bank_dtype=torch.bfloat16 if run.model.dtype == "bfloat16" else None,
        compile=run.model.compile,
        reads_apart=bool(part.start.census),
    )


def _optimizer(run: RunFile) -> OptimizerFactory:
    asked = run.training
    return named_optimizer(
        asked.optimizer,
        lr=asked.learning_rate,
        weight_decay=asked.weight_decay,
        betas=asked.betas,
        momentum=asked.momentum,
        rest_lr=asked.rest_learning_rate,
    )


def _meta(part: _Part, pipeline: Pipeline) -> CheckpointMeta:
    plan = pipeline.plan
    return CheckpointMeta(
        next_batch=0,
        seed=part.run.data.seed,
        schedule=plan.source.name,
        num_stages=plan.num_stages,
        width=plan.width,
        graph_hash=graph_hash(pipeline.graph),
        extra=run_conditions(part.run, _identity(part)),
    )


def _identity(part: _Part) -> DataIdentity:
    """What the folder says, which was written before any process started: nobody reads the data twice."""
    return load_identity(part.folder.data) or data_identity(part.run, part.data)


def _silent(_kind: str, _step: int, **_values: Any) -> None:
    """Ranks other than 0 write no log."""


class _Shared:
    """Tells the others how much memory this rank has had, and rank 0 what the others last told."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, own: int | None) -> list[int | None]:
        """The bytes of every rank, as far as known; of the others only on rank 0."""
        world = self._world
        world.store.set(f"memory/{world.rank}", str(own or 0))
        if world.rank:
            return []
        keys = [f"memory/{rank}" for rank in range(world.size)]
        return [int(world.store.get(key)) or None if world.store.check([key]) else None for key in keys]


class _Log:
    """What rank 0 writes down and says."""

    def __init__(self, world: World, folder: RunFolder, run: RunFile, start: Start) -> None:
        self._metrics = Metrics(folder.metrics, trackers=_trackers(folder, run))
        self._words = start.words
        self._screen = Screen(run.training.steps) if start.is_shown else None
        self._failed: set[str] = set()

    @property
    def tell(self) -> Callable[..., None]:
        """For the loop."""
        return self._tell

    def begin(self, step: int) -> None:
        """The run begins, or goes on."""
        self._tell("start", step, **self._words)

    def end(self, outcome: Outcome) -> None:
        """The run is over, for now."""
        self._tell("stop", outcome.steps, reason=outcome.reason)
        self._metrics.close()
        self._tell_failures(outcome.steps)

    def _tell(self, kind: str, step: int, **values: Any) -> None:
        before = self._metrics.failure
        self._metrics.note(kind, step, **values)
        if self._screen is None:
            return
        self._screen.show(kind, step, values)
        failure = self._metrics.failure
        if failure is not None and failure != before:
            text = f"The log cannot be written ({failure}); its lines wait, and the run continues."
            self._screen.show("warning", step, {"text": text})
        self._tell_failures(step)

    def _tell_failures(self, step: int) -> None:
        """Say once of each tracker that it gets no more curves."""
        for title, failure in self._metrics.tracker_failures.items():
            if title not in self._failed and self._screen is not None:
                self._failed.add(title)
                text = f"{title} gets no more curves ({failure}); the run and its log go on."
                self._screen.show("warning", step, {"text": text})


def _trackers(folder: RunFolder, run: RunFile) -> list[Tracker]:
    """Those that are asked for."""
    asked, config = run.log, run.model_dump(mode="json")
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder.path / "tensorboard"),
        "wandb": lambda: WandB(folder.path, asked.project, config),
        "mlflow": lambda: MLflow(folder.path, asked.project, config),
    }
    return [make() for key, make in makers.items() if asked.trackers[key]]


def first_of(outcomes: Sequence[Outcome]) -> Outcome:
    """That of rank 0, which has what all share."""
    return next(outcome for outcome in outcomes if outcome.own.rank == 0)
