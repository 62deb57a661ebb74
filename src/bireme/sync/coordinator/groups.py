"""`groups`: which replicas average their weights, stage by stage, as they come (SDPipe).

A pure state machine: `groups_step(state, event, now_s)` gives the next state and the groups that formed or
settled. Each stage has a former of its own, and groups of different stages need not be equal. The rules that
tie stages together:

* Only one stage forces a group at a time, the *owner*. Two stages could wait for each other's replicas.
* A replica waits at its last stage with a batch before it waits with it at any other. Otherwise one stage
  could average its batch with a later one of another replica, and another stage the other way around, and the
  two wait for each other where a send holds its rank up until it is received.
* No group is forced while a replica drains, and none that is forced waits for one: it has no batch left until
  the mean over all replicas, which connects it anyway. Once that mean counts, all are waited for again.

A group's mean counts once every member holds it. If a member dies before, the others make it again from the
weights that they kept. Replicas come and go: who is gone counts nowhere. The coordinator feeds this machine
with what ranks report, and the simulator with what its replicas do.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from statistics import median

from bireme.sync.coordinator.messages import GroupMember, replace
from bireme.sync.coordinator.samples import GroupSettings


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rank is ready to average its weights after a batch. As opener it waits for others for `wait_s`, or
    for `patient_s` if that is longer, if it is connected to half of the members at most, and if a group may
    be forced before it comes again: that many updates of all replicas come `until_next`.
    """

    stage: int
    replica: int
    batch: int
    wait_s: float
    patient_s: float = 0.0
    until_next: float = inf


@dataclass(frozen=True, slots=True)
class GroupSummed:
    """A rank holds the mean of an attempt of its group, or could not reach another rank in that attempt."""

    stage: int
    replica: int
    number: int
    attempt: int
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """A rank has no batch left before the next mean over all replicas, so no group waits for it; or it had
    none, and comes with batches again.
    """

    stage: int
    replica: int
    is_drained: bool = True


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """These replicas are the members from now on."""

    replicas: frozenset[int]


GroupEvent = Arrived | GroupSummed | Drained | GroupMembers | None
"""None: time has passed."""


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """Replicas that average the weights of a stage, from those that they kept; `summed` hold the mean of this
    attempt. Once all do the mean counts: the group `is_settled`.
    """

    stage: int
    number: int
    members: tuple[GroupMember, ...]
    attempt: int = 0
    is_forced: bool = False
    summed: frozenset[int] = frozenset()
    is_settled: bool = False

    @property
    def replicas(self) -> tuple[int, ...]:
        """Its members' numbers, rising."""
        return tuple(one.replica for one in self.members)


# How long replicas take from one batch to the next, as the coordinator sees them come, stage by stage.
#
# What an opener of a group waits for follows from it: a replica that is connected to few waits for about as
# long as the others take for a batch, and one that is connected to most not much of that.

_MEMORY = 0.8
"""How much of the known seconds of a batch stays when another one was timed."""
_MOST_WAIT = 0.1
"""Of a batch of the others, for a replica that is connected to most of them."""
_LEAST_S = 1e-6
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
            known = known | {key: _MEMORY * known.get(key, took_s) + (1 - _MEMORY) * took_s}
        return Paces(self.last_s | {key: now_s}, known)

    def begun(self, replica: int, now_s: float) -> "Paces":
        """After a replica was assigned a batch: if it was idle, the batch takes from now on. Its very first
        one may take longer than any other, and is not timed.
        """
        idle = {key: now_s for key in self.batch_s if key[1] == replica and key not in self.last_s}
        return Paces(self.last_s | idle, self.batch_s) if idle else self

    def idle(self, stage: int, replica: int) -> "Paces":
        """After a replica has come to a stage with the last batch that it has: until it is assigned another
        one, no time is that of a batch.
        """
        key = stage, replica
        return Paces({one: at_s for one, at_s in self.last_s.items() if one != key}, self.batch_s)

    def without(self, replicas: Collection[int]) -> "Paces":
        """After replicas have died."""
        return Paces(
            {key: at_s for key, at_s in self.last_s.items() if key[1] not in replicas},
            {key: own_s for key, own_s in self.batch_s.items() if key[1] not in replicas},
        )

    def arrived(self, stage: int, replica: int, batch: int, wait_s: float) -> Arrived:
        """What has happened where a replica comes to a stage that would wait for `wait_s` as opener."""
        known = {key[1]: own_s for key, own_s in self.batch_s.items() if key[0] == stage}
        own_s, others_s = known.get(replica), [own_s for one, own_s in known.items() if one != replica]
        if not others_s:
            return Arrived(stage, replica, batch, wait_s)
        patient_s = median(others_s)
        until_next = inf if own_s is None else sum(own_s / max(one, _LEAST_S) for one in known.values())
        return Arrived(stage, replica, batch, min(wait_s, _MOST_WAIT * patient_s), patient_s, until_next)


