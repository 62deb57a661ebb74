"""Rounds of all lines: granting them, committing them, and dealing the samples of the next batches."""

from collections.abc import Iterable
from dataclasses import replace

from bireme.sync.coordinator.messages import (
    TERM,
    Absence,
    Commit,
    Gone,
    Grant,
    Heal,
    Incarnation,
    Member,
    Report,
    RoundAt,
    SamplePlaces,
    SumSource,
)
from bireme.sync.coordinator.samples import Began, Committed, Dealing, Pool, SyncMode
from bireme.sync.coordinator.state import (
    CoordinatorState,
    Membership,
    RoundSequence,
    heard_replicas,
    is_broken,
    is_ready,
    is_summed,
    next_grant,
)
from bireme.sync.coordinator.windows import num_parts_of, with_own_deals, with_trained

# How replicas become members and cease to be: the beginning, leases, healing, entering.

Lines = list[Began | Committed]


def with_beginning(state: CoordinatorState, now_s: float, lines: Lines) -> CoordinatorState:
    """With the first epoch, once all replicas are there; a lease after the first, once more than half are.

    If all its members end before anything counts there is another beginning. One that begins in the place of
    another coordinator needs all replicas, and all of them must confirm it: who was started again does not
    know what was told before.
    """
    if state.membership.have_ended and not _counts(state):
        state = _anew(state)
    membership, settings = state.membership, state.settings
    if membership.members or membership.voters:
        return state
    lives = heard_replicas(membership, now_s - settings.lease_s)
    lives = [one for one in lives if not membership.is_empty(one)]
    if lives and state.first_heard_s is None:
        state = replace(state, first_heard_s=now_s)
    are_late = state.first_heard_s is not None and now_s >= state.first_heard_s + settings.lease_s
    are_enough = are_late and 2 * len(lives) > settings.num_replicas and not membership.is_strict
    if len(lives) < settings.num_replicas and not are_enough:
        return state
    members = [_as_member(membership, life) for life in lives]
    voters = [frozenset([one]) for one in lives] if membership.is_strict else [frozenset(lives)]
    begun = replace(membership.begun(members), voters=tuple(voters))
    pool = state.pool
    mode, first = settings.mode_in_ledger, settings.first
    lines.append(Began(begun.epoch, first, settings.num_samples, pool.fresh, pool.open, mode))
    return replace(state, membership=begun)


def is_lost(state: CoordinatorState) -> bool:
    """Whether rounds count, and nobody is left who has their weights."""
    membership = state.membership
    if membership.members:
        return membership.have_ended
    return any(one.report.is_empty for one in membership.heard.values())


def _counts(state: CoordinatorState) -> bool:
    """Whether anything has been committed in this run."""
    first = state.settings.first if state.settings.mode is SyncMode.QUORUM else 0
    return bool(state.trained) or any(line.committed > first for line in state.lines)


def _anew(state: CoordinatorState) -> CoordinatorState:
    """As before the first epoch, but for what is known of lives."""
    settings = state.settings
    return replace(
        state,
        membership=replace(state.membership, members=(), voters=()),
        lines=tuple(one.with_epoch() for one in state.lines),
        pool=Pool(settings.fresh, settings.waiting),
        dealing=Dealing(settings.batch_size, settings.limits),
        heals=(),
        commits=(),
        dealt=settings.first,
        dealt_to={},
        ends=(),
        groups=None,
        group_words={},
        first_heard_s=None,
    )


def is_cut_off(state: CoordinatorState, now_s: float) -> bool:
    """Whether so many members are out of reach that another coordinator may have taken up."""
    membership, since_s = state.membership, now_s - state.settings.lease_s
    there = [one for one in membership.members if membership.is_heard(one.own_life, since_s)]
    return bool(membership.members) and not membership.can_be(there)


