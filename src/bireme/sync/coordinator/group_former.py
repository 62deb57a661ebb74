"""The groups of one stage: who waits, until when, and what has been connected since the last forced group.

A group that is not forced closes when all are there or when the wait of its opener is over. A forced one
closes when the groups since the last forced one, and itself, connect all replicas: it has no time limit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from bireme.sync.coordinator.connected import connected_to, is_connected
from bireme.sync.coordinator.messages import GroupMember
from bireme.sync.coordinator.settings import GroupSettings

__all__ = ["Former", "first_wait_s", "next_wait_s"]

LEAST_WAIT_S, FIRST_WAIT_S, MOST_WAIT_S = 1e-5, 1e-3, 1e-2
LATECOMERS = 0.1
"""Of its patience, what an opener waits on for latecomers when it has met most of the others."""


def first_wait_s() -> float:
    """How long a replica waits for others in its first group."""
    return FIRST_WAIT_S


def next_wait_s(wait_s: float, size: int) -> float:
    """How long a replica waits next, after a group of that size: longer if it was alone in it."""
    return min(2 * wait_s, MOST_WAIT_S) if size < 2 else max(0.9 * wait_s, LEAST_WAIT_S)


@dataclass(frozen=True, slots=True)
class Former:
    """One stage. `ready` wait in the order in which they came; the first is the opener, whose wait is over
    at `deadline_s`.

    `present` are the replicas that do not drain, `pairs` those that were in one group since the last forced
    one, `updates` what was done since one was last wanted.
    """

    ready: tuple[GroupMember, ...] = ()
    deadline_s: float = 0.0
    is_forced: bool = False
    present: frozenset[int] = frozenset()
    pairs: frozenset[tuple[int, int]] = frozenset()
    updates: int = 0
    wants_forced: bool = False
    latest: dict[int, int] = field(default_factory=dict)
    """The batch after which each replica was last here."""

    def with_arrival(
        self,
        one: GroupMember,
        wait_s: float,
        now_s: float,
        *,
        patient_s: float,
        members: Collection[int],
        may_force: bool,
    ) -> "Former":
        """With one more that waits. An opener forces a group if one is wanted, and it `may_force` it.

        An opener that is not yet connected to more than half of the members waits for `patient_s`, if that is
        longer: a slow replica meets others while they come by, and a forced group need not wait for it. One
        that comes again before has time, and is given none (see `may_be_last`). Once
        those who have come connect it to more than half, it waits for latecomers only.

        If the groups have connected all members by themselves there is nothing to force. A forced group would
        close with its opener alone; so the next period begins, and the group is one like any other.
        """
        present = self.present | {one.replica}
        if self.ready:
            ready, deadline_s = (*self.ready, one), self.deadline_s
            met = connected_to(ready[0].replica, members, (*self.pairs, *_pairs(ready)))
            if 2 * len(met) > len(members):
                deadline_s = min(deadline_s, now_s + max(wait_s, LATECOMERS * patient_s))
            return replace(self, ready=ready, present=present, deadline_s=deadline_s)
        former = self
        is_with_most = 2 * len(connected_to(one.replica, members, self.pairs)) > len(members)
        if may_force and self.wants_forced and is_connected(members, self.pairs):
            former = replace(self, pairs=frozenset(), wants_forced=False)
        return replace(
            former,
            ready=(one,),
            present=present,
            deadline_s=now_s + (wait_s if is_with_most else max(wait_s, patient_s)),
            is_forced=may_force and former.wants_forced,
        )

    def may_be_last(self, until_next: float, num_members: int, settings: GroupSettings) -> bool:
        """Whether a group may be wanted that is forced before so many more updates of all replicas."""
        return self.wants_forced or self.updates + until_next >= settings.connect_every * num_members

    def is_due(self, members: Collection[int], now_s: float) -> bool:
        """Whether the group closes now, of members that do not drain."""
        if not self.ready:
            return False
        if self.is_forced:
            here = _pairs(self.ready)
            return is_connected(members, (*self.pairs, *here))
        return len(self.ready) >= len(members) or now_s >= self.deadline_s

    def cut(self, num_members: int, settings: GroupSettings) -> list[tuple[GroupMember, ...]]:
        """The groups that those who wait form: one, or pairs where there are many replicas."""
        ready = tuple(sorted(self.ready, key=lambda one: one.replica))
        if self.is_forced or num_members <= settings.pairs_above:
            return [ready]
        return [ready[place : place + 2] for place in range(0, len(ready), 2)]

    def closed(
        self,
        groups: Sequence[Sequence[GroupMember]],
        num_members: int,
        settings: GroupSettings,
    ) -> "Former":
        """After those who waited have formed these groups."""
        pairs = frozenset() if self.is_forced else self.pairs | {p for one in groups for p in _pairs(one)}
        updates = self.updates + len(self.ready)
        period = settings.connect_every * num_members
        return replace(
            self,
            ready=(),
            is_forced=False,
            pairs=pairs,
            updates=updates % period,
            wants_forced=(self.wants_forced and not self.is_forced) or updates >= period,
        )

    def without(self, replica: int) -> "Former":
        """After a replica has died: what went through it connects nobody any more."""
        ready = tuple(one for one in self.ready if one.replica != replica)
        return replace(
            self,
            ready=ready,
            is_forced=self.is_forced and bool(ready),
            present=self.present - {replica},
            pairs=frozenset(pair for pair in self.pairs if replica not in pair),
            latest={one: batch for one, batch in self.latest.items() if one != replica},
        )

    def drained(self, replica: int, members: Collection[int]) -> "Former":
        """After a replica has come to the end of its batches. Where all of the members have, the mean over
        all comes next: everyone is connected, as by a forced group.
        """
        present = self.present - {replica}
        if not self.present.isdisjoint(members) and present.isdisjoint(members):
            return replace(self, present=present, pairs=frozenset(), wants_forced=False, updates=0)
        return replace(self, present=present)


def _pairs(members: Sequence[GroupMember]) -> list[tuple[int, int]]:
    return list(combinations(sorted(one.replica for one in members), 2))
