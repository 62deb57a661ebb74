"""AutoPipe's simulator: when a batch of 1F1B is through, and which stage sets its time.

Stage s of p runs w = min(p − 1 − s, m) forwards ahead. Then step k pairs the forward of micro-batch k + w
with the backward of micro-batch k:

    forward begins   max( its input is there, backward k − 1 of this stage ends )
    backward begins  max( its gradient is there, the forward of its step ends )

An input is there C after the forward ends on stage s − 1, a gradient C after the backward ends on s + 1.
In AutoPipe C comes on top of both, as where a stage waits while it receives; with `overlap` it only
delays what is under way.

The published planner fixes m at 2p and lets step 0 begin its backwards as soon as a gradient could be there,
whatever the stage itself still has to run. Where a late stage is fast that is too early, and too short a
batch; here a stage's own forwards hold its first backward up as they do in a run.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bireme.plan.partition.chain import Seconds

__all__ = ["Iterations", "iterate"]

SLACK = 1e-9
"""Relative to a batch: shorter than that nothing waits, it is rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Iterations:
    """For each partition the seconds of a batch, and its master stage.

    The master is the last stage that never waits once it alternates: the critical path goes along it.
    """

    seconds: Seconds
    master: npt.NDArray[np.intp]


def iterate(
    forward_s: Seconds,
    backward_s: Seconds,
    num_microbatches: int,
    *,
    hop_s: Seconds | None = None,
    overlap: bool = False,
) -> Iterations:
    """Go through one batch of each partition, whose stages' seconds are the rows.

    `hop_s` are the seconds between each stage and the next. Without them the result is exact; so it is for
    stages that wait while they receive. With `overlap` the messages of a link do not wait for each other
    here.
    """
    forward_s, backward_s = np.atleast_2d(forward_s), np.atleast_2d(backward_s)
    num_stages = forward_s.shape[1]
    hop = np.zeros((1, num_stages - 1)) if hop_s is None else np.atleast_2d(hop_s)
    return _Run(forward_s, backward_s, hop, num_microbatches, overlap=overlap).result()


class _Run:
    """One batch on its way. `forward_end_s` and `backward_end_s` are those of each stage's latest.

    A chain of maxima along the stages, each with the stage's own seconds on top, becomes one running maximum
    of what is left when the seconds of the way are taken away first. Rows are the stages here, the last
    first, and columns the partitions.
    """

    def __init__(
        self, forward_s: Seconds, backward_s: Seconds, hop_s: Seconds, num_microbatches: int, *, overlap: bool
    ) -> None:
        num_partitions, self._num_stages = forward_s.shape
        self._num_microbatches = num_microbatches
        self._forward_s = forward_s.T[::-1].copy()
        self._backward_s = backward_s.T[::-1].copy()
        nothing = np.zeros((1, num_partitions))
        self._hop_s = np.broadcast_to(hop_s, (num_partitions, self._num_stages - 1)).T[::-1].copy()
        from_before_s = np.vstack((self._hop_s, nothing))
        from_behind_s = np.vstack((nothing, self._hop_s))
        # A stage that waits while it receives does so even when it is late itself.
        stands = not overlap and bool(self._hop_s.any())
        self._stand_before_s = from_before_s if stands else None
        way_s = np.vstack((self._forward_s[1:], nothing)) + from_before_s
        self._way_s = np.cumsum(way_s[::-1], axis=0)[::-1]
        way_back_s = np.cumsum(np.vstack((nothing, self._backward_s[:-1])) + from_behind_s, axis=0)
        self._way_back_s = way_back_s - from_behind_s if stands else way_back_s
        self._way_through_s = way_back_s + self._backward_s
        self._stand_s = from_before_s + from_behind_s if stands else 0.0 * from_before_s
        self._forward_end_s, self._backward_end_s, self._first_s, self._last_s = np.zeros(
            (4, *self._forward_s.shape)
        )

    def result(self) -> Iterations:
        for microbatch in range(min(self._num_stages, self._num_microbatches)):
            self._forwards_ahead(microbatch)
        for k in range(self._num_microbatches):
            self._step(k)
        return Iterations(self._backward_end_s[-1].copy(), self._masters())

    def _forwards_ahead(self, microbatch: int) -> None:
        """A micro-batch's forwards on the stages where nothing but forwards comes before."""
        begin_s = self._forward_end_s[microbatch:] - self._way_s[microbatch:]
        if self._stand_before_s is not None:
            begin_s += self._stand_before_s[microbatch:]
        begin_s = np.maximum.accumulate(begin_s[::-1], axis=0)[::-1]
        begin_s += self._way_s[microbatch:]
        np.add(begin_s, self._forward_s[microbatch:], out=self._forward_end_s[microbatch:])

    def _step(self, k: int) -> None:
        # The first stages have no forward left at the end; with fewer micro-batches than stages never one.
        num = self._num_stages + min(0, self._num_microbatches - self._num_stages - k)
        if k:
            begin_s = self._backward_end_s[:num]
            if self._stand_before_s is not None:
                begin_s = begin_s + self._stand_before_s[:num]
            with_before = min(num, self._num_stages - 1)
            arrived_s = self._forward_end_s[1 : with_before + 1] + self._hop_s[:with_before]
            late_s = np.maximum(begin_s[:with_before], arrived_s)
            np.add(late_s, self._forward_s[:with_before], out=self._forward_end_s[:with_before])
            if with_before < num:
                np.add(begin_s[-1], self._forward_s[-1], out=self._forward_end_s[-1])
        ready_s = self._forward_end_s
        if k and num < self._num_stages:
            ready_s = np.concatenate((self._forward_end_s[:num], self._backward_end_s[num:]))
        chain_s = ready_s - self._way_back_s
        np.maximum.accumulate(chain_s, axis=0, out=chain_s)
        np.add(chain_s, self._way_through_s, out=self._backward_end_s)
        if k == 0:
            self._first_s[:] = self._last_s[:] = self._backward_end_s
        elif num:
            self._last_s[:num] = self._backward_end_s[:num]

    def _masters(self) -> npt.NDArray[np.intp]:
        busy_s = self._forward_s + self._backward_s
        steps = np.maximum(self._num_microbatches - 1 - np.arange(self._num_stages), 0)[:, None]
        waited_s = self._last_s - self._first_s - steps * (busy_s + self._stand_s)
        never_waits = waited_s <= SLACK * self._backward_end_s[-1]
        # Where each stage waits at some time, the busiest comes nearest to it.
        busiest = busy_s >= busy_s.max(axis=0)
        candidates = np.where(never_waits.any(axis=0), never_waits, busiest)
        return np.asarray(self._num_stages - 1 - candidates.argmax(axis=0), np.intp)
