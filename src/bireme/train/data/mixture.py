"""Weighted mixtures of sources: their samples as one set, and the order in which the sources take turns.

Which source has a place of the run depends on the weights, the seed and the place alone. So it is the same on
any number of ranks, and a run that resumes needs to know nothing but its next batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bireme.errors import BiremeError
from bireme.runtime.microbatches import apportioned
from bireme.train.data.placing import Numbers, Order, SampleOrder, hashed
from bireme.train.data.samples import Batch, Samples, chosen, gathered
from bireme.train.data.stream import StreamSamples

NUM_SLOTS = 1 << 14
"""Places of a run after which every source has had exactly its share; shares are rounded to 1/NUM_SLOTS."""


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One source of a mixture: what to call it, its weight relative to the others, and its samples."""

    name: str
    weight: float
    samples: Samples


@dataclass(frozen=True, slots=True)
class MixedSamples:
    """The samples of several sources, numbered through: those of the first, then those of the second."""

    sources: tuple[MixedSource, ...]

    @property
    def is_quick(self) -> bool:
        """Only if all sources are."""
        return all(one.samples.is_quick for one in self.sources)

    @property
    def is_columnar(self) -> bool:
        """Only if all sources are."""
        return all(one.samples.is_columnar for one in self.sources)

    @property
    def slots(self) -> tuple[int, ...]:
        """How many of NUM_SLOTS places each source has: in proportion to its weight, and one at least."""
        return tuple(apportioned(NUM_SLOTS, [one.weight for one in self.sources]))

    def __len__(self) -> int:
        return sum(len(one.samples) for one in self.sources)

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        """The samples of these numbers, stacked."""
        asked = np.asarray(numbers, np.int64)
        parts: list[tuple[Numbers, Batch]] = []
        first = 0
        for one in self.sources:
            own = np.flatnonzero((asked >= first) & (asked < first + len(one.samples)))
            if len(own):
                wanted = [int(number) for number in asked[own] - first]
                parts.append((own, one.samples.take(wanted, names, chosen(seeds, own))))
            first += len(one.samples)
        self._check_alike([batch for _, batch in parts])
        return gathered(parts)

    def _check_alike(self, found: Sequence[Batch]) -> None:
        """Sources that are mixed must make samples of the same tensors."""
        kinds = [{name: list(tensor.shape[1:]) for name, tensor in batch.items()} for batch in found]
        other = next((kind for kind in kinds if kind != kinds[0]), None)
        if other is not None:
            raise BiremeError(
                f"The sources {', '.join(one.name for one in self.sources)} cannot be mixed: samples of "
                f"one hold {kinds[0]}, of another {other}. Give all the same names and sizes."
            )


@dataclass(frozen=True, slots=True)
class MixedOrder:
    """Sources in turns, each in an order of its own.

    Of any NUM_SLOTS places from a multiple of that on, source i has exactly `slots[i]`, spread evenly:
    wherever a run stands, each source has had its share to within two samples. Each goes through its samples
    again and again, so one epoch of a small source with a large weight is over sooner than that of another.
    Samples are numbered through: those of the first source, then those of the second.
    """

    orders: tuple[SampleOrder, ...]
    slots: tuple[int, ...]
    seed: int

    @property
    def num_samples(self) -> int:
        """Those of all sources."""
        return sum(order.num_samples for order in self.orders)

    @property
    def probes(self) -> tuple[int, ...]:
        """Those of all sources."""
        firsts = self._firsts()
        return tuple(
            first + one for first, order in zip(firsts, self.orders, strict=True) for one in order.probes
        )

    def batch(self, number: int, batch_size: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""
        return self.numbers(number * batch_size, batch_size)

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""
        found = np.empty(count, np.int64)
        places = np.arange(first, first + count)
        for block in range(first // NUM_SLOTS, (first + count - 1) // NUM_SLOTS + 1 if count else 0):
            turns = _turns(self.slots, self.seed, block)
            inside = places // NUM_SLOTS == block
            sources, draws = (one[places[inside] % NUM_SLOTS] for one in turns)
            numbers = np.empty(len(sources), np.int64)
            for source, (start, order) in enumerate(zip(self._firsts(), self.orders, strict=True)):
                own = sources == source
                if own.any():  # its draws are consecutive, for they count its turns
                    drawn = block * self.slots[source] + int(draws[own][0])
                    numbers[own] = start + order.numbers(drawn, int(own.sum()))
            found[inside] = numbers
        return found

    def _firsts(self) -> list[int]:
        sizes = [order.num_samples for order in self.orders]
        return [sum(sizes[:place]) for place in range(len(sizes))]


def sources_of(samples: Samples) -> Mapping[str, Samples]:
    """The samples of each source of a mixture by its name; what is no mixture is its only source."""
    if isinstance(samples, MixedSamples):
        return {one.name: one.samples for one in samples.sources}
    return {"": samples}


def shares_of(samples: Samples) -> Mapping[str, float]:
    """The share of each source of a mixture, by its name."""
    if isinstance(samples, MixedSamples):
        total = sum(one.weight for one in samples.sources)
        return {one.name: one.weight / total for one in samples.sources}
    return {"": 1.0}


def order_of(samples: Samples, seed: int) -> SampleOrder:
    """The order in which a run goes through samples, whatever they are."""
    if isinstance(samples, MixedSamples):
        orders = tuple(order_of(one.samples, seed + place) for place, one in enumerate(samples.sources))
        return MixedOrder(orders, samples.slots, seed)
    if isinstance(samples, StreamSamples):
        return samples.order
    return Order(len(samples), seed)


@lru_cache(maxsize=4)
def _turns(slots: tuple[int, ...], seed: int, block: int) -> tuple[Numbers, Numbers]:
    """For each place of a block its source, and how many turns that source had before in the block.

    Turn j of a source with n of them comes at a random moment between j/n and (j+1)/n of the block.
    """
    sources = np.repeat(np.arange(len(slots)), slots)
    turns = np.concatenate([np.arange(size) for size in slots])
    key = hashed(hashed(np.array([seed % (1 << 64)], np.uint64)) ^ np.uint64(block))
    jitter = hashed(key ^ hashed(np.arange(NUM_SLOTS, dtype=np.uint64))) >> np.uint64(11)
    moments = (turns + jitter / float(1 << 53)) / np.asarray(slots)[sources]
    in_turn = np.argsort(moments, kind="stable")
    return sources[in_turn], turns[in_turn]
