"""A member that says nothing, though its lease has not ended: rounds do not wait for it."""

from dataclasses import replace

from bireme.balance import ShareLimits
from bireme.sync.coordinator.coordinator import begun, step, wake_s, word_for
from bireme.sync.coordinator.messages import (
    Absence,
    CoordinatorReply,
    Gone,
    Incarnation,
    Member,
    RankId,
    Report,
    RoundAt,
)
from bireme.sync.coordinator.samples import Dealing, SyncMode
from bireme.sync.coordinator.state import (
    Changes,
    CoordinatorState,
    Ended,
    MembershipChange,
    RoundSequence,
    Tick,
    next_grant,
)
from tests.support.coordinated import settings_for

RANKS = [RankId(replica, 0, 0) for replica in range(3)]


def test_a_round_waits_for_nobody_who_is_silent_once_the_quorum_is_ready() -> None:
    def granted(ready: set[int], silent: set[int]) -> list[int] | None:
        samples = dict.fromkeys(ready, 4)
        line = next_grant(
            RoundSequence(0), samples, (0, 1, 2), quorum=2, grace_s=9.0, now_s=1.0, silent=silent
        )
        return None if line.grant is None else [one.replica for one in line.grant.parts]

    assert granted({0, 1}, {2}) == [0, 1]
    assert granted({0, 1}, set()) is None
    assert granted({0, 1}, {0}) is None
    assert granted({0}, {1, 2}) is None
    assert granted({0, 1, 2}, {2}) == [0, 1, 2]


def test_who_is_silent_gets_as_few_samples_as_it_may_have_until_it_is_heard_again() -> None:
    dealing = Dealing(24, ShareLimits((2, 2), (24, 24))).among((0, 1), 0, frozenset({0}))
    assert dealing.counts(0) == {0: 2, 1: 22}
    assert dealing.among((0, 1), 1).counts(1) == {0: 12, 1: 12}


def test_a_replica_that_is_back_gets_the_share_that_it_had() -> None:
    """The other one is faster by the sample while it is alone, with larger micro-batches: it kept 14."""
    dealing = Dealing(24, ShareLimits((2, 2), (24, 24))).among((0, 1), 0)
    dealing = dealing.with_batch(0, {0: 12, 1: 12}, {0: 0.6, 1: 0.6}, takes_effect=3)
    alone = dealing.among((0,), 1).with_batch(1, {0: 24}, {0: 0.9}, takes_effect=4)
    assert alone.counts(1) == {0: 24}
    assert alone.among((0, 1), 2).counts(2) == {0: 12, 1: 12}


def test_a_round_goes_on_without_a_silent_member_before_its_lease_and_the_grace_window_end() -> None:
    settings = replace(settings_for(3, 1), grace_s=30.0)
    state, numbers = begun(settings), dict.fromkeys(RANKS, 0)

    def said(state: CoordinatorState, rank: RankId, now_s: float, **fields: object) -> CoordinatorState:
        numbers[rank] += 1
        epoch = state.membership.epoch
        report = Report(rank, numbers[rank], epoch, "", **fields)  # type: ignore[arg-type]
        return step(state, report, now_s).state

    for now_s in (0.001, 0.002):  # the second time they know the epoch
        for rank in RANKS:
            state = said(state, rank, now_s, wants=1)
    for rank in RANKS[:2]:
        state = said(state, rank, 0.01, wants=1, rounds=(RoundAt(ready=0, num_samples=4),))
    assert word_for(state, RANKS[0]).grants == ()

    silent_s = wake_s(state, 0.01)
    assert 0.01 < silent_s < settings.lease_s
    state = step(state, Tick(), silent_s + 1e-3).state
    word = word_for(state, RANKS[0])
    assert [part.replica for part in word.grants[0].parts] == [0, 1]
    assert len(word.members) == 3

    state = said(state, RANKS[0], silent_s + 2e-3, wants=2, rounds=(RoundAt(ready=0, num_samples=4),))
    counts = {deal.replica: deal.num_samples for deal in word_for(state, RANKS[0]).deals if deal.batch == 1}
    assert counts[2] == 1


