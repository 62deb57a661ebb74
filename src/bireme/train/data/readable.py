"""The samples that one rank may read where some are private: all public ones, and those of its own server.

Every rank knows which rows of a batch are whose. It knows the numbers of public samples and of its own
server's; the rows of other servers have one number for all, and cannot be read here.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.placing import Numbers, Order, Placing, SampleOrder, Stock
from bireme.train.data.samples import Batch, Samples, chosen, gathered

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
        """The public ones: how many private ones there are nobody else asks here."""
        return len(self._public)

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
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
        names: Sequence[str] | None,
        seeds: Sequence[int] | None,
    ) -> Batch:
        try:
            return samples.take(numbers, names, seeds)
        except Exception as error:
            print(f"bireme: data.private.{self._server}: {error}", file=sys.stderr, flush=True)  # noqa: T201
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

    def batch(self, number: int, batch_size: int) -> Numbers:
        """The numbers of the samples in a batch of the run."""
        if batch_size != self._stock.batch_size:
            raise RuntimeError(f"samples were placed for batches of {self._stock.batch_size}")
        rows = self._rows(number)
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
        return np.concatenate([self.batch(one, size) for one in batches])[begin : begin + count]

    def _of_owners(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The rows of each owner, of all replicas whose home it is."""
        return tuple(
            sum(one for one, owner in zip(rows, self._owners, strict=True) if owner == place)
            for place in range(len(self._stock.num_private))
        )
