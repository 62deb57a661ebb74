"""The control: a fixed piece of work that no model changes, to tell a slow machine from a slow program.

Shared machines lend their cores to others, and by the minute. So the same few products of matrices are timed
in turns with what is measured, once when a model is profiled and again while it trains: they take longer only
if the machine is slower. They allocate nothing.
"""

from collections.abc import Callable
from statistics import fmean, median
from time import perf_counter

import torch

from bireme.profile.waits import waited_s

__all__ = ["Control"]

WIDTH = 256
NUM_PRODUCTS = 3
"""About a millisecond, in which half a core's cache is used."""

SHARE = 0.005
"""The largest share of the time that it may take while a rank trains."""


class Control:
    """Times the work whenever it is asked. Its own tensors are made with it.

    With `counts_waits` the time counts in which the thread waits for a core, as it does for a step. Leave it
    out for a profile, which knows no such time, and where waiting is predicted because ranks share cores.
    """

    def __init__(self, *, counts_waits: bool, clock: Callable[[], float] = perf_counter) -> None:
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2))
        self._product = torch.empty(WIDTH, WIDTH)
        self._counts_waits = counts_waits
        self._clock = clock
        self._ended_s = -float("inf")
        self.seconds: list[float] = []

    def time(self) -> None:
        """Do the work, and note how long it took."""
        before_s = 0.0 if self._counts_waits else waited_s()
        began_s = self._clock()
        for _ in range(NUM_PRODUCTS):
            torch.mm(self._left, self._right, out=self._product)
        self._ended_s = self._clock()
        if not self._counts_waits:
            began_s += waited_s() - before_s
        self.seconds.append(self._ended_s - began_s)

    def time_if_due(self) -> None:
        """The same, but seldom enough that other work does not feel it."""
        if not self.seconds or (self._clock() - self._ended_s) * SHARE >= self.seconds[-1]:
            self.time()

    @property
    def median_s(self) -> float:
        """What it takes on an ordinary occasion."""
        return median(self.seconds) if self.seconds else 0.0

    @property
    def mean_s(self) -> float:
        """What it takes in the mean, with the occasions on which others had the core."""
        return fmean(self.seconds) if self.seconds else 0.0
