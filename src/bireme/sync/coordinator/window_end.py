"""Who trains the last batches of a window, where replicas train batches of their own.

All wait for the one that ends last. So a slow replica gets none of the last batches where the others would be
done with all of them before it were done with one. It learns so at once, because a pipeline goes on with the
batches that it has only when it knows whether there is another one.

    deals:   fast  ▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭│          fast  ▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭│
             slow  ▭▭▭▭▭▭▭▭ ▭▭▭▭▭▭▭▭│         slow  ▭▭▭▭▭▭▭▭        │
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf

__all__ = ["Trainer", "done_without"]


@dataclass(frozen=True, slots=True)
class Trainer:
    """A replica that is done at `free_s` with all that it was dealt, and takes `batch_s` for a batch of so
    many samples, its `share`.
    """

    free_s: float
    batch_s: float
    share: int


def done_without(others: Iterable[Trainer], num_samples: int, before_s: float) -> float:
    """When the others are done with what they were dealt and with so many samples, each batch of which goes
    to the one that ends it first. Of times that are not before `before_s` the answer is any.
    """
    there = list(others)
    last_s = max((one.free_s for one in there), default=-inf)
    ends = [(one.free_s + one.batch_s, place) for place, one in enumerate(there)]
    heapify(ends)
    while num_samples > 0 and last_s < before_s:
        if not ends:
            return inf
        end_s, place = ends[0]
        last_s = max(last_s, end_s)
        num_samples -= there[place].share
        heapreplace(ends, (end_s + there[place].batch_s, place))
    return last_s
