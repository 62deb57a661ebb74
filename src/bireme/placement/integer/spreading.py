"""A bound on the value of every placement that knows of communication, by one linear program without devices.

Spread evenly over all devices, fractions of items cut no net, so the first bound of a program with a column
for each item and device is work alone. Here `apart[v]` says, for an item that is the *root*, whether item `v`
is on another device; where the root is on a CPU all are apart, itself too. What is not apart is on the root's
accelerator, which must not be loaded above the maximum; so most items must be apart. And two pins of a net
can differ in that only as far as the net is paid for: once by the root's accelerator, and once more by the
other pin's, if that is one. What all pay together is shared out evenly. These are the spreading metrics of
Even, Naor, Rao and Schieber ("Divide-and-conquer approximation algorithms via spreading metrics", 2000), with
a few roots for all items.
"""

import time

import numpy as np

from bireme.placement.bounds import ROUNDING
from bireme.placement.integer.loads import FULL_SCALE, Frame, sizes_in_scale
from bireme.placement.integer.nets import CutNets, cut_nets
from bireme.placement.integer.program import Columns, IntegerProgram

__all__ = ["bounded", "spreading_bound"]

BOUND_SHARE = 0.2
"""The most of a program's time that goes into a bound beforehand, which large ones never rise to."""

NUM_ROOTS = (4, 12)
"""The bound hardly rises with more roots. A few are tried first, to learn how long it takes."""

TIMES_LONGER = 5.0
"""How much longer all devices take than the few."""


def bounded(frame: Frame, *, time_limit_s: float) -> Frame:
    """The frame with this bound, where a share of the time that its program has suffices for it."""
    return frame.above(spreading_bound(frame, time_limit_s=BOUND_SHARE * time_limit_s))


def spreading_bound(frame: Frame, *, time_limit_s: float) -> float:
    """A value that no placement as good as the frame's start is below, contiguous or not.

    In the scale of the frame and never below its `floor`, which it is where the time does not suffice.
    """
    bound, left_s = frame.floor, time_limit_s
    for num_roots in NUM_ROOTS:
        began = time.monotonic()
        roots = _roots(frame, num_roots)
        if roots:
            program = _Spreading(frame, roots).program
            bound = max(bound, program.relaxed_bound(time_limit_s=left_s) * (1 - ROUNDING))
        took_s = time.monotonic() - began
        left_s -= took_s
        if TIMES_LONGER * took_s > left_s:
            break
    return bound


class _Spreading:
    """The linear program for a frame and some roots."""

    def __init__(self, frame: Frame, roots: list[int]) -> None:
        self.frame, self.items, self.num_roots = frame, frame.items, len(roots)
        self.program = IntegerProgram()
        self.maxima = frame.add_maxima(self.program)
        self.paid = self.program.add_columns(len(self.items.net_cost), upper=self.items.num_accelerators)
        self.on_cpu = self.program.add_columns(
            len(self.items), lower=~frame.on_accelerator, upper=frame.on_cpu
        )
        self.apart = self.program.add_columns((len(self.items), len(roots)), upper=1.0)
        own = self.apart[roots, np.arange(len(roots))]
        self.program.add_rows(np.column_stack([own, self.on_cpu[roots]]), [1, -1], upper=0.0)
        self._share_out()
        self._cut(self.on_cpu[:, np.newaxis])
        self._load_roots(self._cut(self.apart))
        on_cpu = np.repeat(self.on_cpu, len(roots))
        self.program.add_rows(np.column_stack([on_cpu, self.apart.ravel()]), [1, -1], upper=0.0)

    def _share_out(self) -> None:
        """All devices of a kind together have no more than the maximum times their number."""
        frame, num_cpus = self.frame, self.items.num_cpus
        for maximum, on_accelerator, on_cpu, cost in zip(
            self.maxima, frame.accelerator_time, frame.cpu_time, frame.net_cost, strict=True
        ):
            columns = np.concatenate([[maximum], self.on_cpu, self.paid])
            factors = np.concatenate([[-self.items.num_accelerators], -on_accelerator, cost])
            self.program.add_rows(columns[np.newaxis, :], factors, upper=-on_accelerator.sum())
            columns = np.concatenate([[maximum], self.on_cpu])
            self.program.add_rows(columns[np.newaxis, :], np.append([-num_cpus], on_cpu), upper=0.0)

    def _cut(self, columns: Columns) -> list[CutNets]:
        """Pins of a net differ by no more than what is paid for it."""
        groups = cut_nets(self.program, self.items, columns)
        for group in groups:
            paid = np.repeat(self.paid[group.numbers], columns.shape[1])
            parts = [group.high.ravel(), paid, *([group.low.ravel()] if len(group.low) else [])]
            signs = [1.0, -1.0, -1.0][: len(parts)]
            self.program.add_rows(np.column_stack(parts), signs, upper=0.0)
        return groups

    def _load_roots(self, groups: list[CutNets]) -> None:
        """What is not apart from a root is on its accelerator, with the nets that cuts."""
        frame = self.frame
        for group in groups:
            self._pay_twice(group)
        for maximum, work, cost in zip(self.maxima, frame.accelerator_time, frame.net_cost, strict=True):
            largest = np.full((self.num_roots, 1), maximum)
            columns = np.hstack([largest, self.apart.T, *(group.payers() for group in groups)])
            factors = np.concatenate([[-1.0], -work, *(group.prices(cost) for group in groups)])
            self.program.add_rows(columns, factors, upper=-work.sum())
        sizes = sizes_in_scale(self.items)
        self.program.add_rows(self.apart.T, -sizes, upper=FULL_SCALE - sizes.sum())

    def _pay_twice(self, group: CutNets) -> None:
        """A pin that is apart while another is not makes its own device pay too, unless that is a CPU."""
        paid = np.repeat(self.paid[group.numbers], self.num_roots)
        starts = self.items.pins.starts[group.numbers]
        for pin in range(group.pins.shape[1]):
            on_cpu = np.repeat(self.on_cpu[self.items.pins.values[starts + pin]], self.num_roots)
            least = group.low if len(group.low) else group.pins[:, 1 - pin]
            rows = np.column_stack([group.pins[:, pin].ravel(), least.ravel(), on_cpu, paid])
            self.program.add_rows(rows, [2.0, -2.0, -1.0, -1.0], upper=0.0)


def _roots(frame: Frame, num_roots: int) -> list[int]:
    """The heaviest item of each stretch of equal work, of those that can be on an accelerator."""
    work = frame.accelerator_time.sum(axis=0)
    middle = np.cumsum(work) - work / 2
    stretch = np.minimum(middle / max(work.sum(), 1e-300) * num_roots, num_roots - 1).astype(np.int64)
    here = (np.flatnonzero(frame.on_accelerator & (stretch == number)) for number in range(num_roots))
    return [int(items[work[items].argmax()]) for items in here if items.size]
