"""How long blocks lie idle between their accesses, in seconds and in events.

The paper calls it the access time interval (ATI): from the end of one access of a living block to the start
of its next. Iterations repeat, so the last access of a block that stays is followed by its first in the next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bireme.profile.behaviour import Behaviour, BlockAccess, MemoryBlock

__all__ = ["Idle", "idle_intervals", "percentile"]


@dataclass(frozen=True, slots=True)
class Idle:
    """A block is not touched between two accesses; one in the next iteration is later than this one's end."""

    block: MemoryBlock
    start_s: float
    end_s: float
    num_events: int

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


def idle_intervals(behaviour: Behaviour) -> list[Idle]:
    """All between two accesses; across the end of the iteration where iterations are known to repeat."""
    found: list[Idle] = []
    for block in behaviour.blocks:
        found += (_between(block, one, other) for one, other in pairwise(block.accesses))
        if block.is_persistent and block.accesses and behaviour.repetition.is_stable:
            last, first = block.accesses[-1], block.accesses[0]
            num_events = behaviour.num_events - last.event + first.event
            end_s = max(behaviour.duration_s + first.start_s, last.end_s)
            found.append(Idle(block, last.end_s, end_s, num_events))
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of some values that so many per cent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def _between(block: MemoryBlock, one: BlockAccess, other: BlockAccess) -> Idle:
    # One operator's accesses of a block are one, so that `other` is a later operator.
    return Idle(block, one.end_s, max(other.start_s, one.end_s), other.event - one.event)
