"""Shares in the engine: they change while it trains, on all ranks at once, and stay one process's numbers."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.balance import Policy, Shares, limits_of, split
from bireme.errors import BiremeError
from bireme.runtime.balancer import Sharing
from bireme.runtime.measuring import batch_end as measuring
from bireme.runtime.measuring.batch_end import replica_times
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stage import Stage
from bireme.runtime.updates import BatchResult
from bireme.train.data.loader import RankBatches
from bireme.train.data.placing import Order
from bireme.train.data.source import OwnSamples
from tests.support.engine_parity import Setting, Trained, oracle, pipeline_of, plan_for
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import Batch, Model, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

NUM_REPLICAS, NUM_MICROBATCHES, BATCH = 2, 4, 40
SUDDEN = 6
"""The batch from which the second replica is three times as slow."""
QUICK = Policy(every=4)


def busy_s(batch: int, rank: int, samples: int) -> float:
    """Made-up seconds: the first replica is faster, and the second one becomes slower."""
    if rank < 2:
        return 0.01 * samples
    return (0.02 if batch < SUDDEN else 0.06) * samples


def sharing(lead: int = 0, first: Shares = (20, 20), policy: Policy | None = QUICK) -> Sharing:
    return Sharing(first, limits_of(NUM_MICROBATCHES, [10, 10]), policy, lead, busy_s)


@dataclass
class Ran:
    """What a rank saw."""

    results: list[BatchResult]
    trained: Trained
    snapshots: list[Snapshot]
    read_ahead: int


def run(
    setting: Setting,
    data: Sequence[Batch],
    shared: Sharing | None,
    saved: Snapshot | None = None,
    batches_of: Callable[[Pipeline, int], Iterator[Batch] | RankBatches] | None = None,
    model: Model | None = None,
) -> list[Ran]:
    """All ranks as threads."""
    num_ranks, model = setting.plan.num_ranks, model or regression()
    setting.factory(
        [("weight", nn.Parameter(torch.zeros(1)))]
    )  # imports what threads must not import at once
    fabric = ThreadFabric(num_ranks)

    def work(rank: int) -> Ran:
        pipeline = pipeline_of(model, setting, fabric.of(rank), sharing=shared)
        found = Ran([], Trained(), [], pipeline.read_ahead)
        try:
            if saved is not None:
                pipeline.restore(saved)
            given = iter(data) if batches_of is None else batches_of(pipeline, rank)
            for result in pipeline.train(given):
                found.results.append(result)
                found.trained.losses.append(result.loss)
                found.trained.norms.append(result.grad_norm)
                found.trained.skipped.append(result.is_skipped)
                found.trained.weights.append(
                    {name: one.clone() for name, one in pipeline.parameters().items()}
                )
                found.snapshots.append(pipeline.snapshot())
        finally:
            pipeline.close()
        return found

    torch.set_num_threads(1)
    return run_threads(num_ranks, work)


def whole(snapshots: Sequence[Snapshot]) -> Snapshot:
    """What all ranks took after a batch, together; they agree on the shares."""
    assert all(one.shares == snapshots[0].shares for one in snapshots)
    return replace(snapshots[0], tensors={n: t for one in snapshots for n, t in one.tensors.items()})


@pytest.mark.few(4)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh", "zb-h1"])
def test_changing_shares_train_as_one_process_does(schedule: str) -> None:
    """To the last bit where sums are made in the order of the micro-batches, which follow the shares."""
    setting = Setting(regression_plan(schedule, 2, width=NUM_REPLICAS), optimizer="sgd")
    data = real_batches(BATCH, 20, WIDTH)
    ran = run(setting, data, sharing())
    shares = [result.shares for result in ran[0].results]
    assert all([result.shares for result in one.results] == shares for one in ran)
    assert len(set(shares)) >= 3, "the speeds differ from the first batch on, and one changes"
    assert all(sum(own) == BATCH and min(own) >= NUM_MICROBATCHES for own in shares)
    # The second replica is half as fast first, and a sixth as fast at the end.
    assert shares[-1][1] in (5, 6, 7)
    sizes = [[size for own in one for size in split(own, NUM_MICROBATCHES)] for one in shares]
    expected = oracle(regression(), setting, data, sizes=sizes)
    for one in ran:
        assert one.trained.losses == pytest.approx([update.loss for update in expected], rel=1e-12)
        assert one.trained.norms == pytest.approx([update.norm for update in expected], rel=1e-12)
        for found, update in zip(one.trained.weights, expected, strict=True):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, update.weights[name], rtol=1e-12, atol=1e-12)


def test_a_run_with_changing_shares_ends_like_one_with_fixed_shares_and_one_process() -> None:
    setting = Setting(regression_plan("1f1b", 2, width=NUM_REPLICAS))
    alone = Setting(regression_plan("sequential", 1))
    data = real_batches(BATCH, 16, WIDTH)
    changing = run(setting, data, sharing())[0].trained.losses
    fixed = run(setting, data, None)[0].trained.losses
    assert changing == pytest.approx(fixed, rel=1e-10)
    assert changing == pytest.approx(run(alone, data, None)[0].trained.losses, rel=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_shares_change_for_batches_that_no_rank_has_read(schedule: str) -> None:
    setting = Setting(regression_plan(schedule, 2, width=NUM_REPLICAS))
    lead = 2
    ran = run(setting, real_batches(BATCH, 14, WIDTH), sharing(lead))
    decided = [dict(one.shares or {}) for one in ran[0].snapshots]
    for batch, (before, after) in enumerate(pairwise(decided), 1):
        if before["shares"] != after["shares"]:
            assert after["first"] == batch + ran[0].read_ahead + 1 + lead
            assert ran[0].results[after["first"] - 1].shares == tuple(before["shares"])
            if after["first"] < len(ran[0].results):
                assert ran[0].results[after["first"]].shares == tuple(after["shares"])


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_going_on_from_a_snapshot_is_never_having_stopped_while_shares_change(schedule: str) -> None:
    """Also from one that was taken when a change was decided and had not come yet."""
    setting = Setting(regression_plan(schedule, 2, width=NUM_REPLICAS), optimizer="adamw")
    data = real_batches(BATCH, 18, WIDTH)
    first = run(setting, data, sharing())
    pending = next(
        batch
        for batch, one in enumerate(first[0].snapshots)
        if one.shares is not None and one.shares["first"] > batch + 1
    )
    saved = whole([one.snapshots[pending] for one in first])
    again = run(setting, data[pending + 1 :], sharing(), saved)
    assert [r.shares for r in again[0].results] == [r.shares for r in first[0].results[pending + 1 :]]
    assert again[0].trained.losses == first[0].trained.losses[pending + 1 :]
    for one, other in zip(first, again, strict=True):
        assert all(
            torch.equal(tensor, other.trained.weights[-1][name])
            for name, tensor in one.trained.weights[-1].items()
        )


def test_shares_of_another_run_are_not_taken_over() -> None:
    setting = Setting(regression_plan("1f1b", 1, width=NUM_REPLICAS))
    data = real_batches(BATCH, 6, WIDTH)
    first = run(setting, data, sharing())
    saved = whole([one.snapshots[-1] for one in first])
    assert saved.shares is not None
    other = replace(saved, shares={**saved.shares, "shares": (10, 10, 20), "before": (10, 10, 20)})
    again = run(setting, data, sharing(), other)
    assert again[0].results[0].shares == (20, 20)


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_replica_in_whose_share_nothing_counts_weighs_nothing(schedule: str) -> None:
    """Weights are those of the targets that count, whatever the shares are when they change."""
    model = tiny_text(tied=True)
    setting = Setting(plan_for(schedule, 2, width=NUM_REPLICAS), optimizer="sgd")
    data = token_batches(BATCH, 9)
    for batch in data[2:]:
        batch["labels"][-16:] = -100
    ran = run(setting, data, sharing(), model=model)
    shares = [result.shares for result in ran[0].results]
    assert len(set(shares)) > 1
    assert any(one[1] <= 16 for one in shares[2:]), "there nothing counts in the second replica"
    sizes = [[size for own in one for size in split(own, NUM_MICROBATCHES)] for one in shares]
    expected = oracle(model, setting, data, sizes=sizes)
    assert ran[0].trained.losses == pytest.approx([update.loss for update in expected], rel=1e-12)
    for name, tensor in ran[0].trained.weights[-1].items():
        torch.testing.assert_close(tensor, expected[-1].weights[name], rtol=1e-11, atol=1e-12)


def test_a_replica_without_a_sample_for_each_micro_batch_is_refused() -> None:
    setting = Setting(regression_plan("1f1b", 2, width=NUM_REPLICAS))
    with pytest.raises(BiremeError, match="do not fit 2 replicas that take at least 4, 4"):
        run(setting, real_batches(BATCH, 1, WIDTH), sharing(first=(40, 0)))


class Slow(OwnSamples):
    """Samples that take long enough for a loader to run ahead."""

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        time.sleep(0.002)
        return super().take(numbers, names, seeds)


@pytest.mark.parametrize(("prefetch", "lead"), [(0, 0), (2, 0), (3, 3)])
def test_a_loader_that_runs_ahead_waits_for_the_shares_and_every_sample_is_read_once(
    prefetch: int, lead: int
) -> None:
    setting = Setting(regression_plan("2bw", 2, width=NUM_REPLICAS))
    samples = Slow("numbers", real_batches(10 * BATCH, 1, WIDTH)[0])
    order, read = Order(len(samples), 3), list[list[int]]()

    class Noting(Slow):
        def take(
            self,
            numbers: Sequence[int],
            names: Sequence[str] | None = None,
            seeds: Sequence[int] | None = None,
        ) -> Batch:
            if names == ("x",):
                read.append(list(numbers))
            return super().take(numbers, names, seeds)

    def batches_of(pipeline: Pipeline, _rank: int) -> RankBatches:
        own = Noting("numbers", real_batches(10 * BATCH, 1, WIDTH)[0])
        return RankBatches(
            own, order, BATCH, num_batches=10, wanted=pipeline.cutter.wanted, prefetch=prefetch
        )

    ran = run(setting, (), sharing(lead), batches_of=batches_of)
    assert len({result.shares for result in ran[0].results}) > 1
    trained = sorted(number for numbers in read for number in numbers)
    assert trained == list(range(len(samples)))
    data = [samples.take([int(n) for n in order.numbers(number * BATCH, BATCH)]) for number in range(10)]
    assert ran[0].trained.losses == pytest.approx(run(setting, data, None)[0].trained.losses, rel=1e-10)


def test_without_a_policy_the_busy_seconds_of_all_ranks_are_known_and_shares_stay() -> None:
    setting = Setting(regression_plan("1f1b", 2, width=NUM_REPLICAS))
    ran = run(setting, real_batches(BATCH, 8, WIDTH), replace(sharing(policy=None), busy_s=None))
    assert {result.shares for result in ran[0].results} == {(20, 20)}
    assert all(len(result.busy_s) == 4 and min(result.busy_s) > 0 for result in ran[0].results)
    assert all(one.results[-1].busy_s == ran[0].results[-1].busy_s for one in ran)


def test_without_shares_that_follow_a_batch_ends_with_the_numbers_that_it_always_had() -> None:
    setting = Setting(regression_plan("1f1b", 2, width=NUM_REPLICAS))
    ran = run(setting, real_batches(BATCH, 3, WIDTH), None)
    assert all(
        result.busy_s == () and one.snapshots[0].shares is None for one in ran for result in one.results
    )


@pytest.mark.parametrize("shard", ["none", "weights"])
def test_every_rank_measures_its_own_stages_and_a_replica_is_as_slow_as_its_slowest(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured trains nothing, and runs on the weights that are trained."""
    setting = Setting(regression_plan("2bw", 2, width=NUM_REPLICAS), shard=shard)
    are_whole: list[bool] = []

    def run_on_the_weights(stage: Stage, *given: Any) -> None:
        weights = stage.banks.newest_to_compute_with()
        are_whole.append(all(torch.equal(one, model.weights[name]) for name, one in weights.items()))
        plain_run(stage, *given)

    plain_run = measuring._run
    monkeypatch.setattr(measuring, "_run", run_on_the_weights)
    model, fabric = regression(), ThreadFabric(setting.plan.num_ranks)
    data = real_batches(16, 1, WIDTH)[0]

    def work(rank: int) -> tuple[object, bool]:
        pipeline = pipeline_of(model, setting, fabric.of(rank), sharing=sharing())
        before = {name: one.clone() for name, one in pipeline.parameters().items()}

        def rows(size: int, names: Sequence[str]) -> dict[str, Tensor]:
            return {name: data[name][:size] for name in names}

        times = replica_times(pipeline, rows, [1, 2, 4, 8], [8, 4])
        same = all(torch.equal(before[name], one) for name, one in pipeline.parameters().items())
        pipeline.close()
        return times, same

    torch.set_num_threads(1)
    found = run_threads(setting.plan.num_ranks, work)
    times = found[0][0]
    assert all(own == times and same for own, same in found)
    assert times[0].sizes == times[1].sizes == (1, 2, 4, 8)
    assert min(times[0].seconds) > 0
    assert times[1].seconds[-1] == float("inf")
    assert are_whole
    assert all(are_whole)
