"""The stage times of many partitions at once, in the form that the recurrence wants."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bireme.plan.partition.chain import Seconds
from bireme.plan.partition.loads import Loads

__all__ = ["ChainTimes", "StageTimes"]


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """A row per partition and a column per stage; `hop_s` has one column less, for the links between."""

    forward_s: Seconds
    backward_s: Seconds
    hop_s: Seconds

    def busy_s(self, *, overlap: bool) -> Seconds:
        """How long a micro-batch keeps each stage busy, its waits for messages included."""
        busy_s = self.forward_s + self.backward_s
        if not overlap:
            busy_s[:, :-1] += self.hop_s
            busy_s[:, 1:] += self.hop_s
        return busy_s


class ChainTimes:
    """What is the same for all partitions of a chain on its devices, worked out once."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        chain, line = loads.chain, loads.line
        self._speeds = np.array([seat.speed for seat in line.seats])
        self._until_s = [
            np.concatenate(([0.0], np.cumsum(values)))
            for values in (chain.forward_s, chain.backward_s, chain.recompute_backward_s)
        ]
        self._again = np.stack(loads.recomputed) if any(t.any() for t in loads.recomputed) else None
        self._bytes_per_s = np.array([link.bytes_per_s for link in line.links])
        self._latency_s = np.array([link.latency_s for link in line.links])

    def times(self, all_cuts: Sequence[Sequence[int]]) -> StageTimes:
        """Those of the partitions with these cuts, which must leave no stage empty."""
        chain = self._loads.chain
        bounds = np.array([(0, *cuts, chain.num_units) for cuts in all_cuts], np.intp)
        begins, ends = bounds[:, :-1], bounds[:, 1:]
        forward_s, backward_s, again_s = self._until_s
        back_s = backward_s[ends] - backward_s[begins]
        if self._again is not None:
            stages = np.arange(begins.shape[1])
            again = self._again[stages, begins - stages, ends - 1 - stages]
            back_s = np.where(again, again_s[ends] - again_s[begins], back_s)
        return StageTimes(
            forward_s=(forward_s[ends] - forward_s[begins]) / self._speeds,
            backward_s=back_s / self._speeds,
            hop_s=chain.boundary_bytes[ends[:, :-1] - 1] / self._bytes_per_s + self._latency_s,
        )
