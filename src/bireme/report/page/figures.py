"""The numbers of a run, from whichever file has them: headline, stages, links, and all as one document.

A run that ended has a summary; of one that is going on or was killed they come from the plan, the recorded
timelines and the metrics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.documents import plain
from bireme.errors import BiremeError
from bireme.plan.forecast import StageForecast, joules_per_sample
from bireme.plan.plan import Plan
from bireme.report.page.run import ReportedStage, ReportedSummary, Run
from bireme.timeline.timeline import BUSY, Timeline

_QUIET_S = 600.0
"""A run that wrote nothing for so long, and for twenty of its lines, is not running any more."""

_QUIET_LINES = 20


@dataclass(frozen=True, slots=True)
class _RunState:
    """Whether a run has ended: a word for it, and the sentence."""

    word: str
    text: str


@dataclass(frozen=True, slots=True)
class Headline:
    """A run in a few numbers; None is what nobody knows."""

    steps: int
    train_loss: float | None
    least_loss: float | None
    eval_loss: float | None
    least_eval_loss: float | None
    least_eval_step: int | None
    tokens_per_s: float | None
    samples_per_s: float | None
    predicted_batch_s: float | None
    measured_batch_s: float | None
    peak_bytes: float | None
    running_s: float
    joules_per_sample: float | None = None
    eval_bits_per_byte: float | None = None

    @property
    def prediction_error(self) -> float | None:
        """Predicted time divided by measured time, minus 1; below 0 the prediction promised too little time.

        For programs; people read the measured time relative to the predicted one.
        """
        if self.predicted_batch_s is None or not self.measured_batch_s:
            return None
        return self.predicted_batch_s / self.measured_batch_s - 1


@dataclass(frozen=True, slots=True)
class StageFigures:
    """A stage, predicted and measured; an unknown figure is None. `units` are its first and its last unit,
    `bytes` the parts of the memory that was predicted.
    """

    stage: int
    units: tuple[int, int]
    unit_names: tuple[str, ...]
    devices: tuple[str, ...]
    predicted_s: float | None
    measured_s: float | None
    predicted_busy_share: float | None
    busy_share: float | None
    predicted_peak_bytes: float | None
    measured_peak_bytes: float | None
    limit_bytes: float | None
    bytes: Mapping[str, float]


def state(run: Run, now_s: float) -> _RunState:
    """Whether the run has ended, at a moment in seconds of the usual epoch."""
    metrics = run.metrics
    if metrics.stop is not None:
        reason = metrics.stop.reason
        if reason == "finished":
            return _RunState("finished", f"finished after {metrics.stop.step:,} steps")
        return _RunState("stopped", f"stopped at step {metrics.stop.step:,}: {reason}")
    recent = metrics.training.time_s[-2:]
    between_s = recent[-1] - recent[0] if len(recent) == 2 else 0.0
    if now_s - run.written_s > max(_QUIET_S, _QUIET_LINES * between_s):
        return _RunState("ended", f"ended without notice after step {metrics.last_step:,}")
    return _RunState("running", f"running, at step {metrics.last_step:,}")


def headline(run: Run) -> Headline:
    """The numbers on top. The summary of a run that goes on again is of its past, and does not count."""
    training, evaluations = run.metrics.training, run.metrics.evaluations
    ended = None if run.metrics.stop is None else run.summary
    summary = ended or ReportedSummary()
    losses = _known(training.loss)
    evaluated = [one for one in evaluations if math.isfinite(one.loss)]
    best = min(evaluated, key=lambda one: one.loss, default=None)
    samples_per_s = _middle(training.samples_per_s)
    forecast = None if run.plan is None else run.plan.forecast
    watts = None if forecast is None else forecast.watts
    return Headline(
        steps=run.metrics.last_step if summary.steps is None else summary.steps,
        train_loss=_first(summary.train_loss, *losses[-1:]),
        least_loss=min(losses, default=None),
        eval_loss=_first(summary.eval_loss, *(one.loss for one in evaluated[-1:])),
        least_eval_loss=None if best is None else best.loss,
        least_eval_step=None if best is None else best.step,
        tokens_per_s=_first(summary.tokens_per_s, _middle(training.tokens_per_s)),
        samples_per_s=samples_per_s,
        predicted_batch_s=_predicted_batch_s(run),
        measured_batch_s=_first(summary.measured_batch_s, _middle(training.seconds)),
        peak_bytes=_peak_bytes(run),
        running_s=run.metrics.last_time_s,
        joules_per_sample=joules_per_sample(watts, samples_per_s) if samples_per_s else None,
        eval_bits_per_byte=_first(
            summary.eval_bits_per_byte, *(one.bits_per_byte for one in evaluations[-1:])
        ),
    )


def stage_figures(run: Run) -> tuple[StageFigures, ...]:
    """Each stage of the plan, with what is known of it."""
    forecast = run.plan.forecast if run.plan is not None else None
    stages = run.summary.stages if run.summary is not None else ()
    if run.plan is not None and len(stages) != run.plan.plan.num_stages:
        stages = ()  # of an earlier plan of the run, or of another run
    foretold: tuple[StageForecast, ...] = () if forecast is None else forecast.stages
    batch_s = headline(run).measured_batch_s
    return tuple(
        _stage(run, stage, one, told, batch_s)
        for stage, (one, told) in enumerate(zip_longest(foretold, stages))
    )


def idle_share(timeline: Timeline) -> float:
    """The share of the devices' time without work, in the middle of the window where there is one."""
    is_long = timeline.program.num_batches > 1
    return timeline.steady_bubble_fraction if is_long else timeline.bubble_fraction


