"""`groups`: which replicas average their weights, stage by stage, as they come (SDPipe).

A pure state machine: `groups_step(state, event, now_s)` gives the next state and what became of it. Each
stage has a former of its own, and groups of different stages need not be equal. The rules that tie stages
together:

* Only one stage forces a group at a time, the *owner*. Two stages could wait for each other's replicas.
* A replica waits at its last stage with a batch before it waits with it at any other. Otherwise one stage
  could average its batch with a later one of another replica, and another stage the other way around, and the
  two wait for each other where a send holds its rank up until it is received.
* No group is forced while a replica drains, and none that is forced waits for one: it has no batch left until
  the mean over all replicas, which connects it anyway. Once that mean counts, all are waited for again.

A group's mean counts once every member holds it. If a member dies before, the others make it again from the
weights that they kept. Replicas come and go: who is gone counts nowhere.

The coordinator feeds it with what ranks report, and the simulator with what its replicas do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bireme.sync.coordinator.group_events import (
    Arrived,
    AveragingGroup,
    Back,
    Came,
    Drained,
    Formed,
    GroupEvent,
    GroupGone,
    GroupSummed,
    GroupTick,
    SettledGroup,
    Unreached,
)
from bireme.sync.coordinator.group_former import Former
from bireme.sync.coordinator.messages import GroupMember
from bireme.sync.coordinator.settings import GroupSettings

__all__ = [
    "GroupState",
    "GroupStep",
    "groups_begun",
    "groups_step",
    "next_deadline_s",
]


@dataclass(frozen=True, slots=True)
class GroupState:
    """All stages. `owner` is the stage that forces a group, `early` are those who came to a stage before
    their replica came to its last one.
    """

    settings: GroupSettings
    members: frozenset[int]
    formers: tuple[Former, ...]
    open: dict[tuple[int, int], AveragingGroup] = field(default_factory=dict)
    """Groups whose mean does not count yet, by stage and number."""
    num_groups: int = 0
    owner: int | None = None
    early: tuple[Arrived, ...] = ()

    def has_come(self, stage: int, replica: int, batch: int) -> bool:
        """Whether a replica has come to a stage with that batch, or a later one."""
        latest = [one.batch for one in self.early if (one.stage, one.replica) == (stage, replica)]
        return batch <= max([self.formers[stage].latest.get(replica, -1), *latest])


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What an event leads to."""

    state: GroupState
    replies: tuple[Formed | SettledGroup, ...] = ()


def groups_begun(settings: GroupSettings, num_stages: int, members: Iterable[int]) -> GroupState:
    """Nobody waits."""
    present = frozenset(members)
    return GroupState(settings, present, tuple(Former(present=present) for _ in range(num_stages)))


def next_deadline_s(state: GroupState) -> float | None:
    """When a `GroupTick` could change something, if nothing else happens before."""
    return min((one.deadline_s for one in state.formers if one.ready and not one.is_forced), default=None)


def groups_step(state: GroupState, event: GroupEvent, now_s: float) -> GroupStep:
    """What follows from an event. One that says nothing new changes nothing."""
    replies: list[Formed | SettledGroup] = []
    match event:
        case Arrived():
            state = _arrived(state, event, now_s)
        case GroupSummed():
            state = _summed(state, event, replies)
        case Unreached():
            state = _unreached(state, event, replies)
        case Came():
            formers = tuple(replace(one, present=one.present | {event.replica}) for one in state.formers)
            state = replace(state, members=state.members | {event.replica}, formers=formers)
        case GroupGone():
            state = _gone(state, event.replica, replies)
        case Drained():
            former = state.formers[event.stage].drained(event.replica, state.members)
            state = _with_former(state, event.stage, former)
        case Back():
            former = state.formers[event.stage]
            former = replace(former, present=former.present | ({event.replica} & state.members))
            state = _with_former(state, event.stage, former)
        case GroupTick():
            pass
    for stage in range(len(state.formers)):
        state = _closed_if_due(state, stage, now_s, replies)
    return GroupStep(state, tuple(replies))


def _arrived(state: GroupState, event: Arrived, now_s: float) -> GroupState:
    """With a rank that has come, and with those of its replica who came before its last stage did."""
    last = len(state.formers) - 1
    if event.replica not in state.members or state.has_come(event.stage, event.replica, event.batch):
        return state
    if event.stage != last and not state.has_come(last, event.replica, event.batch):
        return replace(state, early=(*state.early, event))
    state = _waiting(state, event, now_s)
    followers = [one for one in state.early if one.replica == event.replica and one.batch <= event.batch]
    state = replace(state, early=tuple(one for one in state.early if one not in followers))
    for one in followers:
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
    state = _with_former(state, event.stage, former)
    return replace(state, owner=event.stage) if former.is_forced else state


def _closed_if_due(
    state: GroupState, stage: int, now_s: float, replies: list[Formed | SettledGroup]
) -> GroupState:
    former = state.formers[stage]
    if not former.is_due(state.members & former.present, now_s):
        return state
    groups = former.cut(len(state.members), state.settings)
    was_forced = former.is_forced
    former = former.closed(groups, len(state.members), state.settings)
    state = _with_former(state, stage, former)
    if was_forced:
        state = replace(state, owner=None)
    for members in groups:
        state = _formed(state, stage, members, replies, is_forced=was_forced)
    return state


def _formed(
    state: GroupState,
    stage: int,
    members: tuple[GroupMember, ...],
    replies: list[Formed | SettledGroup],
    *,
    is_forced: bool,
) -> GroupState:
    group = AveragingGroup(stage, state.num_groups, members, is_forced=is_forced)
    replies.append(Formed(group))
    state = replace(state, num_groups=state.num_groups + 1)
    return _settled_or_open(state, group, replies)


def _settled_or_open(
    state: GroupState, group: AveragingGroup, replies: list[Formed | SettledGroup]
) -> GroupState:
    """A group counts once all of it hold the mean; one alone has nothing to average."""
    key = (group.stage, group.number)
    if len(group.members) > 1 and group.summed < frozenset(group.replicas):
        return replace(state, open=state.open | {key: group})
    if group.members:
        replies.append(SettledGroup(group))
    return replace(state, open={one: each for one, each in state.open.items() if one != key})


def _summed(state: GroupState, event: GroupSummed, replies: list[Formed | SettledGroup]) -> GroupState:
    group = state.open.get((event.stage, event.number))
    if group is None or group.attempt != event.attempt or event.replica not in group.replicas:
        return state
    return _settled_or_open(state, replace(group, summed=group.summed | {event.replica}), replies)


def _unreached(state: GroupState, event: Unreached, replies: list[Formed | SettledGroup]) -> GroupState:
    group = state.open.get((event.stage, event.number))
    if group is None or group.attempt != event.attempt or event.replica not in group.replicas:
        return state
    return _again(state, group, group.members, replies)


def _again(
    state: GroupState,
    group: AveragingGroup,
    members: tuple[GroupMember, ...],
    replies: list[Formed | SettledGroup],
) -> GroupState:
    """The next attempt of a group."""
    group = replace(group, members=members, attempt=group.attempt + 1, summed=frozenset())
    if members:
        replies.append(Formed(group))
    return _settled_or_open(state, group, replies)


def _gone(state: GroupState, replica: int, replies: list[Formed | SettledGroup]) -> GroupState:
    if replica not in state.members:
        return state
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
            state = _again(state, group, members, replies)
    return state


def _with_former(state: GroupState, stage: int, former: Former) -> GroupState:
    formers = list(state.formers)
    formers[stage] = former
    return replace(state, formers=tuple(formers))
