"""How equal the stages' times are, which is not the same as how fast they run together."""

import math
import statistics
from dataclasses import dataclass

from bireme.plan.partition.partition import Partition

__all__ = ["Balance", "balance_of", "sigma_ratio"]


@dataclass(frozen=True, slots=True)
class Balance:
    """Of forward and backward of the stages: the mean, the standard deviation and their ratio."""

    mean_s: float
    deviation_s: float

    @property
    def variation(self) -> float:
        """The coefficient of variation."""
        return self.deviation_s / self.mean_s if self.mean_s else 0.0


def balance_of(partition: Partition) -> Balance:
    """The balance of a partition; the deviation is that of all stages, not of a sample."""
    seconds = [stage.forward_s + stage.backward_s for stage in partition.stages]
    return Balance(statistics.fmean(seconds), statistics.pstdev(seconds))


def sigma_ratio(theirs: Partition, ours: Partition) -> float:
    """How many times as much the stage times of one partition deviate as those of another."""
    their_s, our_s = balance_of(theirs).deviation_s, balance_of(ours).deviation_s
    if our_s == 0.0:
        return 1.0 if their_s == 0.0 else math.inf
    return their_s / our_s
