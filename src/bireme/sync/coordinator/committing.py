"""Members of a run and its rounds: who enters and leaves, what is granted, what counts, and which samples the
next batches have. Each function gives the state with what follows from it.
"""

from collections import Counter
from collections.abc import Iterable

from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    Grant,
    Heal,
    Incarnation,
    Member,
    RankId,
    Report,
    SumSource,
    replace,
)
from bireme.sync.coordinator.samples import Began, Dealing, Pool, SyncMode
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


def with_beginning(state: CoordinatorState, now_s: float) -> CoordinatorState:
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
    if is_waiting_to_begin(state, now_s):
        return state
    are_late = state.first_heard_s is not None and now_s >= state.first_heard_s + settings.lease_s
    lives = heard_replicas(membership, now_s - settings.lease_s)
    lives = [one for one in lives if not membership.is_empty(one)]
    if lives and state.first_heard_s is None:
        state = replace(state, first_heard_s=now_s)
    are_enough = are_late and 2 * len(lives) > settings.num_replicas and not membership.is_strict
    if len(lives) < settings.num_replicas and not are_enough:
        return state
    voters = [frozenset([one]) for one in lives] if membership.is_strict else [frozenset(lives)]
    begun = membership.begun([_as_member(membership, life) for life in lives])
    state = replace(state, membership=replace(begun, voters=tuple(voters)))
    return with_start(state, begun.epoch, settings.first)


def is_waiting_to_begin(state: CoordinatorState, now_s: float) -> bool:
    """Whether nothing follows from reports, because the first epoch waits for more replicas."""
    membership, settings = state.membership, state.settings
    if membership.members or membership.voters or state.first_heard_s is None:
        return False
    are_few = len(membership.heard) < settings.num_replicas * settings.num_stages
    return are_few and now_s < state.first_heard_s + settings.lease_s


def with_start(state: CoordinatorState, epoch: int, batch: int) -> CoordinatorState:
    """With the line of the ledger that says that a coordinator begins before a batch."""
    pool, settings = state.pool, state.settings
    mode = str(settings.mode) if settings.averages else ""  # lines of all replicas name none
    line = Began(epoch, batch, settings.num_samples, pool.fresh, pool.open, mode)
    return replace(state, ledger=(*state.ledger, line))


def is_lost(state: CoordinatorState) -> bool:
    """Whether rounds count, and no replica is left that has their weights."""
    membership = state.membership
    if membership.members:
        return membership.have_ended
    return any(one.report.is_empty for one in membership.heard.values())


def _counts(state: CoordinatorState) -> bool:
    """Whether anything has been committed in this run."""
    first = state.settings.first if state.is_quorum else 0
    return bool(state.trained) or any(line.committed > first for line in state.lines)


