"""The weights of a stage of which each replica keeps a part: whole while the stage computes, and let go."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from bireme.runtime.shared_weights import SharedWeights
from bireme.runtime.sharers import Sharers

__all__ = ["GatheredWeights"]

Tensors = Mapping[str, Tensor]


class GatheredWeights(SharedWeights):
    """As `SharedWeights`, but a version that was made is gathered when it is asked for."""

    @property
    def sharers(self) -> Sharers:
        """The replicas that have the other parts."""
        return self._sharers

    def made(self, bank: int) -> None:
        """This replica has its part of a version; nobody needs the whole yet."""

    def take(self, version: int, *, trains: bool = True) -> None:
        """Begin to gather a version. Take part with the others."""
        bank = version % len(self._arriving)
        for store in self._stores:
            store.take(bank)
        self.gather(bank, trains=trains)

    def let_go(self, version: int) -> None:
        """Give back the memory of a version, but for this replica's part."""
        self.arrive(version)
        for store in self._stores:
            store.let_go(version % len(self._arriving))

    @contextmanager
    def lent(self, version: int) -> Iterator[bool]:
        """Within this context a version is whole; False, and nothing is, while another stage has one lent.
        Take part with the others.
        """
        sharers = self._sharers
        if sharers.has_lent:
            yield False
            return
        sharers.has_lent = True
        self.take(version, trains=False)
        self.arrive(version)
        try:
            yield True
        finally:
            self.let_go(version)
            sharers.has_lent = False

    def newest(self, bank: int, *, alone: bool) -> Tensors:
        """Copies of the newest weights, as they are stepped, for nobody has them whole; take part with the
        others. With `alone` all are left out.
        """
        return {} if alone else self._whole_copies((store, store.newest_part(bank)) for store in self._stores)

    def run_on(self, version: int, *, alone: bool) -> Tensors:
        """The same of a version that is computed with."""
        bank = version % len(self._arriving)
        return {} if alone else self._whole_copies((store, store.own(bank)) for store in self._stores)

    def own_newest(self, bank: int) -> Tensors:
        """This replica's pieces of the newest weights."""
        return {name: view for store in self._stores for name, view in store.stepped(bank).items()}

    def own_run_on(self, version: int) -> Tensors:
        """This replica's pieces of a version that is computed with."""
        bank = version % len(self._arriving)
        return {name: view for store in self._stores for name, view in store.pieces(bank).items()}
