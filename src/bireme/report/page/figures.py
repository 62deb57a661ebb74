"""The numbers of a run that a reader asks for first, from whichever file has them.

A run that ended has a summary; of one that is going on or was killed they come from the plan, the recorded
timelines and the metrics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from bireme.plan.forecast import StageForecast, joules_per_sample
from bireme.report.page.run import ReportedStage, Run
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
class MemoryPart:
    """A part of the memory that was predicted."""

    name: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class StageFigures:
    """A stage, predicted and measured; None is what nobody knows."""

    stage: int
    first_unit: int
    last_unit: int
    unit_names: tuple[str, ...]
    devices: tuple[str, ...]
    predicted_s: float | None
    measured_s: float | None
    predicted_share: float | None
    measured_share: float | None
    predicted_bytes: float | None
    measured_bytes: float | None
    limit_bytes: float | None
    parts: tuple[MemoryPart, ...]


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
    summary = None if run.metrics.stop is None else run.summary
    losses = _known(training.loss)
    evaluated = [one for one in evaluations if math.isfinite(one.loss)]
    best = min(evaluated, key=lambda one: one.loss, default=None)
    steps = summary.steps if summary is not None else None
    samples_per_s = _middle(training.samples_per_s)
    forecast = None if run.plan is None else run.plan.forecast
    watts = None if forecast is None else forecast.watts
    return Headline(
        steps=run.metrics.last_step if steps is None else steps,
        train_loss=_first(summary.train_loss if summary else None, losses[-1] if losses else None),
        least_loss=min(losses, default=None),
        eval_loss=_first(summary.eval_loss if summary else None, evaluated[-1].loss if evaluated else None),
        least_eval_loss=None if best is None else best.loss,
        least_eval_step=None if best is None else best.step,
        tokens_per_s=_first(summary.tokens_per_s if summary else None, _middle(training.tokens_per_s)),
        samples_per_s=samples_per_s,
        predicted_batch_s=_predicted_batch_s(run),
        measured_batch_s=_first(summary.measured_batch_s if summary else None, _middle(training.seconds)),
        peak_bytes=_peak_bytes(run),
        running_s=run.metrics.last_time_s,
        joules_per_sample=joules_per_sample(watts, samples_per_s) if samples_per_s else None,
        eval_bits_per_byte=_first(
            summary.eval_bits_per_byte if summary else None, *(one.bits_per_byte for one in evaluations[-1:])
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
    told: ReportedStage | None,
    batch_s: float | None,
) -> StageFigures:
    first, last = (
        told.units if told is not None else (foretold.begin, foretold.end - 1) if foretold else (0, 0)
    )
    forecast = run.plan.forecast if run.plan is not None else None
    predicted_share = told.predicted_busy_share if told is not None else None
    if predicted_share is None and foretold is not None and forecast is not None:
        predicted_share = foretold.busy_s / forecast.batch_s
    measured_share = told.busy_share if told is not None else None
    if measured_share is None and run.measured is not None:
        measured_share = _busy_share(run.measured, stage)
    units = run.plan.units if run.plan is not None else ()
    devices = foretold.devices if foretold is not None else (told.device,) if told and told.device else ()
    return StageFigures(
        stage=stage,
        first_unit=first,
        last_unit=last,
        unit_names=tuple(unit.name for unit in units[first : last + 1]),
        devices=devices,
        predicted_s=foretold.busy_s if foretold is not None else None,
        measured_s=None if measured_share is None or batch_s is None else measured_share * batch_s,
        predicted_share=predicted_share,
        measured_share=measured_share,
        predicted_bytes=_first(
            told.predicted_peak_bytes if told else None, foretold.peak_bytes if foretold else None
        ),
        measured_bytes=_first(told.measured_peak_bytes if told else None, _seen_bytes(run, stage)),
        limit_bytes=foretold.limit_bytes if foretold is not None else None,
        parts=_parts(run, stage, told),
    )


def _parts(run: Run, stage: int, told: ReportedStage | None) -> tuple[MemoryPart, ...]:
    """What the predicted peak consists of: of the stage, or where only that is known of its rank."""
    if told is not None and told.bytes:
        named = told.bytes
    elif run.predicted is not None:
        rank = run.predicted.program.rank_of_stage[stage]
        named = run.predicted.memory[rank].at_peak
    else:
        return ()
    return tuple(MemoryPart(name, num_bytes) for name, num_bytes in named.items() if num_bytes > 0)


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
