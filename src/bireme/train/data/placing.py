"""The placement of samples where some are private: who trains on which of them in which step.

An epoch has K = (public + private samples) / batch size steps, the same for all replicas. A replica on an
owner's server takes the owner's private samples first, spread evenly over the epoch, and public ones in the
places that are left. A public sample is taken by one replica at most in an epoch, unless public samples run
out; then they are taken again. Of an owner with more samples than its places an epoch takes a part, and the
next epoch goes on after it.

All follows from the seed, the step, how many samples there are and how many rows each owner has of a batch.
Nobody needs to know another owner's samples, and no list of samples is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.order import Numbers, Order

__all__ = ["Epoch", "Placing", "Stock", "Taken"]


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

    def epoch(self, rows: Sequence[int]) -> "Epoch":
        """What an epoch takes where each owner has so many rows of every batch."""
        steps = self.steps_per_epoch
        own = tuple(min(one, steps * room) for one, room in zip(self.num_private, rows, strict=True))
        return Epoch(self, own, steps * self.batch_size - sum(own))


@dataclass(frozen=True, slots=True)
class Epoch:
    """How many samples an epoch takes: of each owner's, and places for public ones."""

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
class Taken:
    """What has been taken before a step: of each owner's samples and of the public ones in its epoch, and of
    each owner's in the epochs before. `window` is how many of its samples each owner mixes in the epoch.
    """

    step: int
    own: tuple[int, ...]
    public: int
    before: tuple[int, ...]
    window: tuple[int, ...]


class Placing:
    """Which samples a step takes. `rows(step)` says how many rows of that batch are each owner's.

    It goes on from the step that it was last asked for. To a step before that, or after a resume, it comes by
    counting from the first step on.
    """

    def __init__(self, stock: Stock, seed: int, rows: Callable[[int], Sequence[int]]) -> None:
        self.stock = stock
        self._seed = seed
        self._rows = rows
        self._last = self._first()

    def taken(self, step: int) -> Taken:
        """What has been taken before a step."""
        if step < self._last.step:
            self._last = self._first()
        while self._last.step < step:
            self._last = self._next(self._last)
        return self._last

    def draws(self, taken: Taken) -> tuple[int, ...]:
        """How many rows of a step get private samples, for each owner."""
        steps = self.stock.steps_per_epoch
        done = taken.step % steps + 1
        return tuple(
            min(max(there * done // steps - own, 0), room)
            for there, own, room in zip(
                self.stock.num_private, taken.own, self._rows(taken.step), strict=True
            )
        )

    def private(self, taken: Taken, owner: int, count: int) -> Numbers:
        """The numbers of an owner's next private samples, among its own."""
        places = np.arange(taken.own[owner], taken.own[owner] + count)
        window = taken.window[owner]
        mixed = int((places < window).sum())
        if mixed:
            epoch = taken.step // self.stock.steps_per_epoch
            order = Order(window, self._seed + 1 + owner)
            places[:mixed] = order.numbers(epoch * window + taken.own[owner], mixed)
        found: Numbers = (taken.before[owner] + places) % self.stock.num_private[owner]
        return found

    def public(self, taken: Taken, count: int) -> Numbers:
        """The numbers of the next public samples."""
        there = self.stock.num_public
        epoch = taken.step // self.stock.steps_per_epoch
        places = np.arange(taken.public, taken.public + count) % there
        order = Order(there, self._seed)
        return np.concatenate(
            [
                order.numbers(epoch * there + int(run[0]), len(run))
                for run in np.split(places, np.flatnonzero(places[1:] == 0) + 1)
                if len(run)
            ]
            or [places]
        )

    def _first(self) -> Taken:
        nothing = (0,) * len(self.stock.num_private)
        return Taken(0, nothing, 0, nothing, self._window(0))

    def _window(self, step: int) -> tuple[int, ...]:
        return self.stock.epoch(self._rows(step)).own

    def _next(self, taken: Taken) -> Taken:
        draws = self.draws(taken)
        own = tuple(before + drawn for before, drawn in zip(taken.own, draws, strict=True))
        step = taken.step + 1
        if step % self.stock.steps_per_epoch:
            public = taken.public + self.stock.batch_size - sum(draws)
            return Taken(step, own, public, taken.before, taken.window)
        before = tuple(
            (one + more) % there
            for one, more, there in zip(taken.before, own, self.stock.num_private, strict=True)
        )
        return Taken(step, (0,) * len(own), 0, before, self._window(step))
