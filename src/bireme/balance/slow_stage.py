"""Which stage of a replica has become slow, compared with the others of the same replica.

Shares help where a whole replica is slow. Where one of its stages is, the others only wait for it, and what
helps is another cut. How long each rank ought to take for a sample is given; that all take longer, or all
shorter, says nothing about a stage.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bireme.balance.shares import Shares

__all__ = ["SlowStage", "StageWatch"]

LONG = 20
"""Batches over which a rank must have been slow."""

SLOW = 1.5
"""How many times as long it must take as the others lead to expect."""


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A rank that takes `times` as long for its stages as it should, compared with the others of its replica.

    A new cut could save up to the part `saves` of a batch's time: what all the replica's devices could do if
    each were busy all the time.
    """

    rank: int
    replica: int
    pipeline_rank: int
    times: float
    saves: float


class StageWatch:
    """Watches the ranks of all replicas. `expected_s[rank]` are the seconds that a rank should take for a
    sample, in any unit that all ranks of a replica share.
    """

    def __init__(self, expected_s: Sequence[float], num_pipeline_ranks: int) -> None:
        self._expected_s = expected_s
        self._per_replica = num_pipeline_ranks
        self._recent: list[deque[float]] = [deque(maxlen=LONG) for _ in expected_s]
        self._told: set[int] = set()

    def note(self, shares: Shares, rank_seconds: Sequence[float]) -> SlowStage | None:
        """Learn the busy seconds of all ranks in a batch; a stage that has become slow is told once."""
        if self._per_replica == 1:
            return None
        for rank, busy_s in enumerate(rank_seconds):
            pace = busy_s / shares[rank // self._per_replica]
            self._recent[rank].append(pace / self._expected_s[rank])
        if len(self._recent[0]) < LONG:
            return None
        usual = [sorted(own)[LONG // 4] for own in self._recent]  # what three of four batches take at least
        found = None
        for rank, own in enumerate(usual):
            first = rank - rank % self._per_replica
            others = [usual[other] for other in range(first, first + self._per_replica) if other != rank]
            times = own / median(others) if median(others) > 0 else 1.0
            if times < SLOW:
                self._told.discard(rank)
            elif rank not in self._told and found is None:
                self._told.add(rank)
                found = self._slow_stage(rank, times, usual)
        return found

    def _slow_stage(self, rank: int, times: float, usual: Sequence[float]) -> SlowStage:
        replica, pipeline_rank = divmod(rank, self._per_replica)
        ranks = range(replica * self._per_replica, (replica + 1) * self._per_replica)
        expected_s = [self._expected_s[one] for one in ranks]
        slowest_s = max(usual[one] * self._expected_s[one] for one in ranks)
        even_s = sum(expected_s) / sum(1 / usual[one] for one in ranks)
        return SlowStage(rank, replica, pipeline_rank, times, max(0.0, 1 - even_s / slowest_s))
