"""The engine over real processes: what threads compute, gloo and sockets between processes compute too.

A launch runs many settings one after the other, for starting processes takes longer than training.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bireme.report.terminal import print_timeline
from bireme.report.timeline_document import write_trace
from bireme.runtime.evaluation import Evaluation
from bireme.runtime.launch import launch
from bireme.runtime.world import World
from bireme.schedule.program import Program
from bireme.timeline.timeline import BUSY, Timeline
from tests.support.engine_parity import (
    ALL,
    Setting,
    Trained,
    assert_equal,
    evaluated,
    oracle,
    pipeline_of,
    plan_for,
    tolerance_of,
    train_rank,
)
from tests.support.extent import several
from tests.support.small_models import Batch, Model, token_batches
from tests.support.tiny_text import tiny_text

pytestmark = pytest.mark.slow

PLAIN, DROPPING = 0.0, 0.3
"""How much of its values a model drops."""
TWO_TO_A_RANK = ("interleaved", "zbv")


@dataclass(frozen=True, slots=True)
class Job:
    """What to train in a launch."""

    dropout: float
    setting: Setting
    data: list[Batch]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank brought home of a job."""

    trained: Trained
    whole: dict[str, Tensor]
    evaluation: Evaluation


def job(
    schedule: str, num_ranks: int, width: int = 1, recompute: str = "off", windows: tuple[int, ...] = ()
) -> Job:
    """Draws differ in halves of a micro-batch, so that only the other schedules drop out."""
    num_stages = num_ranks * (2 if schedule in TWO_TO_A_RANK else 1)
    plan = plan_for(schedule, num_stages, width=width, recompute=recompute)
    assert plan.num_ranks == num_ranks * width
    dropout = PLAIN if schedule == "1f1b-sliced" else DROPPING
    return Job(dropout, Setting(plan, clip_norm=0.5, windows=windows), token_batches(9 * width, 3))


def unequal(schedule: str, widths: tuple[int, ...]) -> Job:
    """Stages of unequal width."""
    plan = replace(plan_for(schedule, len(widths)), stage_widths=widths)
    return Job(DROPPING, Setting(plan, clip_norm=0.5), token_batches(9, 3))


def run_jobs(world: World, models: dict[float, Model], jobs: Sequence[Job]) -> list[Outcome]:
    """On every rank: train, evaluate, and put the weights together."""
    outcomes = []
    for one in jobs:
        pipeline = pipeline_of(models[one.dropout], one.setting, world)
        before = torch.get_rng_state()
        trained = train_rank(pipeline, one.setting, one.data)
        assert torch.equal(torch.get_rng_state(), before)
        outcomes.append(Outcome(trained, pipeline.full_state_dict(), pipeline.evaluate(held_out())))
        pipeline.close()
    return outcomes


def held_out() -> list[Batch]:
    return [batch for place, size in enumerate((6, 1)) for batch in token_batches(size, 1, 50 + place)]


def assert_all_equal(jobs: Sequence[Job], num_processes: int) -> None:
    models = {
        dropout: tiny_text(tied=True, dropout=dropout, evaluates=True)
        for dropout in {one.dropout for one in jobs}
    }
    ranks = launch(run_jobs, num_processes, models, jobs, threads_per_process=1)
    for one, outcomes in zip(jobs, zip(*ranks, strict=True), strict=True):
        model = models[one.dropout]
        expected = oracle(model, one.setting, one.data)
        tolerance = max(tolerance_of(one.setting.plan.source.name), 1e-12)
        assert_equal([outcome.trained for outcome in outcomes], expected, tolerance=tolerance)
        first, *others = outcomes
        for name, tensor in expected[-1].weights.items():
            torch.testing.assert_close(first.whole[name], tensor, rtol=tolerance, atol=tolerance)
        assert not any(outcome.whole for outcome in others)
        loss = evaluated(model, first.whole, held_out())
        assert {outcome.evaluation.num_samples for outcome in outcomes} == {7}
        assert [outcome.evaluation.loss for outcome in outcomes] == pytest.approx([loss] * len(outcomes))


def test_four_processes_compute_what_one_does() -> None:
    """Two replicas of two stages under many schedules, in one call of train or several; then four stages.

    A rank amid four stages has messages both ways from the same rank.
    """
    recompute = cycle(("off", "all"))
    pairs = [job(schedule, 2, width=2, recompute=next(recompute)) for schedule in several(ALL, 5)]
    windows = [job("2bw", 2, width=2, windows=(1, 2)), job("2bw-fresh", 2, width=2, windows=(2, 1))]
    deep = [job("2bw", 4, recompute="some"), *(job(one, 4, recompute="all") for one in ("zb-h1", "1f1b"))]
    wide = [unequal("2bw", (3, 1)), unequal("1f1b", (1, 2, 1)), unequal("gpipe", (1, 3))]
    assert_all_equal([*pairs, *several(windows, 1), *several(deep, 2), *several(wide, 1)], 4)


# --- the timeline


def record(
    world: World, model: Model, settings: Sequence[Setting], data: list[Batch]
) -> list[tuple[Timeline, Program]]:
    timelines = []
    for setting in settings:
        pipeline = pipeline_of(model, setting, world)
        list(pipeline.train(data[:2]))
        list(pipeline.train(data[2:], record=True))
        timelines.append((pipeline.timeline(), pipeline.plan.source.program(12, 2)))
        pipeline.close()
    return timelines


def test_a_measured_timeline_has_each_instruction_and_can_be_shown(tmp_path: Path) -> None:
    """Of one replica, in the order of the program; what needs a message begins after what made it."""
    data = token_batches(16, 4) + token_batches(18, 10)
    schedules = ("gpipe", "1f1b-sliced", "interleaved", "zbv", "2bw-fresh")
    plans = [plan_for(schedule, 4 if schedule in TWO_TO_A_RANK else 2) for schedule in schedules]
    settings = [Setting(plan_for("2bw", 1, width=2)), *map(Setting, plans)]
    ranks = launch(record, 2, tiny_text(tied=True), settings, data, threads_per_process=1)
    for (timeline, program), other in zip(*ranks, strict=True):
        assert (timeline, program) == other
        assert timeline.source == "measured"
        assert timeline.program == program
        assert len(timeline.ranks) == timeline.program.num_ranks
        ended: dict[str, float] = {}
        for rank in timeline.ranks:
            assert len(rank.start_s) == len(rank.end_s) == len(rank.track)
            moments = [moment for pair in zip(rank.start_s, rank.end_s, strict=True) for moment in pair]
            assert moments == sorted(moments)
            assert 0.0 < rank.busy_s <= timeline.makespan_s
        steps = [interval for rank in timeline.ranks for interval in rank.intervals()]
        num_stages = timeline.program.num_stages
        for interval in steps:
            made = interval.instruction.makes(num_stages)
            if made is not None and interval.instruction.kind in BUSY:
                ended[str(made)] = interval.end_s
        late = [
            interval.start_s - ended[str(needed)]
            for interval in steps
            if (needed := interval.instruction.needs(num_stages)) is not None and str(needed) in ended
        ]
        # Two clocks agree to about what a message takes, which on a busy machine is not little.
        assert not late or min(late) > -0.05
        shown = io.StringIO()
        print_timeline(timeline, Console(file=shown, width=120))
        assert program.name in shown.getvalue()
        write_trace(timeline, tmp_path / "trace.json")
        assert (tmp_path / "trace.json").stat().st_size > 1000
