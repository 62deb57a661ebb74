"""Updates as soon as the first rank has a batch's gradients: what that saves, and that it costs no time."""

from itertools import product

import pytest

from bireme.plan.plan import Plan
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.symbolic import expected, outcome
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

FLOWING = ("2bw", "2bw-fresh")


def gradient_sets(program: Program) -> tuple[int, ...]:
    """For each stage, how many batches' gradients it keeps at once: from a first backward to the UPDATE."""
    most = [0] * program.num_stages
    kept: list[set[tuple[int, int | None]]] = [set() for _ in most]
    for track in program.tracks:
        for step in track:
            key = step.batch, step.microbatch if program.rule is Rule.STASHED else None
            if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                kept[step.stage].add(key)
                most[step.stage] = max(most[step.stage], len(kept[step.stage]))
            elif step.kind is Kind.UPDATE:
                kept[step.stage].discard(key)
    return tuple(most)


@pytest.mark.parametrize("name", FLOWING)
def test_the_first_rank_keeps_one_set_of_gradients_where_it_kept_two(name: str) -> None:
    for depth, per_rank, more, num_batches in product((1, 2, 3), (1, 2), (0, 2), (2, 3)):
        for early in (False, True):
            program = generate(
                name,
                num_stages=depth * per_rank,
                num_microbatches=depth + more,
                num_batches=num_batches,
                stages_per_rank=per_rank,
                timing=UpdateTiming(early=early),
            )
            on_first, on_others = (1 if early else 2,) * per_rank, (2,) * (depth - 1) * per_rank
            assert gradient_sets(program) == on_first + on_others
            assert check(program).ok
            assert outcome(program) == expected(program)


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("name", FLOWING)
def test_an_early_update_costs_no_time_where_a_sum_is_as_short_as_a_forward(name: str, agree: bool) -> None:
    """On the first rank alone it would: the others' updates would delay the pipeline a second time."""
    for depth, times, reduce_s in product((2, 4), (1, 2, 3), (0.0, 0.9)):
        costs = Costs.per_stage(depth, forward_s=1.0, backward_s=2.0, update_s=0.3, reduce_s=reduce_s)
        late_s, early_s = (
            simulate(
                generate(
                    name,
                    num_stages=depth,
                    num_microbatches=depth * times,
                    num_batches=8,
                    timing=UpdateTiming(early=early),
                ),
                costs,
                agree=agree,
            ).steady_batch_s
            for early in (False, True)
        )
        assert early_s == pytest.approx(late_s)


def test_schedules_that_drain_know_no_earlier_update() -> None:
    for name in ("1f1b", "zb-h1", "pipedream"):
        late, early = (
            generate(name, num_stages=3, num_microbatches=4, num_batches=2, timing=UpdateTiming(early=one))
            for one in (False, True)
        )
        assert late == early


def test_a_plan_updates_early_where_it_sums_no_gradients() -> None:
    def first_sets(plan: Plan) -> int:
        return gradient_sets(plan.source.settled())[0]

    assert first_sets(Plan((1,), 4)) == 1
    assert first_sets(Plan((1,), 4, width=2)) == 2
    assert first_sets(Plan((1,), 4, width=2, updates_early=True)) == 1
    assert first_sets(Plan((1,), 4, updates_early=False)) == 2


@pytest.mark.parametrize(("asked", "sets"), [(None, 2), (True, 1)])
def test_the_engine_waits_for_no_shared_parameters_unless_asked(asked: bool | None, sets: int) -> None:
    """Only the engine sees that the first and the last rank share one, whose gradient is a long sum."""
    plan = Plan((4,), 4, updates_early=asked)
    model, fabric = tiny_text(tied=True), ThreadFabric(plan.num_ranks)

    def work(rank: int) -> int:
        pipeline = pipeline_of(model, Setting(plan), fabric.of(rank))
        pipeline.close()
        return gradient_sets(pipeline.plan.source.settled())[0]

    assert run_threads(plan.num_ranks, work) == [sets, sets]
