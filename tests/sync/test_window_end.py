"""The last batches of a window: nobody is dealt one that the others would have to wait for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import product
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.balance import ShareLimits
from bireme.sync.coordinator.coordinator import begun, step, wake_s, word_for
from bireme.sync.coordinator.messages import (
    CoordinatorReply,
    GroupAt,
    GroupMember,
    RankId,
    Report,
    RoundAt,
    Window,
)
from bireme.sync.coordinator.samples import Committed, GroupSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Event, Tick
from bireme.sync.coordinator.windows import Trainer, done_without
from tests.support.coordinated import settings_for
from tests.support.extent import draws, examples

SHARE = 4
SELDOM = 1000
"""Batches between groups that are forced, so that nobody waits for these."""
TIMES = st.floats(0.1, 9.0)
TRAINERS = st.lists(st.builds(Trainer, TIMES, TIMES, st.just(SHARE)), min_size=1, max_size=3)


@examples(200)
@given(TRAINERS, st.integers(0, 5))
def test_no_way_to_share_what_is_left_is_done_sooner(trainers: Sequence[Trainer], num_left: int) -> None:
    def done_s(takers: Sequence[int]) -> float:
        return max(one.free_s + takers.count(place) * one.batch_s for place, one in enumerate(trainers))

    best_s = min(done_s(takers) for takers in product(range(len(trainers)), repeat=num_left))
    assert done_without(trainers, num_left * SHARE, inf) == pytest.approx(best_s)
    if num_left:
        found_s = done_without(trainers, num_left * SHARE, best_s)
        assert found_s == pytest.approx(best_s) or found_s > best_s


@examples(200)
@given(TRAINERS, st.integers(1, 5))
def test_who_would_end_first_of_all_gets_the_next_batch(trainers: Sequence[Trainer], num_left: int) -> None:
    first = min(trainers, key=lambda one: one.free_s + one.batch_s)
    others = [one for one in trainers if one is not first]
    assert done_without(others, num_left * SHARE, inf) >= first.free_s + first.batch_s


@dataclass
class _Replica:
    rank: RankId
    batch_s: float
    batch: int = 0
    window: int = 0
    computes: bool = False
    trained: list[int] = field(default_factory=list)
    """How many batches it trained in each window."""


class Run:
    """Replicas of one stage that train windows in groups, each batch in its own time, once they know whether
    there is another one after it. `ends_s` says when the mean at the end of each window counted.
    """

    def __init__(
        self, batch_s: Sequence[float], num_batches: int, num_windows: int, *, is_equal: bool = False
    ) -> None:
        num = len(batch_s)
        settings = settings_for(num, 1, SHARE * num)
        limits = ShareLimits((1,) * num, (SHARE,) * num)
        settings = replace(settings, mode=SyncMode.GROUPS, num_lines=0, lease_s=100.0, limits=limits)
        self.state = begun(replace(settings, groups=GroupSettings(SELDOM), is_equal=is_equal))
        self.now_s = self._due_s = 0.0
        self.ends_s: list[float] = []
        self.places: list[int] = []
        self._size, self._num_windows = num_batches * SHARE, num_windows
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.replicas = [_Replica(RankId(one, 0, 0), own_s) for one, own_s in enumerate(batch_s)]
        self._reports = {one.rank: Report(one.rank, 0, 0, "") for one in self.replicas}
        for _ in range(2):  # the second time they know the epoch
            for own in self.replicas:
                self._say(own)
        for own in self.replicas:
            self._enter(own)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until all windows are over, or that is so."""
        while self._queue and not until():
            self.now_s, _, act = heappop(self._queue)
            act()

    def end(self, replica: int) -> None:
        """A replica dies."""
        own = self.replicas[replica]
        del self._reports[own.rank]
        self._hear(Ended(own.rank.own_life))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def _hear(self, event: Event) -> None:
        done = step(self.state, event, self.now_s)
        self.state = done.state
        for line in done.lines:
            if isinstance(line, Committed):
                self.places += [p for own in line.samples for one in own for p in range(one.begin, one.end)]
        for rank, _ in done.words:
            self._after(1e-4, partial(self._act, self.replicas[rank.replica]))
        due_s = max(wake_s(self.state, self.now_s), self.now_s + 1e-4)
        if not self.now_s < self._due_s <= due_s:
            self._due_s = due_s
            self._after(due_s - self.now_s, self._tick)

    def _tick(self) -> None:
        if len(self.ends_s) < self._num_windows:
            self._hear(Tick())

    def _say(self, own: _Replica, **changes: Any) -> None:
        if own.rank in self._reports:
            last, epoch = self._reports[own.rank], self.state.membership.epoch
            self._reports[own.rank] = replace(last, number=last.number + 1, epoch=epoch, **changes)
            self._hear(self._reports[own.rank])

    def _enter(self, own: _Replica) -> None:
        own.trained.append(0)
        until = (own.window + 1) * self._size
        self._say(own, window=Window(own.window, until), wants=own.batch + 2)

    def _act(self, own: _Replica) -> None:
        """Do what follows from the last word."""
        report, word = self._reports.get(own.rank), word_for(self.state, own.rank)
        if report is None or own.computes or len(own.trained) > self._num_windows:
            return
        if report.epoch != word.epoch:
            self._say(own)
        at, group = report.group or GroupAt(), word.group
        if at.arrived == own.batch:
            if group is None or GroupMember(own.rank.replica, own.batch) not in group.members:
                return
            if not group.is_settled:
                if (at.summed, at.attempt) != (group.number, group.attempt):
                    self._say(own, group=replace(at, summed=group.number, attempt=group.attempt))
                return
            own.batch += 1
        dealt = {one.batch for one in word.deals if one.replica == own.rank.replica}
        has_ended = any((one.replica, one.window) == (own.rank.replica, own.window) for one in word.ends)
        if own.batch in dealt and (has_ended or own.batch + 1 in dealt):
            own.computes = True
            self._after(own.batch_s, partial(self._train, own))
        elif own.batch not in dealt and has_ended:
            self._meet(own, report, word)

    def _train(self, own: _Replica) -> None:
        own.computes = False
        own.trained[-1] += 1
        self._say(own, group=GroupAt(arrived=own.batch, wait_s=1e-3), wants=own.batch + 3)

    def _meet(self, own: _Replica, report: Report, word: CoordinatorReply) -> None:
        at = report.rounds[0] if report.rounds else RoundAt()
        number = own.window
        if word.committed[0] > number:
            if len(self.ends_s) == number:
                self.ends_s.append(self.now_s)
            own.window += 1
            self._say(own, rounds=(RoundAt(committed=own.window),))
            if own.window < self._num_windows:
                self._enter(own)
        elif at.ready != number:
            group = replace(report.group or GroupAt(), is_drained=True)
            rounds = (RoundAt(committed=number, ready=number, trained=own.batch),)
            self._say(own, group=group, rounds=rounds)
        elif word.grants and (at.summed, at.attempt) != (number, word.grants[0].attempt):
            self._say(own, rounds=(replace(at, summed=number, attempt=word.grants[0].attempt),))


