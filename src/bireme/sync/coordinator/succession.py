"""How a coordinator takes up after another: from the last words of the members that call it.

It needs more than half of the voters, and of the members, of the latest epoch that a caller knows: then at
least one of them had a part in whatever was committed last. What the ranks hold says the rest. A round counts
once all ranks of its last attempt hold its sum, and no sum is used before. So:

* If all ranks of that attempt that call hold it, it may have been committed, and so it is.
* If one of them does not, it was not, and the round is granted again.

One that was started again where it ran before, and still has its ledger, was never replaced if half of them
call it; but then none of the batches in the ledger may be missing among them. Where there is no other one
half of them are enough too.

Where replicas average weights, words say what was dealt to each and how much of it counts. What the other
coordinator wrote down that nobody here has heard of does not count, and will: the samples are in weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from bireme.sync.coordinator.committing import with_commit
from bireme.sync.coordinator.coordinator import begun
from bireme.sync.coordinator.joining import with_gone
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.membership import Heard, Membership, heard_replicas
from bireme.sync.coordinator.messages import (
    TERM,
    Absence,
    Commit,
    CoordinatorReply,
    Incarnation,
    RankId,
    Report,
)
from bireme.sync.coordinator.regrouping import with_known_groups
from bireme.sync.coordinator.rounds import is_summed
from bireme.sync.coordinator.samples import Pool
from bireme.sync.coordinator.settings import CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import CoordinatorState, CoordinatorStep
from bireme.sync.coordinator.windows import with_own_batches

__all__ = ["CoordinatorCandidate", "taken_up"]

UNKNOWN = -1
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

    It waits for all members, until it `is_late`. Lives that have `ended` elect nobody.
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
        heard=dict(heard),
    )
    for life in (*ended, *(Incarnation(rank.replica, rank.life - 1) for rank in heard)):
        there = there.with_over(life)
    callers = [one for one in last.members if there.reports(one.own_life)]
    if not callers or not there.can_be(callers) or not (is_late or len(callers) == len(last.members)):
        return None
    term = candidate.next_term(max(each.report.epoch for each in heard.values()) // TERM)
    if settings.averages:
        # What was dealt to a replica that was to be dropped, but calls, is not known any more.
        left = {one.own_life for one in newest.members}
        callers = [one for one in callers if one.own_life in left]
    state = replace(
        _state(settings, there, last, term * TERM),
        commits=_commits(last, held, [each.report for each in heard.values()]),
    )
    if settings.averages:
        state = with_own_batches(state, last, newest, {one.replica for one in callers})
    # What the other one wrote after its last word that anyone heard is undone by the first line.
    first = state.lines[0].committed if settings.mode is SyncMode.QUORUM else settings.first
    epoch = term * TERM + 1
    lines: list[Began | Committed] = [
        Began(epoch, first, settings.num_samples, state.pool.fresh, state.pool.open, settings.mode_in_ledger)
    ]
    state = replace(state, membership=replace(state.membership, epoch=epoch))
    state = _with_summed(state, [one.own_life for one in callers], lines)
    if settings.mode is SyncMode.GROUPS:
        state = with_known_groups(state, [one.own_life for one in callers])
    if recorded is not None and state.lines and state.lines[0].committed < recorded:
        return None
    pool = state.pool
    for replica in {replica for replica, _ in pool.deals} - {one.replica for one in callers}:
        pool = pool.with_returned(replica)
    started = replace(state.membership, epoch=epoch - 1).begun(callers)
    state = replace(state, gone=newest.gone)
    for one in last.members:
        if one in callers:
            continue
        why = Absence.ENDED
        if not started.is_over(one.own_life):
            # It may have samples that nobody here knows of.
            started, why = started.without(one.own_life), Absence.SILENT
        state = with_gone(state, one, why)
    return CoordinatorStep(replace(state, membership=started, pool=pool, after=last.place), (), tuple(lines))


def _fresh(
    settings: CoordinatorSettings, candidate: CoordinatorCandidate, heard: Mapping[RankId, Heard]
) -> CoordinatorStep | None:
    """The beginning, where the other coordinator ended before anything that a caller knows of: all replicas
    are there, in whatever life.
    """
    there = Membership(settings.num_stages, 0, heard=dict(heard))
    for rank in heard:
        there = there.with_over(Incarnation(rank.replica, rank.life - 1))
    if len(heard_replicas(there, -inf)) < settings.num_replicas:
        return None
    state = begun(settings, term=candidate.next_term(max(e.report.epoch for e in heard.values()) // TERM))
    membership = replace(state.membership, heard=there.heard, over=there.over, is_strict=True)
    return CoordinatorStep(replace(state, membership=membership))


def _state(
    settings: CoordinatorSettings, membership: Membership, last: CoordinatorReply, first_attempt: int
) -> CoordinatorState:
    """What the last word says, as a state."""
    fresh = begun(settings)
    lines = []
    for line, committed in zip(fresh.lines, last.committed, strict=True):
        grant = next((one for one in last.grants if one.line == line.number), None)
        lines.append(replace(line, committed=committed, grant=grant, first_attempt=first_attempt))
    deals = {(one.replica, one.batch): one.samples for one in last.deals}
    dealt = max((one.batch + 1 for one in last.deals), default=0)
    committed = max(last.committed, default=0) if settings.mode is SyncMode.QUORUM else 0
    return replace(
        fresh,
        membership=membership,
        lines=tuple(lines),
        pool=Pool(last.fresh, last.waiting, deals),
        dealt=max(dealt, committed, settings.first),
    )


def _commits(
    last: CoordinatorReply, held: Collection[CoordinatorReply], reports: Collection[Report]
) -> tuple[Commit, ...]:
    """The rounds that count and that a caller may lack, as a word or who has taken them tells of them. In
    which attempt a round was committed does not follow from its grants: a later one may be unknown here.
    """
    told = [one.last for report in reports for one in report.rounds if one.last is not None]
    known = [*told, *(one for word in held for one in word.commits)]
    found = {(one.line, one.round): replace(one, sources=()) for one in known if one.attempt != UNKNOWN}
    for line, committed in enumerate(last.committed):
        places = [one.rounds[line].committed for one in reports if line < len(one.rounds)]
        for number in range(min(places, default=committed), committed):
            found.setdefault((line, number), Commit(line, number, UNKNOWN, ()))
    return tuple(found[key] for key in sorted(found))


def _with_summed(
    state: CoordinatorState, callers: list[Incarnation], lines: list[Began | Committed]
) -> CoordinatorState:
    """With the rounds that may have been committed as committed, and the others not granted."""
    for line in state.lines:
        grant = line.grant
        parts = {one.replica for one in grant.parts} if grant is not None else set()
        there = [state.membership.reports(one) for one in callers if one.replica in parts]
        if grant is not None and there and all(is_summed(grant, one) for one in there):
            state = with_commit(state, grant, lines)
    return replace(state, lines=tuple(one.with_epoch() for one in state.lines))
