"""Replicas that share an optimizer or weights and sum through a codec: each gets the decoded sums of its
parts, as one process finds them that sends every piece through the codec by itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from tests.runtime.test_coded_sums import CODECS, WIDTH, layers, tolerance_of
from tests.runtime.test_snapshot import TAKEN_BEHIND, all_weights, together
from tests.runtime.test_snapshot import train as train_and_save
from tests.support.engine_parity import Setting, oracle, pipeline_of, plan_for, train_on_threads
from tests.support.oracles import Update
from tests.support.small_models import Batch, Model, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

ONCE_A_BATCH = Plan((2, 4, 6), 4, "1f1b", width=2, stages_per_rank=2, sweep=4)
"""With shared weights, each stage sums its gradients once a batch."""


@pytest.fixture(autouse=True)
def _each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle knows no bundles."""
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)


def cuts_of(pipeline: Pipeline) -> dict[str, tuple[slice, ...]]:
    return {
        name: cuts
        for stage in pipeline.stages.values()
        for part in stage.banks.gradients.parts
        for name, cuts in part.cuts.items()
    }


def train_and_judge(model: Model, setting: Setting, data: Sequence[Batch]) -> list[Update]:
    """Train on threads, and compare with one process: losses, verdicts and weights after each batch."""
    cuts: dict[str, Sequence[slice]] = {}

    def look(pipeline: Pipeline) -> None:
        cuts.update(cuts_of(pipeline))

    found = train_on_threads(model, setting, data, between=look)
    expected = oracle(model, setting, data, cuts=cuts)
    tolerance = tolerance_of(setting.sum_codec)
    for trained in found:
        rough = max(tolerance, 1e-12)
        losses, norms = [one.loss for one in expected], [one.norm for one in expected]
        assert trained.losses == pytest.approx(losses, rel=rough, nan_ok=True)
        assert trained.norms == pytest.approx(norms, rel=rough, nan_ok=True)
        assert trained.skipped == [one.is_skipped for one in expected]
        for weights, update in zip(trained.weights, expected, strict=True):
            for name, tensor in weights.items():
                assert_alike(tensor, update.weights.get(name, tensor), tolerance, name)
    return expected


def assert_alike(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    if not torch.equal(found, expected):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("shard", "schedule", "codec"),
    [
        *(("optimizer", "1f1b", codec) for codec in CODECS),
        ("optimizer", "2bw", "threshold:0.05:3"),
        ("optimizer", "2bw-fresh", "int2"),
        *(("weights", "swept", codec) for codec in CODECS),
    ],
)
def test_owners_get_the_decoded_sums_of_their_pieces(shard: str, schedule: str, codec: str) -> None:
    model, data = tiny_text(), token_batches(16, 4)
    plan = ONCE_A_BATCH if schedule == "swept" else plan_for(schedule, 2, width=2)
    train_and_judge(model, Setting(plan, "sgd", sum_codec=codec, shard=shard), data)


def test_three_replicas_agree_with_one_process() -> None:
    model, data = tiny_text(), token_batches(12, 3)
    for shard in ("optimizer", "weights"):
        plan = replace(ONCE_A_BATCH, width=3)
        train_and_judge(model, Setting(plan, "sgd", sum_codec="int2", shard=shard), data)


def test_muon_steps_matrices_from_decoded_sums() -> None:
    model, data = tiny_text(), token_batches(16, 3)
    setting = Setting(plan_for("1f1b", 2, width=2), "muon", sum_codec="int4", shard="optimizer")
    train_and_judge(model, setting, data)


@pytest.mark.parametrize("codec", ["int4", "lowrank:2:1"])
def test_low_rank_gives_the_bits_of_replicas_with_an_optimizer_each(codec: str) -> None:
    """And other codecs nearly so: their blocks begin elsewhere."""
    model, data = tiny_text(), token_batches(16, 3)
    own = Setting(plan_for("1f1b", 2, width=2), "sgd", sum_codec=codec)
    expected = train_on_threads(model, own, data)
    found = train_on_threads(model, replace(own, shard="optimizer"), data)
    if codec.startswith("lowrank"):
        assert found[0].losses == expected[0].losses
        for name, tensor in expected[0].weights[-1].items():
            assert torch.equal(found[0].weights[-1][name], tensor)
    else:
        assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-2)


@pytest.mark.parametrize("codec", ["threshold:0.05:3", "lowrank:2:1"])
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_skipped_batch_leaves_what_is_kept_as_it_was(shard: str, codec: str) -> None:
    data = real_batches(16, 6, WIDTH)
    data[0]["x"][3] = math.inf
    data[3]["x"][-1] = math.nan
    plan = Plan((1,), 4, "2bw", width=2) if shard == "optimizer" else Plan((1,), 4, "1f1b", width=2, sweep=4)
    expected = train_and_judge(layers(), Setting(plan, "sgd", sum_codec=codec, shard=shard), data)
    assert [one.is_skipped for one in expected] == [True, False, False, True, False, False]


def test_delayed_updates_of_shared_weights_recover_from_a_batch_that_is_not_finite() -> None:
    """The next batch begins before that is known. It goes on from residuals that are finite."""
    data = real_batches(16, 6, WIDTH)
    data[2]["x"][-1] = math.nan
    setting = Setting(Plan((1,), 4, "2bw", width=2), "sgd", sum_codec="int2", shard="weights")
    found = train_on_threads(layers(), setting, data)
    assert found[0].skipped == [False, False, True, False, False, False]
    assert all(torch.isfinite(one).all() for one in found[0].weights[-1].values())


@pytest.mark.parametrize(
    ("shard", "schedule", "codec"),
    [
        ("optimizer", "2bw", "threshold:0.05:3"),
        ("optimizer", "2bw-fresh", "lowrank:2:1"),
        ("weights", "2bw", "int2"),
    ],
)
def test_going_on_is_never_having_stopped(shard: str, schedule: str, codec: str) -> None:
    model, data = tiny_text(), token_batches(16, 8)
    setting = Setting(plan_for(schedule, 2, width=2), sum_codec=codec, shard=shard)
    whole = train_and_save(model, setting, data)
    rest = train_and_save(model, setting, data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_are_counted_as_they_are_sent() -> None:
    """A replica sends the other one its half of the gradients, in messages of pieces."""
    entries = sum(state.num_elements for state in layers().graph.parameters)
    counted: Mapping[str, list[tuple[int, int]]] = {"none": [], "int8": []}
    for codec, bytes_of in counted.items():
        fabric = ThreadFabric(2)
        setting = Setting(Plan((), 4, "1f1b", width=2), sum_codec=codec, shard="optimizer")

        def work(rank: int, setting: Setting = setting, fabric: ThreadFabric = fabric) -> tuple[int, int]:
            pipeline = pipeline_of(layers(), setting, fabric.of(rank))
            try:
                list(pipeline.train(real_batches(16, 1, WIDTH)))
                return pipeline.sum_bytes.raw, pipeline.sum_bytes.sent
            finally:
                pipeline.close()

        bytes_of.extend(run_threads(2, work))
    (raw, dense), _ = counted["none"]
    assert raw == dense
    for (raw, sent), (own, _) in zip(counted["int8"], counted["none"], strict=True):
        assert raw == own
        assert sent < own - 0.7 * 8 * entries / 2
