"""The noun here: a `Partition`, a chain cut into stages, with what each takes and where it lives.

It may not fit: what its stages miss is then with them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bireme.plan.partition.chain import Seconds
from bireme.plan.partition.loads import Loads


@dataclass(frozen=True, slots=True)
class _StageLoad:
    """A stage on its device: the units from `begin` up to but without `end`.

    The seconds are the device's, those of a forward that is run again included. `busy_s` is how long a
    micro-batch keeps it busy, with its share of the update and, where messages do not overlap, with those.
    """

    begin: int
    end: int
    recompute: bool
    forward_s: float
    backward_s: float
    busy_s: float
    peak_bytes: float
    limit_bytes: float

    @property
    def missing_bytes(self) -> float:
        """What it takes more than the device has; zero if it fits."""
        return max(self.peak_bytes - self.limit_bytes, 0.0)


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages, and `pace_s`: the busiest device's or link's seconds for a micro-batch."""

    stages: tuple[_StageLoad, ...]
    pace_s: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """The units at which a new stage begins, as in a `Plan`."""
        return tuple(stage.begin for stage in self.stages[1:])

    @property
    def recompute(self) -> tuple[int, ...]:
        """The stages that run their forward again."""
        return tuple(place for place, stage in enumerate(self.stages) if stage.recompute)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return not any(stage.missing_bytes for stage in self.stages)


def assess(loads: Loads, cuts: Sequence[int]) -> Partition:
    """The partition with these cuts, whether it fits or not."""
    chain, bounds = loads.chain, loads.chain.bounds(cuts)
    stages = []
    for place, (begin, end) in enumerate(pairwise(bounds)):
        seat, again = loads.line.seats[place], loads.is_recomputed(place, begin, end)
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        stages.append(
            _StageLoad(
                begin=begin,
                end=end,
                recompute=again,
                forward_s=float(chain.forward_s[begin:end].sum()) / seat.speed,
                backward_s=float(backward_s[begin:end].sum()) / seat.speed,
                busy_s=loads.busy_of(place, begin, end),
                peak_bytes=loads.bytes_of(place, begin, end),
                limit_bytes=seat.memory_bytes,
            )
        )
    links_s = (loads.link_of(place, end) for place, end in enumerate(bounds[1:-1]))
    return Partition(tuple(stages), max((*links_s, *(stage.busy_s for stage in stages))))


# The partition with the least pace, or the least way through, by dynamic programming over fixed devices.
#
# The pace of a pipeline that does not drain is that of its busiest device or link, so this is the best
# partition for 2bw, and where others begin to look. Devices may differ in speed and memory, links in
# anything. It takes O(units² · stages) steps on arrays.


def exact(loads: Loads) -> Partition:
    """The partition with the least pace of all that fit; if none fits, that whose worst device misses least.

    Of several with that pace it is the one whose last stage begins first, of these the one whose last but
    one does, and so on: what is left over is put at the front as little as can be.
    """
    found = least_max((loads.cost_s(stage) for stage in range(loads.num_stages)), loads.link_s)
    if found.value < np.inf:
        return assess(loads, found.cuts())
    nearest = least_max(loads.missing_bytes(stage) for stage in range(loads.num_stages))
    return assess(loads, nearest.cuts())


@dataclass(frozen=True, slots=True, eq=False)
class LeastCuts:
    """The least cost of every beginning of the chain in every number of stages.

    `least[s][b]` is that of the units up to but without s + 1 + b in s + 1 stages, and `begins[s][b]` where
    the last of these begins, counted from s.
    """

    least: tuple[Seconds, ...]
    begins: tuple[npt.NDArray[np.intp], ...]

    @property
    def value(self) -> float:
        """That of the whole chain."""
        return float(self.least[-1][-1])

    def cuts(self) -> tuple[int, ...]:
        """How the whole chain is cut."""
        return self.cuts_before(len(self.least), len(self.least) + len(self.least[-1]) - 1)

    def cuts_before(self, num_stages: int, end: int) -> tuple[int, ...]:
        """How the units up to but without `end` are cut into so many stages."""
        cuts = []
        for stage in range(num_stages - 1, 0, -1):
            end = stage + int(self.begins[stage][end - 1 - stage])
            cuts.append(end)
        return tuple(reversed(cuts))

    def value_before(self, num_stages: int, end: int) -> float:
        """The least cost of the units before `end`, cut into this number of stages."""
        return float(self.least[num_stages - 1][end - num_stages])


def least_max(costs: Iterable[Seconds], boundaries: Sequence[Seconds] = ()) -> LeastCuts:
    """Cut so that the greatest cost is least; entries are those of `Loads`.

    `boundaries[s][b]` is the cost of the cut after stage s at unit s + 1 + b.
    """
    return _least(
        costs, np.maximum, lambda stage, least: np.maximum(least, boundaries[stage]) if boundaries else least
    )


def least_sum(costs: Sequence[Seconds], boundaries: Sequence[Seconds], most: float) -> tuple[int, ...] | None:
    """Cut so that the sum of the costs is least and none is more than `most`; None where that cannot be.

    On devices of unequal speed the sum, which a micro-batch takes to go through, depends on the cuts.
    """
    possible = (np.where(cost <= most, cost, np.inf) for cost in costs)
    found = _least(possible, np.add, lambda stage, sums: np.where(boundaries[stage] <= most, sums, np.inf))
    return None if found.value == np.inf else found.cuts()


def _least(costs: Iterable[Seconds], join: np.ufunc, crossed: Callable[[int, Seconds], Seconds]) -> LeastCuts:
    """The cuts whose joined costs are least; `crossed` gives the cost of a beginning with the cut after a
    stage.
    """
    least: list[Seconds] = []
    begins: list[npt.NDArray[np.intp]] = []
    for stage, cost in enumerate(costs):
        if stage == 0:  # it begins at the first unit
            least.append(cost[0])
            begins.append(np.zeros(len(cost), np.intp))
            continue
        joined = join(crossed(stage - 1, least[-1])[:, None], cost)
        first = joined.argmin(axis=0)
        begins.append(first)
        least.append(joined[first, np.arange(len(first))])
    return LeastCuts(tuple(least), tuple(begins))
