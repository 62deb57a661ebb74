"""The order of samples in a run: a shuffle that is computed, never stored.

Where a sample stands depends on the seed, the epoch and the number of samples alone. So it is the same on any
number of ranks and workers, and after an interruption, and no list of all samples is ever made.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError

__all__ = ["Numbers", "Order", "SampleOrder", "StreamOrder", "hashed"]

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]

NUM_ROUNDS = 8
"""Fewer than four rounds show patterns; more than these change nothing that could be seen."""

NUM_PROBES = 4
"""Samples by which ranks can tell that their data differ."""


class SampleOrder(Protocol):
    """Which sample has which place of a run. Its text (`str`) differs where the order does."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    @property
    def seed(self) -> int:
        """What the order, and whatever samples draw, is derived from."""

    @property
    def probes(self) -> tuple[int, ...]:
        """Numbers of samples that may be read at any time, to compare the data of two ranks."""

    def batch(self, number: int, batch_size: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample stands at which place of a run that goes over `num_samples` again and again.

    Each epoch is a shuffle of its own, or the samples as they come if `shuffled` is false. Batch t has the
    places from t·B up to but without (t+1)·B; one that lies across the end of an epoch has samples of both.
    """

    num_samples: int
    seed: int = 0
    shuffled: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise BiremeError("There are no samples to put in an order. Give data with at least one.")

    @property
    def probes(self) -> tuple[int, ...]:
        """Samples spread over the data."""
        last = self.num_samples - 1
        return tuple(sorted({last * place // (NUM_PROBES - 1) for place in range(NUM_PROBES)}))

    def batch(self, number: int, batch_size: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""
        return self.numbers(number * batch_size, batch_size)

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""
        places = np.arange(first, first + count, dtype=np.int64)
        within = places % self.num_samples
        if not self.shuffled:
            return within
        epochs = (places // self.num_samples).astype(np.uint64)
        seed = hashed(np.array([self.seed % (1 << 64)], np.uint64))
        return _shuffled(within, self.num_samples, hashed(seed ^ epochs))


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """Samples as a stream gives them. The stream shuffles itself, within a buffer of so many rows."""

    num_samples: int
    seed: int
    shuffle_buffer: int

    @property
    def probes(self) -> tuple[int, ...]:
        """None: a stream is read once, from its beginning on."""
        return ()

    def batch(self, number: int, batch_size: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""
        return self.numbers(number * batch_size, batch_size)

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""
        return np.arange(first, first + count, dtype=np.int64)


def _shuffled(numbers: Numbers, size: int, keys: Words) -> Numbers:
    """Where permutations of 0 … size-1 take the numbers, for each the one of its key.

    It is a Feistel network over pairs (l, r) with l < a and r < b, where a·b is at least `size` and hardly
    more: each round adds to one half, modulo its size, a hash of the other, which can be undone and so is a
    permutation of the pairs. A pair beyond the size is sent through again until it falls below: it does, for
    it is on a cycle that began below.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    found = _through_rounds(numbers.astype(np.uint64), a, b, keys)
    while (beyond := found >= np.uint64(size)).any():
        found[beyond] = _through_rounds(found[beyond], a, b, keys[beyond])
    return found.astype(np.int64)


def _through_rounds(numbers: Words, a: int, b: int, keys: Words) -> Words:
    left, right = numbers // np.uint64(b), numbers % np.uint64(b)
    for round_number in range(NUM_ROUNDS):
        round_keys = hashed(keys + np.uint64(round_number))
        if round_number % 2:
            right = (right + hashed(left ^ round_keys) % np.uint64(b)) % np.uint64(b)
        else:
            left = (left + hashed(right ^ round_keys) % np.uint64(a)) % np.uint64(a)
    mixed: Words = left * np.uint64(b) + right
    return mixed


def hashed(words: Words) -> Words:
    """A hash of 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
