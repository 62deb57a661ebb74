"""Sums over replicas through a codec: one process that applies the same codec gets the same numbers."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from bireme.plan.plan import Plan
from bireme.runtime.layout import layout_of, runnable
from bireme.runtime.snapshot import Snapshot, load_feedback
from bireme.sync.feedback import RESIDUAL, Feedback
from tests.runtime.test_snapshot import TAKEN_BEHIND, all_weights, together, train
from tests.support.engine_parity import (
    Setting,
    assert_equal,
    oracle,
    pipeline_of,
    plan_for,
    train_on_threads,
)
from tests.support.regression import Regression
from tests.support.small_models import Model, captured, made_of, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

CODECS = ("int8", "int4", "int2", "threshold:0.05:3", "lowrank:2:1")
WIDTH = 20


@pytest.fixture(autouse=True)
def _each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle knows no bundles."""
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)


@cache
def layers() -> Model:
    """Three layers with matrices large enough for a codec."""
    kinds = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    module = Regression(made_of([*kinds, nn.Linear(WIDTH, 1)]))
    return captured(module, real_batches(2, 1, WIDTH)[0], name="wide regression")


def tolerance_of(codec: str) -> float:
    """Messages are the same bits in both; products of matrices are not made in one order."""
    return 1e-7 if codec.startswith("lowrank") else 0.0


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("schedule", "codec"),
    [
        *(("1f1b", codec) for codec in CODECS),
        ("2bw", "threshold:0.05:3"),
        ("2bw", "lowrank:2:1"),
        ("2bw-fresh", "int4"),
        ("2bw-fresh", "threshold:0.05:3"),
    ],
)
def test_replicas_sum_through_a_codec_what_one_process_does(schedule: str, codec: str) -> None:
    model, data = tiny_text(), token_batches(16, 4)
    setting = Setting(plan_for(schedule, 2, width=2), optimizer="sgd", sum_codec=codec)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data), tolerance=tolerance_of(codec))


@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_four_replicas_sum_in_parts_what_one_process_does(codec: str) -> None:
    data = real_batches(16, 4, WIDTH)
    setting = Setting(Plan((), 4, "1f1b", width=4), optimizer="sgd", sum_codec=codec)
    assert_equal(train_on_threads(layers(), setting, data), oracle(layers(), setting, data), tolerance=0.0)


@pytest.mark.parametrize("codec", ["threshold:0.05:3", "lowrank:2:1"])
def test_a_skipped_batch_leaves_residuals_thresholds_and_bases_as_they_were(codec: str) -> None:
    data = real_batches(16, 6, WIDTH)
    data[0]["x"][3] = math.inf
    data[3]["x"][-1] = math.nan
    setting = Setting(Plan((1,), 4, "2bw", width=2), optimizer="sgd", sum_codec=codec)
    found = train_on_threads(layers(), setting, data)
    assert found[0].skipped == [True, False, False, True, False, False]
    assert_equal(found, oracle(layers(), setting, data), tolerance=tolerance_of(codec))


@pytest.mark.parametrize(
    ("schedule", "codec", "width"),
    [("2bw", "threshold:0.05:3", 2), ("2bw-fresh", "lowrank:2:1", 2), ("1f1b", "int2", 3)],
)
def test_going_on_amid_a_life_span_is_never_having_stopped(schedule: str, codec: str, width: int) -> None:
    model, data = tiny_text(), token_batches(8 * width, 8)
    setting = Setting(plan_for(schedule, 2, width=width), sum_codec=codec)
    whole = train(model, setting, data)
    rest = train(model, setting, data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_codec_and_other_replicas_go_on_from_the_same_checkpoint() -> None:
    model, data = tiny_text(), token_batches(16, 6)
    whole = train(model, Setting(plan_for("1f1b", 2, width=2), sum_codec="threshold:0.05:3"), data)
    saved = together(whole)
    for width, codec in ((2, "lowrank:2:1"), (4, "threshold:0.05:3"), (2, "none"), (1, "int8")):
        setting = Setting(plan_for("1f1b", 2, width=width), sum_codec=codec)
        rest = train(model, setting, data[TAKEN_BEHIND:], saved)
        assert rest[0].losses[0] == pytest.approx(whole[0].losses[TAKEN_BEHIND], rel=1e-9)
        assert all(math.isfinite(loss) for loss in rest[0].losses)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_other_replicas_share_what_was_not_sent(width: int) -> None:
    model = layers()
    name = model.graph.parameters[0].name
    residuals = [torch.full((WIDTH, WIDTH), 2.0**number, dtype=torch.float64) for number in range(2)]
    saved = {f"feedback/{place}-of-2/{name}/{RESIDUAL}": one for place, one in enumerate(residuals)}
    shared: list[Tensor] = []
    for replica in range(width):
        plan = runnable(Plan((), 4, "1f1b", width=width))
        layout = layout_of(model.graph, model.units, plan, replica, width)
        feedback = Feedback()
        load_feedback(feedback, Snapshot(5, 1.0, saved), layout)
        shared.append(feedback.after(5)[name][RESIDUAL])
    assert torch.allclose(sum(shared, torch.zeros(())), residuals[0] + residuals[1], rtol=1e-15)
    if width == 2:
        assert all(torch.equal(one, other) for one, other in zip(shared, residuals, strict=True))


def sent_bytes(model: Model, codec: str, make: Callable[[], Sequence[dict[str, Tensor]]]) -> tuple[int, int]:
    """What one rank of two replicas would have sent, and has."""
    fabric = ThreadFabric(2)

    def work(rank: int) -> tuple[int, int]:
        setting = Setting(Plan((), 4, "1f1b", width=2), sum_codec=codec)
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        try:
            list(pipeline.train(make()))
        finally:
            pipeline.close()
        return pipeline.sum_bytes.raw, pipeline.sum_bytes.sent

    raw, sent = max(run_threads(2, work))
    return raw, sent


def test_bytes_are_counted_as_they_are_sent() -> None:
    make = partial(real_batches, 16, 2, WIDTH)
    entries = sum(state.num_elements for state in layers().graph.parameters)
    names = len(layers().graph.parameters)  # of each it is said whether there is a gradient
    dense = 2 * (8 * entries + 4 * names)
    assert sent_bytes(layers(), "none", make) == (dense, dense)
    raw, sent = sent_bytes(layers(), "int8", make)
    assert raw == dense
    small = entries - 3 * WIDTH * WIDTH
    blocks = -(-WIDTH * WIDTH // 32)
    # Each gradient begins at a multiple of 16 bytes, so the one of a single element takes two.
    flags = -(-4 * names // 16) * 16
    assert sent == 2 * (flags + 8 * (small + 1) + 3 * (32 * blocks + -(-2 * blocks // 8) * 8))
