"""The free slots of a tier, each with the job after which it may be written to."""

from collections import deque

from bireme.runtime.paging.mover import CopyJob

__all__ = ["SlotPool"]


class SlotPool:
    """Slots 0, 1, 2, … of a tier. One that may be written to at once is taken before all others, and of those
    that may not what was given back first.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._free: deque[tuple[int, CopyJob | None]] = deque((slot, None) for slot in range(num_slots))
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

    def take(self) -> tuple[int, CopyJob | None]:
        """A free slot, and the job to wait for before it is written to."""
        ready = (place for place, (_, job) in enumerate(self._free) if job is None or job.is_done.is_set())
        place = next(ready, 0)
        found = self._free[place]
        del self._free[place]
        self.peak = max(self.peak, self.num_held)
        return found

    def give(self, slot: int, after: CopyJob | None) -> None:
        """A slot is free after a job."""
        self._free.append((slot, after))

    def grow(self, num_slots: int) -> None:
        """There are so many slots more."""
        self._free.extend((slot, None) for slot in range(self.num_slots, self.num_slots + num_slots))
        self.num_slots += num_slots
