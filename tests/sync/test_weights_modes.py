"""`groups` and `diloco` through the coordinator: reports in, words out."""

from dataclasses import replace
from random import Random

import pytest

from bireme.sync.coordinator.coordinator import begun, step, word_for
from bireme.sync.coordinator.host import CoordinatorCandidate, beginner, host_step, taken_up
from bireme.sync.coordinator.messages import (
    CoordinatorReply,
    GroupAt,
    Incarnation,
    Known,
    RankId,
    Report,
    RoundAt,
    Window,
)
from bireme.sync.coordinator.samples import Began, Committed, GroupSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Heard, Tick
from tests.support.coordinated import settings_for
from tests.support.extent import draws


class Talk:
    """Ranks that report when a test says so, one millisecond after the other."""

    def __init__(self, mode: SyncMode, num_replicas: int, num_stages: int, **more: object) -> None:
        settings = settings_for(num_replicas, num_stages)
        self.state = begun(replace(settings, mode=mode, **more))  # type: ignore[arg-type]
        self.now_s = 0.0
        self.lines: list[Began | Committed] = []
        self.is_lasting = False
        """Whether the last lines had to be on the disk."""
        self.reports = {
            rank: Report(rank, 0, 0, "")
            for rank in (RankId(r, 0, s) for r in range(num_replicas) for s in range(num_stages))
        }
        for _ in range(2):  # the second time they know the epoch
            for rank in self.reports:
                self.say(rank)

    def say(self, rank: RankId, **changes: object) -> set[RankId]:
        """A rank reports; whom that is news for."""
        self.now_s += 0.001
        old = self.reports[rank]
        epoch = self.state.membership.epoch
        self.reports[rank] = replace(old, number=old.number + 1, epoch=epoch, **changes)  # type: ignore[arg-type]
        done = step(self.state, self.reports[rank], self.now_s)
        self.state = done.state
        self.lines += done.lines
        self.is_lasting = done.is_lasting if done.lines else self.is_lasting
        return {told for told, _ in done.words}

    def end(self, replica: int) -> None:
        self.now_s += 0.001
        self.state = step(self.state, Ended(Incarnation(replica, 0)), self.now_s).state
        self.reports = {rank: one for rank, one in self.reports.items() if rank.replica != replica}
        for rank in self.reports:
            self.say(rank)

    def word(self, rank: RankId) -> CoordinatorReply:
        return word_for(self.state, rank)

    @property
    def committed(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.batch, one.members) for one in self.lines if isinstance(one, Committed)]


def test_in_groups_samples_count_once_the_weights_of_all_stages_are_in_a_group_with_others() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 2, num_lines=0)
    for rank in talk.reports:
        talk.say(rank, wants=1)
    own = {deal.replica: deal.num_samples for deal in talk.word(RankId(0, 0, 0)).deals}
    assert own == {0: 6, 1: 6}
    for rank in sorted(talk.reports, key=lambda one: -one.stage):
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    group = talk.word(RankId(0, 0, 0)).group
    assert group is not None
    assert [one.replica for one in group.members] == [0, 1]
    for rank in talk.reports:
        assert talk.committed == []
        word = talk.word(rank).group
        assert word is not None
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0, summed=word.number, attempt=word.attempt))
    assert talk.committed == [(0, (0,)), (0, (1,))]
    assert not talk.is_lasting
    words = [talk.word(rank).group for rank in talk.reports]
    assert all(word is not None and word.is_settled for word in words)


def test_a_group_of_replicas_forms_and_counts_once_all_their_ranks_are_there_and_hold_its_mean() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 2, num_lines=0, groups=GroupSettings(of_replicas=True))
    for rank in talk.reports:
        talk.say(rank, wants=1)
    for rank in talk.reports:
        assert talk.word(rank).group is None
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    words = [talk.word(rank).group for rank in talk.reports]
    assert words == [words[0]] * 4, "all ranks of all members are told the same"
    assert words[0] is not None
    assert [one.replica for one in words[0].members] == [0, 1]
    at = GroupAt(arrived=0, wait_s=1.0, summed=words[0].number, attempt=words[0].attempt)
    for rank in talk.reports:
        assert talk.committed == []
        talk.say(rank, group=at)
    assert talk.committed == [(0, (0,)), (0, (1,))]
    settled = [talk.word(rank).group for rank in talk.reports]
    assert all(word is not None and word.is_settled for word in settled)


