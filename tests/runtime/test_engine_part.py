"""A part of a model is trained over a pipeline as one process trains it, and the rest stays as it is.

Ranks are threads; the judge is one process, as in `test_engine`.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from bireme.model.part import LoraPart, TrainedPart
from bireme.plan.plan import Plan
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.small_models import Model, gpt, token_batches

pytestmark = pytest.mark.slow

SIZES = "layers=3,tied=false,dropout=0.3"
PARTS = {
    "train": TrainedPart(train=("layers.2.*", "norm.*")),
    "freeze": TrainedPart(freeze=("tokens.*", "layers.1.*", "*.bias")),
    "lora": TrainedPart(lora=LoraPart(2, dropout=0.1, targets=("query_key_value", "up", "head"))),
}


@cache
def model_of(part: str) -> Model:
    if part == "lora":
        pytest.importorskip("peft")
    return gpt(SIZES, part=PARTS[part])


@pytest.mark.few(6)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("schedule", "recompute", "width"), [("1f1b", (), 2), ("2bw-fresh", (1,), 1), ("zb-h1", (), 1)]
)
def test_a_part_learns_what_one_process_learns(
    part: str, schedule: str, recompute: tuple[int, ...], width: int
) -> None:
    model = model_of(part)
    setting = Setting(Plan((4,), 4, schedule, width=width, recompute=recompute), clip_norm=0.5)
    data = token_batches(8 * width, 3)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)
    learning = {state.name for state in model.graph.parameters if state.trainable}
    for trained in found:
        assert trained.states[-1].keys() <= learning
        for name, tensor in trained.weights[-1].items():
            assert torch.equal(tensor, model.weights[name]) == (name not in learning), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_replicas_share_an_adapter_and_the_weights_below_it(optimizer: str) -> None:
    """And learn what replicas do that have all of it."""
    model, data = model_of("lora"), token_batches(16, 3)
    own = Setting(Plan((4,), 4, "2bw", width=2), optimizer)
    expected = train_on_threads(model, own, data)
    for shard in ("optimizer", "weights"):
        found = train_on_threads(model, replace(own, shard=shard), data)
        for one, other in zip(found, expected, strict=True):
            assert one.losses == other.losses
            for name, tensor in other.weights[-1].items():
                assert torch.equal(one.weights[-1][name], tensor), name