def _stage(
    run: Run,
    stage: int,
    foretold: StageForecast | None,
    reported: ReportedStage | None,
    batch_s: float | None,
) -> StageFigures:
    told = reported or ReportedStage(units=(foretold.begin, foretold.end - 1) if foretold else (0, 0))
    first, last = told.units
    forecast = run.plan.forecast if run.plan is not None else None
    share = foretold.busy_s / forecast.batch_s if foretold is not None and forecast is not None else None
    seen = None if run.measured is None else _busy_share(run.measured, stage)
    busy_share = seen if told.busy_share is None else told.busy_share
    units = run.plan.units if run.plan is not None else ()
    devices = foretold.devices if foretold is not None else (told.device,) if told.device else ()
    return StageFigures(
        stage=stage,
        units=told.units,
        unit_names=tuple(unit.name for unit in units[first : last + 1]),
        devices=devices,
        predicted_s=foretold.busy_s if foretold is not None else None,
        measured_s=None if busy_share is None or batch_s is None else busy_share * batch_s,
        predicted_busy_share=share if told.predicted_busy_share is None else told.predicted_busy_share,
        busy_share=busy_share,
        predicted_peak_bytes=_first(told.predicted_peak_bytes, foretold.peak_bytes if foretold else None),
        measured_peak_bytes=_first(told.measured_peak_bytes, _seen_bytes(run, stage)),
        limit_bytes=foretold.limit_bytes if foretold is not None else None,
        bytes=_parts(run, stage, told),
    )


def _parts(run: Run, stage: int, told: ReportedStage) -> dict[str, float]:
    """What the predicted peak consists of: of the stage, or where only that is known of its rank."""
    if told.bytes:
        named = told.bytes
    elif run.predicted is not None:
        rank = run.predicted.program.rank_of_stage[stage]
        named = run.predicted.memory[rank].at_peak
    else:
        return {}
    return {name: num_bytes for name, num_bytes in named.items() if num_bytes > 0}


def _busy_share(timeline: Timeline, stage: int) -> float | None:
    """The share of time that a stage's own work takes on its device."""
    program = timeline.program
    rank = timeline.ranks[program.rank_of_stage[stage]]
    own_s = sum(
        one.end_s - one.start_s
        for one in rank.intervals()
        if one.instruction.stage == stage and one.instruction.kind in BUSY
    )
    whole_s = timeline.steady_batch_s * program.num_batches
    return min(own_s / whole_s, 1.0) if whole_s > 0 else None


