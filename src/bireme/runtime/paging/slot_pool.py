"""The free slots of a tier, each with the job after which it may be written to."""

from collections import deque

from bireme.runtime.paging.mover import Job

__all__ = ["SlotPool"]


class SlotPool:
    """Slots 0, 1, 2, … of a tier. What was given back first is taken first, for its job is done first."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._free: deque[tuple[int, Job | None]] = deque((slot, None) for slot in range(num_slots))
        self.peak = 0
        """The most slots that were in use at a time."""

    @property
    def num_free(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many slots somebody has."""
        return self.num_slots - len(self._free)

    def take(self) -> tuple[int, Job | None]:
        """A free slot, and the job to wait for before it is written to."""
        found = self._free.popleft()
        self.peak = max(self.peak, self.num_held)
        return found

    def give(self, slot: int, after: Job | None) -> None:
        """A slot is free after a job."""
        self._free.append((slot, after))

    def grow(self, num_slots: int) -> None:
        """There are so many slots more."""
        self._free.extend((slot, None) for slot in range(self.num_slots, self.num_slots + num_slots))
        self.num_slots += num_slots