def speeds_of(seed: int) -> list[float]:
    """One replica is several times slower than the others."""
    random = Random(seed)
    others = [random.uniform(0.1, 0.12) for _ in range(random.randint(1, 3))]
    return [0.1 * random.choice([3, 5, 10, 20]), *others]


@pytest.mark.parametrize("seed", range(draws(500, 8)))
def test_a_window_ends_as_soon_as_it_can_whoever_is_slow(seed: int) -> None:
    """But for a batch or two of the others, and for what groups take. In the first one nobody knows yet how
    long a batch takes.
    """
    batch_s = speeds_of(seed)
    num_batches = Random(seed).randint(30, 60) * (len(batch_s) - 1)
    run = Run(batch_s, num_batches, 2)
    run.run()
    assert sorted(run.places) == list(range(2 * num_batches * SHARE))
    first_s, second_s = run.ends_s
    least_s = done_without([Trainer(0.0, one, SHARE) for one in batch_s], num_batches * SHARE, inf)
    assert second_s - first_s < 1.02 * least_s + 2 * max(batch_s[1:])


def test_what_a_slow_replica_left_to_others_that_die_is_trained_in_the_next_window() -> None:
    run = Run([1.0, 0.1, 0.1], 50, 3)
    run.run(lambda: any(one.replica == 0 for one in run.state.ends))
    assert not run.ends_s
    assert run.state.pool.num_left(50 * SHARE) > 0
    for replica in (1, 2):
        run.end(replica)
    run.run()
    assert len(run.ends_s) == 3
    assert min(run.replicas[0].trained) > 0
    assert sorted(run.places) == list(range(3 * 50 * SHARE))


@pytest.mark.parametrize("batch_s", [(1.0, 0.1), (0.1, 0.3, 0.11), (2.0, 0.1, 0.1, 0.1)])
def test_with_equal_shares_all_replicas_train_as_many_batches_however_slow_one_is(
    batch_s: Sequence[float],
) -> None:
    run = Run(batch_s, 6 * len(batch_s), 3, is_equal=True)
    run.run()
    assert [one.trained[:3] for one in run.replicas] == [[6, 6, 6]] * len(batch_s)
    assert sorted(run.places) == list(range(3 * 6 * len(batch_s) * SHARE))


def test_with_equal_shares_the_others_train_what_a_replica_that_dies_leaves() -> None:
    run = Run([0.5, 0.1, 0.1], 30, 2, is_equal=True)
    run.run(lambda: run.replicas[0].batch > 2)
    run.end(0)
    run.run()
    assert len(run.ends_s) == 2
    assert sorted(run.places) == list(range(2 * 30 * SHARE))