def test_a_group_of_replicas_is_made_again_if_any_rank_of_a_member_could_not_reach_another() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 2, num_lines=0, groups=GroupSettings(of_replicas=True))
    for rank in talk.reports:
        talk.say(rank, wants=1, group=GroupAt(arrived=0, wait_s=1.0))
    first, *others = talk.reports
    word = talk.word(first).group
    assert word is not None
    for rank in others:
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0, summed=word.number, attempt=word.attempt))
    talk.say(first, group=GroupAt(arrived=0, wait_s=1.0, attempt=word.attempt, is_broken=True))
    again = [talk.word(rank).group for rank in talk.reports]
    assert again == [replace(word, attempt=word.attempt + 1)] * 4


def test_the_ranks_of_a_replica_follow_the_one_that_has_gone_on_where_another_coordinator_takes_up() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 2, num_lines=0, groups=GroupSettings(of_replicas=True))
    for rank in talk.reports:
        talk.say(rank, wants=1, group=GroupAt(arrived=0, wait_s=1.0))
    word = talk.word(RankId(0, 0, 0)).group
    assert word is not None
    known = {rank: Known(talk.word(rank)) for rank in talk.reports}
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0, summed=word.number, attempt=word.attempt))
    settled = talk.word(RankId(0, 0, 0)).group
    # One rank has heard that the group counts and is at its next batch; the others have heard nothing.
    gone_on = RankId(0, 0, 1)
    talk.say(gone_on, group=GroupAt(arrived=1, wait_s=1.0, last=settled))
    known[gone_on] = Known(replace(talk.word(gone_on), group=None))
    heard = {
        rank: Heard(replace(report, known=known[rank]), talk.now_s) for rank, report in talk.reports.items()
    }
    taken = taken_up(talk.state.settings, CoordinatorCandidate(0, 1), heard, is_late=False)
    assert taken is not None
    for rank in talk.reports:
        assert word_for(taken.state, rank).group == settled


def test_a_round_without_samples_is_made_if_a_replica_waits_for_it_and_not_for_those_that_drain() -> None:
    talk = Talk(SyncMode.DILOCO, 2, 1)
    nothing = RoundAt(ready=0)
    for rank in talk.reports:
        talk.say(rank, rounds=(nothing, RoundAt()))
    assert not talk.word(RankId(0, 0, 0)).grants
    talk.say(RankId(0, 0, 0), rounds=(replace(nothing, is_due=True), RoundAt()))
    (grant,) = talk.word(RankId(0, 0, 0)).grants
    assert [part.num_samples for part in grant.parts] == [0, 0]


def test_an_attempt_after_a_broken_one_of_another_fragment_has_a_later_number() -> None:
    """Ranks ignore messages that are older than their last attempt, whichever fragment that was of."""
    talk = Talk(SyncMode.DILOCO, 2, 1, num_lines=2)
    ready = RoundAt(ready=0, num_samples=4)
    for rank in talk.reports:
        talk.say(rank, rounds=(ready, ready, RoundAt()))
    (first,) = talk.word(RankId(0, 0, 0)).grants
    talk.say(RankId(0, 0, 0), rounds=(replace(ready, lost=(1,)), ready, RoundAt()))
    (second,) = talk.word(RankId(0, 0, 0)).grants
    assert (first.line, second.line) == (0, 1)
    assert second.attempt > first.attempt


