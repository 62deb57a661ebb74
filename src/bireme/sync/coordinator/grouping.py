"""Groups of the coordinator: what ranks report as events of `groups.py`, and its replies as words."""

from dataclasses import replace

from bireme.sync.coordinator.group_events import (
    Back,
    Came,
    Drained,
    GroupEvent,
    GroupGone,
    GroupSummed,
    GroupTick,
    SettledGroup,
    Unreached,
)
from bireme.sync.coordinator.groups import groups_begun, groups_step
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.messages import GroupReply, Report
from bireme.sync.coordinator.state import CoordinatorState
from bireme.sync.coordinator.windows import with_trained

__all__ = ["with_group_of", "with_groups"]

Lines = list[Began | Committed]


def with_groups(state: CoordinatorState, now_s: float, lines: Lines) -> CoordinatorState:
    """With the groups that the last reports of all members lead to."""
    membership = state.membership
    if not membership.is_installed:
        return state
    if state.groups is None:
        groups = groups_begun(state.settings.groups, state.settings.num_stages, membership.replicas)
        state = replace(state, groups=groups)
    assert state.groups is not None, "it was just made"
    there, now = state.groups.members, set(membership.replicas)
    for replica in sorted(there - now):
        state = _with_event(state, GroupGone(replica), now_s)
        words = {key: word for key, word in state.group_words.items() if key[1] != replica}
        state = replace(state, group_words=words, paces=state.paces.without(replica))
    for replica in sorted(now - there):
        state = _with_event(state, Came(replica), now_s)
    for _, heard in sorted(membership.heard.items()):
        state = _with_report(state, heard.report, now_s)
    state = _with_event(state, GroupTick(), now_s)
    return with_trained(state, state.settings.num_stages, lines)


def with_group_of(state: CoordinatorState, report: Report, now_s: float, lines: Lines) -> CoordinatorState:
    """With the groups that the report of a rank leads to, where nothing else is left that would lead to any,
    and no wait is over.
    """
    if state.groups is None:
        return with_groups(state, now_s, lines)
    state = _with_report(state, report, now_s)
    return with_trained(state, state.settings.num_stages, lines)


def _with_report(state: CoordinatorState, report: Report, now_s: float) -> CoordinatorState:
    stage, replica, at = report.rank.stage, report.rank.replica, report.group
    if at is None or report.epoch != state.membership.epoch or replica not in state.membership.replicas:
        return state
    if at.arrived is not None and _is_new(state, stage, replica, at.arrived):
        state = replace(state, paces=state.paces.with_arrival(stage, replica, now_s))
        arrived = state.paces.arrived(stage, replica, at.arrived, at.wait_s)
        state = _with_event(state, arrived, now_s)
    word = state.group_words.get((stage, replica))
    assert state.groups is not None, "with_groups makes it"
    is_present = replica in state.groups.formers[stage].present
    if (stage, at.summed) in state.groups.open:
        assert at.summed is not None, "groups have numbers"
        state = _with_event(state, GroupSummed(stage, replica, at.summed, at.attempt), now_s)
    elif at.summed is None and at.is_broken and word is not None:
        state = _with_event(state, Unreached(stage, replica, word.number, at.attempt), now_s)
    has_drained = at.is_drained and _is_of_window(state, report)
    if has_drained and is_present:
        state = replace(state, paces=state.paces.idle(stage, replica))
        state = _with_event(state, Drained(stage, replica), now_s)
    elif not (has_drained or is_present):
        state = _with_event(state, Back(stage, replica), now_s)
    return state


def _is_of_window(state: CoordinatorState, report: Report) -> bool:
    """Whether a rank says what it says of the present window, after the last mean over all replicas."""
    return report.window is None or report.window.number >= state.lines[-1].committed


def _is_new(state: CoordinatorState, stage: int, replica: int, batch: int) -> bool:
    """Whether a replica was not at a stage with that batch before."""
    assert state.groups is not None, "with_groups makes it"
    return not state.groups.has_come(stage, replica, batch)


def _with_event(state: CoordinatorState, event: GroupEvent, now_s: float) -> CoordinatorState:
    assert state.groups is not None, "with_groups makes it"
    done = groups_step(state.groups, event, now_s)
    if not done.replies:
        return state if done.state is state.groups else replace(state, groups=done.state)
    words, trained = dict(state.group_words), dict(state.trained)
    for reply in done.replies:
        group = reply.group
        for one in group.members:
            words[group.stage, one.replica] = GroupReply(
                group.number,
                group.attempt,
                group.members,
                is_settled=isinstance(reply, SettledGroup),
            )
            # What a replica did alone goes with it if it dies.
            is_shared = len(group.members) > 1 or len(done.state.members) == 1
            if isinstance(reply, SettledGroup) and is_shared:
                trained[one.replica, group.stage] = one.batch + 1
    return replace(state, groups=done.state, group_words=words, trained=trained)
