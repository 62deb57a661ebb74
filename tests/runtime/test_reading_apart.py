"""Private samples in the engine: each rank reads its own server's, and training is that of one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from bireme.train.data.documents import Cut, DocumentSamples
from bireme.train.data.loader import RankBatches
from bireme.train.data.mixture import ELSEWHERE, ReadableOrder, ReadableSamples
from bireme.train.data.placing import Stock
from bireme.train.data.samples import Batch, Samples, Tokens
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.small_models import CONTEXT, VOCAB
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

SIZE, COUNT, SEED = 16, 4, 5
OWNERS = (0, 1)
"""The first replica is at home on the first server, the second on the second."""


class Ledger:
    """Samples that write down which of them were asked for."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.seen = samples, set[int]()
        self.is_quick, self.is_columnar = samples.is_quick, samples.is_columnar

    def __len__(self) -> int:
        return len(self.samples)

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        self.seen.update(numbers)
        return self.samples.take(numbers, names, seeds)


def tokens(count: int, seed: int) -> DocumentSamples:
    """Samples in which a different number of tokens counts, some of them none at all."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count, CONTEXT), generator=draws)
    shares = torch.rand(count, 1, generator=draws)
    idle = torch.rand(count, CONTEXT, generator=draws) < torch.where(shares < 0.2, 2.0, shares)
    flat = torch.where(idle, -1 - ids, ids).reshape(-1).numpy()
    return Cut(CONTEXT, "stream", 0).samples(Tokens("tokens", flat, has_uncounted=True))


PUBLIC, PRIVATE = tokens(40, 1), (tokens(20, 2), tokens(30, 3))
STOCK = Stock(len(PUBLIC), (20, 30), SIZE)


def order_of(own: int | None, pipeline: Pipeline) -> ReadableOrder:
    rows = pipeline.cutter.rows_of_replicas
    return ReadableOrder(STOCK, SEED, OWNERS, (8, 8), lambda step: rows(step, SIZE), own=own)


def whole_batches(pipeline: Pipeline) -> list[dict[str, Tensor]]:
    """The batches as somebody would have them who may read everything."""
    views = [order_of(own, pipeline) for own in (0, 1)]
    found = []
    for step in range(COUNT):
        rows: list[Batch] = []
        for pair in zip(*(view.numbers(step * SIZE, SIZE).tolist() for view in views), strict=True):
            owner = next((own for own, number in enumerate(pair) if number < ELSEWHERE), None)
            samples = PUBLIC if owner is None else PRIVATE[owner]
            rows.append(samples.take([pair[0] if owner is None else ELSEWHERE - 1 - pair[owner]]))
        found.append({name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    return found


def losses_of(plan: Plan, ledgers: Sequence[Ledger] | None) -> list[float]:
    """The losses of a run: as private data asks for it, or with whole batches everywhere."""
    model, fabric = tiny_text(), ThreadFabric(plan.num_ranks)
    per_replica = plan.source.num_ranks

    def work(rank: int) -> list[float]:
        pipeline = pipeline_of(model, Setting(plan, reads_apart=ledgers is not None), fabric.of(rank))
        own = OWNERS[rank // per_replica]
        batches: object = whole_batches(pipeline)
        if ledgers is not None:
            samples = ReadableSamples(PUBLIC, ledgers[rank], f"server{own}")
            batches = RankBatches(
                samples,
                order_of(own, pipeline),
                SIZE,
                num_batches=COUNT,
                wanted=pipeline.cutter.wanted,
                prefetch=rank % 2,
            )
        found = [result.loss for result in pipeline.train(batches)]  # type: ignore[arg-type]
        pipeline.close()
        return found

    found = run_threads(plan.num_ranks, work)
    assert all(losses == found[0] for losses in found)
    return list(found[0])


@pytest.mark.parametrize("schedule", ["2bw-fresh", "zbv", "1f1b-sliced"])
def test_private_rows_are_read_by_their_owners_ranks_alone_and_nothing_else_changes(schedule: str) -> None:
    """What micro-batches weigh goes around as numbers, so losses are those of whole batches to the bit."""
    plan = plan_for(schedule, 4 if schedule == "zbv" else 2, width=2)
    ledgers = [Ledger(PRIVATE[OWNERS[rank // 2]]) for rank in range(4)]
    assert losses_of(plan, ledgers) == losses_of(plan, None)
    readers = {rank for rank, ledger in enumerate(ledgers) if ledger.seen}
    assert readers == ({0, 2} if schedule == "zbv" else {0, 1, 2, 3})


def test_a_row_of_another_server_cannot_be_read() -> None:
    samples = ReadableSamples(PUBLIC, PRIVATE[0], "server0")
    assert samples.take([3, ELSEWHERE - 1 - 7])["input_ids"].tolist() == [
        PUBLIC.take([3])["input_ids"][0].tolist(),
        PRIVATE[0].take([7])["input_ids"][0].tolist(),
    ]
    with pytest.raises(RuntimeError, match="another server"):
        samples.take([3, ELSEWHERE])