def test_what_a_replica_is_dealt_is_news_for_its_own_ranks_alone_and_a_group_for_its_members() -> None:
    talk = Talk(SyncMode.GROUPS, 3, 2, num_lines=0)
    first, second, _ = ({RankId(replica, 0, stage) for stage in range(2)} for replica in range(3))
    assert talk.say(RankId(0, 0, 1), wants=1) == first
    at = GroupAt(arrived=0, wait_s=0.0015)
    assert talk.say(RankId(0, 0, 1), group=at) == {RankId(0, 0, 1)}
    assert talk.say(RankId(1, 0, 1), group=at) == {RankId(1, 0, 1)}
    assert talk.say(RankId(2, 0, 0)) == {*first, *second, RankId(2, 0, 0)}


@pytest.mark.parametrize("seed", range(draws(100, 5)))
def test_nothing_more_follows_after_what_ranks_say_of_their_groups(seed: int) -> None:
    """Such reports do not go through all rules; a tick at the same time does."""
    random = Random(seed)
    talk = Talk(SyncMode.GROUPS, 3, 2, num_lines=0)
    settled, formed = 0, set[int]()
    for _ in range(200):
        rank = random.choice(list(talk.reports))
        at, group = talk.reports[rank].group or GroupAt(), talk.word(rank).group
        is_in = group is not None and any(
            (one.replica, one.batch) == (rank.replica, at.arrived) for one in group.members
        )
        if at.arrived is None or (is_in and group is not None and group.is_settled):
            batch = 0 if at.arrived is None else at.arrived + 1
            settled += is_in
            talk.say(rank, group=GroupAt(arrived=batch, wait_s=0.002), wants=batch + 2)
        elif is_in and group is not None:
            formed.add(group.number)
            talk.say(rank, group=replace(at, summed=group.number, attempt=group.attempt))
        else:
            talk.say(rank)
        assert step(talk.state, Tick(), talk.now_s).words == ()
    assert settled > 10
    assert len(formed) > 3
    assert len(talk.committed) == len(set(talk.committed)) > 3


def test_all_members_of_a_group_are_told_the_same_members_under_the_same_number() -> None:
    talk = Talk(SyncMode.GROUPS, 3, 1, num_lines=0)
    for rank in reversed(talk.reports):
        talk.say(rank, wants=1)
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    (told,) = {talk.word(rank).group for rank in talk.reports}
    assert told is not None
    assert [one.replica for one in told.members] == [0, 1, 2]


def test_messages_of_an_old_epoch_change_nothing() -> None:
    """A rank that does not know yet that another one is gone has said what it says to that one, too."""
    talk = Talk(SyncMode.DILOCO, 3, 1, num_lines=1)
    for rank in talk.reports:
        talk.say(rank, wants=1)
    old, of_dead = talk.state.membership.epoch, talk.reports[RankId(2, 0, 0)]
    talk.end(2)
    before, ledger = talk.word(RankId(0, 0, 0)), list(talk.lines)
    rounds = (RoundAt(ready=0, num_samples=8, trained=1), RoundAt(ready=0, trained=1))
    for rank, last in [*talk.reports.items(), (of_dead.rank, of_dead)]:
        late = replace(last, number=last.number + 1, epoch=old, rounds=rounds)
        done = step(talk.state, late, talk.now_s)
        talk.state = done.state
        after = talk.word(RankId(0, 0, 0))
        assert (after.epoch, after.members, after.grants, after.commits) == (
            (before.epoch, before.members, (), ())
        ), rank
        assert [*ledger, *done.lines] == ledger
    for rank, last in talk.reports.items():
        talk.reports[rank] = replace(last, number=last.number + 1)
        talk.say(rank, rounds=rounds)
    assert talk.word(RankId(0, 0, 0)).grants  # the same is heard in the new epoch


