"""What a stage holds at its worst moments: counted in one go, and reckoned for deep pipelines."""

import pytest

from bireme.plan.partition import loads as module
from bireme.plan.partition.loads import DEEP, holdings
from bireme.schedule.catalogue import SCHEDULES, generate


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", [name for name, one in SCHEDULES.items() if one.stages_per_rank == 1])
def test_counting_all_at_once_is_counting_one_by_one(name: str, recompute: bool) -> None:
    again = range(4) if recompute else ()
    program = generate(name, num_stages=4, num_microbatches=6, num_batches=3, recompute=again)
    for rank in range(4):
        assert module._at_once(program, rank) == module._one_by_one(program, rank)


@pytest.mark.slow
@pytest.mark.few(10)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "early"),
    [*((name, False) for name in sorted(module.EVENLY)), ("2bw", True), ("2bw-fresh", True)],
)
def test_deep_pipelines_hold_what_counting_says(name: str, early: bool, recompute: bool) -> None:
    for num_stages in (DEEP + 1, DEEP + 4):
        for num_microbatches in (num_stages, num_stages + 1, num_stages + 3):
            counted = module._counted(name, num_stages, num_microbatches, recompute, early)
            reckoned = holdings(name, num_stages, num_microbatches, recompute=recompute, updates_early=early)
            assert [set(stage) for stage in reckoned] == [set(stage) for stage in counted]


@pytest.mark.parametrize("name", ["2bw", "2bw-fresh"])
def test_early_updates_leave_the_first_stage_one_set_of_gradients(name: str) -> None:
    for num_stages in (3, 40):
        late, early = (holdings(name, num_stages, 64, updates_early=one) for one in (False, True))
        sets = [[max(moment.gradient for moment in stage) for stage in one] for one in (late, early)]
        assert sets == [[2.0] * num_stages, [1.0] + [2.0] * (num_stages - 1)]
