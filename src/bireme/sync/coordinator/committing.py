"""Rounds of all lines: granting them, committing them, and dealing the samples of the next batches."""

from collections.abc import Iterable
from dataclasses import replace

from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    Grant,
    Member,
    Report,
    RoundAt,
    SamplePlaces,
    SumSource,
)
from bireme.sync.coordinator.rounds import RoundSequence, is_broken, is_ready, is_summed, next_grant
from bireme.sync.coordinator.samples import Pool
from bireme.sync.coordinator.settings import SyncMode
from bireme.sync.coordinator.state import CoordinatorState
from bireme.sync.coordinator.windows import num_parts_of, with_own_deals, with_trained

__all__ = ["committed_rounds", "with_commit", "with_deals", "with_rounds", "with_sources"]

Lines = list[Began | Committed]


def with_rounds(state: CoordinatorState, now_s: float, lines: Lines) -> CoordinatorState:
    """With what the reports lead to in each line of rounds. One line has a round at a time: ranks that are in
    two could each wait for the other one in the other.
    """
    for number in range(len(state.lines)):
        if all(one.grant is None or one.number == number for one in state.lines):
            state = _with_line(state, number, now_s, lines)
    return state


def _with_line(state: CoordinatorState, number: int, now_s: float, lines: Lines) -> CoordinatorState:
    """With what follows in one line. Where a replica is about to enter, no round is granted before it has."""
    line, membership = state.lines[number], state.membership
    grant = line.grant
    if grant is not None:
        parts = [membership.reports(one.own_life) for one in membership.members if _is_in(one, grant)]
        if all(is_summed(grant, one) for one in parts):
            return with_commit(state, grant, lines)
        if not any(is_broken(grant, one) for one in parts):
            return state
        line = line.broken(now_s)
    is_quorum = state.settings.mode is SyncMode.QUORUM
    if is_quorum and any(one.first is not None and one.first <= line.committed for one in state.heals):
        return replace(state, lines=tuple(line if one.number == number else one for one in state.lines))
    ready = {
        one.replica: _num_samples(state, line, one)
        for one in membership.members
        if membership.confirms(one.own_life)
        and membership.is_heard(one.own_life, line.broken_s)
        and is_ready(line, membership.reports(one.own_life))
        and (_is_of_means(state, line) or _is_in_window(state, membership.reports(one.own_life)))
    }
    if state.settings.mode is SyncMode.OUTER and not _is_of_means(state, line) and not any(ready.values()):
        ready = {}  # those who drain have nothing to add, but hold what others do
    line = next_grant(
        line,
        ready,
        membership.replicas,
        quorum=len(membership.members) + 1 if _is_of_means(state, line) else _quorum(state),
        grace_s=state.settings.grace_s,
        now_s=now_s,
        silent=_silent(state, now_s) if ready else frozenset(),
    )
    return replace(state, lines=tuple(line if one.number == number else one for one in state.lines))


def _is_of_means(state: CoordinatorState, line: RoundSequence) -> bool:
    """Whether the rounds of a line are the means over all replicas, which need every member."""
    return state.settings.mode is not SyncMode.QUORUM and line.number == len(state.lines) - 1


def _is_in_window(state: CoordinatorState, reports: Iterable[Report]) -> bool:
    """Whether all ranks of a replica are past the last mean: what they offered before it is void."""
    if state.settings.mode is SyncMode.QUORUM:
        return True
    number = state.lines[-1].committed
    return all(one.window is None or one.window.number == number for one in reports)


