"""The samples of a run: which are dealt to whom, which wait to be dealt again, and which are fresh.

A sample is a place in the run's order. Each place is dealt, and then either committed, which ends it, or
returned, so that it waits and is dealt again before any fresh one. So every place is committed once at most,
and all places below `fresh` are committed, dealt or waiting.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bireme.sync.coordinator.messages import Deal, SamplePlaces

__all__ = ["Pool", "united"]


@dataclass(frozen=True, slots=True)
class Pool:
    """`deals` by replica and batch; `waiting` in rising order, without overlaps. So many samples were
    `returned` so far.
    """

    fresh: int = 0
    waiting: tuple[SamplePlaces, ...] = ()
    deals: dict[tuple[int, int], tuple[SamplePlaces, ...]] = field(default_factory=dict)
    returned: int = 0

    def with_deal(self, batch: int, counts: Mapping[int, int]) -> "Pool":
        """After so many samples of a batch have been dealt to each of these replicas."""
        pool, deals = self, dict(self.deals)
        for replica, count in counts.items():
            taken, pool = pool._taken(count)
            deals[replica, batch] = taken
        return replace(pool, deals=deals)

    def without_deal(self, replica: int, batch: int) -> "Pool":
        """After a deal has been committed."""
        return replace(self, deals={key: own for key, own in self.deals.items() if key != (replica, batch)})

    def with_returned(self, replica: int, *, below: int | None = None) -> "Pool":
        """After what a replica has of the batches `below` has come back; without a limit all of it."""
        back = [key for key in self.deals if key[0] == replica and (below is None or key[1] < below)]
        if not back:
            return self
        waiting = united((*self.waiting, *(one for key in back for one in self.deals[key])))
        return replace(
            self,
            waiting=waiting,
            deals={key: own for key, own in self.deals.items() if key not in back},
            returned=self.returned + sum(one.count for key in back for one in self.deals[key]),
        )

    def count(self, replica: int, batch: int) -> int:
        """How many samples a replica has in a batch."""
        return sum(one.count for one in self.deals.get((replica, batch), ()))

    def listed(self) -> tuple[Deal, ...]:
        """All deals."""
        return tuple(Deal(replica, batch, own) for (replica, batch), own in self.deals.items())

    def num_left(self, until: int) -> int:
        """How many samples can still be dealt: those that wait, and the fresh ones below a place."""
        return sum(one.count for one in self.waiting) + max(until - self.fresh, 0)

    @property
    def open(self) -> tuple[SamplePlaces, ...]:
        """The places below `fresh` that are not committed."""
        return united((*self.waiting, *(one for own in self.deals.values() for one in own)))

    def _taken(self, count: int) -> tuple[tuple[SamplePlaces, ...], "Pool"]:
        """So many samples, those that wait first, and the pool without them."""
        taken, left = [], list(self.waiting)
        while count and left:
            first = left.pop(0)
            end = min(first.end, first.begin + count)
            taken.append(SamplePlaces(first.begin, end))
            count -= end - first.begin
            if end < first.end:
                left.insert(0, SamplePlaces(end, first.end))
        if count:
            taken.append(SamplePlaces(self.fresh, self.fresh + count))
        return united(taken), replace(self, fresh=self.fresh + count, waiting=tuple(left))


def united(samples: Iterable[SamplePlaces]) -> tuple[SamplePlaces, ...]:
    """The same places in rising order, neighbours joined. They must not overlap."""
    found: list[SamplePlaces] = []
    for one in sorted(samples):
        if found and found[-1].end == one.begin:
            found[-1] = SamplePlaces(found[-1].begin, one.end)
        else:
            found.append(one)
    return tuple(found)
