"""`groups`: which replicas average their weights, stage by stage, as they come (SDPipe).

A pure state machine: `step(state, event, now_s)` gives the next state and what became of it. Each stage has a
former of its own, and groups of different stages need not be equal. The rules that tie stages together:

* Only one stage forces a group at a time, the *owner*. Two stages could wait for each other's replicas.
* No group is forced while a replica drains.
* The last stage decides after which batch a replica stops, or takes part in a mean over all. Its other stages
  follow at the same batch; where one of them is heard of first, it waits for the last stage's word.

A group's mean counts once every member holds it. If a member dies before, the others make it again from the
weights that they kept. Replicas come and go: who is gone counts nowhere.

The coordinator feeds it with what ranks report, and the simulator with what its replicas do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bireme.sync.coordinator.group_events import (
    Arrived,
    Came,
    Event,
    Formed,
    Gone,
    Group,
    MeanAsked,
    Settled,
    StopAsked,
    Summed,
    Tick,
    Unreached,
)
from bireme.sync.coordinator.group_former import Former
from bireme.sync.coordinator.messages import GroupMember
from bireme.sync.coordinator.settings import GroupSettings

__all__ = [
    "GroupState",
    "Step",
    "begun",
    "next_deadline_s",
    "step",
]


@dataclass(frozen=True, slots=True)
class GroupState:
    """All stages. `owner` is the stage that forces a group, `stops` after which batch each replica stops.

    `to_stop` are replicas whose stop is not decided, `mean_at` the batch after which each takes part in the
    mean that is being made, `early` those who came before their replica's last stage.
    """

    settings: GroupSettings
    members: frozenset[int]
    formers: tuple[Former, ...]
    open: dict[tuple[int, int], Group] = field(default_factory=dict)
    """Groups whose mean does not count yet, by stage and number."""
    num_groups: int = 0
    owner: int | None = None
    to_stop: frozenset[int] = frozenset()
    stops: dict[int, int] = field(default_factory=dict)
    updates: int = 0
    num_means: int = 0
    """Means that are wanted and not made, the one that is being made among them."""
    mean_at: dict[int, int] | None = None
    mean_of: frozenset[int] = frozenset()
    """Those who take part in it: who comes later does not."""
    early: tuple[Arrived, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What an event leads to."""

    state: GroupState
    replies: tuple[Formed | Settled, ...] = ()


def begun(settings: GroupSettings, num_stages: int, members: Iterable[int]) -> GroupState:
    """Nobody waits."""
    present = frozenset(members)
    return GroupState(settings, present, tuple(Former(present=present) for _ in range(num_stages)))


def next_deadline_s(state: GroupState) -> float | None:
    """When a `Tick` could change something, if nothing else happens before."""
    return min((one.deadline_s for one in state.formers if one.ready and not one.is_forced), default=None)


def step(state: GroupState, event: Event, now_s: float) -> Step:
    """What follows from an event. One that says nothing new changes nothing."""
    replies: list[Formed | Settled] = []
    match event:
        case Arrived():
            state = _arrived(state, event, now_s)
        case Summed():
            state = _summed(state, event, replies)
        case Unreached():
            state = _unreached(state, event, replies)
        case Came():
            formers = tuple(replace(one, present=one.present | {event.replica}) for one in state.formers)
            state = replace(state, members=state.members | {event.replica}, formers=formers)
        case Gone():
            state = _gone(state, event.replica, replies)
        case MeanAsked():
            state = replace(state, num_means=state.num_means + 1)
        case StopAsked():
            state = replace(state, to_stop=state.members)
        case Tick():
            pass
    state = _mean_begun(state)
    for stage in range(len(state.formers)):
        state = _closed_if_due(state, stage, now_s, replies)
    return Step(state, tuple(replies))


def _arrived(state: GroupState, event: Arrived, now_s: float) -> GroupState:
    last_stage = len(state.formers) - 1
    seen = state.formers[event.stage].latest.get(event.replica, -1)
    if event.replica not in state.members or event.batch <= seen or event in state.early:
        return state
    decided = state.formers[last_stage].latest.get(event.replica, -1)
    if event.stage != last_stage and event.batch > decided:
        return replace(state, early=(*state.early, event))
    state = _waiting(state, event, now_s)
    followers = [one for one in state.early if _follows(one, event)] if event.stage == last_stage else []
    state = replace(state, early=tuple(one for one in state.early if one not in followers))
    for one in followers:
        state = _waiting(state, one, now_s)
    return state


def _follows(one: Arrived, event: Arrived) -> bool:
    return one.replica == event.replica and one.batch <= event.batch


def _waiting(state: GroupState, event: Arrived, now_s: float) -> GroupState:
    """With a rank that waits at its stage, for a group or for the mean over all."""
    replica, one = event.replica, GroupMember(event.replica, event.batch)
    former = state.formers[event.stage]
    former = replace(former, latest=former.latest | {replica: event.batch})
    if event.stage == len(state.formers) - 1:
        if replica in state.to_stop:
            state = replace(
                state, to_stop=state.to_stop - {replica}, stops=state.stops | {replica: event.batch}
            )
        if state.mean_at is not None and replica in state.mean_of - state.mean_at.keys():
            state = replace(state, mean_at=state.mean_at | {replica: event.batch})
    if state.mean_at is not None and state.mean_at.get(replica) == event.batch:
        former = replace(former, for_mean=(*former.for_mean, one), present=former.present | {replica})
        return _with_former(state, event.stage, former)
    # The one that arrives does not drain any more.
    is_whole = state.members <= former.present | {replica}
    may_force = state.owner is None and state.mean_at is None and not state.num_means and is_whole
    former = former.with_arrival(
        one,
        event.wait_s,
        now_s,
        patient_s=event.patient_s,
        members=state.members,
        may_force=may_force,
    )
    state = _with_former(state, event.stage, former)
    return replace(state, owner=event.stage) if former.is_forced else state