def _quorum(state: CoordinatorState) -> int:
    """How many contributions suffice: at least half, for what fewer know could be lost with them."""
    num = len(state.membership.members)
    return max(state.settings.quorum or num // 2 + 1, (num + 1) // 2)


def with_commit(state: CoordinatorState, grant: Grant, lines: Lines) -> CoordinatorState:
    """After a round was committed: its samples count, and those of the others wait to be dealt again."""
    line = state.lines[grant.line]
    commit = Commit(grant.line, grant.round, grant.attempt, grant.parts)
    state = replace(
        state,
        commits=(*state.commits, commit),
        lines=tuple(one.after_commit() if one is line else one for one in state.lines),
    )
    if state.settings.mode is SyncMode.QUORUM:
        return _with_batch(state, grant, lines)
    num_parts = num_parts_of(state)
    trained = {
        (one.replica, part): min(
            (_at(report, grant.line).trained for report in _reports(state, one.replica)), default=0
        )
        for one in grant.parts
        for part in (range(num_parts) if _is_of_means(state, line) else (grant.line,))
    }
    return with_trained(replace(state, trained=state.trained | trained), num_parts, lines)


def _with_batch(state: CoordinatorState, grant: Grant, lines: Lines) -> CoordinatorState:
    batch, membership = grant.round, state.membership
    replicas = tuple(one.replica for one in grant.parts)
    samples = tuple(state.pool.deals.get((one, batch), ()) for one in replicas)
    pool = state.pool
    for one in replicas:
        pool = pool.without_deal(one, batch)
    late = {replica for replica, own in pool.deals if own == batch}
    for one in {replica for replica, _ in pool.deals}:
        pool = pool.with_returned(one, below=batch + 1)
    lines.append(_line(membership.epoch, batch, grant.attempt, replicas, samples, pool))
    busy = {
        one: max((_at(report, grant.line).busy_s for report in _reports(state, one)), default=0.0)
        for one in replicas
    }
    counts = {one.replica: one.num_samples for one in grant.parts}
    dealing = state.dealing.with_batch(batch, counts, busy, takes_effect=state.dealt)
    dealing = dealing.with_late(batch, late, takes_effect=state.dealt)
    return replace(state, pool=pool, dealing=dealing)


def _silent(state: CoordinatorState, now_s: float) -> frozenset[int]:
    """The members that may be dead: they have said nothing for longer than they would if they lived."""
    membership, since_s = state.membership, now_s - state.settings.silent_s
    return frozenset(
        one.replica for one in membership.members if not membership.is_heard(one.own_life, since_s)
    )


def with_deals(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With the samples of all batches that somebody wants."""
    members = state.membership.members
    if not members:
        return state
    if state.settings.mode is SyncMode.QUORUM:
        while state.dealt < max(_wants(state, one) for one in state.contributors):
            dealing = state.dealing.among(state.contributors, state.dealt, _silent(state, now_s))
            pool = state.pool.with_deal(state.dealt, dealing.counts(state.dealt))
            state = replace(state, dealing=dealing, pool=pool, dealt=state.dealt + 1)
        return state
    return with_own_deals(state, now_s)


def _wants(state: CoordinatorState, replica: int) -> int:
    return max((one.wants for one in _reports(state, replica)), default=0)


def with_sources(state: CoordinatorState) -> CoordinatorState:
    """With a source of each committed sum for each replica that had no part in it, and without the rounds
    that everybody has.
    """
    lowest = committed_rounds(state)
    commits = tuple(
        _sourced(state, one)
        for one in state.commits
        if one.round < state.lines[one.line].committed and one.round >= lowest[one.line]
    )
    return state if commits == state.commits else replace(state, commits=commits)


def committed_rounds(state: CoordinatorState, *, donor: int | None = None) -> list[int]:
    """Of each line how many rounds all members have, and those that heal: all, or only those of a `donor`."""
    is_quorum = state.settings.mode is SyncMode.QUORUM  # else a snapshot says which rounds are in it
    heals = {one.replica: is_quorum * one.batch for one in state.heals if donor in (None, one.donor)}
    reports: dict[int, list[Report]] = {one: [] for one in (*state.membership.replicas, *heals)}
    for rank, heard in state.membership.heard.items():
        if rank.replica in reports:
            reports[rank.replica].append(heard.report)

    def num_rounds(replica: int, line: int) -> int:
        """How many rounds of a line a replica has; who heals needs none of the first ones."""
        own = min((_at(one, line).committed for one in reports[replica]), default=0)
        return max(heals.get(replica, 0), own)

    return [
        min((num_rounds(one, line.number) for one in reports), default=line.committed) for line in state.lines
    ]


def _sourced(state: CoordinatorState, commit: Commit) -> Commit:
    """With sources that live for those that lack its sum."""
    parts = {one.replica for one in commit.parts}
    members = state.membership.replicas
    sources, kept = [], {one.target: one.source for one in commit.sources}
    for target in members:
        if target in parts:
            continue
        lost = {one for r in _reports(state, target) for one in _at(r, commit.line).lost}
        source = kept.get(target)
        if source not in members or source in lost:
            holders = [one for one in members if one in parts and one not in lost]
            holders = holders or [one for one in members if one != target and _has(state, one, commit)]
            source = holders[target % len(holders)] if holders else None
        if source is not None:
            sources.append(SumSource(target, source))
    is_quorum = state.settings.mode is SyncMode.QUORUM
    late = [one for one in state.heals if one.batch <= commit.round or not is_quorum]
    sources += [SumSource(one.replica, one.donor) for one in late]
    return replace(commit, sources=tuple(sources))


def _has(state: CoordinatorState, replica: int, commit: Commit) -> bool:
    reports = _reports(state, replica)
    return bool(reports) and all(_at(one, commit.line).committed > commit.round for one in reports)


def _line(
    epoch: int,
    batch: int,
    attempt: int,
    replicas: tuple[int, ...],
    samples: tuple[tuple[SamplePlaces, ...], ...],
    pool: Pool,
) -> Committed:
    return Committed(epoch, batch, attempt % TERM, replicas, samples, pool.fresh, pool.open, pool.returned)


def _num_samples(state: CoordinatorState, line: RoundSequence, member: Member) -> int:
    if state.settings.mode is SyncMode.QUORUM:
        return state.pool.count(member.replica, line.committed)
    return max((_at(one, line.number).num_samples for one in _reports(state, member.replica)), default=0)


def _reports(state: CoordinatorState, replica: int) -> Iterable[Report]:
    heard = state.membership.heard
    return [each.report for rank, each in heard.items() if rank.replica == replica]


def _is_in(member: Member, grant: Grant) -> bool:
    return any(one.replica == member.replica for one in grant.parts)


def _at(report: Report, line: int) -> RoundAt:
    return report.rounds[line] if line < len(report.rounds) else RoundAt()
