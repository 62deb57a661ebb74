"""The order of samples: a shuffle of every epoch that anybody can compute at any place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bireme.train.data.placing import Order

SEEDS = st.integers(0, 2**63)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 5))
def test_an_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    numbers = Order(num_samples, seed).numbers(epoch * num_samples, num_samples)
    assert sorted(numbers) == list(range(num_samples))


def test_every_small_number_of_samples_is_permuted() -> None:
    for num_samples in range(1, 130):
        assert sorted(Order(num_samples, 3).numbers(0, num_samples)) == list(range(num_samples))


@given(st.integers(1, 200), SEEDS, st.integers(0, 500), st.integers(1, 40))
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(
    num_samples: int, seed: int, first: int, size: int
) -> None:
    order = Order(num_samples, seed)
    whole = order.numbers(0, (first + 3) * size)
    batches = [order.numbers(number * size, size) for number in range(first, first + 3)]
    assert np.array_equal(np.concatenate(batches), whole[first * size :])


@given(st.integers(30, 3000), SEEDS)
def test_epochs_and_seeds_differ(num_samples: int, seed: int) -> None:
    def epoch(order: Order, number: int) -> list[int]:
        return list(order.numbers(number * num_samples, num_samples))

    order, other = Order(num_samples, seed), Order(num_samples, seed + 1)
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(other, 0)
    assert epoch(order, 1) != epoch(other, 0)


def test_samples_land_anywhere_about_equally_often() -> None:
    size, num_epochs = 20, 2000
    numbers = Order(size, 7).numbers(0, size * num_epochs).reshape(num_epochs, size)
    counts = np.stack([np.bincount(numbers[:, place], minlength=size) for place in range(size)])
    # Chi squared of 20 × 20 cells that should hold 100 each; 361 degrees of freedom deviate by 27.
    assert ((counts - 100.0) ** 2 / 100).sum() < 361 + 5 * 27


def test_neighbors_are_strangers() -> None:
    numbers = Order(10_000, 1).numbers(0, 10_000)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(numbers)) == 1).mean() < 0.01


def test_the_order_never_changes_between_releases() -> None:
    assert Order(10, 0).numbers(0, 20).tolist() == [
        5,
        1,
        0,
        3,
        9,
        6,
        4,
        8,
        2,
        7,
        2,
        8,
        6,
        4,
        1,
        5,
        9,
        0,
        3,
        7,
    ]


def test_a_place_in_a_huge_corpus_costs_nothing() -> None:
    numbers = Order(10**12, 5).numbers(10**15, 64)
    assert len(set(numbers.tolist())) == 64
    assert numbers.max() < 10**12


def test_unshuffled_samples_come_as_they_are_again_and_again() -> None:
    assert Order(3, 9, shuffled=False).numbers(2, 5).tolist() == [2, 0, 1, 2, 0]
