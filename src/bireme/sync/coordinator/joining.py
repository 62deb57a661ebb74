"""How replicas become members and cease to be: the beginning, leases, healing, entering."""

from dataclasses import replace

from bireme.sync.coordinator.dealing import Dealing
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.membership import Membership, heard_replicas
from bireme.sync.coordinator.messages import Absence, Gone, Heal, Incarnation, Member, Report
from bireme.sync.coordinator.samples import Pool
from bireme.sync.coordinator.settings import SyncMode
from bireme.sync.coordinator.state import CoordinatorState

__all__ = [
    "is_cut_off",
    "is_lost",
    "with_beginning",
    "with_entries",
    "with_gone",
    "with_heals",
    "without_lost",
]

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
