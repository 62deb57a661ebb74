"""Gradients kept as principal components: the engine does with them what one process does."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bireme.errors import BiremeError
from bireme.model.units import linear_maps
from bireme.plan.plan import Plan
from bireme.runtime.settings import named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from tests.runtime.test_snapshot import TAKEN_BEHIND, all_weights, together, train
from tests.support.engine_parity import Setting, assert_equal, oracle, pipeline_of, plan_for, train_on_threads
from tests.support.principal_oracle import LR, principal_oracle
from tests.support.regression import Regression
from tests.support.small_models import Model, captured, made_of, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text

pytestmark = pytest.mark.slow

WIDTH, RANK = 20, 3


def layers() -> tuple[Regression, Model]:
    kinds = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    module = Regression(made_of([*kinds, nn.Linear(WIDTH, 1)]))
    return module, captured(module, real_batches(2, 1, WIDTH)[0], name="three layers of twenty")


class Plain(Setting):
    """Steps that are nothing but a rate times the gradient."""

    @property
    def factory(self) -> OptimizerFactory:
        return named_optimizer("sgd", lr=LR, momentum=0.0, weight_decay=0.0)


@pytest.mark.parametrize(("schedule", "width"), [("1f1b", 1), ("1f1b", 2), ("2bw", 2)])
def test_the_engine_steps_as_one_process_with_the_same_stream(schedule: str, width: int) -> None:
    module, model = layers()
    data = real_batches(16, 6, WIDTH)
    data[2]["x"][3] = math.nan  # a batch that is skipped leaves all as it was
    plan = Plan((1,), 4, schedule, width=width)
    setting = Plain(plan, lr_factor=lambda _batch: 1.0, gradient=f"principal:{RANK}")
    found = train_on_threads(model, setting, data)
    maps = {f"layers.{at}.weight": module.layers.get_submodule(str(at)) for at in (0, 2, 4)}
    expected = principal_oracle(
        module,
        {name: layer for name, layer in maps.items() if isinstance(layer, nn.Linear)},
        data,
        rank=RANK,
        width=width,
        num_microbatches=4,
        is_delayed=schedule != "1f1b",
    )
    assert found[0].skipped == [number == 2 for number in range(6)]
    for step, wanted in enumerate(expected):
        for trained in found:
            for name, tensor in trained.weights[step].items():
                assert torch.equal(tensor, wanted[name]), (name, step)


def full(**more: Any) -> dict[str, Any]:
    """Components of the rank that matrices of width 16 have."""
    names = tuple(linear_maps(tiny_text().graph))
    return {"gradient": "principal:16", "gradient_of": names, **more}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("schedule", "width", "recompute", "optimizer"),
    [
        ("1f1b", 1, "some", "adamw"),
        ("1f1b", 2, "all", "muon"),
        ("interleaved", 1, "off", "sgd"),
        ("2bw", 2, "off", "adamw"),
        ("2bw-fresh", 1, "off", "adamw"),
        ("2bw-fresh", 2, "all", "sgd"),
    ],
)
def test_components_of_the_full_rank_train_as_whole_gradients_do(
    schedule: str, width: int, recompute: str, optimizer: str
) -> None:
    model, data = tiny_text(), token_batches(16, 4)
    plan = plan_for(schedule, 2 if width > 1 else None, recompute=recompute, width=width)
    setting = Setting(plan, optimizer=optimizer, clip_norm=0.5)
    found = train_on_threads(model, replace(setting, **full()), data)
    assert_equal(found, oracle(model, setting, data), tolerance=1e-6)


@pytest.mark.parametrize(("schedule", "width"), [("1f1b", 2), ("2bw", 1), ("2bw-fresh", 2)])
def test_going_on_from_components_is_never_having_stopped(schedule: str, width: int) -> None:
    model, data = tiny_text(), token_batches(16, 8)
    setting = Setting(plan_for(schedule, 2, width=width), gradient="principal:2")
    whole = train(model, setting, data)
    rest = train(model, setting, data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_ranks_replicas_and_whole_gradients_go_on_from_components() -> None:
    model, data = tiny_text(), token_batches(16, 6)
    saved = together(train(model, Setting(plan_for("1f1b", 2, width=2), gradient="principal:2"), data))
    for schedule, width, gradient in (
        ("2bw", 2, "principal:2"),
        ("1f1b", 1, "principal:4"),
        ("1f1b", 1, "whole"),
    ):
        setting = Setting(plan_for(schedule, 2, width=width), gradient=gradient)
        rest = train(model, setting, data[TAKEN_BEHIND:], saved)
        assert all(math.isfinite(loss) for loss in rest[0].losses)


def kept(model: Model, gradient: str) -> tuple[int, int]:
    """The bytes of gradients that a rank keeps, and of what goes on from batch to batch."""
    fabric = ThreadFabric(1)
    setting = Plain(Plan((), 4, "1f1b"), gradient=gradient)
    pipeline = pipeline_of(model, setting, fabric.of(0))
    try:
        list(pipeline.train(real_batches(16, 2, WIDTH)))
        memory = pipeline.stages[0].banks.memory()
        return memory.gradient_bytes, memory.optimizer_bytes
    finally:
        pipeline.close()


def test_gradients_take_the_bytes_of_their_components_alone() -> None:
    _, model = layers()
    elements = sum(state.num_elements for state in model.graph.parameters)
    rest = elements - 3 * WIDTH * WIDTH
    whole, momenta = kept(model, "whole")
    some, settled = kept(model, f"principal:{RANK}")
    components = 3 * RANK * (2 * WIDTH + 1)
    assert whole == 8 * elements
    assert some <= 8 * (rest + 2 * components)
    assert settled - momenta == 8 * components


@pytest.mark.parametrize(
    ("schedule", "words"),
    [("zb-h1", "two halves of a backward"), ("1f1b", "matches no parameter")],
)
def test_what_cannot_stream_is_refused_before_anything_is_open(schedule: str, words: str) -> None:
    model = tiny_text()
    of = None if schedule == "zb-h1" else ("nothing.*",)
    setting = Setting(plan_for(schedule, 1), gradient="principal:2", gradient_of=of)
    with pytest.raises(BiremeError, match=words):
        pipeline_of(model, setting, ThreadFabric(1).of(0))
