"""How long annealing goes on: rounds from every start and from the best placement in turn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic

import numpy as np

from bireme.placement.annealing_loops import Heat, Neighbors, Walk
from bireme.placement.contraction import SLACK, Integers

_MOVES_PER_PART, _LEAST_MOVES = 600, 6_000
"""In one round."""

_ROUNDS_ALIKE = 8
"""After this number of rounds, the next ones have twice the moves."""

_NUM_BLOCKS = 30
"""The parts of a round; the clock is read after each."""

_SMOOTH, _SHARP, _SHARP_FROM = 3, 6, 0.5
"""Squarings of the norm of loads in the first part of each round, and in the last."""

_DEARER, _CHEAPER = 1.25, 0.9
"""Factors of the price of a byte, after a part that ended without enough memory or with it."""


class Annealing(ABC):
    """The search for a better placement, from some starts."""

    hot: tuple[float, ...] = (0.05, 0.01, 0.002)
    """Where rounds begin, relative to the best value known; they take turns."""
    cold = 1e-5
    """Where they end."""

    def __init__(self, near: Neighbors, usual_value: float, num_bytes: float, seed: int) -> None:
        count = len(near.family)
        slots, best, moved, old, marks = (np.zeros(count, np.int64) for _ in range(5))
        random = np.array([(seed * 7919 + 12345) % 2147483646 + 1], np.int64)
        self.near = near
        self.walk = Walk(slots, best, np.array([math.inf]), np.zeros(2), moved, old, marks, random)
        self._usual_value = usual_value or 1.0
        self._usual_price = self._price = self._usual_value / (num_bytes or 1.0)

    @property
    def best_value(self) -> float:
        """The value of the best placement that fits; infinite if no placement has fit."""
        return float(self.walk.best_value[0])

    @abstractmethod
    def anneal(self, heat: Heat, num_moves: int) -> float:
        """Try `num_moves`, from the present slots on; returns the energy after them."""

    def run(
        self,
        starts: Sequence[Integers],
        *,
        time_limit_s: float,
        lower_bound: float,
        num_rounds: int | None = None,
        num_moves: int | None = None,
    ) -> None:
        """Evaluate all starts, then anneal the better ones, and the best placement in every second round.

        The search ends after `num_rounds`, when the time is over, or at a value that is proven; with
        `num_moves` after about that number of moves, however long they take.
        """
        ranked = sorted((self._energy_of(start), number) for number, start in enumerate(starts))
        # Pieces in a circle are a last resort: from there, annealing only wanders until it is out.
        runs = [number for energy, number in ranked if energy < math.inf]
        starts = [starts[number] for number in runs or range(len(starts))]
        each = max(_LEAST_MOVES, _MOVES_PER_PART * len(self.walk.slots))
        left = math.inf if num_moves is None else num_moves
        each = each if num_moves is None else min(each, -(-num_moves // 4))
        deadline, number = monotonic() + (time_limit_s if num_moves is None else math.inf), 0
        while number != num_rounds and left > 0:
            if monotonic() > deadline or self.best_value <= lower_bound * (1 + SLACK):
                return
            again = self.best_value < math.inf and number % 2
            start = self.walk.best if again or number // 2 >= len(starts) else starts[number // 2]
            self.walk.slots[:] = start
            self._round(self.hot[number % len(self.hot)], each << number // _ROUNDS_ALIKE, deadline)
            left -= each << number // _ROUNDS_ALIKE
            number += 1

    def _energy_of(self, start: Integers) -> float:
        self.walk.slots[:] = start
        return self.anneal(Heat(1.0, 1.0, self._price, _SHARP), 0)

    def _round(self, hot: float, num_moves: int, deadline: float) -> None:
        """Cool down once, by the share of the moves or of the time left, whichever is larger."""
        scale = min(self.best_value, self._usual_value) or 1.0
        began, cooled = monotonic(), 0.0
        while cooled < 1 - 1e-9:
            warm, cool = (scale * hot * (self.cold / hot) ** at for at in (cooled, cooled + 1 / _NUM_BLOCKS))
            squarings = _SMOOTH if cooled < _SHARP_FROM else _SHARP
            self.anneal(Heat(warm, cool, self._price, squarings), -(-num_moves // _NUM_BLOCKS))
            # The price keeps annealing near the placements that just fit.
            price = self._price * (_DEARER if self.walk.outcome[1] > 0 else _CHEAPER)
            self._price = min(max(price, self._usual_price / 100), self._usual_price * 1000)
            now = monotonic()
            over = (now - began) / (deadline - began) if now < deadline else 1.0
            cooled = max(cooled + 1 / _NUM_BLOCKS, over)
