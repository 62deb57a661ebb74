"""Snapshots taken amid a stream: who goes on from one is where nobody ever stopped."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot, joined
from tests.support.engine_parity import ALL, DELAYED, FLUSH, Setting, pipeline_of, plan_for
from tests.support.small_models import Batch, Model, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

TAKEN_BEHIND = 4
"""Batches; more are under way when the snapshot is taken."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank saw: the loss of every batch, its weights at the end, and a snapshot on the way."""

    losses: list[float]
    weights: Mapping[str, Tensor]
    snapshot: Snapshot | None


def train(
    model: Model,
    setting: Setting,
    data: Sequence[Batch],
    saved: Snapshot | None = None,
    but: Collection[str] = (),
) -> list[Seen]:
    """All ranks as threads, from a snapshot on where there is one; `but` is left out of the one they take."""
    fabric = ThreadFabric(setting.plan.num_ranks)

    def work(rank: int) -> Seen:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        try:
            return follow(pipeline)
        finally:
            pipeline.close()

    def follow(pipeline: Pipeline) -> Seen:
        if saved is not None:
            pipeline.restore(saved)
        losses, snapshot = [], None
        for result in pipeline.train(data):
            losses.append(result.loss)
            if result.batch + 1 == TAKEN_BEHIND:
                snapshot = pipeline.snapshot(but=but)
        weights = {name: tensor.clone() for name, tensor in pipeline.parameters().items()}
        return Seen(losses, weights, snapshot)

    torch.set_num_threads(1)
    return run_threads(setting.plan.num_ranks, work)


def together(seen: Sequence[Seen]) -> Snapshot:
    """The whole of what the ranks took, in which nothing is there twice."""
    parts = [one.snapshot for one in seen if one.snapshot is not None]
    assert len({(part.num_trained, part.clip_scale) for part in parts}) == 1
    names = [name for part in parts for name in part.tensors]
    assert len(names) == len(set(names))
    return replace(parts[0], tensors={n: t for part in parts for n, t in part.tensors.items()})


def all_weights(seen: Sequence[Seen]) -> dict[str, Tensor]:
    return {name: tensor for one in seen for name, tensor in one.weights.items()}


@pytest.mark.few(6)
@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("width", [1, 2])
def test_going_on_from_a_snapshot_is_never_having_stopped(schedule: str, width: int) -> None:
    model = tiny_text(tied=True, dropout=0.3)
    setting = Setting(plan_for(schedule, width=width), clip_norm=0.5)
    data = token_batches(8 * width, 7)
    whole = train(model, setting, data)
    rest = train(model, setting, data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", ["1f1b", *DELAYED])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
def test_so_it_is_with_bfloat16_banks_and_every_optimizer(schedule: str, optimizer: str) -> None:
    model = tiny_text(dtype="bfloat16")
    setting = Setting(plan_for(schedule), optimizer=optimizer, bank_dtype=torch.bfloat16)
    data = token_batches(8, 7)
    whole = train(model, setting, data)
    rest = train(model, setting, data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("schedule", "shard"), [("2bw", "weights"), ("2bw-fresh", "none")])
def test_a_part_goes_on_from_what_was_trained_alone(schedule: str, shard: str) -> None:
    model = tiny_text(dropout=0.3, freeze=("tokens.*", "layers.1.*", "*.bias"))
    frozen = {state.name for state in model.graph.parameters if not state.trainable}
    setting = Setting(plan_for(schedule, width=2), clip_norm=0.5, shard=shard)
    data = token_batches(16, 7)
    whole = train(model, setting, data, but=frozen)
    saved = together(whole)
    names = joined(saved.tensors)
    assert {name.partition("/")[2] for name in names if name.startswith("weights/")} == {
        state.name for state in model.graph.parameters if state.trainable
    }
    rest = train(model, setting, data[TAKEN_BEHIND:], saved)
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 1), ("zb-h1", 2), ("gpipe", 6), ("2bw", 2)])
def test_another_number_of_stages_goes_on_within_rounding(schedule: str, num_stages: int) -> None:
    model = tiny_text(tied=True)
    first = "2bw" if schedule in DELAYED else FLUSH[2]
    data = token_batches(8, 7)
    whole = train(model, Setting(plan_for(first)), data)
    rest = train(model, Setting(plan_for(schedule, num_stages)), data[TAKEN_BEHIND:], together(whole))
    assert rest[0].losses == pytest.approx(whole[0].losses[TAKEN_BEHIND:], rel=1e-12)


def test_a_synchronous_run_goes_on_delayed_from_its_newest_weights() -> None:
    model, data = tiny_text(tied=True), token_batches(8, 7)
    whole = train(model, Setting(plan_for("1f1b")), data)
    delayed = train(model, Setting(plan_for("2bw")), data[TAKEN_BEHIND:], together(whole))
    # Its first batch runs on the version before, which is held to be equal to the newest; so its loss is the
    # same, and that of the next one is of an older version.
    assert delayed[0].losses[0] == pytest.approx(whole[0].losses[TAKEN_BEHIND], rel=1e-12)
    assert delayed[0].losses[1] != pytest.approx(whole[0].losses[TAKEN_BEHIND + 1], rel=1e-6)