def test_a_member_of_a_group_that_dies_leaves_its_samples_to_the_others() -> None:
    talk = Talk(SyncMode.GROUPS, 3, 1, num_lines=0)
    for rank in talk.reports:
        talk.say(rank, wants=1)
    lost = next(one for one in talk.state.pool.listed() if one.replica == 2).samples
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    talk.end(2)
    word = talk.word(RankId(0, 0, 0)).group
    assert word is not None
    assert ([one.replica for one in word.members], word.attempt) == ([0, 1], 1)
    assert talk.state.pool.waiting == lost
    talk.say(RankId(0, 0, 0), wants=2)
    assert talk.state.pool.waiting == ()


def test_in_diloco_a_round_of_each_fragment_makes_samples_count_and_a_slow_replica_is_left_out() -> None:
    talk = Talk(SyncMode.DILOCO, 3, 1, num_lines=2, grace_s=0.01)
    for rank in talk.reports:
        talk.say(rank, wants=2)

    def contribute(line: int, replicas: tuple[int, ...]) -> None:
        for replica in replicas:
            rank = RankId(replica, 0, 0)
            rounds = list(talk.reports[rank].rounds or (RoundAt(), RoundAt()))
            rounds[line] = RoundAt(ready=0, num_samples=8, trained=2)
            talk.say(rank, rounds=tuple(rounds))
        for _ in range(20):
            talk.say(RankId(0, 0, 0))
        (grant,) = talk.word(RankId(0, 0, 0)).grants
        assert [one.replica for one in grant.parts] == list(replicas)
        for replica in replicas:
            rank = RankId(replica, 0, 0)
            rounds = list(talk.reports[rank].rounds)
            rounds[line] = replace(rounds[line], summed=0, attempt=grant.attempt)
            talk.say(rank, rounds=tuple(rounds))

    contribute(0, (0, 1))
    assert talk.committed == []
    (commit,) = talk.word(RankId(2, 0, 0)).commits
    assert [(one.target, one.source in (0, 1)) for one in commit.sources] == [(2, True)]
    contribute(1, (0, 1))
    assert talk.committed == [(0, (0,)), (1, (0,)), (0, (1,)), (1, (1,))]


def test_a_window_ends_where_its_samples_are_dealt_and_the_mean_of_all_makes_them_count() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0)
    first, second = talk.reports
    talk.say(first, wants=9, window=Window(0, 24))
    talk.say(second, wants=1, window=Window(0, 24))
    ends = {one.replica: (one.batch, one.until) for one in talk.word(first).ends}
    assert ends == {0: (4, 24), 1: (0, 24)}
    assert [one.num_samples for one in talk.word(first).deals] == [6] * 4
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(is_drained=True), rounds=(RoundAt(ready=0, trained=4),))
    (grant,) = talk.word(first).grants
    assert [one.replica for one in grant.parts] == [0, 1]
    assert talk.committed == []
    for rank in talk.reports:
        talk.say(rank, rounds=(RoundAt(ready=0, trained=4, summed=0, attempt=grant.attempt),))
    assert talk.committed == [(batch, (0,)) for batch in range(4)]
    assert talk.is_lasting


def test_who_comes_first_in_a_window_waits_for_those_that_have_drained_in_the_one_before() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0)
    first, second = talk.reports
    for rank in talk.reports:
        talk.say(rank, wants=1, window=Window(0, 12))
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(is_drained=True), rounds=(RoundAt(ready=0, trained=1),))
    (grant,) = talk.word(first).grants
    for rank in talk.reports:
        talk.say(rank, rounds=(RoundAt(ready=0, trained=1, summed=0, attempt=grant.attempt),))
    talk.say(first, wants=2, window=Window(1, 24), group=GroupAt(), rounds=(RoundAt(committed=1),))
    talk.say(first, group=GroupAt(arrived=1, wait_s=1.0))
    assert talk.word(first).group is None
    talk.say(second, wants=2, window=Window(1, 24), group=GroupAt(), rounds=(RoundAt(committed=1),))
    talk.say(second, group=GroupAt(arrived=1, wait_s=1.0))
    group = talk.word(first).group
    assert group is not None
    assert [one.replica for one in group.members] == [0, 1]


