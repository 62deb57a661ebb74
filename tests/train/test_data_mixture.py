"""Weighted sources: who has which place of a run, and that it never depends on where a run was cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.train.data.mixture import NUM_SLOTS, MixedOrder, MixedSamples, order_of
from bireme.train.data.placing import Order
from bireme.train.data.prepare import ModelSide, prepare_data
from bireme.train.model import RunModel
from bireme.train.run_data import private_samples_of
from bireme.train.run_file import load_run_file
from bireme.train.run_file.tables import Data
from tests.support.training import GPT
from tests.support.whole_batches import WholeBatches

SIZES = (40, 1000, 7)
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=3, max_size=3)


def mixed(slots: tuple[int, ...], seed: int = 0) -> MixedOrder:
    return MixedOrder(tuple(Order(size, seed + place) for place, size in enumerate(SIZES)), slots, seed)


def source_of(numbers: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(SIZES), numbers, "right")


@given(st.tuples(st.integers(1, 9000), st.integers(1, 3000)), st.integers(0, 10))
def test_every_source_has_its_share_wherever_a_run_stands(parts: tuple[int, int], seed: int) -> None:
    slots = (*parts, NUM_SLOTS - sum(parts))
    sources = source_of(mixed(slots, seed).numbers(0, 2 * NUM_SLOTS))
    places = np.arange(1, len(sources) + 1)
    for source, size in enumerate(slots):
        had = np.cumsum(sources == source)
        assert np.abs(had - places * size / NUM_SLOTS).max() <= 2
        assert had[NUM_SLOTS - 1] == size


@given(st.integers(0, 3 * NUM_SLOTS), st.integers(0, 400), st.integers(1, 400))
def test_the_order_is_the_same_however_it_is_cut(first: int, left: int, right: int) -> None:
    order = mixed((9000, 5000, NUM_SLOTS - 14000))
    whole = order.numbers(first, left + right)
    assert whole.tolist() == [*order.numbers(first, left), *order.numbers(first + left, right)]


def test_an_epoch_of_each_source_has_every_sample_once() -> None:
    numbers = mixed((9000, 5000, NUM_SLOTS - 14000)).numbers(0, 4 * NUM_SLOTS)
    for source, size in enumerate(SIZES):
        own = numbers[source_of(numbers) == source] - sum(SIZES[:source])
        for epoch in range(3):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        if size > 7:
            assert own[:size].tolist() != own[size : 2 * size].tolist()


def test_batches_of_a_mixture_hold_the_sources_samples(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / name).write_text(letter * 4000)
    mixture = [
        {"source": str(tmp_path / "a"), "weight": 3.0},
        {"source": str(tmp_path / "b"), "weight": 1.0},
    ]
    data = prepare_data(Data.model_validate({"mixture": mixture, "length": 8}), ModelSide({}), 8)
    assert isinstance(data.training, MixedSamples)
    assert (data.num_tokens, data.num_documents) == (8002, 2)
    batches = list(WholeBatches(data.training, order_of(data.training, 0), 8, num_batches=20))
    shares = [(batch["input_ids"] == ord("a")).all(1).sum().item() for batch in batches]
    assert sum(shares) == pytest.approx(120, abs=2)
    assert all(4 <= share <= 8 for share in shares)
    assert isinstance(data.evaluation, MixedSamples)
    assert [one.name for one in data.evaluation.sources] == [one["source"] for one in mixture]


def test_private_samples_beside_a_mixture_are_those_of_their_server(tmp_path: Path) -> None:
    for name in ("a", "own"):
        (tmp_path / name).write_text(name[0] * 4000)
    mixture = f'[{{source = "{tmp_path / "a"}", weight = 1.0}}]'
    private = f'{{there = "{tmp_path / "own"}"}}'
    run = load_run_file(
        None, [f"model.source={GPT}", "data.length=32", f"data.mixture={mixture}", f"data.private={private}"]
    )
    samples = private_samples_of(run, RunModel.of(run, 1), "there")
    assert set(samples.take([0, 1])["input_ids"].flatten().tolist()) == {ord("o")}
