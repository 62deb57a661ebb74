"""Replicas that share an optimiser compute what they do with one each, in less memory, and save all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.bank_memory import BankMemory
from bireme.runtime.piece_sections import joined
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.small_models import Batch, Model, gpt, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

TAKEN_AFTER = 3
"""Batches, of which more are under way then."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank saw: of every batch the loss, the verdict and the weights after it; a snapshot on the way
    and one at the end; all that it held then; the loss of an evaluation, and what its stages keep.
    """

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    weights: list[dict[str, Tensor]]
    amid: Snapshot | None
    end: Snapshot
    held: Snapshot
    evaluated: float
    memory: list[BankMemory]


def train(
    model: Model, setting: Setting, data: Sequence[Batch], saved: Sequence[Snapshot] = ()
) -> list[Seen]:
    fabric = ThreadFabric(setting.plan.num_ranks, timeout_s=60.0)

    def work(rank: int) -> Seen:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        try:
            if saved:
                pipeline.restore(saved[rank % len(saved)])
            return follow(pipeline)
        finally:
            pipeline.close()

    def follow(pipeline: Pipeline) -> Seen:
        results, weights, amid = [], [], None
        for result in pipeline.train(data):
            results.append(result)
            weights.append({name: one.clone() for name, one in pipeline.parameters().items()})
            if result.batch + 1 == TAKEN_AFTER:
                amid = pipeline.snapshot()
        end = pipeline.snapshot()
        return Seen(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            [result.is_skipped for result in results],
            weights,
            amid,
            end,
            pipeline.snapshot(all_held=True),
            pipeline.evaluate(data[:1]).loss,
            [stage.banks.memory() for stage in pipeline.stages.values()],
        )

    torch.set_num_threads(1)
    return run_threads(setting.plan.num_ranks, work)


def together(snapshots: Sequence[Snapshot | None]) -> Snapshot:
    """The whole of what the ranks took, in which nothing is there twice."""
    parts = [one for one in snapshots if one is not None]
    names = [name for part in parts for name in part.tensors]
    assert len(names) == len(set(names))
    return replace(parts[0], tensors={n: t for part in parts for n, t in part.tensors.items()})


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0) -> None:
    assert set(found) == set(expected)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("schedule", "width", "text", "dtype", "optimizer", "clip_norm"),
    [
        ("1f1b", 2, "layers=3", "float64", "adamw", None),
        ("2bw", 2, "layers=3,tied=false", "bfloat16", "sgd", None),
        ("2bw-fresh", 2, "layers=3", "float64", "adamw", None),
        ("2bw", 3, "layers=3", "float64", "adamw", 0.5),
        ("2bw-fresh", 3, "layers=3,tied=false", "bfloat16", "adamw", 0.5),
        ("interleaved", 2, "layers=3", "float64", "adamw", 0.5),
    ],
)
def test_it_computes_what_replicas_with_an_optimiser_each_do(
    schedule: str, width: int, text: str, dtype: str, optimizer: str, clip_norm: float | None
) -> None:
    """To the last bit, but for the norm, which is a sum of other pieces. One batch counts for nothing."""
    model = gpt(text, dtype)
    bank_dtype = None
    if dtype == "bfloat16":
        model = replace(model, weights={name: one.float() for name, one in model.weights.items()})
        bank_dtype = torch.bfloat16
    alone = Setting(plan_for(schedule, width=width), optimizer, clip_norm, bank_dtype)
    data = token_batches(8 * width, 6)
    data[2] = {**data[2], "labels": torch.full_like(data[2]["labels"], -100)}
    expected = train(model, alone, data)
    found = train(model, replace(alone, shard="optimizer"), data)
    tolerance = 0.0 if clip_norm is None else {"float64": 1e-12, "bfloat16": 1e-5}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=tolerance or 1e-15, nan_ok=True)
        assert one.norms == pytest.approx(other.norms, rel=max(tolerance, 1e-6))
        assert one.skipped == other.skipped == [place == 2 for place in range(6)]
        for weights, wanted in zip(one.weights, other.weights, strict=True):
            assert_alike(weights, wanted, tolerance)
        assert one.evaluated == pytest.approx(other.evaluated, rel=tolerance or 1e-15)
    for moment in ("amid", "end"):
        saved, plain = (together([getattr(one, moment) for one in seen]) for seen in (found, expected))
        assert_alike(joined(saved.tensors), plain.tensors, tolerance)


@pytest.mark.parametrize(("schedule", "dtype"), [("1f1b", "bfloat16"), ("2bw-fresh", "float64")])
def test_a_replica_keeps_its_part_of_the_optimiser_only(schedule: str, dtype: str) -> None:
    model, bank_dtype = gpt("layers=3,tied=false", dtype), None
    if dtype == "bfloat16":
        model = replace(model, weights={name: one.float() for name, one in model.weights.items()})
        bank_dtype = torch.bfloat16
    alone = Setting(plan_for(schedule, width=3), bank_dtype=bank_dtype)
    data = token_batches(24, 3)
    whole = train(model, alone, data)
    shared = train(model, replace(alone, shard="optimizer"), data)
    per_replica = len(whole) // 3
    for place in range(per_replica):
        for stage, expected in enumerate(whole[place].memory):
            own = [shared[place + replica * per_replica].memory[stage] for replica in range(3)]
            for kind in ("apart_bytes", "optimizer_bytes"):
                sizes, all_bytes = [getattr(one, kind) for one in own], getattr(expected, kind)
                counts = 4 * 3 * 40  # each owner of a piece counts its steps
                assert 0 < all_bytes <= sum(sizes) <= all_bytes + counts
                assert max(sizes) <= all_bytes / 3 + 1024
            assert all(one.banks_bytes == expected.banks_bytes for one in own)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"])
def test_going_on_from_a_snapshot_with_it_or_without_is_never_having_stopped(schedule: str) -> None:
    model, data = gpt("layers=3"), token_batches(12, 6)
    alone = Setting(plan_for(schedule, width=2))
    shared = replace(alone, shard="optimizer")
    expected = train(model, alone, data)
    saved = together([one.amid for one in train(model, shared, data)])
    for setting, snapshot in (
        (alone, saved),
        (shared, saved),
        (shared, together([one.amid for one in expected])),
    ):
        rest = train(model, setting, data[TAKEN_AFTER:], [snapshot])
        assert rest[0].losses == expected[0].losses[TAKEN_AFTER:]
        assert_alike(rest[0].weights[-1], expected[0].weights[-1])
    if schedule == "2bw":  # trial versions are of each replica, and others begin with the newest weights
        rest = train(model, replace(shared, plan=plan_for(schedule, width=3)), data[TAKEN_AFTER:], [saved])
        assert rest[0].losses == pytest.approx(expected[0].losses[TAKEN_AFTER:], rel=1e-12)


def test_the_schedule_can_change_on_the_way() -> None:
    """As it does after a delay warm-up: each rank makes its next pipeline from all that it held."""
    text = gpt("layers=3,tied=false", "bfloat16")
    model = replace(text, weights={name: one.float() for name, one in text.weights.items()})
    data, seen = token_batches(8, 5), []
    for shard in ("none", "optimizer"):
        first = Setting(plan_for("1f1b", width=2), bank_dtype=torch.bfloat16, shard=shard)
        held = [one.held for one in train(model, first, data[:2])]
        seen.append(train(model, replace(first, plan=plan_for("2bw-fresh", width=2)), data[2:], held))
    expected, found = seen
    assert found[0].losses == expected[0].losses
    for one, other in zip(found, expected, strict=True):
        assert_alike(one.weights[-1], other.weights[-1])


def test_what_does_not_go_with_it_is_refused_in_a_sentence() -> None:
    model, plan = gpt("layers=3"), plan_for("1f1b", width=2)
    refused = {
        "Muon steps .* as a whole": Setting(plan, "muon", shard="optimizer"),
        'does not go with sums through "int8"': Setting(plan, sum_codec="int8", shard="optimizer"),
        "principal components": Setting(plan, gradient="principal:2", shard="optimizer"),
        "There is no shard 'weights'": Setting(plan, shard="weights"),
    }
    for sentence, setting in refused.items():
        with pytest.raises(BiremeError, match=sentence):
            pipeline_of(model, setting, ThreadFabric(plan.num_ranks).of(0))
