"""Sums over replicas that begin while the last backward of a batch still makes other gradients.

    the rank's thread      … backward of layer 3 │ of layer 2 │ of layer 1 │ of layer 0 │ REDUCE
    the reducer's                                │ sum of 3   │ sum of 2   │ sum of 1   │ sum of 0 │ numbers

Buckets follow from the layout alone, later layers first, so they are the same on all replicas, whatever the
order in which one replica's gradients come. A sum that begins after the backward has the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import Tensor

from bireme.sync.group import Group
from bireme.wire.connection import Bell


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together, by name, and the flat memory in which they lie."""

    names: tuple[str, ...]
    flats: Sequence[Tensor]


FlatPlace = tuple[int, int, tuple[int, ...]]
"""Where a tensor lies: the number of its flat, the first element there, and the shape."""


def buckets_of(places: Mapping[str, FlatPlace], flats: Sequence[Tensor], least_bytes: float) -> list[Bucket]:
    """Buckets of gradients in reverse order; each but the last has at least `least_bytes`."""
    found: list[Bucket] = []
    names: list[str] = []
    size = 0
    for name in reversed([*places]):
        number, _, shape = places[name]
        names.append(name)
        size += prod(shape) * flats[number].itemsize
        if size >= least_bytes:
            found.append(_bucket(names, places, flats))
            names, size = [], 0
    return [*found, _bucket(names, places, flats)] if names else found


def _bucket(names: Sequence[str], places: Mapping[str, FlatPlace], flats: Sequence[Tensor]) -> Bucket:
    runs: list[tuple[int, int, int]] = []
    for number, begin, shape in sorted(places[name] for name in names):
        end = begin + prod(shape)
        if runs and runs[-1][0] == number and runs[-1][2] == begin:
            runs[-1] = number, runs[-1][1], end
        else:
            runs.append((number, begin, end))
    return Bucket(
        tuple(reversed(names)), tuple(flats[number].view(-1)[begin:end] for number, begin, end in runs)
    )


Parts = tuple[int, ...]
"""Where a flat tensor is cut: member i owns its elements from the i-th number up to the next."""


def pieces_of(flat: Tensor, parts: Parts, begin: int, most: int) -> list[Tensor]:
    """Of every part, its elements from the one of that number on, `most` of them or as many as it has."""
    return [flat[first:end] for first, end in _ends_of(parts, begin, most)]


def _ends_of(parts: Parts, begin: int, most: int) -> Iterator[tuple[int, int]]:
    for first, end in pairwise(parts):
        start = min(first + begin, end)
        yield start, min(start + most, end)


def rounds_of(parts: Parts, most: int) -> range:
    """Where in their parts the members begin each round, if these are of that many elements."""
    return range(0, max(end - first for first, end in pairwise(parts)), most)


def buckets_in_parts(
    places: Mapping[str, FlatPlace], flats: Sequence[Tensor], parts: Sequence[Parts], round_bytes: float
) -> list[Bucket]:
    """Buckets of which each has a piece of every part of a flat, at most `round_bytes` in all, so that all
    members add up at the same time. Those whose last gradient comes first come first.

    A gradient is in every bucket that has some of it.
    """
    slots: list[list[tuple[int, int, str]]] = [[] for _ in flats]
    for name, (number, begin, shape) in places.items():
        slots[number].append((begin, begin + prod(shape), name))
    order, found = {name: place for place, name in enumerate(places)}, list[Bucket]()
    for flat, cut, own in zip(flats, parts, slots, strict=True):
        most = max(int(round_bytes) // flat.itemsize // (len(cut) - 1), 1)
        for begin in rounds_of(cut, most):
            ends = [*_ends_of(cut, begin, most)]
            names = (name for first, end, name in own if any(first < b and a < end for a, b in ends))
            found.append(Bucket(tuple(names), pieces_of(flat, cut, begin, most)))
    found.sort(key=lambda bucket: -min(map(order.__getitem__, bucket.names), default=0))
    left = order.keys() - {name for bucket in found for name in bucket.names}
    return [*found, Bucket(tuple(sorted(left)), ())]


class Arrivals:
    """The gradients of a batch whose last backward may still run. The rank's thread notes each that is final,
    which adds its name to `held`, and the end; the reducer's thread takes the buckets in their order. `bell`
    wakes that thread up, and `check` raises if no more gradients will come.
    """

    def __init__(
        self, buckets: Sequence[Bucket], held: set[str], bell: Bell, check: Callable[[], None]
    ) -> None:
        self._buckets, self._held, self._bell, self._check = buckets, held, bell, check
        self._missing = [set(bucket.names) for bucket in buckets]
        self._missing_of = dict[str, list[set[str]]]()
        for missing in self._missing:
            for name in missing:
                self._missing_of.setdefault(name, []).append(missing)
        self._has_ended = False

    def note(self, name: str) -> None:
        """A gradient is final."""
        self._held.add(name)
        for missing in self._missing_of.get(name, ()):
            missing.discard(name)
            if not missing:
                self._bell.ring()

    def end(self, held: Iterable[str]) -> None:
        """No more gradients come: these are the names of all."""
        self._held.update(held)
        self._has_ended = True
        self._bell.ring()

    def in_turn(self, group: Group, go_on: Callable[[], bool] = lambda: False) -> Iterator[Bucket]:
        """The buckets, each once its gradients are final. Meanwhile the group moves the sums that have begun;
        `go_on` is called first, and gives whether it had anything to do.
        """
        for bucket, missing in zip(self._buckets, self._missing, strict=True):
            while missing and not self._has_ended:
                self._wait(group, go_on)
            yield bucket

    def wait(self, group: Group) -> None:
        """Return after the `end`."""
        while not self._has_ended:
            self._wait(group, lambda: False)

    def _wait(self, group: Group, go_on: Callable[[], bool]) -> None:
        self._check()
        if not go_on():
            group.go_on(self._bell)
