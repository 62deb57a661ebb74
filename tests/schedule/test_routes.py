"""The rank of each micro-batch: shares are kept, spread evenly, and the same on all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.schedule.routes import Routes, microbatch_owner, shares_of_stages

SHARES = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple)


def test_equal_shares_go_round_and_others_are_spread() -> None:
    assert microbatch_owner((2, 2, 2)) == (0, 1, 2, 0, 1, 2)
    assert microbatch_owner((2, 1)) == (0, 1, 0)
    assert microbatch_owner((6, 2)) == (0, 0, 1, 0, 0, 0, 1, 0)


@given(SHARES)
def test_each_replica_takes_its_share_spread_evenly(share: tuple[int, ...]) -> None:
    owners, num = microbatch_owner(share), sum(share)
    assert len(owners) == num
    for replica, own in enumerate(share):
        for end in range(num + 1):
            taken = owners[:end].count(replica)
            assert abs(taken - own * end / num) <= 1 + len(share) / 2


@given(st.integers(1, 9), st.integers(0, 30))
def test_even_shares_differ_by_one_and_the_first_take_the_rest(width: int, more: int) -> None:
    share = shares_of_stages([width], (), width + more)[0]
    assert sum(share) == width + more
    assert list(share) == sorted(share, reverse=True)
    assert share[0] - share[-1] <= 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(4, 9))
def test_every_microbatch_passes_each_stage_on_one_of_its_ranks(widths: list[int], num: int) -> None:
    routes = Routes.wide(shares_of_stages(widths, (), num))
    assert routes.num_ranks == sum(widths)
    for stage, width in enumerate(widths):
        own = [routes.microbatches_of(rank, num) for rank in routes.ranks_of(stage)]
        assert len(own) == width
        assert sorted(k for one in own for k in one) == list(range(num))
        for k in range(num):
            assert k in routes.microbatches_of(routes.rank_of(stage, k), num)
        assert all(routes.stages_of(rank) == (stage,) for rank in routes.ranks_of(stage))


def test_routes_of_one_rank_for_each_stage() -> None:
    routes = Routes((0, 1, 0))
    assert (routes.num_ranks, routes.stages_of(0), routes.rank_of(2, 5)) == (2, (0, 2), 0)
    assert routes.microbatches_of(1, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("widths", "shares", "words"),
    [
        ((), ((2, 2),), "no stage_widths"),
        ((2, 1), ((2, 2),), "shares for 2 replicas"),
        ((2, 1), ((2, 1), (4,)), "replicas of stage 0 take 2 \\+ 1 micro-batches"),
        ((2, 1), ((4, 0), (4,)), "Give each at least one"),
        ((2, 0), (), "Stage 1 has 0 replicas"),
        ((5, 1), (), "Stage 0 has 5 replicas for 4 micro-batches"),
    ],
)
def test_shares_that_do_not_fit_are_refused(
    widths: tuple[int, ...], shares: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(BiremeError, match=words):
        shares_of_stages(widths, shares, 4)


def test_a_plan_refuses_widths_that_are_not_of_its_stages() -> None:
    with pytest.raises(BiremeError, match="3 stage_widths for 2 stages"):
        Plan((1,), 4, "1f1b", stage_widths=(2, 1, 1))
    with pytest.raises(BiremeError, match="leave out width"):
        Plan((1,), 4, "1f1b", width=2, stage_widths=(2, 1))