def test_a_rank_that_has_not_entered_the_window_yet_does_not_end_it_for_its_replica() -> None:
    talk = Talk(SyncMode.GROUPS, 1, 2, num_lines=0)
    first, second = talk.reports
    for rank in talk.reports:
        talk.say(rank, window=Window(0, 0))
    talk.say(second, window=Window(0, 24))
    talk.say(second, wants=1)
    word = talk.word(first)
    assert word.ends == ()
    assert [one.num_samples for one in word.deals] == [12]


def test_a_window_that_somebody_asks_to_end_ends_with_a_batch_of_the_run() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0)
    first, second = talk.reports
    talk.say(first, wants=3, window=Window(0, 120))
    talk.say(second, means=1, window=Window(0, 120))
    talk.say(second, wants=2)
    talk.say(first, wants=4)
    assert {one.replica: (one.batch, one.until) for one in talk.word(first).ends} == {0: (3, 24), 1: (1, 24)}


def test_what_a_replica_offered_before_the_last_mean_is_not_meant_any_more() -> None:
    talk = Talk(SyncMode.DILOCO, 2, 1, num_lines=1, grace_s=0.01)
    for rank in talk.reports:
        talk.say(rank, rounds=(RoundAt(ready=0), RoundAt(ready=0)), window=Window(0, 12))
    (grant,) = talk.word(RankId(0, 0, 0)).grants
    assert grant.line == 1  # those who have nothing to add make no round of a fragment
    for rank in talk.reports:
        mean = RoundAt(ready=0, summed=0, attempt=grant.attempt)
        talk.say(rank, rounds=(RoundAt(ready=0), mean))
    first, second = talk.reports
    mean = RoundAt(committed=1)
    talk.say(first, rounds=(RoundAt(ready=0, num_samples=6), mean), window=Window(1, 24))
    assert talk.word(first).grants == ()
    talk.say(second, rounds=(RoundAt(ready=0, num_samples=6), mean), window=Window(1, 24))
    assert [one.line for one in talk.word(first).grants] == [0]


def test_a_coordinator_of_averages_waits_for_members_that_were_all_silent_for_longer_than_the_lease() -> None:
    """As after all of them were stopped. Nobody could take up what it knows of groups."""
    settings = replace(settings_for(2, 1), mode=SyncMode.GROUPS, num_lines=0)
    host = beginner(settings, 1)
    for number in (1, 2):
        for replica in range(2):
            epoch = 0 if host.state is None else host.state.membership.epoch
            report = Report(RankId(replica, 0, 0), number, epoch, "", wants=1)
            host = host_step(host, report, 0.001 * number).host
    assert host.state is not None
    before = host.state
    done = host_step(host, Tick(), 10 * settings.lease_s)
    assert not done.resigns
    assert done.host.state is not None
    assert done.host.state.membership.members == before.membership.members
    assert done.host.state.pool == before.pool


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_samples_that_count_are_on_the_disk_before_ranks_hear_of_it_where_another_host_may_take_up(
    num_hosts: int,
) -> None:
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0)
    for rank in talk.reports:
        talk.say(rank, wants=1)
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    first, second = talk.reports
    holds = GroupAt(arrived=0, wait_s=1.0, summed=0)
    talk.say(first, group=holds)
    host = replace(beginner(talk.state.settings, num_hosts), state=talk.state)
    last = talk.reports[second]
    done = host_step(host, replace(last, number=last.number + 1, group=holds), talk.now_s)

    assert [one.members for one in done.lines if isinstance(one, Committed)] == [(0,), (1,)]
    assert done.is_lasting is (num_hosts > 1)


