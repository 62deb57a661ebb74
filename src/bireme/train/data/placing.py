"""The placement of samples if some are private: which replica trains on which of them in which step.

An epoch has K = (public + private samples) / batch size steps, the same for all replicas. A replica on an
owner's server takes the owner's private samples first, spread evenly over the epoch, and public ones in the
places that are left. A public sample is taken by one replica at most in an epoch, unless public samples run
out; then they are taken again. Of an owner with more samples than its places an epoch takes a part, and the
next epoch goes on after it.

A step takes the same samples whatever came before it: all follows from the seed, the step, how many samples
there are, and the rows that each owner has of a batch. No rank needs another owner's samples, and no list of
samples is made. Rows may change within an epoch; an owner that then has too few for a step leaves the rest of
its samples of that step out, and public ones that come next are taken twice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError

# The order of samples in a run: a shuffle that is computed, never stored.
#
# Where a sample stands depends on the seed, the epoch and the number of samples alone. So it is the same on
# any number of ranks and workers, and after an interruption, and no list of all samples is ever made.

Numbers = NDArray[np.int64]
_Words = NDArray[np.uint64]

_NUM_ROUNDS = 8
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

    @property
    def probes(self) -> tuple[int, ...]:
        """Samples spread over the data."""
        last = self.num_samples - 1
        return tuple(sorted({last * place // (NUM_PROBES - 1) for place in range(NUM_PROBES)}))

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
    """Samples as a stream gives them. The stream shuffles itself, within a buffer of rows."""

    num_samples: int
    seed: int
    shuffle_buffer: int

    @property
    def probes(self) -> tuple[int, ...]:
        """None: a stream is read once, from its beginning on."""
        return ()

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""
        return np.arange(first, first + count, dtype=np.int64)


def _shuffled(numbers: Numbers, size: int, keys: _Words) -> Numbers:
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


def _through_rounds(numbers: _Words, a: int, b: int, keys: _Words) -> _Words:
    left, right = numbers // np.uint64(b), numbers % np.uint64(b)
    for round_number in range(_NUM_ROUNDS):
        round_keys = hashed(keys + np.uint64(round_number))
        if round_number % 2:
            right = (right + hashed(left ^ round_keys) % np.uint64(b)) % np.uint64(b)
        else:
            left = (left + hashed(right ^ round_keys) % np.uint64(a)) % np.uint64(a)
    mixed: _Words = left * np.uint64(b) + right
    return mixed


def hashed(words: _Words) -> _Words:
    """A hash of 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Stock:
    """How many samples there are, public ones and private ones of each owner, for batches of one size.

    With `is_added` a batch has that many public samples, and private ones beside them; otherwise private
    samples take places in it.
    """

    num_public: int
    num_private: tuple[int, ...]
    batch_size: int
    is_added: bool = False

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1 or self.num_public < 1 or min(self.num_private, default=1) < 1:
            raise BiremeError(
                f"There are {self.num_public} public samples and {list(self.num_private)} private ones for "
                f"batches of {self.batch_size}. Give public data, and each owner, at least one sample, and "
                "all of them a batch."
            )

    @property
    def steps_per_epoch(self) -> int:
        """K: the steps that everybody makes in an epoch."""
        placed = 0 if self.is_added else sum(self.num_private)
        return (self.num_public + placed) // self.batch_size


@dataclass(frozen=True, slots=True)
class PrivateTurns:
    """When an owner's samples take their turns: `window` of its `num_samples` in each epoch, spread evenly
    over `steps` steps. The next epoch goes on after them.
    """

    num_samples: int
    window: int
    steps: int
    seed: int

    def before(self, step: int) -> int:
        """How many samples come in the steps before this one, since the run began."""
        epoch, place = divmod(step, self.steps)
        return epoch * self.window + self.window * place // self.steps

    def count(self, step: int) -> int:
        """How many samples a step has."""
        return self.before(step + 1) - self.before(step)

    def numbers(self, step: int, begin: int, end: int) -> Numbers:
        """The numbers of the samples of a step, from the one at `begin` up to but without `end`."""
        if begin >= end:
            return np.empty(0, np.int64)
        mixed = Order(self.window, self.seed).numbers(self.before(step) + begin, end - begin)
        epoch = step // self.steps
        return (epoch * self.window + mixed) % self.num_samples


@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch takes: the number of samples of each owner, and of places for public ones."""

    stock: Stock
    own: tuple[int, ...]
    public: int

    @property
    def own_left_out(self) -> tuple[int, ...]:
        """Private samples of each owner that wait for later epochs."""
        return tuple(there - taken for there, taken in zip(self.stock.num_private, self.own, strict=True))

    @property
    def public_left_out(self) -> int:
        """Public samples that the epoch does not take."""
        return max(self.stock.num_public - self.public, 0)

    @property
    def public_repeated(self) -> int:
        """Places that get a public sample which the epoch has taken before."""
        return max(self.public - self.stock.num_public, 0)


@dataclass(frozen=True, slots=True)
class Placing:
    """Which samples a step takes. `rows` are the numbers of rows of a batch that the owners begin with."""

    stock: Stock
    seed: int
    rows: tuple[int, ...]

    @property
    def epoch(self) -> Epoch:
        """What an epoch takes with these rows."""
        places = self.stock.steps_per_epoch * self.stock.batch_size
        own = tuple(one.window for one in self.turns)
        return Epoch(self.stock, own, places if self.stock.is_added else places - sum(own))

    @property
    def turns(self) -> tuple[PrivateTurns, ...]:
        """Those of each owner. An epoch has places for as many samples as the owner has rows in its steps."""
        steps = self.stock.steps_per_epoch
        return tuple(
            PrivateTurns(one, min(one, steps * room), steps, self.seed + 1 + owner)
            for owner, (one, room) in enumerate(zip(self.stock.num_private, self.rows, strict=True))
        )

    def draws(self, step: int, rows: Sequence[int]) -> tuple[int, ...]:
        """How many rows of a step get private samples, for each owner, of the rows that it has now."""
        return tuple(min(one.count(step), room) for one, room in zip(self.turns, rows, strict=True))

    def private(self, step: int, owner: int, count: int) -> Numbers:
        """The numbers of an owner's samples for a step, among its own."""
        return self.turns[owner].numbers(step, 0, count)

    def public_before(self, step: int) -> int:
        """How many places of the steps before this one are for public samples, since the run began."""
        return step * self.stock.batch_size - sum(one.before(step) for one in self.turns)

    def public(self, step: int, count: int) -> Numbers:
        """The numbers of the public samples for a step."""
        epoch = step // self.stock.steps_per_epoch
        first = self.public_before(step) - self.public_before(epoch * self.stock.steps_per_epoch)
        there = self.stock.num_public
        if not count:
            return np.empty(0, np.int64)
        places = np.arange(first, first + count) % there
        order = Order(there, self.seed)
        runs = np.split(places, np.flatnonzero(places[1:] == 0) + 1)  # one, unless they start again in it
        return np.concatenate([order.numbers(epoch * there + int(run[0]), len(run)) for run in runs])
