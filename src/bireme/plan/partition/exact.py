"""The partition with the least pace, or the least way through, by dynamic programming over fixed devices.

The pace of a pipeline that does not drain is that of its busiest device or link, so this is the best
partition for 2bw, and where others begin to look. Devices may differ in speed and memory, links in anything.
It takes O(units² · stages) steps on arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bireme.plan.partition.chain import Seconds
from bireme.plan.partition.loads import Loads
from bireme.plan.partition.partition import Misfit, Partition, assess

__all__ = ["LeastMax", "exact", "least_max", "least_sum"]


def exact(loads: Loads) -> Partition | Misfit:
    """The partition with the least pace of all that fit, or the one that comes nearest to fitting.

    Of several with that pace it is the one whose last stage begins first, of these the one whose last but
    one does, and so on: what is left over is put at the front as little as can be.
    """
    found = least_max((loads.cost_s(stage) for stage in range(loads.num_stages)), loads.link_s)
    if found.value < np.inf:
        return assess(loads, found.cuts())
    nearest = least_max(loads.missing_bytes(stage) for stage in range(loads.num_stages))
    partition = assess(loads, nearest.cuts())
    missing = [stage.missing_bytes for stage in partition.stages]
    return Misfit(partition, missing.index(max(missing)))


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


def least_max(costs: Iterable[Seconds], borders: Sequence[Seconds] = ()) -> LeastMax:
    """Cut so that the greatest cost is least; entries are those of `Loads`.

    `borders[s][b]` is the cost of the cut after stage s at unit s + 1 + b.
    """
    least: list[Seconds] = []
    begins: list[npt.NDArray[np.intp]] = []
    for stage, cost in enumerate(costs):
        if stage == 0:
            # All units before the first stage are none, so it begins at the first.
            least.append(cost[0])
            begins.append(np.zeros(len(cost), np.intp))
            continue
        before = np.maximum(least[-1], borders[stage - 1]) if borders else least[-1]
        greatest = np.maximum(before[:, None], cost)
        first = greatest.argmin(axis=0)
        begins.append(first)
        least.append(greatest[first, np.arange(len(first))])
    return LeastMax(tuple(least), tuple(begins))


def least_sum(costs: Sequence[Seconds], borders: Sequence[Seconds], most: float) -> tuple[int, ...] | None:
    """Cut so that the sum of the costs is least and none is more than `most`; None where that cannot be.

    On devices of unequal speed the sum, which a micro-batch takes to go through, depends on the cuts.
    """
    sums = np.where(costs[0][0] <= most, costs[0][0], np.inf)
    begins: list[npt.NDArray[np.intp]] = []
    for stage in range(1, len(costs)):
        before = np.where(borders[stage - 1] <= most, sums, np.inf)
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
