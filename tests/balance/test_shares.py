"""Shares are whole samples within their limits, and take the least time that such shares can."""

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bireme.balance import (
    ShareLimits,
    Times,
    batch_seconds,
    fair_shares,
    grown_shares,
    in_proportion,
    knee,
    limits_of,
    shares_by_times,
    split,
)
from bireme.errors import BiremeError
from tests.support.extent import examples

PACES = st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[float], ShareLimits]:
    paces = draw(PACES)
    least = [draw(st.integers(1, 4)) for _ in paces]
    most = [low + draw(st.integers(0, 60)) for low in least]
    return draw(st.integers(sum(least), sum(most))), paces, ShareLimits(tuple(least), tuple(most))


@examples(300)
@given(problems())
def test_shares_add_up_to_the_batch_and_keep_within_limits(
    problem: tuple[int, list[float], ShareLimits],
) -> None:
    batch_size, paces, limits = problem
    shares = fair_shares(batch_size, paces, limits)
    assert sum(shares) == batch_size
    assert limits.hold(shares)


@examples(100)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(3, 9), st.integers(2, 9))
def test_no_other_shares_take_less_time(paces: list[float], batch_size: int, most: int) -> None:
    limits = ShareLimits((1,) * len(paces), (most,) * len(paces))
    assume(batch_size <= most * len(paces))
    found = batch_seconds(fair_shares(batch_size, paces, limits), paces)
    every = (one for one in product(range(1, most + 1), repeat=len(paces)) if sum(one) == batch_size)
    assert found == min(batch_seconds(one, paces) for one in every)


@examples(300)
@given(problems(), st.integers(0, 5), st.floats(1.0, 16.0))
def test_a_replica_that_becomes_faster_never_gets_fewer_samples(
    problem: tuple[int, list[float], ShareLimits], place: int, times: float
) -> None:
    batch_size, paces, limits = problem
    place %= len(paces)
    faster = [pace / times if replica == place else pace for replica, pace in enumerate(paces)]
    assert fair_shares(batch_size, faster, limits)[place] >= fair_shares(batch_size, paces, limits)[place]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_shares_in_proportion_to_a_plan_are_those_of_the_plan(
    sizes: list[int], num_microbatches: int
) -> None:
    limits = limits_of(num_microbatches, [100] * len(sizes))
    shares = in_proportion(num_microbatches * sum(sizes), sizes, limits)
    assert shares == tuple(num_microbatches * size for size in sizes)


@given(st.integers(1, 200), st.integers(1, 20))
def test_micro_batches_of_a_share_differ_by_a_sample_at_most(share: int, num_microbatches: int) -> None:
    sizes = split(share, num_microbatches)
    assert sum(sizes) == share
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_batch_that_no_shares_make_is_refused_with_what_would_do() -> None:
    limits = limits_of(4, [2, 3])
    with pytest.raises(BiremeError, match=r"holds 20 samples of a batch \(8, 12\), but .* is 24"):
        limits.check(24)
    with pytest.raises(BiremeError, match="too small for 2 replicas, whose micro-batches need 8"):
        limits.check(7)


SATURATING = Times((1, 2, 4, 8, 16), (0.10, 0.11, 0.13, 0.20, 0.40))
"""As of a device that is not busy with few samples: 40 samples/s from micro-batches of 8 on."""


def test_the_knee_is_the_smallest_size_with_nearly_the_best_rate() -> None:
    assert knee(SATURATING) == 8
    assert knee(Times((1, 2, 4), (0.1, 0.2, 0.4))) == 1


def test_measured_shares_make_replicas_take_the_same_time_at_their_own_sizes() -> None:
    slow, fast = Times((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0)), Times((1, 8, 32, 64), (0.8, 1.0, 3.2, 6.4))
    shares = shares_by_times((80, 80), 4, [slow, fast], limits_of(4, [40, 40]), margin=0.05)
    assert sum(shares) == 160
    times = [one.at(share / 4) for one, share in zip((slow, fast), shares, strict=True)]
    assert max(times) <= 1.15 * min(times)


def test_devices_that_take_as_long_for_few_samples_as_for_many_keep_their_shares() -> None:
    """Shares went to the one that was a little faster by chance, though no share saved any time."""
    one, other = Times((1, 2, 4, 8), (1.0, 1.0, 1.01, 1.02)), Times((1, 2, 4, 8), (1.03, 1.04, 1.04, 1.05))
    assert shares_by_times((8, 8), 2, [one, other], limits_of(2, [7, 7]), margin=0.05) == (8, 8)


def test_a_grown_batch_lets_every_replica_work_for_the_knee_of_the_slowest() -> None:
    slow, fast = Times((1, 2, 4), (1.0, 1.11, 2.22)), Times((1, 16, 64), (0.1, 0.32, 1.28))
    assert grown_shares(4, [slow, fast], limits_of(4, [64, 64])) == (4 * 2, 4 * 55)
    assert grown_shares(4, [slow, fast], limits_of(4, [64, 30])) == (4 * 2, 4 * 30)