@pytest.mark.parametrize("num_holders", [1, 2])
def test_a_coordinator_that_takes_up_counts_a_group_if_all_who_call_hold_its_mean(num_holders: int) -> None:
    """If one of them does not, both wait for a group again. What was dealt stays dealt."""
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0)
    for rank in talk.reports:
        talk.say(rank, wants=2)
    for rank in talk.reports:
        talk.say(rank, group=GroupAt(arrived=0, wait_s=1.0))
    heard, holds = {}, [0] * num_holders + [None] * (2 - num_holders)
    for (rank, last), summed in zip(talk.reports.items(), holds, strict=True):
        at, known = GroupAt(arrived=0, wait_s=1.0, summed=summed), Known(talk.word(rank))
        heard[rank] = Heard(replace(last, number=last.number + 1, group=at, known=known), talk.now_s)
    taken = taken_up(talk.state.settings, CoordinatorCandidate(0, 1), heard, is_late=False)

    assert taken is not None
    assert (taken.state.pool, taken.state.dealt_to) == (talk.state.pool, talk.state.dealt_to)
    talk.state, talk.reports = taken.state, {rank: one.report for rank, one in heard.items()}
    for rank in talk.reports:
        talk.say(rank, known=None)
    groups = [talk.word(rank).group for rank in talk.reports]
    assert [one and (one.number, one.is_settled) for one in groups] == (
        [(0, True)] * 2 if num_holders == 2 else [(1, False)] * 2
    )


def test_a_replica_leaves_once_all_of_its_ranks_have() -> None:
    """Who leads has left only when nobody of it writes any more; none of its ranks is dropped meanwhile."""
    talk = Talk(SyncMode.GROUPS, 2, 2, num_lines=0)
    first, second, *others = talk.reports
    talk.say(first, is_leaving=True)
    assert [one.replica for one in talk.word(others[0]).members] == [0, 1]
    assert not talk.word(second).is_dropped
    talk.say(second, is_leaving=True)
    assert [one.replica for one in talk.word(others[0]).members] == [1]


def test_replicas_that_all_wait_for_each_other_for_the_timeout_are_told_so_and_others_are_not() -> None:
    talk = Talk(SyncMode.GROUPS, 2, 1, num_lines=0, timeout_s=0.5, lease_s=0.4)
    first, second = talk.reports

    def wait() -> str:
        for _ in range(400):  # of which none is silent for the lease
            talk.say(first)
            talk.say(second)
        return talk.word(first).standstill

    talk.say(first, waits="a mean of the replicas")
    assert wait() == ""
    talk.say(second, waits="replica 0 to leave")
    talk.say(first, wants=1)  # which is news
    found = wait()
    assert "nothing has happened for 0.5 s: rank 0 of replica 0 for a mean of the replicas" in found
    assert "rank 0 of replica 1 for replica 0 to leave" in found


def test_a_member_that_is_silent_is_dropped_before_the_others_seem_to_stand_still() -> None:
    talk = Talk(SyncMode.GROUPS, 3, 1, num_lines=0, timeout_s=0.5)
    *others, _ = talk.reports
    for rank in talk.reports:
        talk.say(rank, waits="a mean of the replicas")
    while len(talk.word(others[0]).members) == 3:
        for rank in others:
            talk.say(rank)
        assert not talk.state.standstill


def test_members_are_told_that_all_of_them_have_the_last_mean_whoever_still_heals() -> None:
    """Nobody ends before, and who heals from another one may never have it."""
    talk = Talk(SyncMode.GROUPS, 3, 1, num_lines=0)
    first, second, third = talk.reports
    talk.end(third.replica)
    late = RankId(third.replica, 1, 0)
    talk.state = step(talk.state, Report(late, 1, 0, ""), talk.now_s).state
    assert talk.word(second).heals[0].donor == first.replica
    for rank in (first, second):
        talk.say(rank, rounds=(RoundAt(ready=0),))
    (grant,) = talk.word(first).grants
    for rank in (first, second):
        talk.say(rank, rounds=(RoundAt(ready=0, summed=0, attempt=grant.attempt),))
    talk.say(second, rounds=(RoundAt(committed=1),))
    before = talk.word(second)
    talk.say(first, rounds=(RoundAt(committed=1),))
    after = talk.word(second)
    assert (before.kept, after.kept) == ((0,), (1,))
    assert after.number > before.number
