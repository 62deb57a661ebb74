"""Samples of several sources as one set: weighted mixtures, and public samples with private ones.

Which source has a place of the run depends on the weights, the seed and the place alone. So it is the same on
any number of ranks, and a run that resumes needs to know nothing but its next batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bireme.errors import BiremeError, tell
from bireme.runtime.microbatches import apportioned
from bireme.train.data.documents import StreamSamples
from bireme.train.data.placing import Numbers, Order, Placing, SampleOrder, Stock, hashed
from bireme.train.data.samples import Batch, Names, Samples, Seeds, chosen, gathered

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

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
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


# The samples that one rank may read where some are private: all public ones, and those of its own server.
#
# Every rank knows which rows of a batch are whose. It knows the numbers of public samples and of its own
# server's; the rows of other servers have one number for all, and cannot be read here.

ELSEWHERE = -1
"""The number of a private sample of another server. Those of the own server come below it."""


class ReadableSamples:
    """Public samples by their numbers, and the own server's below `ELSEWHERE`.

    `server` is its name. What goes wrong with a private sample is told on the server alone, for a message may
    hold what the sample does.
    """

    def __init__(self, public: Samples, own: Samples | None, server: str) -> None:
        self._public, self._own, self._server = public, own, server

    @property
    def is_quick(self) -> bool:
        """Only if both are."""
        return self._public.is_quick and (self._own is None or self._own.is_quick)

    @property
    def is_columnar(self) -> bool:
        """Only if both are."""
        return self._public.is_columnar and (self._own is None or self._own.is_columnar)

    def __len__(self) -> int:
        """The number of public samples."""
        return len(self._public)

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked."""
        asked = np.asarray(numbers, np.int64)
        if (asked == ELSEWHERE).any():
            raise RuntimeError(f"a private sample of another server was asked for on {self._server}")
        public, own = np.flatnonzero(asked >= 0), np.flatnonzero(asked < ELSEWHERE)
        parts: list[tuple[Numbers, Batch]] = []
        if len(public):
            parts.append((public, self._public.take(asked[public].tolist(), names, chosen(seeds, public))))
        if len(own) and self._own is not None:
            numbers = (ELSEWHERE - 1 - asked[own]).tolist()
            parts.append((own, self._private(self._own, numbers, names, chosen(seeds, own))))
        return parts[0][1] if len(parts) == 1 else gathered(parts)

    def _private(
        self,
        samples: Samples,
        numbers: Sequence[int],
        names: Names,
        seeds: Seeds,
    ) -> Batch:
        try:
            return samples.take(numbers, names, seeds)
        except Exception as error:
            tell(f"data.private.{self._server}: {error}")
            raise BiremeError(
                f"A private sample of {self._server} cannot be read ({type(error).__name__}). Its message "
                f"is on {self._server} alone, in what the process there writes to standard error."
            ) from None


class ReadableOrder:
    """The order of a run's samples as the ranks of one server know it; a `SampleOrder`.

    `owners` has the owner of each replica by its place in the stock, None where a replica takes public
    samples alone; `own` is the owner that this rank is of. `planned` are the rows of a batch that the plan
    gives each replica, one after the other, and `rows(step)` those that they have. `public` is the order of
    public samples. Samples of one source that can be counted come once in each epoch of the stock.
    """

    def __init__(
        self,
        stock: Stock,
        seed: int,
        owners: Sequence[int | None],
        planned: Sequence[int],
        rows: Callable[[int], Sequence[int]],
        *,
        own: int | None,
        public: SampleOrder | None = None,
    ) -> None:
        self.seed = seed
        self._public = public or Order(stock.num_public, seed)
        self._stock, self._owners, self._rows, self._own = stock, tuple(owners), rows, own
        self.placing = Placing(stock, seed, self._of_owners(planned))

    def __str__(self) -> str:
        """The same on all ranks of a run."""
        return f"{self.placing} {self._owners} {self._public}"

    @property
    def num_samples(self) -> int:
        """The public ones."""
        return self._public.num_samples

    @property
    def probes(self) -> tuple[int, ...]:
        """Public samples spread over the data."""
        return self._public.probes

    def _batch(self, number: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""
        batch_size, rows = self._stock.batch_size, self._rows(number)
        found = np.full(batch_size, ELSEWHERE, np.int64)
        is_public = np.ones(batch_size, np.bool_)
        whose = np.repeat([-1 if one is None else one for one in self._owners], rows)
        for owner, count in enumerate(self.placing.draws(number, self._of_owners(rows))):
            places = np.flatnonzero(whose == owner)[:count]
            is_public[places] = False
            if owner == self._own:
                found[places] = ELSEWHERE - 1 - self.placing.private(number, owner, count)
        num_public = int(is_public.sum())
        if isinstance(self._public, Order):
            found[is_public] = self.placing.public(number, num_public)
        else:
            found[is_public] = self._public.numbers(self.placing.public_before(number), num_public)
        return found

    def numbers(self, first: int, count: int) -> Numbers:
        """The numbers of the samples at `count` places of the run, from `first` on."""
        size = self._stock.batch_size
        batches = range(first // size, -(-(first + count) // size))
        if not count:
            return np.empty(0, np.int64)
        begin = first - batches.start * size
        return np.concatenate([self._batch(one) for one in batches])[begin : begin + count]

    def _of_owners(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The rows of each owner, of all replicas whose home it is."""
        return tuple(
            sum(one for one, owner in zip(rows, self._owners, strict=True) if owner == place)
            for place in range(len(self._stock.num_private))
        )
