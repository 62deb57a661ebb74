"""DAPPLE's planner, as far as it cuts a chain into a given number of stages: the least latency of a batch.

The latency is that of a pivot stage, before which the pipeline fills and after which it drains. Messages
are stages of their own. While a plan is built, all units that are left make a last stage, replicated over
all devices that are left.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bireme.plan.partition.chain import Seconds
from bireme.plan.partition.loads import Loads, Recompute
from bireme.simulate.links import ring_share

__all__ = ["dapple", "dapple_latency_s"]


def dapple(loads: Loads) -> tuple[int, ...]:
    """Cut by DAPPLE's dynamic programming over the units dealt out and the devices used.

    Like all of DAPPLE's it takes the best beginning of a plan for granted when it extends it. It knows
    neither memory nor unequal devices.
    """
    planner = _Planner(loads)
    plans = planner.first()
    for num_dealt in range(2, loads.num_stages):
        plans = planner.longer(plans, num_dealt)
    best = int(plans.latency_s.argmin())
    return tuple(int(cut) for cut in plans.cuts[best])


def dapple_latency_s(
    forward_s: Seconds, backward_s: Seconds, sync_s: Seconds, num_microbatches: int
) -> Seconds:
    """The latency of a batch for each row of stages, those of messages among them.

    With Q the pivot it is Σ_{s≤Q} F_s + (m − 1)(F_Q + B_Q) + max_s (sync_s ± what lies between s and Q of
    the backwards): after the pivot a stage is done that much sooner.
    """
    rows = np.arange(len(forward_s))
    num_stages = forward_s.shape[1]
    both_s = forward_s + backward_s
    until_s = np.hstack((np.zeros((len(rows), 1)), np.cumsum(both_s, axis=1)))
    pivot = np.full(len(rows), num_stages - 1)
    for stage in range(num_stages - 2, -1, -1):
        steady_s = (num_microbatches - 1) * both_s[:, stage]
        pivot_s = (num_microbatches - 1) * both_s[rows, pivot]
        between_s = until_s[rows, pivot] - until_s[:, stage + 1]
        pivot = np.where(steady_s > pivot_s + between_s, stage, pivot)
    fill_s = np.cumsum(forward_s, axis=1)[rows, pivot]
    steady_s = (num_microbatches - 1) * both_s[rows, pivot]
    back_s = np.hstack((np.zeros((len(rows), 1)), np.cumsum(backward_s, axis=1)))
    place = np.arange(num_stages)
    before_s = back_s[rows, pivot + 1][:, None] - back_s[:, :-1]
    after_s = back_s[:, 1:] - back_s[rows, pivot][:, None]
    drain_s = sync_s + np.where(place <= pivot[:, None], before_s, -after_s)
    return np.asarray(fill_s + steady_s + drain_s.max(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class _Plans:
    """The best plan of every number of units dealt out; a column per stage, and per message after it."""

    ends: npt.NDArray[np.intp]
    cuts: npt.NDArray[np.intp]
    forward_s: Seconds
    backward_s: Seconds
    latency_s: Seconds


class _Planner:
    """What a plan's latency is made of."""

    def __init__(self, loads: Loads) -> None:
        chain, line, setting = loads.chain, loads.line, loads.setting
        again = setting.recompute is Recompute.ALWAYS
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        self._num_units = chain.num_units
        self._num_devices = line.num_stages
        self._num_microbatches = setting.num_microbatches
        self._forward_s = np.concatenate(([0.0], np.cumsum(chain.forward_s)))
        self._backward_s = np.concatenate(([0.0], np.cumsum(backward_s)))
        self._bytes_per_s = min((link.bytes_per_s for link in line.links), default=math.inf)
        latency_s = max((link.latency_s for link in line.links), default=0.0)
        self._message_s = np.concatenate(([0], chain.boundary_bytes)) / self._bytes_per_s + latency_s
        self._gradient_bytes = chain.bytes.gradient[:, -1]

    def first(self) -> _Plans:
        """One stage, or no other than the last where there is but one device."""
        nothing, none_dealt = np.zeros((1, 0)), np.zeros(1, np.intp)
        begun = _Plans(none_dealt, np.zeros((1, 0), np.intp), nothing, nothing, np.zeros(1))
        if self._num_devices == 1:
            return begun
        ends = np.arange(1, self._num_units - self._num_devices + 2)
        return self._best(begun, np.zeros(len(ends), np.intp), ends, 1)

    def longer(self, plans: _Plans, num_dealt: int) -> _Plans:
        """The best plans with one stage more."""
        ends = np.arange(num_dealt, self._num_units - self._num_devices + num_dealt + 1)
        before, after = np.nonzero(plans.ends[:, None] < ends[None, :])
        return self._best(plans, before, ends[after], num_dealt)

    def _best(
        self, plans: _Plans, before: npt.NDArray[np.intp], ends: npt.NDArray[np.intp], num_dealt: int
    ) -> _Plans:
        """Of all ways to go on from a plan to an end the first best for each end."""
        begins = plans.ends[before]
        forward_s, backward_s = (
            np.column_stack((rows[before], sums[ends] - sums[begins], self._message_s[ends]))
            for rows, sums in ((plans.forward_s, self._forward_s), (plans.backward_s, self._backward_s))
        )
        left = self._num_devices - num_dealt
        rest_s = [(sums[-1] - sums[ends]) / left for sums in (self._forward_s, self._backward_s)]
        sync_s = np.zeros((len(ends), forward_s.shape[1] + 1))
        sync_s[:, -1] = ring_share(left) * self._gradient_bytes[ends] / self._bytes_per_s
        latency_s = dapple_latency_s(
            np.column_stack((forward_s, rest_s[0])),
            np.column_stack((backward_s, rest_s[1])),
            sync_s,
            self._num_microbatches,
        )
        order = np.lexsort((np.arange(len(ends)), latency_s, ends))
        chosen = order[np.unique(ends[order], return_index=True)[1]]
        return _Plans(
            ends=ends[chosen],
            cuts=np.column_stack((plans.cuts[before[chosen]], ends[chosen])),
            forward_s=forward_s[chosen],
            backward_s=backward_s[chosen],
            latency_s=latency_s[chosen],
        )
