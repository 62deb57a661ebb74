"""What a coordinator that takes up makes of the last words of its callers."""

from dataclasses import replace

from bireme.sync.coordinator.coordinator import step
from bireme.sync.coordinator.host import CoordinatorCandidate, Host, host_step, taken_up
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Grant,
    Incarnation,
    Known,
    Member,
    RankId,
    Report,
    RoundAt,
    RoundPart,
    SumSource,
)
from bireme.sync.coordinator.samples import SyncMode
from bireme.sync.coordinator.state import Heard, Tick
from tests.support.coordinated import settings_for

MEMBERS = (Member(0, 0, ("a",)), Member(1, 0, ("b",)))
VOTERS = ((Incarnation(0, 0), Incarnation(1, 0)),)


BOTH = (RoundPart(0, 6), RoundPart(1, 6))


def word(number: int, committed: int, *grants: Grant) -> CoordinatorReply:
    return CoordinatorReply(
        1, number, (committed,), members=MEMBERS, voters=VOTERS, is_installed=True, grants=grants
    )


def heard(replica: int, at: RoundAt, last: CoordinatorReply) -> Heard:
    report = Report(RankId(replica, 0, 0), 1, 1, "", rounds=(at,), known=Known(last))
    return Heard(report, 0.0)


def test_a_round_that_counts_in_an_attempt_that_nobody_tells_of_comes_from_who_has_its_sum() -> None:
    """The other one holds the sum of an attempt that may be another one, and must not use it."""
    callers = [
        heard(0, RoundAt(committed=6), word(9, 6)),
        heard(1, RoundAt(committed=5, ready=5, summed=5, attempt=0), word(3, 5)),
    ]
    ranks = {one.report.rank: one for one in callers}
    taken = taken_up(settings_for(2, 1), CoordinatorCandidate(0, 1), ranks, is_late=True)

    assert taken is not None
    (commit,) = step(taken.state, Tick(), 0.0).state.commits
    assert (commit.round, commit.sources) == (5, (SumSource(target=1, source=0),))
    assert commit.attempt not in {one.report.rounds[0].attempt for one in callers}


def test_a_round_was_committed_in_the_attempt_that_who_took_it_tells_of() -> None:
    """The other one knows of an earlier attempt only, whose sum it must not use."""
    last = Commit(0, 5, 1, BOTH)
    callers = [
        heard(0, RoundAt(committed=6, last=last), word(9, 6)),
        heard(1, RoundAt(committed=5, ready=5, summed=5), word(3, 5, Grant(0, 5, 0, BOTH))),
    ]
    ranks = {one.report.rank: one for one in callers}
    taken = taken_up(settings_for(2, 1), CoordinatorCandidate(0, 1), ranks, is_late=True)

    assert taken is not None
    assert taken.state.commits == (last,)


def test_a_coordinator_that_another_one_came_after_needs_more_than_half_whatever_its_ledger_says() -> None:
    caller = heard(0, RoundAt(committed=5), word(3, 5))
    taken = taken_up(
        settings_for(2, 1), CoordinatorCandidate(0, 2, 5, used=2), {caller.report.rank: caller}, is_late=True
    )

    assert taken is None


def test_a_host_that_a_single_rank_calls_takes_up_once_it_has_waited_for_the_others() -> None:
    """It began to wait anew with each report."""
    settings = replace(settings_for(2, 1), mode=SyncMode.GROUPS, num_lines=0)
    last = replace(word(3, 0), voters=((Incarnation(0, 0),),))
    host = Host(settings, CoordinatorCandidate(0, 1))
    for number in range(20):
        report = heard(0, RoundAt(), last).report
        host = host_step(host, replace(report, number=number), 0.1 * number).host

    assert host.state is not None
    assert host.state.membership.replicas == (0,)
