"""A member that says nothing, though its lease has not ended: rounds do not wait for it."""

from dataclasses import replace

from bireme.balance.shares import Limits
from bireme.sync.coordinator.coordinator import begun, step, wake_s, word_for
from bireme.sync.coordinator.dealing import Dealing
from bireme.sync.coordinator.messages import RankId, Report, RoundAt
from bireme.sync.coordinator.rounds import Line, next_grant
from bireme.sync.coordinator.state import State, Tick
from tests.support.coordinated import settings_for

RANKS = [RankId(replica, 0, 0) for replica in range(3)]


def test_a_round_waits_for_nobody_who_is_silent_once_the_quorum_is_ready() -> None:
    def granted(ready: set[int], silent: set[int]) -> list[int] | None:
        samples = dict.fromkeys(ready, 4)
        line = next_grant(Line(0), samples, (0, 1, 2), quorum=2, grace_s=9.0, now_s=1.0, silent=silent)
        return None if line.grant is None else [one.replica for one in line.grant.parts]

    assert granted({0, 1}, {2}) == [0, 1]
    assert granted({0, 1}, set()) is None
    assert granted({0, 1}, {0}) is None
    assert granted({0}, {1, 2}) is None
    assert granted({0, 1, 2}, {2}) == [0, 1, 2]


def test_who_is_silent_gets_as_few_samples_as_it_may_have_until_it_is_heard_again() -> None:
    dealing = Dealing(24, Limits((2, 2), (24, 24))).among((0, 1), 0, frozenset({0}))
    assert dealing.counts(0) == {0: 2, 1: 22}
    assert dealing.among((0, 1), 1).counts(1) == {0: 12, 1: 12}


def test_a_round_goes_on_without_a_silent_member_before_its_lease_and_the_grace_window_end() -> None:
    settings = replace(settings_for(3, 1), grace_s=30.0)
    state, numbers = begun(settings), dict.fromkeys(RANKS, 0)

    def said(state: State, rank: RankId, now_s: float, **fields: object) -> State:
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
