"""Shares from measured times: what each replica takes for micro-batches of several sizes, and what follows.

The knee of a replica is the smallest micro-batch with which it is about as fast as with any. With times that
are known at some sizes, a size between two takes what lies on the line between them; sizes past the last go
on at its pace.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from bireme.balance.shares import ShareLimits, Shares, batch_seconds, fair_shares

__all__ = ["Times", "grown_shares", "knee", "shares_by_times"]

NEAR_BEST = 0.95
"""Of the most samples per second."""

MOST_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Times:
    """What a replica takes for micro-batches of these rising sizes; infinite where memory holds none."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def known(self) -> "Times":
        """Of the sizes that were measured; a larger micro-batch takes no less than a smaller one."""
        pairs = [pair for pair in zip(self.sizes, self.seconds, strict=True) if isfinite(pair[1])]
        most, seconds = 0.0, []
        for _, one_s in pairs:
            most = max(most, one_s)
            seconds.append(most)
        return Times(tuple(size for size, _ in pairs), tuple(seconds))

    def at(self, size: float) -> float:
        """The seconds of a micro-batch of any size."""
        place = bisect_left(self.sizes, size)
        if place == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        if place == 0:
            return self.seconds[0]
        low, high = self.sizes[place - 1], self.sizes[place]
        part = (size - low) / (high - low)
        return (1 - part) * self.seconds[place - 1] + part * self.seconds[place]


def knee(times: Times) -> int:
    """The smallest size that was measured with nearly the most samples per second."""
    rates = [size / one_s for size, one_s in zip(times.sizes, times.seconds, strict=True)]
    return next(size for size, rate in zip(times.sizes, rates, strict=True) if rate >= NEAR_BEST * max(rates))


def shares_by_times(
    first: Shares, num_microbatches: int, times: Sequence[Times], limits: ShareLimits, *, margin: float = 0.0
) -> Shares:
    """The shares of the same batch with which all replicas take about the same time, or the `first` ones
    where others would not save more than the part `margin` of its time.

    The pace of a replica depends on its share, so they are found step by step, as long as a step helps.
    """
    known, batch_size = [one.known() for one in times], sum(first)

    def paces(shares: Shares) -> list[float]:
        sizes = [share / num_microbatches for share in shares]
        return [one.at(size) / size for one, size in zip(known, sizes, strict=True)]

    best = first
    for _ in range(MOST_ROUNDS):
        found = fair_shares(batch_size, paces(best), limits)
        if batch_seconds(found, paces(found)) >= batch_seconds(best, paces(best)):
            break
        best = found
    saved = 1 - batch_seconds(best, paces(best)) / batch_seconds(first, paces(first))
    return best if saved > margin else first


def grown_shares(num_microbatches: int, times: Sequence[Times], limits: ShareLimits) -> Shares:
    """What every replica does, micro-batch by micro-batch, while the slowest one does its knee."""
    known = [one.known() for one in times]
    slowest = min(known, key=lambda one: max(s / t for s, t in zip(one.sizes, one.seconds, strict=True)))
    common_s = slowest.at(knee(slowest))
    found = []
    for one, least, most in zip(known, limits.least, limits.most, strict=True):
        sizes = range(least // num_microbatches, most // num_microbatches + 1)
        place = bisect_right(sizes, common_s, key=one.at)
        found.append(num_microbatches * sizes[max(place - 1, 0)])
    return tuple(found)
