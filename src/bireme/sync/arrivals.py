"""Gradients that are summed over replicas while the backward that makes them goes on.

    the rank's thread      … backward of layer 3 │ of layer 2 │ of layer 1 │ of layer 0 │ REDUCE
    the reducer's                                │ sum of 3   │ sum of 2   │ sum of 1   │ sum of 0 │ numbers

Buckets follow from the layout alone, later layers first, so they are the same on all replicas, whatever the
order in which one replica's gradients come. A sum has the same bits if it begins when all are there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bireme.sync.group import Group
from bireme.wire.connection import Bell


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together, by name, and the flat memory in which they lie."""

    names: tuple[str, ...]
    flats: tuple[Tensor, ...]


FlatPlace = tuple[int, int, int]
"""Where a gradient lies: the number of its flat, and the first element there and the one after the last."""


def buckets_of(places: Mapping[str, FlatPlace], flats: Sequence[Tensor], least_bytes: float) -> list[Bucket]:
    """Gradients in the reverse of their order, as many to a bucket as are `least_bytes` together."""
    found: list[Bucket] = []
    names: list[str] = []
    size = 0
    for name in reversed([*places]):
        number, begin, end = places[name]
        names.append(name)
        size += (end - begin) * flats[number].itemsize
        if size >= least_bytes:
            found.append(_bucket(names, places, flats))
            names, size = [], 0
    return [*found, _bucket(names, places, flats)] if names else found


def _bucket(names: Sequence[str], places: Mapping[str, FlatPlace], flats: Sequence[Tensor]) -> Bucket:
    runs: list[FlatPlace] = []
    for number, begin, end in sorted(places[name] for name in names):
        if runs and runs[-1][0] == number and runs[-1][2] == begin:
            runs[-1] = number, runs[-1][1], end
        else:
            runs.append((number, begin, end))
    return Bucket(
        tuple(reversed(names)), tuple(flats[number].view(-1)[begin:end] for number, begin, end in runs)
    )


class Arrivals:
    """The gradients of a batch whose last backward may be under way. The rank's thread adds those that are
    final to `held`, and ends it; the reducer's thread takes buckets, one after the other. `bell` rings there,
    and `check` raises if no more will come.
    """

    def __init__(
        self, buckets: Sequence[Bucket], held: set[str], bell: Bell, check: Callable[[], None]
    ) -> None:
        self.buckets = buckets
        self._held, self._bell, self._check = held, bell, check
        self._missing = [set(bucket.names) for bucket in buckets]
        self._bucket_of = {name: missing for missing in self._missing for name in missing}
        self._has_ended = False

    def note(self, name: str) -> None:
        """A gradient is final."""
        self._held.add(name)
        missing = self._bucket_of.get(name, set())
        missing.discard(name)
        if not missing:
            self._bell.ring()

    def end(self, held: Iterable[str]) -> None:
        """No more gradients come; these are all."""
        self._held.update(held)
        self._has_ended = True
        self._bell.ring()

    def in_turn(self, group: Group, go_on: Callable[[], bool] = lambda: False) -> Iterator[Bucket]:
        """The buckets, each when no more of it comes. Meanwhile `go_on` does what can be done, if anything
        can, and the group moves what has begun.
        """
        for bucket, missing in zip(self.buckets, self._missing, strict=True):
            while missing and not self._has_ended:
                self._wait(group, go_on)
            yield bucket

    def wait(self, group: Group) -> None:
        """Return when all gradients are there that come."""
        while not self._has_ended:
            self._wait(group, lambda: False)

    def _wait(self, group: Group, go_on: Callable[[], bool]) -> None:
        self._check()
        if not go_on():
            group.go_on(self._bell)
