"""Batches, cut into the micro-batches of every replica, with what each weighs in the batch's loss.

Every rank is given the same batches, and reads of them what its stages and its replica need. The sizes of all
micro-batches follow from the number of samples alone. So do their weights, unless the loss leaves out some
targets: then every rank reads the inputs that the targets are made of, the labels, of the whole batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bireme.balance.shares import split
from bireme.errors import BiremeError
from bireme.model.counting import Count
from bireme.model.graph import Value
from bireme.runtime.batches import Batch, LazyBatch, Rows, lazy, read, rows_of

__all__ = ["Cutter", "Feed", "MicroBatch", "Portion", "apportioned", "micro_batch_seed"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this replica, or half of one: what the model is given of it.

    `share` is its weight in the batch's mean; `seed` is its own, the same whatever the pipeline's shape.
    `halves` are there where it goes forward in two.
    """

    num_samples: int
    share: float
    seed: int
    inputs: dict[str, Tensor]
    halves: tuple["MicroBatch", ...] = ()


@dataclass(frozen=True, slots=True)
class Portion:
    """What one replica has of a batch. `weight` is that of the whole batch; 0 where nothing in it counts for
    the loss, and then all shares are 0 too.

    `stamp` is equal where batches are (see `LazyBatch`). `shares` are the samples of each replica.
    """

    micro_batches: tuple[MicroBatch, ...]
    weight: float
    num_samples: int
    stamp: int
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a batch is cut: micro-batch i has the samples from `bounds[i]` up to but without the next bound.

    `own` are those of this replica, one after the other.
    """

    bounds: tuple[int, ...]
    own: range

    @property
    def num_samples(self) -> int:
        """Of the whole batch."""
        return self.bounds[-1]

    def shares(self, width: int) -> tuple[int, ...]:
        """The samples of each of so many replicas, which have equally many micro-batches."""
        ends = self.bounds[:: (len(self.bounds) - 1) // width]
        return tuple(end - begin for begin, end in pairwise(ends))

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """The bounds of each micro-batch."""
        return pairwise(self.bounds)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts batches for one replica of some.

    `required` are all inputs of the model, `needed` those that this rank's stages take. The first
    `num_sliced` micro-batches are cut in halves. `sizes` says in what proportion the replicas' micro-batches
    are large; they are equal if it is empty. With `shares`, which gives the samples of each replica in the
    batch of a number, batches of just so many samples are cut by these instead.
    """

    width: int
    replica: int
    num_microbatches: int
    num_sliced: int
    count: Count
    required: tuple[Value, ...]
    needed: tuple[str, ...]
    device: torch.device
    seed: int
    sizes: tuple[int, ...] = ()
    shares: Callable[[int], Sequence[int]] | None = None

    def wanted(self, number: int, num_samples: int) -> tuple[Rows, ...]:
        """What this rank reads of the batch of that number, to train on it."""
        return self._wanted(self._to_train(number, num_samples))

    def cut(self, given: Batch, number: int) -> Portion:
        """This replica's portion of a batch, which is the one of that number."""
        batch = lazy(given, number, self.required)
        cut = self._to_train(number, batch.num_samples)
        portion = self._portion(batch, number, cut, self.num_sliced, batch.stamp)
        return replace(portion, shares=cut.shares(self.width))

    def wanted_to_evaluate(self, number: int, num_samples: int) -> tuple[Rows, ...]:
        """What this rank reads of a batch to evaluate with."""
        return self._wanted(self._to_evaluate(num_samples))

    def cut_to_evaluate(self, given: Batch, number: int) -> Portion:
        """This replica's portion of a batch of any size to evaluate with, in which it may have no part."""
        batch = lazy(given, number, self.required)
        return self._portion(batch, number, self._to_evaluate(batch.num_samples), 0, 0)

    def _to_train(self, number: int, num_samples: int) -> _Cut:
        pieces = self.width * self.num_microbatches
        if num_samples < (2 * pieces if self.num_sliced else pieces):
            raise BiremeError(
                f"Batch {number} has {num_samples} samples, and the plan cuts it into {pieces} "
                f"micro-batches ({self.num_microbatches} for each of {self.width} replicas). Skip such a "
                "batch, or plan for fewer micro-batches."
            )
        shares = () if self.shares is None else self.shares(number)
        if shares and sum(shares) == num_samples:
            sizes = [size for share in shares for size in split(share, self.num_microbatches)]
        else:
            of_replicas = shares or self.sizes or (1,) * self.width
            sizes = apportioned(
                num_samples, [one for one in of_replicas for _ in range(self.num_microbatches)]
            )
        first = self.replica * self.num_microbatches
        return _Cut(tuple(accumulate(sizes, initial=0)), range(first, first + self.num_microbatches))

    def _to_evaluate(self, num_samples: int) -> _Cut:
        pieces = min(num_samples, self.width * self.num_microbatches)
        first, end = (pieces * replica // self.width for replica in (self.replica, self.replica + 1))
        bounds = (num_samples * piece // max(pieces, 1) for piece in range(pieces + 1))
        return _Cut(tuple(bounds), range(first, end))

    def _wanted(self, cut: _Cut) -> tuple[Rows, ...]:
        found = []
        if self.count.reads:
            found.append(Rows(self.count.reads, 0, cut.num_samples))
        rest = tuple(name for name in self.needed if name not in self.count.reads)
        if rest and cut.own:
            found.append(Rows(rest, cut.bounds[cut.own.start], cut.bounds[cut.own.stop]))
        return tuple(found)

    def _portion(self, batch: LazyBatch, number: int, cut: _Cut, num_sliced: int, stamp: int) -> Portion:
        columns = {
            name: _Column(tensor, wanted.begin)
            for wanted in self._wanted(cut)
            for name, tensor in read(batch, wanted, number, self.required).items()
        }

        def weight(begin: int, end: int) -> float:
            if not self.count.reads:
                return float(end - begin)
            return self.count({name: columns[name].rows(begin, end) for name in self.count.reads})

        weights = [weight(begin, end) for begin, end in cut.pieces]
        total = sum(weights)

        def piece(begin: int, end: int, weight: float, seed: int) -> MicroBatch:
            inputs = {name: columns[name].rows(begin, end).to(self.device) for name in self.needed}
            return MicroBatch(end - begin, weight / total if total else 0.0, seed, inputs)

        def micro_batch(place: int, index: int) -> MicroBatch:
            begin, end = cut.bounds[index], cut.bounds[index + 1]
            seed = micro_batch_seed(self.seed, number, index)
            whole = piece(begin, end, weights[index], seed)
            if place >= num_sliced:
                return whole
            middle = (begin + end + 1) // 2
            halves = (
                piece(*part, weight(*part), seed + SECOND_HALF * half)
                for half, part in enumerate(((begin, middle), (middle, end)))
            )
            return replace(whole, halves=tuple(halves))

        own = tuple(micro_batch(place, index) for place, index in enumerate(cut.own))
        return Portion(own, total, cut.num_samples, stamp)


@dataclass(frozen=True, slots=True)
class _Column:
    """What was read of an input, from the sample `first` on."""

    tensor: Tensor
    first: int

    def rows(self, begin: int, end: int) -> Tensor:
        """Those of some samples of the batch."""
        return rows_of(self.tensor, begin - self.first, end - self.first)


SECOND_HALF = 1 << 62
"""Added to a micro-batch's seed for its second half."""


def micro_batch_seed(seed: int, batch: int, index: int) -> int:
    """The seed of one micro-batch, `index` of all that the batch is cut into."""
    return ((seed * 1_000_003 + batch) * 1_000_003 + index) % SECOND_HALF


class Feed:
    """The batches of a stream: read no further than asked, and forgotten when they are done with."""

    def __init__(self, batches: Iterable[Batch], cutter: Cutter, first_batch: int) -> None:
        self._source: Iterator[Batch] = iter(batches)
        self._cutter = cutter
        self._first = first_batch
        self._portions: dict[int, Portion] = {}
        self._num_read = 0
        self._has_ended = False

    def has(self, number: int) -> bool:
        """Whether the stream has at least so many batches; reads them if it must."""
        while self._num_read < number and not self._has_ended:
            batch = next(self._source, None)
            if batch is None:
                self._has_ended = True
                break
            index = self._first + self._num_read
            self._portions[index] = self._cutter.cut(batch, index)
            self._num_read += 1
        return self._num_read >= number

    def portion(self, batch: int) -> Portion:
        """This replica's portion of a batch."""
        return self._portions[batch]

    def hold(self, batch: int, portion: Portion) -> None:
        """Have a portion that was not read here."""
        self._portions[batch] = portion

    def drop(self, batch: int) -> None:
        """Forget a batch."""
        del self._portions[batch]


def apportioned(num_samples: int, shares: Sequence[float]) -> list[int]:
    """So many samples in these proportions, as nearly as can be, and at least one each."""
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [max(int(part), 1) for part in exact]
    while (missing := num_samples - sum(sizes)) != 0:
        step = 1 if missing > 0 else -1
        able = (place for place, size in enumerate(sizes) if size + step >= 1)
        sizes[max(able, key=lambda place: step * (exact[place] - sizes[place]))] += step
    return sizes
