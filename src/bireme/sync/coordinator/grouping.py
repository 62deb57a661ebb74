"""Groups of the coordinator: what ranks report as events of `groups.py`, and its replies as words."""

from dataclasses import replace

from bireme.sync.coordinator.committing import with_trained
from bireme.sync.coordinator.group_events import (
    Arrived,
    Came,
    Event,
    Formed,
    Gone,
    MeanAsked,
    Settled,
    Summed,
    Tick,
    Unreached,
)
from bireme.sync.coordinator.groups import begun, step
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.messages import GroupAt, GroupWord, Report
from bireme.sync.coordinator.state import State

__all__ = ["with_groups"]

Lines = list[Began | Committed]


def with_groups(state: State, now_s: float, lines: Lines) -> State:
    """With the groups that the last reports of all members lead to."""
    membership = state.membership
    if not membership.is_installed:
        return state
    if state.groups is None:
        groups = begun(state.settings.groups, state.settings.num_stages, membership.replicas)
        state = replace(state, groups=groups)
    assert state.groups is not None, "it was just made"
    there, now = state.groups.members, set(membership.replicas)
    for replica in sorted(there - now):
        state = _with_event(state, Gone(replica), now_s)
        words = {key: word for key, word in state.group_words.items() if key[1] != replica}
        state = replace(state, group_words=words)
    for replica in sorted(now - there):
        state = _with_event(state, Came(replica), now_s)
    for _, heard in sorted(membership.heard.items()):
        report = heard.report
        if report.epoch == membership.epoch and report.rank.replica in now and report.group is not None:
            for event in _events(state, report, report.group):
                state = _with_event(state, event, now_s)
    wanted = max((one.report.means for one in membership.heard.values()), default=0)
    while state.means < wanted:
        state = _with_event(replace(state, means=state.means + 1), MeanAsked(), now_s)
    state = _with_event(state, Tick(), now_s)
    return with_trained(state, state.settings.num_stages, lines)


def _events(state: State, report: Report, at: GroupAt) -> list[Event]:
    stage, replica = report.rank.stage, report.rank.replica
    found: list[Event] = []
    if at.arrived is not None:
        found.append(Arrived(stage, replica, at.arrived, at.wait_s, at.patient_s))
    word = state.group_words.get((stage, replica))
    if at.summed is not None:
        found.append(Summed(stage, replica, at.summed, at.attempt))
    elif at.is_broken and word is not None:
        found.append(Unreached(stage, replica, word.number, at.attempt))
    return found


def _with_event(state: State, event: Event, now_s: float) -> State:
    assert state.groups is not None, "with_groups makes it"
    done = step(state.groups, event, now_s)
    words, trained = dict(state.group_words), dict(state.trained)
    for reply in done.replies:
        group = reply.group
        for one in group.members:
            words[group.stage, one.replica] = GroupWord(
                group.number,
                group.attempt,
                group.members,
                is_settled=isinstance(reply, Settled),
                is_mean=group.is_mean,
                is_last=one.replica in group.last,
            )
            # What a replica did alone goes with it if it dies.
            is_shared = len(group.members) > 1 or len(done.state.members) == 1
            if isinstance(reply, Settled) and is_shared:
                trained[one.replica, group.stage] = one.batch + 1
    if not any(isinstance(one, Formed | Settled) for one in done.replies):
        return replace(state, groups=done.state)
    return replace(state, groups=done.state, group_words=words, trained=trained)