# Whether groups have joined all replicas: which can be reached from which over the pairs in one group.


def is_connected(replicas: Collection[int], pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether each replica can be reached from each other one over the pairs; those of others count not."""
    first = next(iter(replicas), None)
    return first is None or len(_connected_to(first, replicas, pairs)) == len(set(replicas))


def _connected_to(one: int, replicas: Collection[int], pairs: Iterable[tuple[int, int]]) -> set[int]:
    """The replicas that can be reached from one over the pairs, itself among them."""
    beside: dict[int, list[int]] = {replica: [] for replica in replicas}
    for left, right in pairs:
        if left in beside and right in beside:
            beside[left].append(right)
            beside[right].append(left)
    found, todo = {one}, [one]
    while todo:
        new = [other for other in beside.get(todo.pop(), ()) if other not in found]
        found.update(new)
        todo += new
    return found


# The groups of one stage: who waits, until when, and what has been connected since the last forced group.
#
# A group that is not forced closes when all are there or when the wait of its opener is over. A forced one
# closes when the groups since the last forced one, and itself, connect all replicas: it has no time limit.

_LEAST_WAIT_S, _MOST_WAIT_S = 1e-5, 1e-2
FIRST_WAIT_S = 1e-3
"""How long a replica waits for others in its first group."""
_LATECOMERS = 0.1
"""Of its patience, what an opener waits on for latecomers when it has met most of the others."""


def next_wait_s(wait_s: float, size: int) -> float:
    """How long a replica waits next, after a group of that size: longer if it was alone in it."""
    return min(2 * wait_s, _MOST_WAIT_S) if size < 2 else max(0.9 * wait_s, _LEAST_WAIT_S)


@dataclass(frozen=True, slots=True)
class _Former:
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
    ) -> "_Former":
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
            met = _connected_to(ready[0].replica, members, (*self.pairs, *_pairs(ready)))
            if 2 * len(met) > len(members):
                deadline_s = min(deadline_s, now_s + max(wait_s, _LATECOMERS * patient_s))
            return replace(self, ready=ready, present=present, deadline_s=deadline_s)
        former = self
        is_with_most = 2 * len(_connected_to(one.replica, members, self.pairs)) > len(members)
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
        """Whether a group may be wanted that is forced before that many more updates of all replicas."""
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
    ) -> "_Former":
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

    def without(self, replica: int) -> "_Former":
        """After a replica has died: what went through it connects no replicas any more."""
        ready = tuple(one for one in self.ready if one.replica != replica)
        return replace(
            self,
            ready=ready,
            is_forced=self.is_forced and bool(ready),
            present=self.present - {replica},
            pairs=frozenset(pair for pair in self.pairs if replica not in pair),
            latest={one: batch for one, batch in self.latest.items() if one != replica},
        )

    def drained(self, replica: int, members: Collection[int]) -> "_Former":
        """After a replica has come to the end of its batches. Where all of the members have, the mean over
        all comes next: everyone is connected, as by a forced group.
        """
        present = self.present - {replica}
        if not self.present.isdisjoint(members) and present.isdisjoint(members):
            return replace(self, present=present, pairs=frozenset(), wants_forced=False, updates=0)
        return replace(self, present=present)


def _pairs(members: Sequence[GroupMember]) -> list[tuple[int, int]]:
    return list(combinations(sorted(one.replica for one in members), 2))


@dataclass(frozen=True, slots=True)
class GroupState:
    """All stages. `owner` is the stage that forces a group, `early` are those who came to a stage before
    their replica came to its last one.
    """

    settings: GroupSettings
    members: frozenset[int]
    formers: tuple[_Former, ...]
    open: dict[tuple[int, int], AveragingGroup] = field(default_factory=dict)
    """Groups whose mean does not count yet, by stage and number."""
    num_groups: int = 0
    owner: int | None = None
    early: tuple[Arrived, ...] = ()

    def has_come(self, stage: int, replica: int, batch: int) -> bool:
        """Whether a replica has come to a stage with that batch, or a later one."""
        latest = [one.batch for one in self.early if (one.stage, one.replica) == (stage, replica)]
        return batch <= max([self.formers[stage].latest.get(replica, -1), *latest])

    def with_former(self, stage: int, former: _Former) -> "GroupState":
        """With another former of a stage."""
        return replace(self, formers=(*self.formers[:stage], former, *self.formers[stage + 1 :]))


def groups_begun(settings: GroupSettings, num_stages: int, members: Iterable[int]) -> GroupState:
    """No replica waits."""
    present = frozenset(members)
    return GroupState(settings, present, tuple(_Former(present=present) for _ in range(num_stages)))


def next_deadline_s(state: GroupState) -> float | None:
    """When time alone could change something, if nothing else happens before."""
    return min((one.deadline_s for one in state.formers if one.ready and not one.is_forced), default=None)


def groups_step(
    state: GroupState, event: GroupEvent, now_s: float
) -> tuple[GroupState, list[AveragingGroup]]:
    """What follows from an event: the state, and each new attempt of a group and each that settled, in order.
    An event that says nothing new changes nothing.
    """
    groups: list[AveragingGroup] = []
    match event:
        case Arrived():
            state = _arrived(state, event, now_s)
        case GroupSummed():
            state = _summed(state, event, groups)
        case GroupMembers():
            for replica in sorted(state.members - event.replicas):
                state = _gone(state, replica, groups)
            new = event.replicas - state.members
            if new:
                formers = tuple(replace(one, present=one.present | new) for one in state.formers)
                state = replace(state, members=event.replicas, formers=formers)
        case Drained():
            former = state.formers[event.stage]
            if event.is_drained:
                former = former.drained(event.replica, state.members)
            else:
                former = replace(former, present=former.present | ({event.replica} & state.members))
            state = state.with_former(event.stage, former)
    for stage in range(len(state.formers)):
        state = _closed_if_due(state, stage, now_s, groups)
    return state, groups


def _arrived(state: GroupState, event: Arrived, now_s: float) -> GroupState:
    """With a rank that has come, and with those of its replica who came before its last stage did."""
    last = len(state.formers) - 1
    if event.replica not in state.members or state.has_come(event.stage, event.replica, event.batch):
        return state
    if event.stage != last and not state.has_come(last, event.replica, event.batch):
        return replace(state, early=(*state.early, event))
    followers = [one for one in state.early if one.replica == event.replica and one.batch <= event.batch]
    state = replace(state, early=tuple(one for one in state.early if one not in followers))
    for one in (event, *followers):
        state = _waiting(state, one, now_s)
    return state


def _waiting(state: GroupState, event: Arrived, now_s: float) -> GroupState:
    """With a rank that waits at its stage."""
    former = state.formers[event.stage]
    former = replace(former, latest=former.latest | {event.replica: event.batch})
    # The one that arrives does not drain any more.
    is_whole = state.members <= former.present | {event.replica}
    may_be_last = former.may_be_last(event.until_next, len(state.members), state.settings)
    former = former.with_arrival(
        GroupMember(event.replica, event.batch),
        event.wait_s,
        now_s,
        patient_s=event.patient_s if may_be_last else 0.0,
        members=state.members,
        may_force=state.owner is None and is_whole,
    )
    state = state.with_former(event.stage, former)
    return replace(state, owner=event.stage) if former.is_forced else state


def _closed_if_due(state: GroupState, stage: int, now_s: float, groups: list[AveragingGroup]) -> GroupState:
    former = state.formers[stage]
    if not former.is_due(state.members & former.present, now_s):
        return state
    cut = former.cut(len(state.members), state.settings)
    state = state.with_former(stage, former.closed(cut, len(state.members), state.settings))
    if former.is_forced:
        state = replace(state, owner=None)
    for members in cut:
        group = AveragingGroup(stage, state.num_groups, members, is_forced=former.is_forced)
        groups.append(group)
        state = _settled_or_open(replace(state, num_groups=state.num_groups + 1), group, groups)
    return state


def _settled_or_open(state: GroupState, group: AveragingGroup, groups: list[AveragingGroup]) -> GroupState:
    """A group counts once all of it hold the mean; one alone has nothing to average."""
    key = (group.stage, group.number)
    if len(group.members) > 1 and group.summed < frozenset(group.replicas):
        return replace(state, open=state.open | {key: group})
    if group.members:
        groups.append(replace(group, is_settled=True))
    return replace(state, open={one: each for one, each in state.open.items() if one != key})


def _summed(state: GroupState, event: GroupSummed, groups: list[AveragingGroup]) -> GroupState:
    group = state.open.get((event.stage, event.number))
    if group is None or group.attempt != event.attempt or event.replica not in group.replicas:
        return state
    if event.is_broken:
        return _again(state, group, group.members, groups)
    return _settled_or_open(state, replace(group, summed=group.summed | {event.replica}), groups)


def _again(
    state: GroupState,
    group: AveragingGroup,
    members: tuple[GroupMember, ...],
    groups: list[AveragingGroup],
) -> GroupState:
    """The next attempt of a group."""
    group = replace(group, members=members, attempt=group.attempt + 1, summed=frozenset())
    if members:
        groups.append(group)
    return _settled_or_open(state, group, groups)


def _gone(state: GroupState, replica: int, groups: list[AveragingGroup]) -> GroupState:
    forced = [stage for stage, one in enumerate(state.formers) if one.is_forced]
    state = replace(
        state,
        members=state.members - {replica},
        formers=tuple(one.without(replica) for one in state.formers),
        early=tuple(one for one in state.early if one.replica != replica),
    )
    if any(not state.formers[stage].is_forced for stage in forced):
        state = replace(state, owner=None)  # nobody is left of its group
    for group in list(state.open.values()):
        if replica in group.replicas:
            members = tuple(one for one in group.members if one.replica != replica)
            state = _again(state, group, members, groups)
    return state
