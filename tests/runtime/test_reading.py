"""Every rank reads of a batch what its stages and its replica need, and computes what it would with all."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.runtime.microbatches import Rows
from bireme.runtime.pipeline import Pipeline
from bireme.train.data.documents import Cut, DocumentSamples
from bireme.train.data.loader import RankBatches
from bireme.train.data.placing import Order
from bireme.train.data.samples import Batch, Samples, Tokens
from bireme.train.data.source import OwnSamples
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import CONTEXT, VOCAB, Model, real_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

SIZE, COUNT, SEED = 16, 3, 5
"""Samples of a batch, batches, and the seed of their order."""


class Noting:
    """Samples that note what is read of them: the rows of each tensor; not what all ranks look at once."""

    is_quick = False

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.is_columnar = samples.is_columnar
        self.seen: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        for name in names or ():
            self.seen.setdefault(name, []).extend(numbers)
        return self._samples.take(numbers, names, seeds)


def train_partly(
    model: Model, plan: Plan, samples: Callable[[], Samples]
) -> tuple[list[Noting], list[float]]:
    """What each rank reads of three batches, and the losses of these."""
    setting, fabric = Setting(plan), ThreadFabric(plan.num_ranks)
    notings = [Noting(samples()) for _ in range(plan.num_ranks)]

    def work(rank: int) -> list[float]:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        order = Order(len(notings[rank]), SEED)
        batches = RankBatches(
            notings[rank], order, SIZE, num_batches=COUNT, wanted=pipeline.cutter.wanted, prefetch=rank % 2
        )
        losses = [result.loss for result in pipeline.train(batches)]
        pipeline.close()
        return losses

    found = run_threads(plan.num_ranks, work)
    assert all(losses == found[0] for losses in found)
    return notings, found[0]


def train_whole(model: Model, plan: Plan, samples: Samples) -> list[float]:
    """The losses where every rank is given whole batches."""
    fabric = ThreadFabric(plan.num_ranks)
    order = Order(len(samples), SEED)
    data = [samples.take([int(n) for n in order.numbers(number * SIZE, SIZE)]) for number in range(COUNT)]

    def work(rank: int) -> list[float]:
        pipeline = pipeline_of(model, Setting(plan), fabric.of(rank))
        losses = [result.loss for result in pipeline.train(data)]
        pipeline.close()
        return losses

    found: list[float] = run_threads(plan.num_ranks, work)[0]
    return found


def halves(num_samples: int) -> list[list[int]]:
    """The samples of each of two replicas over all batches, and those of both."""
    order = Order(num_samples, SEED)
    batches = [list(map(int, order.numbers(number * SIZE, SIZE))) for number in range(COUNT)]
    first, second = ([n for batch in batches for n in batch[half]] for half in (slice(8), slice(8, 16)))
    return [first, second, [n for batch in batches for n in batch]]


def columns() -> OwnSamples:
    return OwnSamples("numbers", real_batches(70, 1, WIDTH)[0])


def tokens() -> DocumentSamples:
    """Some of them are only read."""
    ids = torch.randint(VOCAB, (70 * CONTEXT,), generator=torch.Generator().manual_seed(1)).numpy()
    ids = np.where(np.arange(len(ids)) % 5 == 0, -1 - ids, ids)
    return Cut(CONTEXT, "stream", 0).samples(Tokens("tokens", ids, has_uncounted=True))


class Rowed:
    """A dataset of samples that are made one by one, whole."""

    def __init__(self) -> None:
        self.rows = columns()
        self.made: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.made.append(number)
        return {name: tensor[0] for name, tensor in self.rows.take([number]).items()}


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_rank_reads_the_inputs_of_its_stages_and_the_rows_of_its_replica(schedule: str) -> None:
    """Every rank read whole batches: of a pipeline of eight stages six needed nothing of them."""
    plan = regression_plan(schedule, 2, width=2)
    notings, losses = train_partly(regression(), plan, columns)
    first, second, _ = halves(70)
    assert [noting.seen for noting in notings] == [
        {"x": first},
        {"wanted": first},
        {"x": second},
        {"wanted": second},
    ]
    assert losses == train_whole(regression(), plan, columns())


def test_where_targets_are_left_out_the_labels_are_read_whole_and_the_inputs_are_not() -> None:
    """What micro-batches weigh depends on the labels of all of them."""
    plan = plan_for("2bw", 2, width=2)
    model = tiny_text()
    notings, losses = train_partly(model, plan, tokens)
    first, second, both = halves(70)
    assert [noting.seen for noting in notings] == [
        {"labels": both, "input_ids": first},
        {"labels": both},
        {"labels": both, "input_ids": second},
        {"labels": both},
    ]
    assert losses == train_whole(model, plan, tokens())


@pytest.mark.slow
def test_samples_that_are_made_whole_are_made_once_and_for_their_replica_alone() -> None:
    plan = regression_plan("1f1b", 1, width=2)
    datasets: list[Rowed] = []

    def samples() -> OwnSamples:
        datasets.append(Rowed())
        return OwnSamples("rows", datasets[-1])

    _, losses = train_partly(regression(), plan, samples)
    looked_at = [0, 23, 46, 69]
    for dataset, rows in zip(datasets, halves(70), strict=False):
        assert sorted(dataset.made) == sorted(rows + looked_at)
    assert losses == train_whole(regression(), plan, columns())


def test_an_evaluation_reads_as_little() -> None:
    plan, model = regression_plan("2bw", 2, width=2), regression()
    fabric = ThreadFabric(plan.num_ranks)
    notings = [Noting(columns()) for _ in range(plan.num_ranks)]
    order = Order(70, SEED)

    def work(rank: int) -> tuple[float, float]:
        pipeline = pipeline_of(model, Setting(plan), fabric.of(rank))
        wanted = pipeline.cutter.wanted_to_evaluate
        parts = RankBatches(notings[rank], order, SIZE, num_batches=COUNT, wanted=wanted)
        whole = [
            columns().take([int(n) for n in order.numbers(number * SIZE, SIZE)]) for number in range(COUNT)
        ]
        losses = pipeline.evaluate(parts).loss, pipeline.evaluate(whole).loss
        pipeline.close()
        return losses

    found = run_threads(plan.num_ranks, work)
    assert all(math.isfinite(one) and one == other for one, other in found)
    first, second, _ = halves(70)
    assert [noting.seen for noting in notings] == [
        {"x": first},
        {"wanted": first},
        {"x": second},
        {"wanted": second},
    ]


def refused(plan: Plan, batches_of: Callable[[int, Pipeline], RankBatches | list[object]]) -> list[str]:
    """What each rank ends with."""
    fabric = ThreadFabric(plan.num_ranks)

    def work(rank: int) -> str:
        pipeline = pipeline_of(regression(), Setting(plan), fabric.of(rank))
        with pytest.raises(BiremeError) as caught:
            list(pipeline.train(batches_of(rank, pipeline)))  # type: ignore[arg-type]
        pipeline.close()
        return str(caught.value)

    return run_threads(plan.num_ranks, work)


def test_ranks_with_other_batches_are_told_so_though_none_reads_a_whole_one() -> None:
    def other_order(rank: int, pipeline: Pipeline) -> RankBatches:
        return RankBatches(columns(), Order(70, rank), SIZE, num_batches=2, wanted=pipeline.cutter.wanted)

    def other_data(rank: int, pipeline: Pipeline) -> RankBatches:
        samples = OwnSamples("numbers", real_batches(70, 1, WIDTH, first=rank)[0])
        return RankBatches(samples, Order(70), SIZE, num_batches=2, wanted=pipeline.cutter.wanted)

    for batches_of in (other_order, other_data):
        for told in refused(regression_plan("1f1b", 2), batches_of):
            assert "Batch 0 is not the same on all ranks" in told


class Short:
    """A batch that gives a row less than it is asked for."""

    num_samples, stamp = SIZE, 1

    def rows(self, wanted: Rows) -> Batch:
        whole = real_batches(wanted.num_samples - 1, 1, WIDTH)[0]
        return {name: whole[name] for name in wanted.names}


def test_a_batch_of_ones_own_that_does_not_give_what_it_is_asked_for_is_refused() -> None:
    plan = regression_plan("1f1b", 1)
    [told] = refused(plan, lambda _rank, _pipeline: [Short()])
    assert "asked for 16 samples of x and gave 15" in told
    [told] = refused(plan, lambda _rank, _pipeline: [[1, 2]])
    assert "Batch 0 is a list" in told
