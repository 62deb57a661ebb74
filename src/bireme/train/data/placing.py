"""The placement of samples where some are private: who trains on which of them in which step.

An epoch has K = (public + private samples) / batch size steps, the same for all replicas. A replica on an
owner's server takes the owner's private samples first, spread evenly over the epoch, and public ones in the
places that are left. A public sample is taken by one replica at most in an epoch, unless public samples run
out; then they are taken again. Of an owner with more samples than its places an epoch takes a part, and the
next epoch goes on after it.

A step takes the same samples whatever came before it: all follows from the seed, the step, how many samples
there are, and the rows that each owner has of a batch. Nobody needs another owner's samples, and no list of
samples is made. Rows may change within an epoch; an owner that then has too few for a step leaves the rest of
its samples of that step out, and public ones that come next are taken twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.order import Numbers, Order

__all__ = ["Epoch", "Placing", "Stock"]


@dataclass(frozen=True, slots=True)
class Stock:
    """How many samples there are, public ones and private ones of each owner, for batches of one size."""

    num_public: int
    num_private: tuple[int, ...]
    batch_size: int

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
        return (self.num_public + sum(self.num_private)) // self.batch_size


@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch takes: so many samples of each owner, and public ones in so many places."""

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
    """Which samples a step takes, where each owner has so many `rows` of a batch at the beginning."""

    stock: Stock
    seed: int
    rows: tuple[int, ...]

    @property
    def epoch(self) -> Epoch:
        """What an epoch takes with these rows."""
        places = self.stock.steps_per_epoch * self.stock.batch_size
        return Epoch(self.stock, self._windows, places - sum(self._windows))

    def draws(self, step: int, rows: Sequence[int]) -> tuple[int, ...]:
        """How many rows of a step get private samples, for each owner, of the rows that it has now."""
        _, place = divmod(step, self.stock.steps_per_epoch)
        return tuple(
            min(self._before(window, place + 1) - self._before(window, place), room)
            for window, room in zip(self._windows, rows, strict=True)
        )

    def private(self, step: int, owner: int, count: int) -> Numbers:
        """The numbers of an owner's samples for a step, among its own."""
        epoch, place = divmod(step, self.stock.steps_per_epoch)
        window = self._windows[owner]
        if not count:
            return np.empty(0, np.int64)
        order = Order(window, self.seed + 1 + owner)
        mixed = order.numbers(epoch * window + self._before(window, place), count)
        return (epoch * window + mixed) % self.stock.num_private[owner]

    def public(self, step: int, count: int) -> Numbers:
        """The numbers of the public samples for a step."""
        epoch, place = divmod(step, self.stock.steps_per_epoch)
        first = place * self.stock.batch_size - sum(self._before(one, place) for one in self._windows)
        there = self.stock.num_public
        if not count:
            return np.empty(0, np.int64)
        places = np.arange(first, first + count) % there
        order = Order(there, self.seed)
        runs = np.split(places, np.flatnonzero(places[1:] == 0) + 1)  # one, unless they start again in it
        return np.concatenate([order.numbers(epoch * there + int(run[0]), len(run)) for run in runs])

    @property
    def _windows(self) -> tuple[int, ...]:
        """How many of its samples each owner has places for in an epoch."""
        steps = self.stock.steps_per_epoch
        return tuple(
            min(one, steps * room) for one, room in zip(self.stock.num_private, self.rows, strict=True)
        )

    def _before(self, window: int, place: int) -> int:
        """How many of them come in the steps of an epoch before this one."""
        return window * place // self.stock.steps_per_epoch
