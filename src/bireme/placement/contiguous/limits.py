"""The sum of two maxima, by one maximum under a limit on the other.

Of all splits whose largest forward load is below a limit, the one with the smallest largest backward load is
taken; then the limit goes down to its own forward load, and so on. Every best pair is met on the way, and the
way ends as soon as no pair that is left can have a smaller sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bireme.placement.found import loads_of
from bireme.placement.items import Items

__all__ = ["SplitLimits", "SplitSteps", "flush_by_limits"]


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """What a split must stay below: every device's forward load, and the value that is made small."""

    forward: float = math.inf
    value: float = math.inf


@dataclass(frozen=True, slots=True)
class SplitSteps:
    """Where the way ended: the best split, None where there is none, and a bound that no split is below."""

    where: tuple[int, ...] | None
    lower_bound: float


def flush_by_limits(
    items: Items,
    smallest_backward: Callable[[SplitLimits], tuple[int, ...] | None],
    *,
    forward_bound: float = 0.0,
    start: tuple[int, ...] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> SplitSteps:
    """The split with the smallest sum of the two maxima.

    `smallest_backward` finds the split of the smallest largest backward load within limits, and None where
    there is none; `forward_bound` is a forward load that some device has in every split. `start` is a split
    to be better than. Once `is_over` says so the way ends early; an answer of `smallest_backward` that came
    in after that is not used, as it may have been cut short.
    """
    best, best_sum = start, math.inf if start is None else sum(_maxima(items, start))
    limit, backward_bound = math.inf, 0.0
    while forward_bound < limit and forward_bound + backward_bound < best_sum:
        found = smallest_backward(SplitLimits(limit, best_sum - forward_bound))
        if is_over():
            return SplitSteps(best, min(best_sum, forward_bound + backward_bound))
        if found is None:
            break
        forward, backward_bound = _maxima(items, found)
        if forward + backward_bound < best_sum:
            best, best_sum = found, forward + backward_bound
        # The next one is really below this one, whatever the last digit of a sum in another order is.
        limit = min(forward, limit) * (1 - 1e-12)
    return SplitSteps(best, best_sum)


def _maxima(items: Items, where: tuple[int, ...]) -> tuple[float, float]:
    forward, backward = loads_of(items, where).max(axis=0).tolist()
    return forward, backward
