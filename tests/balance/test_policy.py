"""Shares follow speeds: soon after a change, and not after chance; held against the best there could be."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replica_speeds.balanced_run import (
    BalancedRun,
    Fixed,
    Following,
    Informed,
    ReplicaCost,
    balanced_run,
)
from bireme.balance import Balance, Policy, ShareLimits, StageWatch, begun, limits_of, rebalance
from bireme.errors import BiremeError
from tests.support.extent import draws, examples

LIMITS = ShareLimits((4,) * 4, (1000,) * 4)
DROP, BACK, NUM_BATCHES = 50, 150, 220
SOON = 10
"""Batches after a change of speed within which shares must have followed."""


def one_slow_for_a_time(jitter: float) -> list[ReplicaCost]:
    """Four replicas, one of which drops to a third of its speed and recovers."""
    usual = ReplicaCost(0.01, jitter=jitter)
    return [ReplicaCost(0.01, speeds=((DROP, 1 / 3), (BACK, 1.0)), jitter=jitter), usual, usual, usual]


def both(
    replicas: list[ReplicaCost], batch_size: int, seed: int, slack: int = 0
) -> tuple[BalancedRun, BalancedRun]:
    """A run whose shares follow, and one that knew, with the same chance."""
    limits = ShareLimits((4,) * len(replicas), (1000,) * len(replicas))
    equal = (batch_size // len(replicas),) * len(replicas)
    rules = (Following(equal, limits, read_ahead=3), Informed(replicas, batch_size, limits))
    following, informed = (
        balanced_run(replicas, NUM_BATCHES, rule, slack=slack, seed=seed) for rule in rules
    )
    return following, informed


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("slack", [0, 1])
def test_shares_follow_a_replica_that_slows_down_and_recovers(jitter: float, slack: int) -> None:
    for seed in range(draws(100, 6)):
        run, possible = both(one_slow_for_a_time(jitter), 320, seed, slack)
        for begin, end in ((DROP + SOON, BACK), (BACK + SOON, NUM_BATCHES)):
            assert run.samples_per_s(begin, end) >= 0.9 * possible.samples_per_s(begin, end), seed


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
def test_shares_change_at_most_once_in_twenty_batches_while_no_speed_does(jitter: float) -> None:
    speeds = (1.0, 1.1, 1.3, 2.0)
    num_changes = []
    for seed in range(draws(100, 6)):
        run, _ = both([ReplicaCost(0.01 / speed, jitter=jitter) for speed in speeds], 320, seed)
        assert all(after - before >= 20 for before, after in zip(run.changes, run.changes[1:], strict=False))
        num_changes.append(len(run.changes))
    assert fmean(num_changes) <= 1 + 2 * (jitter > 0.1)


def test_two_replicas_of_speeds_one_and_ten_do_nine_tenths_of_the_sum_of_both() -> None:
    replicas = [ReplicaCost(0.1), ReplicaCost(0.01)]
    run, _ = both(replicas, 88, 0)
    assert run.samples_per_s(20) >= 0.9 * 110
    equal = balanced_run(replicas, 40, Fixed((44, 44)))
    assert equal.samples_per_s() == pytest.approx(0.18 * 110, rel=0.02)


def test_periodic_load_is_not_made_worse() -> None:
    """It comes and goes faster than shares can follow, so at worst they stay behind it."""
    loaded = ReplicaCost(0.01, load_period=6, load_batches=3, load_speed=0.5)
    replicas = [loaded, ReplicaCost(0.01), ReplicaCost(0.01), ReplicaCost(0.01)]
    run, _ = both(replicas, 320, 0)
    fixed = balanced_run(replicas, NUM_BATCHES, Fixed((80,) * 4))
    assert run.samples_per_s() >= 0.95 * fixed.samples_per_s()


@examples(200)
@given(
    st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5),
    st.lists(st.floats(0.8, 1.2), min_size=5, max_size=60),
)
def test_however_times_scatter_shares_keep_their_sum_and_their_limits(
    paces: list[float], chances: list[float]
) -> None:
    width = len(paces)
    limits = limits_of(2, [200] * width)
    balance = begun((40,) * width)
    for batch, chance in enumerate(chances):
        seconds = [pace * share * chance for pace, share in zip(paces, balance.at(batch), strict=True)]
        before = balance
        balance = rebalance(balance, batch, seconds, limits=limits, policy=Policy(), takes_effect=batch + 4)
        assert sum(balance.shares) == 40 * width
        assert limits.hold(balance.shares)
        if balance.shares != before.shares:
            assert (balance.before, balance.first) == (before.shares, batch + 4)


def test_batches_of_older_shares_say_nothing() -> None:
    balance = Balance((10, 10), (5, 15), 7, ((), ()), is_new=False)
    settings = {"limits": limits_of(1, [20, 20]), "policy": Policy()}
    assert rebalance(balance, 6, [9.0, 1.0], takes_effect=10, **settings) == balance  # type: ignore[arg-type]
    assert rebalance(balance, 7, [9.0, 1.0], takes_effect=11, **settings).paces == ((1.8,), (1 / 15,))  # type: ignore[arg-type]


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(BiremeError, match=r"jitter is 1.5"):
        ReplicaCost(0.1, jitter=1.5)
    with pytest.raises(BiremeError, match="must be greater than 0"):
        ReplicaCost(0.1, speeds=((3, 0.0),))


def test_a_stage_that_has_become_slow_is_told_once_and_a_slow_replica_is_not() -> None:
    watch = StageWatch([0.1, 0.2, 0.1, 0.2], 2)
    slow_replica = [watch.note((8, 8), [0.8, 1.6, 2.4, 4.8]) for _ in range(60)]
    assert slow_replica == [None] * 60
    found = [one for _ in range(80) if (one := watch.note((8, 8), [0.8, 1.6, 2.4, 14.4])) is not None]
    assert [(one.rank, one.replica, one.pipeline_rank) for one in found] == [(3, 1, 1)]
    assert found[0].times == pytest.approx(3.0)
    # 0.1 s of work at a third of the speed and 0.2 s at a ninth: two thirds of a batch's time is waiting.
    assert found[0].saves == pytest.approx(1 - 0.3 / (1 / 3 + 1 / 9) / 1.8)
