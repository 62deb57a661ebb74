"""How long replicas take from one batch to the next, as the coordinator sees them come, stage by stage.

What an opener of a group waits for follows from it: a replica that is connected to few waits for about as
long as the others take for a batch, and one that is connected to most not much of that.
"""

from dataclasses import dataclass, field
from math import inf
from statistics import median

from bireme.sync.coordinator.group_events import Arrived

__all__ = ["Paces"]

MEMORY = 0.8
"""How much of the known seconds of a batch stays when another one was timed."""
MOST_WAIT = 0.1
"""Of a batch of the others, for a replica that is connected to most of them."""
LEAST_S = 1e-6
"""Of a batch."""


@dataclass(frozen=True, slots=True)
class Paces:
    """By stage and replica when it was last there, and its seconds from one batch to the next."""

    last_s: dict[tuple[int, int], float] = field(default_factory=dict)
    batch_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def with_arrival(self, stage: int, replica: int, now_s: float) -> "Paces":
        """After a replica has come to a stage with its next batch."""
        key, known = (stage, replica), self.batch_s
        if key in self.last_s:
            took_s = now_s - self.last_s[key]
            known = known | {key: MEMORY * known.get(key, took_s) + (1 - MEMORY) * took_s}
        return Paces(self.last_s | {key: now_s}, known)

    def begun(self, replica: int, now_s: float) -> "Paces":
        """After a replica was dealt a batch: if it was idle, the batch takes from now on. Its very first one
        may take longer than any other, and is not timed.
        """
        idle = {key: now_s for key in self.batch_s if key[1] == replica and key not in self.last_s}
        return Paces(self.last_s | idle, self.batch_s) if idle else self

    def idle(self, stage: int, replica: int) -> "Paces":
        """After a replica has come to a stage with the last batch that it has: until it is dealt another one,
        no time is that of a batch.
        """
        key = stage, replica
        return Paces({one: at_s for one, at_s in self.last_s.items() if one != key}, self.batch_s)

    def without(self, replica: int) -> "Paces":
        """After a replica has died."""
        return Paces(
            {key: at_s for key, at_s in self.last_s.items() if key[1] != replica},
            {key: own_s for key, own_s in self.batch_s.items() if key[1] != replica},
        )

    def arrived(self, stage: int, replica: int, batch: int, wait_s: float) -> Arrived:
        """What has happened where a replica comes to a stage that would wait for `wait_s` as opener."""
        known = {key[1]: own_s for key, own_s in self.batch_s.items() if key[0] == stage}
        own_s, others_s = known.get(replica), [own_s for one, own_s in known.items() if one != replica]
        if not others_s:
            return Arrived(stage, replica, batch, wait_s)
        patient_s = median(others_s)
        until_next = inf if own_s is None else sum(own_s / max(one, LEAST_S) for one in known.values())
        return Arrived(stage, replica, batch, min(wait_s, MOST_WAIT * patient_s), patient_s, until_next)
