"""Gradients kept as principal components, for the planner and for people."""

import pytest

from bireme.cluster.catalogue import device_named
from bireme.codec.sum_description import GradientForm
from bireme.errors import BiremeError
from bireme.model.units import chosen_maps
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search import problem
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.train.choices import gradient_document, with_kept_gradients
from bireme.train.run_file import RunFile, load_run_file
from tests.support.estimates import estimated_once
from tests.support.tiny_profiles import gpt

RANK = 2


def run(*sets: str) -> RunFile:
    return load_run_file(None, ["training.gradient=principal:2", *sets])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 1), ("2bw", 2)])
def test_the_planner_counts_components_and_what_they_go_on_from(schedule: str, copies: int) -> None:
    graph = gpt(tied="false")
    maps = chosen_maps(graph, GradientForm(RANK)).values()
    before = estimated_once(graph, device_named("laptop"), [1])
    after = with_kept_gradients(run(f"plan.schedule={schedule}"), graph, before)
    kept = sum(4 * RANK * (one.rows + one.columns + 1) for one in maps)
    whole = sum(4 * one.rows * one.columns for one in maps)
    saved = [sum(unit.gradient_bytes for unit in one.units) for one in (before, after)]
    state = [sum(unit.optimizer_bytes for unit in one.units) for one in (before, after)]
    assert saved[0] - saved[1] == whole - kept > 0
    assert state[1] - state[0] == copies * kept
    told = gradient_document(run(), graph)["gradient"]
    assert (told["whole_bytes"], told["kept_bytes"]) == tuple(saved)
    assert with_kept_gradients(RunFile(), graph, before) is before
    assert gradient_document(RunFile(), graph) == {}


def test_no_plan_splits_backwards_that_must_be_whole() -> None:
    splits = {
        name
        for name, one in SCHEDULES.items()
        if generate(
            name, num_stages=2 * one.stages_per_rank, num_microbatches=4, num_batches=1
        ).splits_backward
    }
    assert splits == {name for name, one in SCHEDULES.items() if one.splits_backward} != set()
    assert splits.isdisjoint(problem._schedules(PlanRequest(8, whole_backwards=True)))
    assert splits <= set(problem._schedules(PlanRequest(8)))


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BiremeError, match=r"training\.gradient is \"whole\""):
        load_run_file(None, ['training.gradient_of=["*.weight"]'])
    with pytest.raises(BiremeError, match="principal:RANK"):
        load_run_file(None, ["training.gradient=svd:3"])
