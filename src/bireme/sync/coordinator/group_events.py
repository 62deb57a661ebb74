"""What happens to groups, and what becomes of it: the events and replies of `groups.py`."""

from dataclasses import dataclass
from math import inf

from bireme.sync.coordinator.messages import GroupMember

__all__ = [
    "Arrived",
    "AveragingGroup",
    "Back",
    "Came",
    "Drained",
    "Formed",
    "GroupEvent",
    "GroupGone",
    "GroupSummed",
    "GroupTick",
    "SettledGroup",
    "Unreached",
]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rank is ready to average its weights after a batch. As opener it waits for others for `wait_s`, or
    for `patient_s` if that is longer, if it is connected to half of the members at most, and if a group may
    be forced before it comes again: so many updates of all replicas come `until_next`.
    """

    stage: int
    replica: int
    batch: int
    wait_s: float
    patient_s: float = 0.0
    until_next: float = inf


@dataclass(frozen=True, slots=True)
class GroupSummed:
    """A rank holds the mean of an attempt of its group."""

    stage: int
    replica: int
    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """An attempt of a group failed on a rank: it could not reach another one."""

    stage: int
    replica: int
    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Came:
    """A replica is a member from now on."""

    replica: int


@dataclass(frozen=True, slots=True)
class Drained:
    """A rank has no batch left before the next mean over all replicas: no group waits for it."""

    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class Back:
    """A rank that had drained will come with batches again."""

    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class GroupGone:
    """A replica is dead, or has left."""

    replica: int


@dataclass(frozen=True, slots=True)
class GroupTick:
    """Time has passed."""


GroupEvent = Arrived | GroupSummed | Unreached | Came | Drained | Back | GroupGone | GroupTick


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """Replicas that average the weights of a stage; `summed` hold the mean of this attempt."""

    stage: int
    number: int
    members: tuple[GroupMember, ...]
    attempt: int = 0
    is_forced: bool = False
    summed: frozenset[int] = frozenset()

    @property
    def replicas(self) -> tuple[int, ...]:
        """Its members' numbers, rising."""
        return tuple(one.replica for one in self.members)


@dataclass(frozen=True, slots=True)
class Formed:
    """All members of a group make its mean, from the weights that they kept."""

    group: AveragingGroup


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """All members hold the mean of their group: it counts, and they use it."""

    group: AveragingGroup