def _mean_begun(state: GroupState) -> GroupState:
    """Begin the next mean over all replicas if one is wanted and no stage forces a group.

    Each takes part with the next batch that its last stage comes with: the other stages cannot be past that.
    """
    if not state.num_means or state.mean_at is not None or state.owner is not None:
        return state
    return replace(state, mean_at={}, mean_of=state.members)


def _closed_if_due(
    state: GroupState, stage: int, now_s: float, replies: list[Formed | Settled]
) -> GroupState:
    former = state.formers[stage]
    if former.for_mean and {one.replica for one in former.for_mean} >= state.mean_of:
        everyone = tuple(sorted(former.for_mean, key=lambda one: one.replica))
        state = _with_former(state, stage, former.mean_made(_drains(state, everyone)))
        state = _formed(state, stage, everyone, replies, is_mean=True)
        former = state.formers[stage]
        if _mean_is_made(state):
            state = replace(state, num_means=state.num_means - 1, mean_at=None)
    if not former.is_due(state.members, now_s):
        return state
    groups = former.cut(len(state.members), state.settings)
    drains = _drains(state, former.ready)
    num_updates, was_forced = len(former.ready), former.is_forced
    former = former.closed(groups, len(state.members), state.settings, drains=drains)
    state = _with_former(state, stage, former)
    if was_forced:
        state = replace(state, owner=None)
    for members in groups:
        state = _formed(state, stage, members, replies, is_forced=was_forced)
    if stage == len(state.formers) - 1 and state.settings.stop_every:
        period = state.settings.stop_every * len(state.members)
        updates = state.updates + num_updates
        to_stop = state.members if updates >= period else state.to_stop
        state = replace(state, updates=updates % period, to_stop=to_stop)
    return state


def _drains(state: GroupState, members: Iterable[GroupMember]) -> frozenset[int]:
    """Those of them that stop after the batch that they are here with."""
    return frozenset(one.replica for one in members if state.stops.get(one.replica) == one.batch)


def _mean_is_made(state: GroupState) -> bool:
    """Whether every stage has made the mean after the batches that were agreed."""
    agreed = state.mean_at
    if agreed is None or not state.mean_of <= agreed.keys():
        return False
    return all(
        not former.for_mean and all(former.latest.get(one, -1) >= agreed[one] for one in state.mean_of)
        for former in state.formers
    )


def _formed(
    state: GroupState,
    stage: int,
    members: tuple[GroupMember, ...],
    replies: list[Formed | Settled],
    *,
    is_forced: bool = False,
    is_mean: bool = False,
) -> GroupState:
    group = Group(
        stage,
        state.num_groups,
        members,
        is_forced=is_forced,
        is_mean=is_mean,
        last=_drains(state, members),
    )
    replies.append(Formed(group))
    state = replace(state, num_groups=state.num_groups + 1)
    return _settled_or_open(state, group, replies)


def _settled_or_open(state: GroupState, group: Group, replies: list[Formed | Settled]) -> GroupState:
    """A group counts once all of it hold the mean; one alone has nothing to average."""
    key = (group.stage, group.number)
    if len(group.members) > 1 and group.summed < frozenset(group.replicas):
        return replace(state, open=state.open | {key: group})
    if group.members:
        replies.append(Settled(group))
    return replace(state, open={one: each for one, each in state.open.items() if one != key})


def _summed(state: GroupState, event: Summed, replies: list[Formed | Settled]) -> GroupState:
    group = state.open.get((event.stage, event.number))
    if group is None or group.attempt != event.attempt or event.replica not in group.replicas:
        return state
    return _settled_or_open(state, replace(group, summed=group.summed | {event.replica}), replies)


def _unreached(state: GroupState, event: Unreached, replies: list[Formed | Settled]) -> GroupState:
    group = state.open.get((event.stage, event.number))
    if group is None or group.attempt != event.attempt or event.replica not in group.replicas:
        return state
    return _again(state, group, group.members, replies)


def _again(
    state: GroupState, group: Group, members: tuple[GroupMember, ...], replies: list[Formed | Settled]
) -> GroupState:
    """The next attempt of a group."""
    group = replace(group, members=members, attempt=group.attempt + 1, summed=frozenset())
    if members:
        replies.append(Formed(group))
    return _settled_or_open(state, group, replies)


def _gone(state: GroupState, replica: int, replies: list[Formed | Settled]) -> GroupState:
    if replica not in state.members:
        return state
    forced = [stage for stage, one in enumerate(state.formers) if one.is_forced]
    state = replace(
        state,
        members=state.members - {replica},
        formers=tuple(one.without(replica) for one in state.formers),
        to_stop=state.to_stop - {replica},
        stops={one: batch for one, batch in state.stops.items() if one != replica},
        early=tuple(one for one in state.early if one.replica != replica),
    )
    if state.mean_at is not None:
        mean_at = {one: batch for one, batch in state.mean_at.items() if one != replica}
        state = replace(state, mean_at=mean_at, mean_of=state.mean_of - {replica})
        if _mean_is_made(state):
            state = replace(state, mean_at=None, num_means=state.num_means - 1)
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