def _anew(state: CoordinatorState) -> CoordinatorState:
    """As before the first epoch, but for what is known of incarnations."""
    settings = state.settings
    return replace(
        state.without_grants(),
        membership=replace(state.membership, members=(), voters=(), is_installed=False),
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

    lost = [one for one in membership.members if not membership.goes_on(one, since_s)]
    if not lost:
        return state
    left = [one for one in membership.members if one not in lost]
    leaving = {one for one in lost if any(r.is_leaving for r in membership.reports(one.own_life))}
    for one in leaving:
        membership = membership.with_over(one.own_life)
    if not left:
        return state.with_dropped(membership, leaving, leaving)  # hosts without replicas are to know
    if not membership.can_be(left):
        return replace(state, membership=membership)
    state, gone = state.with_dropped(membership, lost, leaving), {one.replica for one in lost}
    return replace(
        state.in_epoch(state.membership, left).with_returned(gone),
        dealt_to={one: batch for one, batch in state.dealt_to.items() if one not in gone},
        ends=tuple(one for one in state.ends if one.replica not in gone),
        trained={key: batch for key, batch in state.trained.items() if key[0] not in gone},
    )


def with_heals(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With a donor for each replica that is there and no member, as long as both are heard of."""
    membership, settings = state.membership, state.settings
    if not membership.is_installed:
        return state
    own = {one.replica: one.life for one in membership.members}
    others = {rank.own_life for rank in membership.heard if own.get(rank.replica) != rank.life}
    joining = [
        life
        for life in sorted(others)
        if membership.is_heard(life, now_s - settings.lease_s)
        and not any(one.is_leaving for one in membership.reports(life))
    ]
    if not joining and not state.heals:
        return state
    replicas, donors = {one.replica for one in joining}, own.keys()
    kept = {
        one.replica: one
        for one in state.heals
        if one.replica in replicas and one.donor in donors and not _cannot_reach_donor(state, one)
    }
    before = {one.replica: one for one in state.heals}
    state = state.with_returned(before.keys() - kept.keys())
    new = [life for life in joining if life.replica not in donors and life.replica not in kept]
    # Who is late itself has the sums too late for anybody to catch up by them.
    late = {one.replica for one in membership.members if new and not _has_caught_up(state, one.own_life)}
    for life in new:
        avoided = before[life.replica].donor if life.replica in before else None
        num_healed = Counter(heal.donor for heal in kept.values())
        donor = min(donors, key=lambda one: (one == avoided, one in late, num_healed[one], one))
        batch = max((line.committed for line in state.lines), default=0) + 1
        if not state.is_quorum:  # the donor's own, which it has not begun
            batch = state.first_undealt(donor)
        addresses = tuple(one.address for one in membership.reports(life))
        kept[life.replica] = Heal(life.replica, donor, batch, addresses)
    return replace(state, heals=tuple(kept.values()))


def with_entries(state: CoordinatorState) -> CoordinatorState:
    """With those who have healed as members. In `quorum` that is where a batch begins that was not assigned
    when they were found to have the sums of the others but the last one, and once they have that too: whoever
    holds it alone may die.
    """
    membership, is_quorum = state.membership, state.is_quorum
    heals, entering = [], []
    for heal in state.heals:
        life = _newest_life(membership, heal.replica)
        if heal.first is None and life is not None and goes_on(state, heal, life):
            heal = replace(heal, first=state.dealt if is_quorum else heal.batch)  # noqa: PLW2901
        if life is None or heal.first is None or not goes_on(state, heal, life):
            heals.append(heal)
        else:
            entering.append(replace(_as_member(membership, life), first=heal.first))
    if tuple(heals) == state.heals:
        return state
    state = replace(state, heals=tuple(heals))
    if not is_quorum:
        state = replace(state, dealt_to=state.dealt_to | {one.replica: one.first for one in entering})
    return state.in_epoch(membership, [*membership.members, *entering]) if entering else state


def goes_on(state: CoordinatorState, heal: Heal, life: Incarnation | RankId) -> bool:
    """Whether the first batch of a replica that heals can be named, or the replica can enter there."""
    if heal.first is not None:
        return not state.is_quorum or _has_all(state, heal.first, life)
    reports = state.membership.reports(life)
    is_healed = bool(reports) and all(one.healed == heal.batch for one in reports)
    return is_healed and (not state.is_quorum or _has_caught_up(state, life))


def _as_member(membership: Membership, life: Incarnation) -> Member:
    return Member(life.replica, life.life, tuple(one.address for one in membership.reports(life)))


def _newest_life(membership: Membership, replica: int) -> Incarnation | None:
    """The newest incarnation of a replica that is heard."""
    newest = Incarnation(replica, membership.over.get(replica, 0))
    stages = range(membership.num_stages)
    return newest if any(RankId(replica, newest.life, one) in membership.heard for one in stages) else None


def _cannot_reach_donor(state: CoordinatorState, heal: Heal) -> bool:
    """Whether a rank that heals could not reach its donor."""
    life = _newest_life(state.membership, heal.replica)
    reports = [] if life is None else state.membership.reports(life)
    return any(heal.donor in at.lost for one in reports for at in one.rounds)


def _has_all(state: CoordinatorState, first: int, life: Incarnation | RankId) -> bool:
    """Whether all rounds below `first` are committed, and a replica has the sums of all there are."""
    committed, reports = state.lines[0].committed, state.membership.reports(life)
    return committed >= first and bool(reports) and all(one.at(0).committed >= committed for one in reports)


def _has_caught_up(state: CoordinatorState, life: Incarnation | RankId) -> bool:
    """Whether all ranks of a replica have all committed rounds, but for one of each line."""
    return all(
        len(one.rounds) == len(state.lines)
        and all(at.committed >= line.committed - 1 for at, line in zip(one.rounds, state.lines, strict=True))
        for one in state.membership.reports(life)
    )


# Rounds of all lines: granting them, committing them, and assigning the samples of the next batches.


def with_rounds(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With what the reports lead to in each line of rounds. One line has a round at a time: ranks that are in
    two could each wait for the other one in the other.
    """
    for line in state.lines:
        if all(one.grant is None or one.number == line.number for one in state.lines):
            state = _with_line(state, line, now_s)
    return state


def _with_line(state: CoordinatorState, line: RoundSequence, now_s: float) -> CoordinatorState:
    """With what follows in one line. Where a replica is about to enter, no round is granted before it has."""
    membership, grant = state.membership, line.grant
    if grant is not None:
        there = {one.replica for one in grant.parts}
        parts = [membership.reports(one) for one in membership.members if one.replica in there]
        for reports in parts:
            if not is_summed(grant, reports):
                break
        else:
            return with_commit(state, grant)
        if not any(is_broken(grant, one) for one in parts):
            return state
        line = replace(line, grant=None, broken_s=now_s)
    if state.is_quorum and any(one.first is not None and one.first <= line.committed for one in state.heals):
        return state.with_line(line)
    is_of_means = state.is_of_means(line)
    ready = {
        one.replica: _num_samples(state, line, one.replica)
        for one in membership.members
        if is_ready(line, reports := membership.reports(one))
        and membership.are_of_epoch(reports)
        and (not line.broken_s or membership.is_heard(one, line.broken_s))
        and (is_of_means or state.is_quorum or _are_in_window(state, reports))
    }
    if state.settings.mode is SyncMode.DILOCO and not is_of_means and not any(ready.values()):
        # Those who drain have nothing to add, but hold what others do.
        waits = any(at.is_due for one in ready for at in state.places(one, line.number))
        ready = ready if waits else {}
    quorum = quorum_of(state, line)
    line = next_grant(
        line,
        ready,
        membership.replicas,
        quorum=quorum,
        grace_s=state.settings.grace_s,
        now_s=now_s,
        silent=_silent(state, now_s) if len(ready) >= quorum else frozenset(),
        attempts=max(one.attempts for one in state.lines),
    )
    return state.with_line(line)


def quorum_of(state: CoordinatorState, line: RoundSequence) -> int:
    """How many replicas must be ready before a round of a line goes on without the others."""
    num = len(state.membership.members)
    return num + 1 if state.is_of_means(line) else num // 2 + 1


def _are_in_window(state: CoordinatorState, reports: Iterable[Report]) -> bool:
    """Whether all ranks of a replica are past the last mean: what they offered before it is void."""
    windows = [one.window for one in reports]
    return all(one is None or one.number == state.lines[-1].committed for one in windows)


def _num_samples(state: CoordinatorState, line: RoundSequence, replica: int) -> int:
    if state.is_quorum:
        return state.pool.count(replica, line.committed)
    return max((one.num_samples for one in state.places(replica, line.number)), default=0)


def with_commit(state: CoordinatorState, grant: Grant) -> CoordinatorState:
    """After a round was committed: its samples count, and those of the others wait to be assigned again."""
    line = state.lines[grant.line]
    commit = Commit(grant.line, grant.round, grant.attempt, grant.parts)
    state = replace(state.with_line(line.after_commit()), commits=(*state.commits, commit))
    if state.is_quorum:
        return _with_batch(state, grant)
    parts = range(num_parts_of(state)) if state.is_of_means(line) else (grant.line,)
    trained = {
        (one.replica, part): min((at.trained for at in state.places(one.replica, grant.line)), default=0)
        for one in grant.parts
        for part in parts
    }
    return with_trained(replace(state, trained=state.trained | trained))


def _with_batch(state: CoordinatorState, grant: Grant) -> CoordinatorState:
    batch, replicas = grant.round, tuple(one.replica for one in grant.parts)
    pool, others = state.pool, {replica for replica, _ in state.pool.deals} - {*replicas}
    late = {one for one in others if (one, batch) in pool.deals}
    for one in others:
        pool = pool.with_returned(one, below=batch + 1)
    state = replace(state, pool=pool).with_counted(batch, grant.attempt % TERM, replicas)
    busy = {one: max((at.busy_s for at in state.places(one, grant.line)), default=0.0) for one in replicas}
    counts = {one.replica: one.num_samples for one in grant.parts}
    dealing = state.dealing.with_batch(batch, counts, busy, takes_effect=state.dealt)
    return replace(state, dealing=dealing.with_late(batch, late, takes_effect=state.dealt))


def _silent(state: CoordinatorState, now_s: float) -> frozenset[int]:
    """The members that may be dead: they have said nothing for longer than they would if they lived."""
    membership, since_s = state.membership, now_s - state.settings.silent_s
    return frozenset(one.replica for one in membership.members if not membership.is_heard(one, since_s))


def with_deals(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With the samples of all batches that a rank wants."""
    if not state.is_quorum:
        return with_own_deals(state, now_s)
    if not state.membership.members:
        return state
    while _are_wanted(state):
        dealing = state.dealing.among(state.contributors, state.dealt, _silent(state, now_s))
        pool = state.pool.with_deal(state.dealt, dealing.counts(state.dealt))
        state = replace(state, dealing=dealing, pool=pool, dealt=state.dealt + 1)
    return state


def _are_wanted(state: CoordinatorState) -> bool:
    """Whether a replica that trains the next batch wants its samples."""
    found = {rank.replica for rank, each in state.membership.heard.items() if each.report.wants > state.dealt}
    return bool(found) and not found.isdisjoint(state.contributors)


def with_sources(state: CoordinatorState) -> CoordinatorState:
    """With a source of each committed sum for each replica that had no part in it, and without the rounds
    that everybody has.
    """
    if not state.commits:
        return state
    lowest = committed_rounds(state)
    commits = tuple(
        _sourced(state, one)
        for one in state.commits
        if one.round < state.lines[one.line].committed and one.round >= lowest[one.line]
    )
    return state if commits == state.commits else replace(state, commits=commits)


def committed_rounds(state: CoordinatorState, *, donor: int | None = None) -> list[int]:
    """Of each line how many rounds all members have, and those that heal: all, or only those of a `donor`."""
    # But for quorum a snapshot says which rounds are in it.
    heals = {one.replica: state.is_quorum * one.batch for one in state.heals if donor in (None, one.donor)}
    others = {*state.membership.replicas} - heals.keys()
    reports = {rank: each.report for rank, each in state.membership.heard.items() if rank.replica in others}
    is_one_silent = len({rank.replica for rank in reports}) < len(others)
    found = []
    for line in state.lines:
        numbers = [num_rounds(state, one, line.number, least) for one, least in heals.items()]
        numbers += [one.at(line.number).committed for one in reports.values()]
        found.append(0 if is_one_silent else min(numbers, default=line.committed))
    return found


def num_rounds(state: CoordinatorState, replica: int, line: int, least: int) -> int:
    """How many rounds of a line a replica has; who heals needs none of the first ones."""
    reports = state.reports(replica)
    if not reports:
        return least
    lowest = reports[0].at(line).committed
    for one in reports:
        lowest = min(lowest, one.at(line).committed)
    return max(least, lowest)


def _sourced(state: CoordinatorState, commit: Commit) -> Commit:
    """With sources that live for those that lack its sum."""
    parts = {one.replica for one in commit.parts}
    members = state.membership.replicas
    sources, kept = [], {one.target: one.source for one in commit.sources}
    for target in members:
        if target in parts:
            continue
        lost = {one for at in state.places(target, commit.line) for one in at.lost}
        source = kept.get(target)
        if source not in members or source in lost:
            holders = [one for one in members if one in parts and one not in lost]
            holders = holders or [one for one in members if one != target and _has(state, one, commit)]
            source = holders[target % len(holders)] if holders else None
        if source is not None:
            sources.append(SumSource(target, source))
    late = [one for one in state.heals if one.batch <= commit.round or not state.is_quorum]
    sources += [SumSource(one.replica, one.donor) for one in late]
    return replace(commit, sources=tuple(sources))


def _has(state: CoordinatorState, replica: int, commit: Commit) -> bool:
    places = state.places(replica, commit.line)
    return bool(places) and all(one.committed > commit.round for one in places)
