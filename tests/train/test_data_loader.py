"""Batches depend on their numbers alone: not on what is made ahead, nor on where a run was interrupted."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.runtime.microbatches import Rows
from bireme.train.data.documents import Cut, DocumentSamples
from bireme.train.data.loader import RankBatches
from bireme.train.data.placing import Order
from bireme.train.data.samples import Batch, Samples, Tokens
from bireme.train.data.source import OwnSamples
from bireme.train.replica import DealtBatches
from tests.support.extent import examples
from tests.support.whole_batches import WholeBatches

SAMPLES = Cut(4, "stream", 0).samples(Tokens("corpus", np.arange(84, dtype=np.uint16)))


def seen(batches: Iterator[Batch] | WholeBatches) -> list[list[int]]:
    """The first token of each sample, batch by batch."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def batches(first: int = 0, count: int | None = 9, **ways: int) -> WholeBatches:
    return WholeBatches(SAMPLES, Order(len(SAMPLES), 3), 4, first, count, prefetch=ways.get("prefetch", 2))


@examples(30)
@given(st.integers(0, 9), st.integers(0, 4))
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(done: int, prefetch: int) -> None:
    whole = seen(batches(prefetch=0))
    begun = batches(count=done, prefetch=prefetch)
    assert seen(begun) + seen(batches(begun.state(), 9 - done, prefetch=prefetch)) == whole


def test_a_batch_has_the_samples_of_its_places_in_the_order() -> None:
    order = Order(len(SAMPLES), 3)
    for number, firsts in enumerate(seen(batches())):
        assert firsts == [4 * int(sample) for sample in order.numbers(4 * number, 4)]


def test_the_state_is_the_number_of_the_next_batch_however_many_are_ready() -> None:
    loader = batches(first=5, prefetch=4)
    assert loader.state() == 5
    running = iter(loader)
    next(running)
    assert loader.state() == 6


def test_iterating_again_goes_on_where_the_last_time_was_left() -> None:
    loader = batches()
    first = [next(iter(loader)), next(iter(loader))]
    assert seen(iter(first)) + seen(loader) == seen(batches())


def test_batches_without_end_go_on_over_the_epochs() -> None:
    with batches(count=None) as loader:
        running = iter(loader)
        assert len([next(running) for _ in range(30)]) == 30


def test_no_thread_is_left_when_nobody_reads_on() -> None:
    loader = batches(count=None)
    running = iter(loader)
    next(running)
    assert "bireme data" in [thread.name for thread in threading.enumerate()]
    del running
    assert "bireme data" not in [thread.name for thread in threading.enumerate()]


def test_no_more_is_made_ahead_than_was_asked() -> None:
    made: list[int] = []
    caught_up = threading.Event()

    class Counting(DocumentSamples):
        def take(
            self,
            numbers: Sequence[int],
            names: Sequence[str] | None = None,
            seeds: Sequence[int] | None = None,
        ) -> Batch:
            made.append(1)
            if len(made) == 3:
                caught_up.set()
            return DocumentSamples.take(self, numbers, names, seeds)

    counting = Counting(SAMPLES.tokens, 4, SAMPLES.pieces, 0, is_shared=False)
    with WholeBatches(counting, Order(len(counting)), 4, prefetch=2) as loader:
        running = iter(loader)
        next(running)
        assert caught_up.wait(10)
        assert not threading.Event().wait(0.05)
        assert len(made) == 3  # one given, two ready


def test_a_replica_asks_for_the_samples_of_one_batch_ahead_so_that_one_that_joins_has_a_part_soon() -> None:
    asked: list[int] = []
    came = threading.Event()

    def deal(batch: int) -> list[range]:
        asked.append(batch)
        if len(asked) == 2:
            came.set()
        return [range(batch, batch + 1)]

    order = Order(len(SAMPLES))
    with DealtBatches(SAMPLES, order, 4, num_batches=9, prefetch=4, deal=deal) as loader:
        running = iter(loader)
        next(running)
        assert came.wait(10)
        assert not threading.Event().wait(0.05)
        assert asked == [0, 1]


def test_an_error_comes_where_its_batch_was_due_and_names_the_sample() -> None:
    samples = OwnSamples("data", [{"x": number} if number != 7 else None for number in range(12)])
    for prefetch in (0, 3):
        loader = WholeBatches(samples, Order(12, shuffled=False), 2, num_batches=6, prefetch=prefetch)
        running = iter(loader)
        for _ in range(3):
            next(running)
        with pytest.raises(BiremeError, match="Sample 7 of data is nothing"):
            next(running)
        assert loader.state() == 3


def test_of_a_batch_there_are_the_tensors_and_rows_that_are_wanted() -> None:
    whole = next(iter(batches()))
    labels, ids = Rows(("labels",), 0, 4), Rows(("input_ids",), 1, 3)
    order = Order(len(SAMPLES), 3)
    [batch] = RankBatches(SAMPLES, order, 4, num_batches=1, wanted=lambda _number, _size: (labels, ids))
    assert batch.num_samples == 4
    assert batch.rows(labels).keys() == {"labels"}
    assert torch.equal(batch.rows(labels)["labels"], whole["labels"])
    assert torch.equal(batch.rows(ids)["input_ids"], whole["input_ids"][1:3])
    with pytest.raises(BiremeError, match="hold input_ids, labels, and not pixels"):
        list(RankBatches(SAMPLES, order, 4, num_batches=1, wanted=lambda *_: (Rows(("pixels",), 0, 1),)))


def stamps(samples: Samples, *, seed: int = 3, size: int = 4, first: int = 0) -> list[int]:
    loader = RankBatches(samples, Order(len(samples), seed), size, first, 3, wanted=lambda *_: ())
    return [batch.stamp for batch in loader]


def test_a_stamp_is_that_of_the_batch_though_ranks_read_other_parts_of_it() -> None:
    """Or nothing: it tells data, their order, and places in it apart."""
    found = stamps(SAMPLES)
    assert found == stamps(SAMPLES)
    assert stamps(SAMPLES, first=1)[:2] == found[1:]
    assert len(set(found)) == 3
    other = Cut(4, "stream", 0).samples(Tokens("corpus", np.arange(1, 85, dtype=np.uint16)))
    for changed in (stamps(SAMPLES, seed=4), stamps(SAMPLES, size=5), stamps(other)):
        assert not set(changed) & set(found)


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    samples = OwnSamples("data", {"x": torch.arange(3)})
    [batch] = WholeBatches(samples, Order(3, 1), 8, num_batches=1)
    assert sorted(batch["x"][:3].tolist()) == [0, 1, 2]


def test_an_order_of_other_samples_is_refused() -> None:
    with pytest.raises(BiremeError, match="order is for 5 samples"):
        WholeBatches(SAMPLES, Order(5), 2)