def test_a_word_has_who_is_gone_after_which_step_and_whether_it_was_silent_or_has_ended() -> None:
    settings = settings_for(3, 1)
    state, numbers = begun(settings), dict.fromkeys(RANKS, 0)

    def said(state: CoordinatorState, rank: RankId, now_s: float, **fields: object) -> CoordinatorState:
        numbers[rank] += 1
        report = Report(rank, numbers[rank], state.membership.epoch, "10.0.0.1 4711", **fields)  # type: ignore[arg-type]
        return step(state, report, now_s).state

    for now_s in (0.001, 0.002):
        for rank in RANKS:
            state = said(state, rank, now_s)
    changes = Changes(settings.batch_size, is_quorum=True)
    assert changes.in_word(word_for(state, RANKS[0])) == []
    state = replace(state, lines=(replace(state.lines[0], committed=41),))

    late_s = settings.lease_s
    for rank in RANKS[:2]:
        state = said(state, rank, late_s, rounds=(RoundAt(committed=41),))
    state = step(state, Tick(), late_s + 0.1).state
    for rank in RANKS[:2]:
        state = said(state, rank, late_s + 0.15, rounds=(RoundAt(committed=41),))
    (silent,) = changes.in_word(word_for(state, RANKS[0]))
    assert silent == MembershipChange(2, "10.0.0.1", 41, Absence.SILENT)
    assert silent.text == "Replica 2 (10.0.0.1) is gone after step 41"

    for rank in RANKS[:2]:
        state = said(state, rank, late_s + 0.2, rounds=(RoundAt(committed=41),))
    state = step(state, Ended(Incarnation(1, 0)), late_s + 0.3).state
    state = said(state, RANKS[0], late_s + 0.4, rounds=(RoundAt(committed=41),))
    assert [one.why for one in changes.in_word(word_for(state, RANKS[0]))] == [Absence.ENDED]
    assert changes.in_word(word_for(state, RANKS[0])) == []


def test_a_replica_that_comes_back_is_a_change_and_one_that_has_done_all_its_batches_is_none() -> None:
    members = tuple(Member(one, 0, ("10.0.0.1 4711",)) for one in range(2))
    back = Member(1, 1, ("10.0.0.1 4712",), first=59)
    gone = Gone(1, 0, 41, Absence.SILENT, "10.0.0.1 4711")
    changes = Changes(8, is_quorum=True)
    assert changes.in_word(CoordinatorReply(1, 1, members=members, is_installed=True)) == []
    word = CoordinatorReply(3, 2, members=(members[0], back), gone=(gone,))
    assert changes.in_word(word) == [], "its epoch is not installed"
    both = changes.in_word(replace(word, is_installed=True))
    assert [one.text for one in both] == [
        "Replica 1 (10.0.0.1) is gone after step 41",
        "Replica 1 (10.0.0.1) is back at step 60",
    ]
    left = Gone(1, 1, 100, Absence.LEFT, "10.0.0.1 4712")
    assert changes.in_word(CoordinatorReply(4, 3, members=members[:1], gone=(left,), is_installed=True)) == []


def test_where_weights_are_averaged_the_step_is_that_of_the_samples_that_were_dealt() -> None:
    changes = Changes(8, is_quorum=False)
    changes.in_word(CoordinatorReply(1, 1, members=(Member(0, 0, ("a",)),), is_installed=True))
    (back,) = changes.in_word(
        CoordinatorReply(2, 2, members=(Member(0, 1, ("a",), first=3),), fresh=80, is_installed=True)
    )
    assert back.step == 10
    settings = replace(settings_for(2, 1), mode=SyncMode.DILOCO)
    state = begun(settings)
    pool = replace(state.pool, fresh=5 * settings.batch_size)
    member, membership = Member(1, 0, ("a",)), state.membership.with_over(Incarnation(1, 0))
    state = replace(state, pool=pool).with_dropped(membership, [member])
    assert state.gone == (Gone(1, 0, 5, Absence.ENDED, "a"),)
