"""Weights that do not learn page too: they are read, and never written back."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.checker import check
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.program import Program
from tests.support.engine_parity import Setting, pipeline_of, train_on_threads
from tests.support.paged import assert_same, paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.small_models import Model, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

pytestmark = pytest.mark.slow

STASH = 40_000


def part_of_a_model() -> Model:
    """Nothing of the first stage learns, and of the others one layer does not."""
    return tiny_text(freeze=("tokens.*", "layers.0.*", "layers.2.*", "layers.4.*"))


def frozen_copies(program: Program) -> dict[Kind, int]:
    found = dict.fromkeys((Kind.FETCH, Kind.EVICT), 0)
    for track in program.tracks:
        for step in track:
            if step.page is not None and step.page.item is Item.FROZEN and step.page.is_copied:
                found[step.kind] += 1
    return found


@pytest.mark.parametrize(
    ("plan", "host", "windows"),
    [
        (Plan((2, 4, 6), 3, "2bw", stages_per_rank=2), 0.3, (1, 2)),
        (Plan((2, 4, 6), 3, "1f1b", stages_per_rank=4, recompute=(0, 1, 2, 3)), 0.0, ()),
    ],
    ids=["three-tiers", "disk"],
)
def test_a_part_trained_on_paged_frozen_weights_learns_what_it_does_without_paging(
    plan: Plan, host: float, windows: tuple[int, ...], tmp_path: Path
) -> None:
    model, data = part_of_a_model(), token_batches(6, 3)
    within = paged(plan, sizes_of(model, plan, stash=STASH), 0.0, host=host, disk=True)
    program = within.program(3)
    assert check(program).ok
    copies = frozen_copies(program)
    assert copies[Kind.FETCH] > 0
    assert copies[Kind.EVICT] == 0

    settings = PagingSettings(tmp_path, partial(StrictMover, seed=5), memory=poisoned)
    pipelines: set[Pipeline] = set()
    resident = Setting(plan, clip_norm=0.5, windows=windows)
    expected = train_on_threads(model, resident, data)
    found = train_on_threads(
        model, replace(resident, plan=within, paging=settings), data, between=pipelines.add
    )
    assert_same(found, expected)
    for pipeline in pipelines:
        for tier in pipeline.tiers:
            assert tier.bytes_moved == tier.predicted_bytes_moved
            assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes
        states = {state.name: state for state in model.graph.parameters}
        for name, tensor in pipeline.parameters().items():
            assert states[name].trainable or torch.equal(tensor, model.weights[name])


def test_a_snapshot_without_frozen_weights_leaves_those_of_the_pipeline(tmp_path: Path) -> None:
    model, plan = part_of_a_model(), Plan((2, 4, 6), 3, "1f1b", stages_per_rank=4)
    within = paged(plan, sizes_of(model, plan, stash=STASH), 0.1, host=0.0, disk=True)
    frozen = [state.name for state in model.graph.parameters if not state.trainable]
    data, setting = token_batches(6, 2), Setting(within, paging=PagingSettings(tmp_path))
    first, second = (pipeline_of(model, setting, None) for _ in range(2))
    list(first.train(data[:1]))
    saved = first.snapshot(but=frozen)
    assert not any(name.partition("/")[2] in frozen for name in saved.tensors)
    second.restore(saved)
    assert [one.loss for one in second.train(data[1:])] == [one.loss for one in first.train(data[1:])]
    for pipeline in (first, second):
        pipeline.close()


def test_a_plan_that_does_not_count_frozen_weights_is_refused(tmp_path: Path) -> None:
    whole, plan = tiny_text(), Plan((2, 4, 6), 3, "1f1b", stages_per_rank=4)
    within = paged(plan, sizes_of(whole, plan, stash=STASH), 0.1, host=0.0, disk=True)
    with pytest.raises(BiremeError, match=r"Rank 0 has [\d.,]+ \w+ of frozen weights that the plan leaves"):
        pipeline_of(part_of_a_model(), Setting(within, paging=PagingSettings(tmp_path)), None)


def test_a_frozen_weight_that_two_stages_share_is_summed_with_nobody(tmp_path: Path) -> None:
    model = tiny_text(tied=True, freeze=("tokens.*",))
    plan = Plan((2, 4, 6), 3, "1f1b", stages_per_rank=4)
    within = paged(plan, sizes_of(model, plan, stash=STASH), 0.0, host=0.0, disk=True)
    (found,) = train_on_threads(model, Setting(within, paging=PagingSettings(tmp_path)), token_batches(6, 1))
    (expected,) = train_on_threads(model, Setting(plan), token_batches(6, 1))
    assert found.losses == expected.losses
