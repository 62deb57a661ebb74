"""Long curves made short enough to draw, without losing a peak; and smoothed ones to draw with them."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Points", "evened", "finite", "smoothed", "thinned"]

MOST_POINTS = 1000
"""About as many as there are pixels to draw them on."""

SMOOTHING = 50
"""A smoothed curve looks back and ahead over this part of all points."""

LEAST_EVENED = 5
"""Rates are evened over at least so many points."""

LEAST_RATE = 1e-6
"""No rate is taken for less, as one of 0 would be the end of time."""

LEAST_SMOOTHED = 20
"""With fewer points nothing is to be smoothed."""


@dataclass(frozen=True, slots=True)
class Points:
    """A curve: one value for each place, the places rising. `places` are indices into where it is from."""

    xs: "array[float]"
    ys: "array[float]"
    places: "array[int]"

    def __len__(self) -> int:
        return len(self.xs)


def finite(xs: Sequence[float], ys: Sequence[float]) -> Points:
    """The points that can be drawn: those with a value."""
    places = array("q", (i for i, y in enumerate(ys) if math.isfinite(y)))
    return Points(array("d", (xs[i] for i in places)), array("d", (ys[i] for i in places)), places)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many of the points, 4 or more.

    The range of places is cut into equal parts, and of each part stay the least and the greatest value, so
    that on a screen it looks as all points would. The first and the last point stay.
    """
    if len(points) <= most:
        return points
    kept = sorted({0, len(points) - 1, *_extremes(points, (most - 2) // 2)})
    return Points(
        array("d", (points.xs[i] for i in kept)),
        array("d", (points.ys[i] for i in kept)),
        array("q", (points.places[i] for i in kept)),
    )


def smoothed(points: Points) -> Points | None:
    """A mean at each place that weighs values less the farther they are; None where there are too few.

    It looks back and ahead alike, so that it does not lag where a curve is steep.
    """
    if len(points) < LEAST_SMOOTHED:
        return None
    keep = 1 - 1 / max(len(points) / SMOOTHING, 4.0)
    back = _means(points.ys, keep)
    ahead = reversed(_means(points.ys[::-1], keep))
    ys = array("d", ((one + other) / 2 for one, other in zip(back, ahead, strict=True)))
    return Points(points.xs, ys, points.places)


def evened(points: Points) -> Points:
    """Rates, each that of some points around it together, which represent equal work.

    Where a pipeline is drained its last two batches end at nearly the same moment, so the rate of one batch
    by itself may be a hundred times what was reached.
    """
    count = len(points)
    window = min(max(LEAST_EVENED, count // SMOOTHING), count)
    times = [0.0, *accumulate(1 / max(rate, LEAST_RATE) for rate in points.ys)]
    begins = (min(max(i - window // 2, 0), count - window) for i in range(count))
    ys = array("d", (window / (times[begin + window] - times[begin]) for begin in begins))
    return Points(points.xs, ys, points.places)


def _means(values: Sequence[float], keep: float) -> "array[float]":
    """At each place the mean of the values so far, each step back weighing `keep` times as much."""
    total = weight = 0.0
    means = array("d")
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(total / weight)
    return means


def _extremes(points: Points, num_parts: int) -> Iterator[int]:
    """For each part of the range that has points the least and the greatest."""
    first, span = points.xs[0], points.xs[-1] - points.xs[0] or 1.0
    ys = points.ys
    part, low, high = 0, 0, 0
    for i, x in enumerate(points.xs):
        here = min(int((x - first) / span * num_parts), num_parts - 1)
        if here != part:
            yield low
            yield high
            part, low, high = here, i, i
        elif ys[i] < ys[low]:
            low = i
        elif ys[i] > ys[high]:
            high = i
    yield low
    yield high