def _seen_bytes(run: Run, stage: int) -> float | None:
    """The most that a rank of the stage was seen to hold; ranks go replica by replica."""
    seen = run.metrics.peak_bytes
    if run.plan is None or not seen:
        return None
    width = run.plan.plan.width
    source = run.plan.plan.source
    ranks = source.routes.ranks_of(stage)
    own = [
        num_bytes
        for place, num_bytes in enumerate(seen)
        if place % source.num_ranks in ranks
        if num_bytes > 0
    ]
    return max(own, default=None) if len(seen) == width * source.num_ranks else None


def _predicted_batch_s(run: Run) -> float | None:
    told = run.summary.predicted_batch_s if run.summary is not None else None
    started = [one.predicted_batch_s for one in run.metrics.starts if math.isfinite(one.predicted_batch_s)]
    forecast = run.plan.forecast if run.plan is not None else None
    return _first(told, started[-1] if started else None, forecast.batch_s if forecast else None)


def _peak_bytes(run: Run) -> float | None:
    stages = run.summary.stages if run.summary is not None else ()
    told = [stage.measured_peak_bytes for stage in stages if stage.measured_peak_bytes]
    return max((*told, *(num_bytes for num_bytes in run.metrics.peak_bytes if num_bytes > 0)), default=None)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _middle(values: Sequence[float]) -> float | None:
    """The median of the second half: what the run settled to."""
    known = _known(values)
    return median(known[len(known) // 2 :]) if known else None


def _first(*values: float | None) -> float | None:
    """The first that is known and a number."""
    return next((value for value in values if value is not None and math.isfinite(value)), None)


# Who runs what in a plan, and what flows between them: the facts under the drawing of the cluster.


@dataclass(frozen=True, slots=True)
class Post:
    """A device that has a part in the plan: which rank of which replica it is, and its stages."""

    device: str
    rank: int
    replica: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes between two neighbors in a pipeline; nan is what nobody knows.

    `forth_bytes` a batch go from the first to the second, `back_bytes` the other way. `used_bytes_per_s` is
    the greater of the two while the run goes on, `most_bytes_per_s` what the way between them carries.
    """

    source: Post
    destination: Post
    forth_bytes: float
    back_bytes: float
    used_bytes_per_s: float
    most_bytes_per_s: float

    @property
    def share(self) -> float:
        """Of the way, how much is used; nan where it is not known."""
        if not self.most_bytes_per_s or math.isinf(self.most_bytes_per_s):
            return math.nan
        return self.used_bytes_per_s / self.most_bytes_per_s


def posts(run: Run) -> tuple[Post, ...]:
    """Every device in use, replica by replica; none where the plan names none."""
    if run.plan is None:
        return ()
    plan = run.plan.plan
    source = plan.source
    names = _names(run, plan, source.num_ranks)
    return tuple(
        Post(names[rank][replica], rank, replica, source.stages_of(rank))
        for replica in range(plan.width if names else 0)
        for rank in range(source.num_ranks)
    )


def flows(run: Run) -> tuple[Flow, ...]:
    """What goes between the devices of each replica, each pair once."""
    if run.plan is None:
        return ()
    hops = run.plan.plan.source.routes.hops()
    pairs = dict.fromkeys((min(pair), max(pair)) for _, *pair in hops)
    placed = {(post.replica, post.rank): post for post in posts(run)}
    replicas = sorted({replica for replica, _ in placed})
    return tuple(
        _flow(run, placed[replica, one], placed[replica, other])
        for replica in replicas
        for one, other in pairs
    )


def _names(run: Run, plan: Plan, num_ranks: int) -> tuple[tuple[str, ...], ...]:
    """The plan's devices by rank and replica, or those that the run began with."""
    if plan.devices:
        return plan.rank_devices
    started = run.metrics.starts[-1].devices if run.metrics.starts else ()
    if len(started) != num_ranks * plan.width:
        return ()
    return tuple(started[rank::num_ranks] for rank in range(num_ranks))


def _flow(run: Run, source: Post, destination: Post) -> Flow:
    figures = headline(run)
    batch_s = figures.measured_batch_s or figures.predicted_batch_s or math.nan
    known = next((one for one in (run.predicted, run.measured) if one is not None and one.transfers), None)
    forth = _bytes(known, source.rank, destination.rank)
    back = _bytes(known, destination.rank, source.rank)
    return Flow(
        source,
        destination,
        forth,
        back,
        max(forth, back) / batch_s,
        _bandwidth(run.cluster, source.device, destination.device),
    )


def _bytes(timeline: Timeline | None, source: int, destination: int) -> float:
    """Of a batch, from one rank to another."""
    if timeline is None:
        return math.nan
    sent = (
        sum(one.num_bytes)
        for one in timeline.transfers
        if (one.source, one.destination) == (source, destination)
    )
    return sum(sent) / timeline.program.num_batches


def _bandwidth(cluster: Cluster | None, source: str, destination: str) -> float:
    if cluster is None:
        return math.nan
    try:
        return cluster.bandwidth(cluster.number_of(source), cluster.number_of(destination))
    except BiremeError:
        return math.nan


# The numbers of runs as one JSON document, for programs; what is not known is null.


def runs_document(runs: Sequence[Run], now_s: float) -> dict[str, Any]:
    """Every run with its figures, its stages, its links and its events; `now_s` tells whether it runs."""
    return {"runs": [plain(_run(run, now_s)) for run in runs]}


def _run(run: Run, now_s: float) -> dict[str, Any]:
    figures, metrics = headline(run), run.metrics
    plan = None if run.plan is None else run.plan.plan
    found = state(run, now_s)
    shared = None if run.summary is None else run.summary.sync.shared
    return {
        "run_dir": str(run.folder),
        "name": run.name,
        "model": run.model or None,
        "state": found.word,
        "state_text": found.text,
        "written_s": run.written_s,
        "schedule": plan.schedule if plan else metrics.starts[-1].schedule if metrics.starts else None,
        "num_stages": plan.num_stages if plan else None,
        "width": plan.width if plan else None,
        "num_microbatches": plan.num_microbatches if plan else None,
        **asdict(figures),
        "prediction_error": figures.prediction_error,
        "learns": run.learns.model_dump(),
        "absences": [asdict(one) for one in metrics.absences()],
        "recoveries": [asdict(one) for one in metrics.recoveries],
        "num_lines": len(metrics.training),
        "num_skipped": int(sum(count for count in metrics.training.num_skipped if count > 0)),
        "num_resumed": max(len(metrics.starts) - 1, 0),
        "stages": [
            {name: value for name, value in asdict(stage).items() if name != "unit_names"}
            for stage in stage_figures(run)
        ],
        "links": [
            asdict(flow)
            | {"share": flow.share, "source": flow.source.device, "destination": flow.destination.device}
            for flow in flows(run)
        ],
        **({} if shared is None else {"shared": shared.model_dump()}),
        "predicted_timeline": _timeline(run.predicted),
        "measured_timeline": _timeline(run.measured),
        "evaluations": [one.model_dump() for one in metrics.evaluations],
        "checkpoints": [one.model_dump() for one in metrics.checkpoints],
        "warnings": [one.model_dump() for one in metrics.warnings],
        "notes": list(run.notes),
    }


def _timeline(timeline: Timeline | None) -> dict[str, float] | None:
    if timeline is None:
        return None
    return {
        "num_batches": timeline.program.num_batches,
        "makespan_s": timeline.makespan_s,
        "steady_batch_s": timeline.steady_batch_s,
        "idle_share": idle_share(timeline),
    }
