"""A host on which a coordinator may run: it coordinates, or waits to be called by enough ranks to take up.

A pure state machine around `coordinator.step`. It resigns, which closes all connections, where another may
have replaced it: when a rank knows a later term, when a rank was told more than it took up from, and when so
many members are out of reach that others may have taken up. Then it waits like any other host.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from bireme.sync.coordinator.committing import is_cut_off, with_commit, with_start
from bireme.sync.coordinator.coordinator import begun, is_behind, wake_s, word_for
from bireme.sync.coordinator.coordinator import step as coordinator_step
from bireme.sync.coordinator.groups import groups_begun
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    CoordinatorReply,
    GroupMember,
    GroupReply,
    Incarnation,
    RankId,
    Report,
    joint,
    replace,
)
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, Pool, SyncMode
from bireme.sync.coordinator.state import (
    CoordinatorState,
    CoordinatorStep,
    Ended,
    Event,
    Heard,
    HeardRanks,
    Membership,
    Tick,
    heard_replicas,
    is_summed,
)

# Groups where a coordinator takes up after another: from what ranks wait for, and which means they hold.
#
# A group counts once all of its members hold the mean of its last attempt, and no rank uses it before. So if
# all members that call hold it or have gone on, it may have counted, and so it does. If one of them does not,
# it has not counted, and those who call wait for a group again. Where groups are of replicas, a rank that has
# gone on tells of the group with which it did, and the others of its replica follow it.

_Reports = Mapping[tuple[int, int], Sequence[Report]]
"""By former and replica, those of the ranks that are there together."""


def _with_known_groups(state: CoordinatorState, callers: Collection[Incarnation]) -> CoordinatorState:
    """With the groups that these replicas know of as they are now."""
    settings = state.settings
    heard: dict[tuple[int, int], list[Report]] = {}
    for rank, each in state.membership.heard.items():
        if rank.own_life in callers:
            key = settings.former_of(rank.stage), rank.replica
            heard.setdefault(key, []).append(each.report)
    groups = groups_begun(settings.groups, settings.num_formers, [one.replica for one in callers])
    latest: list[dict[int, int]] = [{} for _ in groups.formers]
    words, trained = dict(state.group_words), dict(state.trained)
    for (former, replica), reports in heard.items():
        at = joint([one.group for one in reports])
        if at is None or at.arrived is None:
            continue
        member = GroupMember(replica, at.arrived)
        group = _group_of(reports, member)
        counts = group is not None and _may_count(group, former, heard)
        if group is not None and counts:
            words[former, replica] = replace(group, is_settled=True)
            if len(group.members) > 1:
                before = trained.get((replica, former), 0)
                trained[replica, former] = max(before, member.batch + 1)
        latest[former][replica] = member.batch - (not counts)
    told = [_last(one) for reports in heard.values() for one in reports]
    numbers = [group.number for group in told if group is not None]
    formers = tuple(replace(former, latest=own) for former, own in zip(groups.formers, latest, strict=True))
    groups = replace(groups, formers=formers, num_groups=max(numbers, default=-1) + 1)
    return replace(state, groups=groups, group_words=words, trained=trained)


def _last(report: Report) -> GroupReply | None:
    """The last group that a rank was told of."""
    last = None if report.known is None else report.known.last
    return None if last is None else last.group


def _group_of(reports: Sequence[Report], member: GroupMember) -> GroupReply | None:
    """The last group that ranks of a replica know of after that batch: one that is settled, if any is."""
    known = [
        group
        for report in reports
        for group in (_last(report), None if report.group is None else report.group.last)
        if group is not None and member in group.members
    ]
    return max(known, key=lambda one: (one.is_settled, one.number, one.attempt), default=None)


def _may_count(group: GroupReply, former: int, heard: _Reports) -> bool:
    if group.is_settled:
        return True
    return all(
        _has(report, one, group) for one in group.members for report in heard.get((former, one.replica), ())
    )


def _has(report: Report, one: GroupMember, group: GroupReply) -> bool:
    """Whether a rank of a member of a group holds its mean, or has gone on with it."""
    at = report.group
    if at is None or at.arrived is None or at.arrived < one.batch:
        return False
    known = _group_of([report], GroupMember(one.replica, at.arrived))
    is_past = at.arrived > one.batch or (known is not None and known.is_settled)
    return is_past or (at.summed, at.attempt) == (group.number, group.attempt)


# How a coordinator takes up after another: from the last words of the members that call it.
#
# It needs more than half of the voters, and of the members, of the latest epoch that a caller knows: then at
# least one of them had a part in whatever was committed last. What the ranks hold says the rest. A round
# counts once all ranks of its last attempt hold its sum, and no sum is used before. So:
#
# * If all ranks of that attempt that call hold it, it may have been committed, and so it is.
# * If one of them does not, it was not, and the round is granted again.
#
# One that was started again where it ran before, and still has its ledger, was never replaced if half of them
# call it; but then none of the batches in the ledger may be missing among them. Where there is no other one
# half of them are enough too.
#
# Where replicas average weights, words say what was assigned to each and how much of it counts. What the
# other coordinator wrote down that nobody here has heard of does not count, and will: the samples are in
# weights.

_UNKNOWN = -1
"""The attempt of a round that counts, where no caller tells of it. Who lacks its sum gets it from another."""


@dataclass(frozen=True, slots=True)
class CoordinatorCandidate:
    """A coordinator that may take up: the one with that `number` among `num_candidates`, from 0 on.

    `recorded` is how many batches its own ledger has, if it is the one that wrote it last. `used` is the last
    term that it had; it has none twice.
    """

    number: int
    num_candidates: int
    recorded: int | None = None
    used: int = -1

    def next_term(self, term: int) -> int:
        """The first term after that one that only this candidate can have."""
        return (max(term, self.used) // self.num_candidates + 1) * self.num_candidates + self.number


def taken_up(
    settings: CoordinatorSettings,
    candidate: CoordinatorCandidate,
    heard: Mapping[RankId, Heard],
    *,
    ended: Collection[Incarnation] = (),
    is_late: bool,
) -> CoordinatorStep | None:
    """The state with which the candidate goes on, if those that it has heard are enough.

    It waits for all members, until it `is_late`. Incarnations that have `ended` do not vote.
    """
    # A rank that does not say what it knows is none that counts.
    heard = {rank: each for rank, each in heard.items() if each.report.known is not None}
    known = [each.report.known for each in heard.values() if each.report.known is not None]
    held = [one.held for one in known if one.held is not None]
    if not held:
        return _fresh(settings, candidate, heard)
    last = max(held, key=lambda word: word.place)
    newest = max((one.last for one in known if one.last is not None), key=lambda word: word.place)
    # Where another one has coordinated since, the own ledger does not say that this one was never replaced.
    recorded = candidate.recorded if last.epoch // TERM == candidate.used else None
    offered = {one.offered for one in known if one.offered is not None and one.offered.place > last.place}
    sets = [frozenset(own) for own in last.voters]
    # They may have been installed without any caller's knowledge.
    sets += [frozenset(one.own_life for one in word.members) for word in (last, *offered)]
    there = Membership(
        settings.num_stages,
        last.epoch,
        last.members,
        tuple(sets),
        is_strict=recorded is None and candidate.num_candidates > 1,
        heard=HeardRanks(heard),
    )
    for life in (*ended, *(Incarnation(rank.replica, rank.life - 1) for rank in heard)):
        there = there.with_over(life)
    callers = [one for one in last.members if there.reports(one.own_life)]
    if not callers or not there.can_be(callers) or not (is_late or len(callers) == len(last.members)):
        return None
    term = candidate.next_term(max(each.report.epoch for each in heard.values()) // TERM)
    if settings.averages:
        # What was assigned to a replica that was to be dropped, but calls, is not known any more.
        left = {one.own_life for one in newest.members}
        callers = [one for one in callers if one.own_life in left]
    state = _state(settings, there, last, newest, {one.replica for one in callers}, term * TERM)
    state = replace(state, commits=_commits(last, held, [each.report for each in heard.values()]))
    # What the other one wrote after its last word that anyone heard is undone by the first line.
    first = settings.first if settings.averages else state.lines[0].committed
    epoch = term * TERM + 1
    state = with_start(state, epoch, first)
    state = replace(state, membership=replace(state.membership, epoch=epoch))
    state = _with_summed(state, [one.own_life for one in callers])
    if settings.mode is SyncMode.GROUPS:
        state = _with_known_groups(state, [one.own_life for one in callers])
    if recorded is not None and state.lines and state.lines[0].committed < recorded:
        return None
    state = state.with_returned({one for one, _ in state.pool.deals} - {one.replica for one in callers})
    started = replace(state.membership, epoch=epoch - 1).begun(callers)
    lost = [one for one in last.members if one not in callers]
    return CoordinatorStep(replace(state, gone=newest.gone, after=last.place).with_dropped(started, lost))


def _fresh(
    settings: CoordinatorSettings, candidate: CoordinatorCandidate, heard: Mapping[RankId, Heard]
) -> CoordinatorStep | None:
    """The beginning, where the other coordinator ended before anything that a caller knows of: all replicas
    are there, in whatever incarnation.
    """
    there = Membership(settings.num_stages, 0, heard=HeardRanks(heard))
    for rank in heard:
        there = there.with_over(Incarnation(rank.replica, rank.life - 1))
    if len(heard_replicas(there, -inf)) < settings.num_replicas:
        return None
    state = begun(settings, term=candidate.next_term(max(e.report.epoch for e in heard.values()) // TERM))
    membership = replace(state.membership, heard=there.heard, over=there.over, is_strict=True)
    return CoordinatorStep(replace(state, membership=membership))


def _state(
    settings: CoordinatorSettings,
    membership: Membership,
    last: CoordinatorReply,
    newest: CoordinatorReply,
    replicas: Collection[int],
    first_attempt: int,
) -> CoordinatorState:
    """What words say, as a state: what counted by the `last` word of an epoch in which anything may count.
    Where these replicas train batches of their own, what was assigned and who heals is by the `newest` word.
    """
    state = replace(begun(settings), membership=membership)
    for line, committed in zip(state.lines, last.committed, strict=True):
        grant = next((one for one in last.grants if one.line == line.number), None)
        line = replace(line, committed=committed, grant=grant, first_attempt=first_attempt)  # noqa: PLW2901
        state = state.with_line(line)
    deals = {(one.replica, one.batch): one.samples for one in last.deals}
    if not settings.averages:
        dealt = max([settings.first, *last.committed, *(batch + 1 for _, batch in deals)])
        return replace(state, pool=Pool(last.fresh, last.waiting, deals), dealt=dealt)
    own = {key: samples for key, samples in deals.items() if key[0] in replicas}
    told = own | {(one.replica, one.batch): one.samples for one in newest.deals}
    return replace(
        state,
        heals=tuple(one for one in newest.heals if one.donor in replicas),
        pool=Pool(newest.fresh, newest.waiting, told),
        ends=tuple(one for one in newest.ends if one.replica in replicas),
        dealt_to={one.replica: one.dealt for one in newest.progress if one.replica in replicas},
        trained={
            (one.replica, part): batch
            for one in last.progress
            if one.replica in replicas
            for part, batch in enumerate(one.trained)
            if batch
        },
    )


def _commits(
    last: CoordinatorReply, held: Collection[CoordinatorReply], reports: Collection[Report]
) -> tuple[Commit, ...]:
    """The rounds that count and that a caller may lack, as a word or who has taken them tells of them. In
    which attempt a round was committed does not follow from its grants: a later one may be unknown here.
    """
    told = [one.last for report in reports for one in report.rounds if one.last is not None]
    known = [*told, *(one for word in held for one in word.commits)]
    found = {(one.line, one.round): replace(one, sources=()) for one in known if one.attempt != _UNKNOWN}
    for line, committed in enumerate(last.committed):
        places = [one.rounds[line].committed for one in reports if line < len(one.rounds)]
        for number in range(min(places, default=committed), committed):
            found.setdefault((line, number), Commit(line, number, _UNKNOWN, ()))
    return tuple(found[key] for key in sorted(found))


def _with_summed(state: CoordinatorState, callers: list[Incarnation]) -> CoordinatorState:
    """With the rounds that may have been committed as committed, and the others not granted."""
    for line in state.lines:
        grant = line.grant
        parts = {one.replica for one in grant.parts} if grant is not None else set()
        there = [state.membership.reports(one) for one in callers if one.replica in parts]
        if grant is not None and there and all(is_summed(grant, one) for one in there):
            state = with_commit(state, grant)
    return state.without_grants()


_LATENESS = 0.5
"""Leases for which a host waits for all members to call, once enough have."""


@dataclass(frozen=True, slots=True)
class Host:
    """One that has a `state` coordinates. One that has none has `heard` ranks since `since_s`, and of
    lives that have `ended`.
    """

    settings: CoordinatorSettings
    candidate: CoordinatorCandidate
    state: CoordinatorState | None = None
    heard: dict[RankId, Heard] = field(default_factory=dict)
    ended: frozenset[Incarnation] = frozenset()
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _HostStep:
    """What an event leads to. The lines must be written before the words are sent, and on the disk if they
    are `is_lasting`. One that `resigns` closes all connections.
    """

    host: Host
    words: tuple[tuple[RankId, CoordinatorReply], ...] = ()
    lines: tuple[Began | Committed, ...] = ()
    is_lasting: bool = True
    resigns: bool = False


def beginner(settings: CoordinatorSettings, num_hosts: int, *, used: int = -1) -> Host:
    """The first host, where the run begins, in a term after those that it has `used` before."""
    candidate = CoordinatorCandidate(0, num_hosts, used=used)
    return Host(settings, candidate, begun(settings, term=candidate.next_term(used)))


def host_wake_s(host: Host, now_s: float) -> float:
    """The next time at which a `Tick` could change something."""
    if host.state is not None:
        return wake_s(host.state, now_s)
    return now_s + _LATENESS * host.settings.lease_s


def host_step(host: Host, event: Event, now_s: float) -> _HostStep:
    """What follows from an event at that time."""
    if host.state is None:
        return _gathered(host, event, now_s)
    # Where replicas average weights, one that is the only one waits for members that are all silent: it
    # knows more of their samples than they do.
    may_be_replaced = not host.settings.averages or host.candidate.num_candidates > 1
    if _is_replaced(host.state, event, now_s, may_be_replaced=may_be_replaced):
        candidate = replace(host.candidate, recorded=None)
        return _HostStep(replace(host, candidate=candidate, state=None, heard={}), resigns=True)
    done = coordinator_step(host.state, event, now_s)
    # What ranks are told another host may take up, which then reads the lines.
    is_lasting = done.is_lasting or host.candidate.num_candidates > 1
    return _HostStep(replace(host, state=done.state), done.words, done.lines, is_lasting)


def _is_replaced(state: CoordinatorState, event: Event, now_s: float, *, may_be_replaced: bool) -> bool:
    membership = state.membership
    if isinstance(event, Report):
        is_later = event.epoch // TERM > membership.epoch // TERM
        return is_later or (is_behind(state, event) and not membership.is_installed)
    return may_be_replaced and isinstance(event, Tick) and is_cut_off(state, now_s)


def _gathered(host: Host, event: Event, now_s: float) -> _HostStep:
    """Learn who calls, and take up if enough do."""
    alive_s = now_s - host.settings.lease_s
    heard = {rank: one for rank, one in host.heard.items() if one.at_s >= alive_s}
    since_s = host.since_s if heard else now_s
    if isinstance(event, Report):
        last = heard.get(event.rank)
        if last is None or last.report.number < event.number:
            heard[event.rank] = Heard(event, now_s)
    ended = host.ended | {event.life} if isinstance(event, Ended) else host.ended
    heard = {rank: one for rank, one in heard.items() if rank.own_life not in ended}
    host = replace(host, heard=heard, ended=ended, since_s=since_s)
    is_late = now_s >= host.since_s + _LATENESS * host.settings.lease_s
    taken = taken_up(host.settings, host.candidate, heard, ended=ended, is_late=is_late)
    if taken is None:
        return _HostStep(host)
    return _begun(host, taken, now_s)


def _begun(host: Host, taken: CoordinatorStep, now_s: float) -> _HostStep:
    done = coordinator_step(taken.state, Tick(), now_s)
    state = done.state
    candidate = replace(host.candidate, used=state.membership.epoch // TERM)
    words = tuple((rank, word_for(state, rank)) for rank in sorted(state.membership.heard))
    host = replace(host, candidate=candidate, state=state, heard={}, ended=frozenset())
    return _HostStep(host, words, (*taken.lines, *done.lines))
