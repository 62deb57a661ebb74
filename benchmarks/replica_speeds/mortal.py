"""Replicas whose speed changes, that are held up by chance, or die and return, on the simulator's clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from bireme.errors import BiremeError
from bireme.simulate.agreements import GroupsAgreement
from bireme.simulate.together import Agreement, Speed, Together
from bireme.sync.coordinator.groups import GroupEvent, GroupMembers, GroupSummed


@dataclass(frozen=True, slots=True)
class UnevenSpeed(Speed):
    """How slow a replica is: each pair of `slowness` says from when on it takes how many times as long.

    `held_s` is for how long a forward or backward is held up, with the probability `held_chance`.
    """

    slowness: tuple[tuple[float, float], ...] = ()
    held_s: float = 0.0
    held_chance: float = 0.0

    def __post_init__(self) -> None:
        for _, times in self.slowness:
            if times <= 0:
                raise BiremeError(f"slowness has the value {times}; it must be greater than 0.")
        if self.held_s < 0 or not 0 <= self.held_chance <= 1:
            raise BiremeError(
                f"held_s is {self.held_s} and held_chance {self.held_chance}; seconds must be 0 or more, and "
                "a chance between 0 and 1."
            )

    def slowness_at(self, now_s: float) -> float:
        found = 1.0
        for begin_s, times in self.slowness:
            if now_s >= begin_s:
                found = times
        return found

    def seconds(self, work_s: float, now_s: float, random: Random) -> float:
        own_s = Speed.seconds(self, work_s, now_s, random)
        return own_s + (self.held_s if self.held_chance and random.random() < self.held_chance else 0.0)


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies at a moment. Its launcher has it running again `back_s` later, without any weights."""

    replica: int
    at_s: float
    back_s: float


class SurvivingAgreement(Agreement):
    """An agreement that is told of deaths."""

    def died(self, replica: int, now_s: float) -> None:
        """A replica was killed; nobody has noticed yet."""

    def returned(self, replica: int, now_s: float) -> None:
        """A replica runs again, without weights."""


@dataclass(eq=False)
class MortalReplicas(Together):
    """Replicas of which some are killed."""

    kills: Sequence[Kill] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kill in self.kills:
            assert isinstance(self.agreement, SurvivingAgreement), "the others hear of no death"
            self.at(kill.at_s, partial(self._kill, kill, self.agreement))

    def _kill(self, kill: Kill, agreement: SurvivingAgreement, now_s: float) -> None:
        if self.pipelines.pop(kill.replica, None) is not None:
            agreement.died(kill.replica, now_s)
            self.at(now_s + kill.back_s, partial(agreement.returned, kill.replica))


@dataclass(eq=False)
class SurvivingGroups(GroupsAgreement, SurvivingAgreement):
    """`groups` of replicas that may die. A dead one is dropped after `noticed_s`. One that returns takes the
    weights of the others, which takes `heal_s`, and goes on at the batch of the furthest.
    """

    noticed_s: float = field(default=10.0, kw_only=True)
    heal_s: float = field(default=0.0, kw_only=True)
    furthest: int = field(default=0, init=False)

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        self.furthest = max(self.furthest, batch)
        super().offered(replica, stage, batch, now_s)

    def died(self, replica: int, now_s: float) -> None:
        """The coordinator hears of it, or its lease ends."""
        self.paces = self.paces.without([replica])
        self.run.at(now_s + self.noticed_s, partial(self._drop, replica))

    def returned(self, replica: int, now_s: float) -> None:
        """It takes the weights of the others, and is a member from then on."""
        self._remove(replica, now_s)
        self.run.at(now_s + self.heal_s, partial(self._join, replica))

    def happened(self, event: GroupEvent, now_s: float) -> None:
        """Who has died holds no mean."""
        if not isinstance(event, GroupSummed) or self.run.is_alive(event.replica):
            super().happened(event, now_s)

    def _drop(self, replica: int, now_s: float) -> None:
        if not self.run.is_alive(replica):
            self._remove(replica, now_s)

    def _remove(self, replica: int, now_s: float) -> None:
        self.happened(GroupMembers(self.state.members - {replica}), now_s)

    def _join(self, replica: int, now_s: float) -> None:
        self.happened(GroupMembers(self.state.members | {replica}), now_s)
        self.run.start(replica, self.furthest + 1, now_s)