def without_lost(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Without members that have ended, all of whose ranks left, or that were not heard of for the lease.

    Where too few would be left, they stay: it may be this coordinator that is cut off.
    """
    membership = state.membership
    since_s = now_s - state.settings.lease_s

    def stays(one: Member) -> bool:
        life = one.own_life
        return membership.is_heard(life, since_s) and not all(r.is_leaving for r in membership.reports(life))

    lost = [one for one in membership.members if not stays(one)]
    left = [one for one in membership.members if one not in lost]
    leaving = {one for one in lost if any(r.is_leaving for r in membership.reports(one.own_life))}
    for one in leaving:
        membership = membership.with_over(one.own_life)
    if not lost or not left or not membership.can_be(left):
        return replace(state, membership=membership)
    for one in lost:
        why = Absence.LEFT if one in leaving else Absence.ENDED
        if not membership.is_over(one.own_life):
            membership, why = membership.without(one.own_life), Absence.SILENT
        state = with_gone(state, one, why)
    pool = state.pool
    for one in lost:
        pool = pool.with_returned(one.replica)
    gone = {one.replica for one in lost}
    return replace(
        _in_new_epoch(state, membership, left),
        pool=pool,
        dealt_to={one: batch for one, batch in state.dealt_to.items() if one not in gone},
        ends=tuple(one for one in state.ends if one.replica not in gone),
        trained={key: batch for key, batch in state.trained.items() if key[0] not in gone},
    )


def with_gone(state: CoordinatorState, member: Member, why: Absence) -> CoordinatorState:
    """With a member among those that are gone."""
    is_quorum = state.settings.mode is SyncMode.QUORUM
    step = state.lines[0].committed if is_quorum else state.pool.fresh // state.settings.batch_size
    address = member.addresses[0] if member.addresses else ""
    gone = Gone(member.replica, member.life, step, why, address)
    return replace(state, gone=(*(one for one in state.gone if one.replica != member.replica), gone))


def with_heals(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With a donor for each replica that is there and no member, as long as both are heard of."""
    membership, settings = state.membership, state.settings
    if not membership.is_installed:
        return state
    lives = heard_replicas(membership, now_s - settings.lease_s)
    joining = [life for life in lives if membership.member(life) is None and not _leaves(membership, life)]
    replicas, donors = {one.replica for one in joining}, set(membership.replicas)
    kept = [
        one
        for one in state.heals
        if one.replica in replicas and one.donor in donors and not _is_lost(state, one)
    ]
    pool = state.pool
    for replica in {one.replica for one in state.heals} - {one.replica for one in kept}:
        pool = pool.with_returned(replica)
    for life in joining:
        if life.replica in donors or any(one.replica == life.replica for one in kept):
            continue
        avoided = next((one.donor for one in state.heals if one.replica == life.replica), None)
        # Who is late itself has the sums too late for anybody to catch up by them.
        late = {one.replica for one in membership.members if not _has_caught_up(state, one.own_life)}
        free = sorted(
            donors,
            key=lambda one: (one == avoided, one in late, sum(h.donor == one for h in kept), one),
        )
        addresses = tuple(one.address for one in membership.reports(life))
        batch = max((line.committed for line in state.lines), default=0) + 1
        if settings.mode is not SyncMode.QUORUM:  # the donor's own, which it has not begun
            batch = state.dealt_to.get(free[0], settings.first)
        kept.append(Heal(life.replica, free[0], batch, addresses))
    heals = tuple(kept)
    return state if heals == state.heals else replace(state, heals=heals, pool=pool)


def with_entries(state: CoordinatorState) -> CoordinatorState:
    """With those who have healed as members. In `quorum` that is where a batch begins that was not dealt when
    they were found to have the sums of the others but the last one, and once they have that too: whoever
    holds it alone may die.
    """
    membership, is_quorum = state.membership, state.settings.mode is SyncMode.QUORUM
    heals, entering = [], []
    for heal in state.heals:
        life = _life_of(membership, heal.replica)
        reports = [] if life is None else membership.reports(life)
        is_healed = bool(reports) and all(one.healed == heal.batch for one in reports)
        found = heal
        has_caught_up = not is_quorum or (bool(reports) and _has_caught_up(state, reports[0].rank.own_life))
        if is_healed and heal.first is None and has_caught_up:
            found = replace(heal, first=state.dealt if is_quorum else heal.batch)
        if found.first is None or (is_quorum and not _has_all(state, found.first, reports)):
            heals.append(found)
        else:
            entering.append(replace(_as_member(membership, reports[0].rank.own_life), first=found.first))
    if tuple(heals) == state.heals:
        return state
    state = replace(state, heals=tuple(heals))
    if not is_quorum:
        state = replace(state, dealt_to=state.dealt_to | {one.replica: one.first for one in entering})
    return _in_new_epoch(state, membership, [*membership.members, *entering]) if entering else state


def _in_new_epoch(state: CoordinatorState, membership: Membership, members: list[Member]) -> CoordinatorState:
    return replace(
        state, membership=membership.begun(members), lines=tuple(one.with_epoch() for one in state.lines)
    )


def _as_member(membership: Membership, life: Incarnation) -> Member:
    return Member(life.replica, life.life, tuple(one.address for one in membership.reports(life)))


def _leaves(membership: Membership, life: Incarnation) -> bool:
    return any(one.is_leaving for one in membership.reports(life))


def _life_of(membership: Membership, replica: int) -> Incarnation | None:
    """The newest life of a replica that is heard."""
    return max((rank.own_life for rank in membership.heard if rank.replica == replica), default=None)


def _is_lost(state: CoordinatorState, heal: Heal) -> bool:
    """Whether a rank that heals could not reach its donor."""
    life = _life_of(state.membership, heal.replica)
    reports = [] if life is None else state.membership.reports(life)
    return any(heal.donor in at.lost for one in reports for at in one.rounds)


def _has_all(state: CoordinatorState, first: int, reports: list[Report]) -> bool:
    """Whether all rounds below `first` are committed, and a replica has the sums of all there are."""
    committed = state.lines[0].committed
    return (
        committed >= first and bool(reports) and all(one.rounds[0].committed >= committed for one in reports)
    )


def _has_caught_up(state: CoordinatorState, life: Incarnation) -> bool:
    """Whether all ranks of a replica have all committed rounds, but for one of each line."""
    return all(_is_close(state, one) for one in state.membership.reports(life))


def _is_close(state: CoordinatorState, report: Report) -> bool:
    """Whether a rank has all committed rounds, but for one of each line."""
    return len(report.rounds) == len(state.lines) and all(
        at.committed >= line.committed - 1 for at, line in zip(report.rounds, state.lines, strict=True)
    )


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
    if state.settings.mode is SyncMode.DILOCO and not _is_of_means(state, line) and not any(ready.values()):
        # Those who drain have nothing to add, but hold what others do.
        waiting = {one for one in ready if any(_at(r, line.number).is_due for r in _reports(state, one))}
        ready = ready if waiting else {}
    line = next_grant(
        line,
        ready,
        membership.replicas,
        quorum=len(membership.members) + 1 if _is_of_means(state, line) else _quorum(state),
        grace_s=state.settings.grace_s,
        now_s=now_s,
        silent=_silent(state, now_s) if ready else frozenset(),
        attempts=max(one.attempts for one in state.lines),
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
