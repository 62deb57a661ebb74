"""Groups where a coordinator takes up after another: from what ranks wait for, and which means they hold.

A group counts once all of its members hold the mean of its last attempt, and nobody uses it before. So if all
members that call hold it or have gone on, it may have counted, and so it does. If one of them does not, it
has not counted, and those who call wait for a group again.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from bireme.sync.coordinator.groups import groups_begun
from bireme.sync.coordinator.messages import GroupMember, GroupReply, Incarnation, Report
from bireme.sync.coordinator.state import CoordinatorState

__all__ = ["with_known_groups"]

Reports = Mapping[tuple[int, int], Report]
"""By stage and replica."""


def with_known_groups(state: CoordinatorState, callers: Collection[Incarnation]) -> CoordinatorState:
    """With the groups that these replicas know of as they are now."""
    heard: dict[tuple[int, int], Report] = {
        (rank.stage, rank.replica): each.report
        for rank, each in state.membership.heard.items()
        if rank.own_life in callers
    }
    settings = state.settings
    groups = groups_begun(settings.groups, settings.num_stages, [one.replica for one in callers])
    latest: list[dict[int, int]] = [{} for _ in groups.formers]
    words, trained = dict(state.group_words), dict(state.trained)
    for (stage, replica), report in heard.items():
        if report.group is None or report.group.arrived is None:
            continue
        batch, group = report.group.arrived, _known(report)
        counts = group is not None and _may_count(group, stage, heard)
        if group is not None and counts:
            words[stage, replica] = replace(group, is_settled=True)
            if len(group.members) > 1:
                before = trained.get((replica, stage), 0)
                trained[replica, stage] = max(before, batch + 1)
        latest[stage][replica] = batch - (not counts)
    numbers = [group.number for report in heard.values() if (group := _last(report)) is not None]
    formers = tuple(replace(former, latest=own) for former, own in zip(groups.formers, latest, strict=True))
    groups = replace(groups, formers=formers, num_groups=max(numbers, default=-1) + 1)
    return replace(state, groups=groups, group_words=words, trained=trained)


def _last(report: Report) -> GroupReply | None:
    """The last group that a rank was told of."""
    last = None if report.known is None else report.known.last
    return None if last is None else last.group


def _known(report: Report) -> GroupReply | None:
    """The group that a rank was told of, if it is that of its last arrival."""
    group, at = _last(report), report.group
    if group is None or at is None or at.arrived is None:
        return None
    return group if GroupMember(report.rank.replica, at.arrived) in group.members else None


def _may_count(group: GroupReply, stage: int, heard: Reports) -> bool:
    if group.is_settled:
        return True
    return all(
        _has(heard[stage, one.replica], one, group) for one in group.members if (stage, one.replica) in heard
    )


def _has(report: Report, one: GroupMember, group: GroupReply) -> bool:
    """Whether a member of a group holds its mean, or has gone on with it."""
    at, known = report.group, _known(report)
    if at is None or at.arrived is None or at.arrived < one.batch:
        return False
    is_past = at.arrived > one.batch or (known is not None and known.is_settled)
    return is_past or (at.summed, at.attempt) == (group.number, group.attempt)
