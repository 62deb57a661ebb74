"""The noun here: a `Partition`, a chain cut into stages, with what each takes and where it lives.

It may not fit: what its stages miss is then with them.
"""

from collections.abc import Iterable, Sequence
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
    device: str
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
    chain, line = loads.chain, loads.line
    stages = []
    link_s = [0.0]
    for place, (begin, end) in enumerate(pairwise(chain.bounds(cuts))):
        seat = line.seats[place]
        again = loads.is_recomputed(place, begin, end)
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        stage = _StageLoad(
            begin=begin,
            end=end,
            device=seat.name,
            recompute=again,
            forward_s=float(chain.forward_s[begin:end].sum()) / seat.speed,
            backward_s=float(backward_s[begin:end].sum()) / seat.speed,
            busy_s=loads.busy_of(place, begin, end),
            peak_bytes=loads.bytes_of(place, begin, end),
            limit_bytes=seat.memory_bytes,
        )
        stages.append(stage)
        if end < chain.num_units:
            link_s.append(loads.link_of(place, end))
    return Partition(tuple(stages), max(*link_s, *(stage.busy_s for stage in stages)))


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
class LeastMax:
    """The least greatest cost of every beginning of the chain in every number of stages.

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
        """The least greatest cost of the units up to but without `end` in so many stages."""
        return float(self.least[num_stages - 1][end - num_stages])


def least_max(costs: Iterable[Seconds], boundaries: Sequence[Seconds] = ()) -> LeastMax:
    """Cut so that the greatest cost is least; entries are those of `Loads`.

    `boundaries[s][b]` is the cost of the cut after stage s at unit s + 1 + b.
    """
    least: list[Seconds] = []
    begins: list[npt.NDArray[np.intp]] = []
    for stage, cost in enumerate(costs):
        if stage == 0:
            # All units before the first stage are none, so it begins at the first.
            least.append(cost[0])
            begins.append(np.zeros(len(cost), np.intp))
            continue
        before = np.maximum(least[-1], boundaries[stage - 1]) if boundaries else least[-1]
        greatest = np.maximum(before[:, None], cost)
        first = greatest.argmin(axis=0)
        begins.append(first)
        least.append(greatest[first, np.arange(len(first))])
    return LeastMax(tuple(least), tuple(begins))


def least_sum(costs: Sequence[Seconds], boundaries: Sequence[Seconds], most: float) -> tuple[int, ...] | None:
    """Cut so that the sum of the costs is least and none is more than `most`; None where that cannot be.

    On devices of unequal speed the sum, which a micro-batch takes to go through, depends on the cuts.
    """
    sums = np.where(costs[0][0] <= most, costs[0][0], np.inf)
    begins: list[npt.NDArray[np.intp]] = []
    for stage in range(1, len(costs)):
        before = np.where(boundaries[stage - 1] <= most, sums, np.inf)
        found = before[:, None] + np.where(costs[stage] <= most, costs[stage], np.inf)
        first = found.argmin(axis=0)
        begins.append(first)
        sums = found[first, np.arange(len(first))]
    if sums[-1] == np.inf:
        return None
    cuts = []
    place = len(sums) - 1
    for stage in range(len(costs) - 1, 0, -1):
        place = int(begins[stage - 1][place])
        cuts.append(stage + place)
    return tuple(reversed(cuts))
