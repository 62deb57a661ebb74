"""How replicas that come become members, and what those are dealt that are late."""

from collections.abc import Sequence
from dataclasses import replace

from bireme.balance import ShareLimits
from bireme.sync.coordinator.committing import committed_rounds, with_heals
from bireme.sync.coordinator.coordinator import begun, step
from bireme.sync.coordinator.messages import Absence, Heal, Incarnation, Member, RankId, Report, RoundAt
from bireme.sync.coordinator.samples import Dealing
from bireme.sync.coordinator.state import CoordinatorState, Ended, Heard, HeardRanks
from tests.support.coordinated import settings_for


def two_members(committed: Sequence[int]) -> CoordinatorState:
    """Replicas that have so many sums of nine, the first two of which are members."""
    state = begun(settings_for(3, 1))
    heard = {}
    for replica, number in enumerate(committed):
        rank = RankId(replica, 0, 0)
        heard[rank] = Heard(Report(rank, 1, 1, "there", rounds=(RoundAt(committed=number),)), 0.0)
    members = tuple(Member(replica, 0, ("there",)) for replica in range(2))
    membership = replace(
        state.membership, epoch=1, members=members, is_installed=True, heard=HeardRanks(heard)
    )
    return replace(state, membership=membership, lines=(replace(state.lines[0], committed=9),))


def test_a_replica_heals_from_one_that_is_not_late_itself() -> None:
    """It could not catch up by the sums of a donor that has them long after the others."""
    (heal,) = with_heals(two_members([5, 8, 0]), 0.5).heals
    assert (heal.replica, heal.donor) == (2, 1)


def test_sums_are_kept_until_all_members_have_them_and_by_a_donor_from_the_snapshot_on() -> None:
    state = two_members([8, 9, 0])
    assert committed_rounds(state) == [8]
    state = replace(state, heals=(Heal(2, 1, 6),))
    assert committed_rounds(state) == committed_rounds(state, donor=1) == [6]
    assert committed_rounds(state, donor=0) == [8]


def test_a_member_of_which_all_ranks_have_left_is_none_at_once() -> None:
    state = two_members([9, 9, 9])
    report = Report(RankId(1, 0, 0), 2, 1, "there", rounds=(RoundAt(committed=9),), is_leaving=True)
    left = step(state, report, 0.1).state
    assert left.membership.replicas == (0,)
    assert [one.why for one in left.gone] == [Absence.LEFT]


def test_a_run_all_of_whose_members_have_left_is_over_and_says_that_they_left() -> None:
    """A host without replicas took it for one whose replicas had all died elsewhere."""
    state = two_members([9, 9, 9])
    for replica in range(2):
        report = Report(RankId(replica, 0, 0), 2, 1, "there", rounds=(RoundAt(committed=9),), is_leaving=True)
        state = step(state, report, 0.1 + replica / 10).state
    assert state.word is not None
    assert state.word.is_lost
    assert {one.why for one in state.word.gone} == {Absence.LEFT}


def test_a_hold_up_that_makes_a_replica_late_in_many_rounds_halves_its_share_once() -> None:
    """Until rounds come that were dealt after it was known."""
    dealing = Dealing(24, ShareLimits((1, 1), (24, 24))).among((0, 1), 0)
    for batch in range(4):
        dealing = dealing.with_late(batch, {0}, takes_effect=4).among((0, 1), 4)
    assert dealing.counts(4) == {0: 8, 1: 16}

    dealing = dealing.with_late(4, {0}, takes_effect=8).among((0, 1), 8)
    assert dealing.counts(8)[0] in (4, 5)


def test_a_replica_that_is_back_before_the_others_waits_where_nothing_counts_yet() -> None:
    """All members of the first epoch have ended, so nobody has anything to heal it by."""
    state, number = begun(settings_for(2, 1)), 0

    def report(replica: int, life: int, epoch: int) -> None:
        nonlocal state, number
        number += 1
        rank = RankId(replica, life, 0)
        state = step(state, Report(rank, number, epoch, "there", rounds=(RoundAt(),)), 0.1 * number).state

    for epoch in (0, 1):
        for replica in range(2):
            report(replica, 0, epoch)
    assert state.membership.is_installed
    report(0, 1, 0)
    report(1, 0, state.membership.epoch)
    assert state.membership.is_installed
    state = step(state, Ended(Incarnation(1, 0)), 0.1 * number).state
    assert not state.membership.members
    assert not state.heals
    report(0, 1, 0)
    report(1, 1, 0)
    assert [one.own_life for one in state.membership.members] == [Incarnation(0, 1), Incarnation(1, 1)]
