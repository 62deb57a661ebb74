"""A short latency, soon: simple placements, improved by simulated annealing.

What comes back fits and can run, and never is worse than any of the placements it began with. Nothing is
proven but the combinatorial bound.
"""

import math
import time

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.placement.items import Integers
from bireme.placement.latency.kernel import anneal, energy_of
from bireme.placement.latency.latency import LatencyFound, latency_lower_bound, latency_of
from bireme.placement.latency.starts import starts_of
from bireme.placement.latency.steps import LatencySteps, steps_of
from bireme.placement.latency.wiring import CIRCLE, CPU, scratch_for, wiring_of
from bireme.placement.workload import Workload

__all__ = ["search_latency"]

NUM_ROUNDS = 16
"""So often a placement is annealed, from every kind of start in turn, where time allows."""

MOVES_PER_STEP = 600
LEAST_MOVES = 6_000
"""In one round."""

NUM_BLOCKS = 30
"""A round is annealed in so many parts; between two of them the clock is looked at."""

HOT = (0.05, 0.01, 0.002)
"""Where rounds begin, relative to the best latency known; they take turns."""

COLD = 1e-5

DEARER, CHEAPER = 1.25, 0.9
"""What the price of a byte without room is multiplied by, after a part that ended without room or with it."""

PROVEN = 1e-12
"""Relative: so near the lower bound, only rounding is left."""


def search_latency(
    workload: Workload, *, num_pieces: int = 1, time_limit_s: float, seed: int = 0
) -> LatencyFound:
    """A placement with a short latency, with up to `num_pieces` pieces on each accelerator.

    The same workload and seed give the same placement, unless the time is over before the search is.
    """
    if num_pieces < 1:
        raise BiremeError(f"An accelerator has {num_pieces} pieces in this search; it must be 1 or more.")
    deadline = time.monotonic() + time_limit_s
    lower_bound = latency_lower_bound(workload)
    search = _Search(steps_of(workload), num_pieces, seed)
    search.run(deadline, lower_bound)
    if search.best_latency == math.inf:
        raise BiremeError(
            f"The search found no placement that fits: {workload.num_accelerators} accelerators of "
            f"{workload.accelerator_bytes:g} bytes, with {num_pieces} pieces each, and no CPU. More time may "
            "help, or the integer program, which also tells if there is none."
        )
    return search.found(workload, lower_bound)


class _Search:
    """The best placement so far, as a slot for each step."""

    def __init__(self, steps: LatencySteps, num_pieces: int, seed: int) -> None:
        self.steps = steps
        self.wiring = wiring_of(steps, num_pieces)
        self.scratch = scratch_for(self.wiring)
        self.state: NDArray[np.int64] = np.array([(seed * 7919 + 12345) % 2147483646 + 1], np.int64)
        self.best: Integers = np.zeros(len(steps), np.int64)
        self.best_latency = math.inf
        self.starts: list[Integers] = []
        times = self.wiring.cpu_time if steps.num_cpus else self.wiring.accelerator_time
        self.scale = float(times.sum())
        self.usual_price = self.scale / (float(self.wiring.size.sum()) or 1.0)
        self.excess_price = self.usual_price

    def run(self, deadline: float, lower_bound: float) -> None:
        """Look at all starts, then anneal the better ones, and the best over and over."""
        ranked = sorted((self._consider(start), number) for number, start in enumerate(self._all_starts()))
        # Pieces in a circle are a last resort: from there, annealing only wanders until it is out.
        runs = [number for energy, number in ranked if energy < math.inf]
        starts = [self.starts[number] for number in runs or range(len(ranked))]
        for number in range(NUM_ROUNDS):
            if time.monotonic() > deadline or self.best_latency <= lower_bound * (1 + PROVEN):
                return
            again = self.best_latency < math.inf and number % 2
            start = self.best if again or number // 2 >= len(starts) else starts[number // 2]
            self._anneal(start.copy(), HOT[number % len(HOT)], deadline)

    def found(self, workload: Workload, lower_bound: float) -> LatencyFound:
        """The best placement, for nodes."""
        num_pieces = self.wiring.num_pieces
        devices = np.where(self.best == CPU, self.steps.num_accelerators, self.best // num_pieces)
        pieces = np.where(self.best == CPU, 0, self.best % num_pieces)
        of_nodes = self.steps.spread(devices.tolist())
        in_pieces = self.steps.spread(pieces.tolist())
        value = latency_of(workload, of_nodes, in_pieces).latency
        return LatencyFound(of_nodes, in_pieces, value, min(lower_bound, value))

    def _all_starts(self) -> list[Integers]:
        for slots in starts_of(self.steps, self.wiring.num_pieces):
            if not any(np.array_equal(slots, other) for other in self.starts):
                self.starts.append(slots)
        return self.starts

    def _consider(self, slots: Integers) -> float:
        energy = float(energy_of(self.wiring, slots, self.scratch, self.excess_price))
        latency = float(self.scratch.duration[-1])
        if latency != CIRCLE and self.scratch.used[-1] == 0 and latency < self.best_latency:
            self.best_latency = latency
            self.best[:] = slots
        return energy

    def _anneal(self, slots: Integers, hot: float, deadline: float) -> None:
        num_moves = max(LEAST_MOVES, MOVES_PER_STEP * len(self.steps)) // NUM_BLOCKS
        scale = min(self.best_latency, self.scale) or 1.0
        cooling = (COLD / hot) ** (1 / NUM_BLOCKS)
        for block in range(NUM_BLOCKS):
            if time.monotonic() > deadline:
                return
            warm = hot * cooling**block * scale
            self.best_latency = float(
                anneal(
                    self.wiring,
                    slots,
                    self.best,
                    self.scratch,
                    self.state,
                    num_moves,
                    warm,
                    warm * cooling,
                    self.excess_price,
                    self.best_latency,
                )
            )
            # Annealing goes along the border of what fits: to where the price keeps it from both sides.
            energy_of(self.wiring, slots, self.scratch, self.excess_price)
            price = self.excess_price * (DEARER if self.scratch.used[-1] > 0 else CHEAPER)
            self.excess_price = min(max(price, self.usual_price / 100), self.usual_price * 1000)
