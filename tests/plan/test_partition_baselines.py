"""Other planners' partitions are the best of their own cost function, and balance is told apart from time."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.chains import chain_of_numbers, equal_devices
from benchmarks.partitioners.balance import balance_of, sigma_ratio
from benchmarks.partitioners.baselines import BASELINES, pipedream_2bw, pipedream_2bw_s, piper, uniform
from benchmarks.partitioners.dapple import dapple, dapple_latency_s
from bireme.errors import BiremeError
from bireme.plan.partition.chain import Chain
from bireme.plan.partition.loads import Loads, RowLink, StageSetting, loads_of
from bireme.plan.partition.partition import assess
from tests.support.extent import examples

NUMBERS = st.lists(st.integers(1, 20), min_size=1, max_size=9)


def loads(chain: Chain, num_stages: int, link: RowLink | None = None, m: int = 8) -> Loads:
    return loads_of(chain, equal_devices(num_stages, link=link), StageSetting("1f1b", m))


def gpt_like(layers: int) -> Chain:
    names = ["embed", *(f"layers.{k}.{half}" for k in range(layers) for half in ("a", "f")), "head"]
    forward_s = [0.1, *([1.0, 1.5] * layers), 6.0]
    return chain_of_numbers(
        forward_s,
        [2 * one for one in forward_s],
        names=names,
        parameter_bytes=[50, *([4, 8] * layers), 50],
        boundary_bytes=1,
    )


@pytest.mark.parametrize("name", sorted(BASELINES))
@pytest.mark.parametrize("num_stages", [1, 2, 5, 8])
def test_every_planner_gives_each_stage_a_unit(name: str, num_stages: int) -> None:
    tables = loads(gpt_like(8), num_stages, RowLink(10.0))
    partition = assess(tables, BASELINES[name](tables))
    assert len(partition.stages) == num_stages
    assert partition.stages[-1].end == tables.chain.num_units


def test_equal_numbers_differ_by_one_at_most() -> None:
    chain = chain_of_numbers([1.0] * 11, [1.0] * 11)
    assert uniform(loads(chain, 4)) == (3, 6, 9)


@given(NUMBERS, st.data())
def test_parameters_are_as_equal_as_they_can_be(weights: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    chain = chain_of_numbers([1.0] * len(weights), [1.0] * len(weights), parameter_bytes=weights)

    def heaviest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))

    found = BASELINES["parameters"](loads(chain, num_stages))
    assert heaviest(found) == min(map(heaviest, combinations(range(1, len(weights)), num_stages - 1)))


@given(NUMBERS, st.data())
def test_piper_adds_the_transfers_of_both_boundaries_to_the_slowest_stage(
    times: list[int], data: st.DataObject
) -> None:
    num_units = len(times)
    num_stages = data.draw(st.integers(1, num_units))
    boundaries = data.draw(st.lists(st.integers(0, 9), min_size=num_units, max_size=num_units))
    chain = chain_of_numbers(times, times, boundary_bytes=boundaries)

    def per_sample_s(cuts: tuple[int, ...]) -> float:
        into = [0, *(boundaries[cut - 1] for cut in cuts), 0]
        stages = enumerate(pairwise((0, *cuts, num_units)))
        return max(2 * sum(times[a:b]) + 2 * (into[s] + into[s + 1]) / 4 for s, (a, b) in stages)

    found = piper(loads(chain, num_stages, RowLink(4.0)))
    everything = combinations(range(1, num_units), num_stages - 1)
    assert per_sample_s(found) == pytest.approx(min(map(per_sample_s, everything)))


def test_piper_does_not_know_that_devices_differ() -> None:
    chain = chain_of_numbers([1.0] * 8, [1.0] * 8)
    unequal = loads_of(chain, equal_devices(2, speeds=(1.0, 0.25)), StageSetting("1f1b", 4))
    assert piper(unequal) == (4,)


def test_equal_blocks_take_the_embedding_first_and_the_head_last() -> None:
    chain = gpt_like(8)
    assert pipedream_2bw(loads(chain, 4)) == (5, 9, 13)
    assert pipedream_2bw(loads(chain, 3)) == (5, 11)
    with pytest.raises(BiremeError, match="2 layers cannot be dealt out to 3"):
        pipedream_2bw(loads(gpt_like(2), 3))


def test_pipedream_2bw_adds_messages_to_the_slowest_stage_and_overlaps_the_all_reduce() -> None:
    chain = chain_of_numbers([1.0, 1.0], [2.0, 2.0], boundary_bytes=[5, 0], parameter_bytes=800)
    tables = loads(chain, 2, RowLink(10.0), m=4)
    assert pipedream_2bw_s(tables, (1,)) == 3 + 2 * 5 / 10
    assert pipedream_2bw_s(tables, (1,), width=2, sync_bytes_per_s=10.0) == 800 / 10 / 4
    assert pipedream_2bw_s(tables, (1,), width=2) == 4


def test_dapples_latency_of_equal_stages_is_that_of_a_flushed_pipeline() -> None:
    for num_stages, m in ((1, 3), (4, 8), (5, 5)):
        equal = np.ones((1, num_stages))
        latency_s = dapple_latency_s(equal, 2 * equal, np.zeros((1, num_stages)), m)
        assert latency_s[0] == 3 * (m + num_stages - 1)


def test_dapples_pivot_is_the_stage_that_the_batch_waits_for() -> None:
    forward_s, backward_s = np.array([[1.0, 5.0, 1.0]]), np.array([[2.0, 10.0, 2.0]])
    latency_s = dapple_latency_s(forward_s, backward_s, np.zeros((1, 3)), 10)
    assert latency_s[0] == (1 + 5) + 9 * 15 + (2 + 10)
    sync_s = np.array([[0.0, 0.0, 100.0]])
    # Stage 2 is done 10 + 2 s of backwards before stage 1, so most of its all-reduce is left over.
    assert dapple_latency_s(forward_s, backward_s, sync_s, 10)[0] == (1 + 5) + 9 * 15 + 100 - 12


@examples(60)
@given(NUMBERS)
def test_with_two_devices_dapple_finds_the_least_latency(times: list[int]) -> None:
    num_units = len(times)
    if num_units < 2:
        return
    chain = chain_of_numbers(times, times)

    def latency_s(cut: int) -> float:
        stages = np.array([[sum(times[:cut]), 0, sum(times[cut:])]], np.float64)
        return float(dapple_latency_s(stages, stages, np.zeros((1, 3)), 8)[0])

    found = dapple(loads(chain, 2))
    assert latency_s(found[0]) == min(map(latency_s, range(1, num_units)))


def test_balance_is_the_deviation_of_all_stage_times() -> None:
    chain = chain_of_numbers([1.0] * 6, [1.0] * 6)
    tables = loads(chain, 2)
    even, uneven = assess(tables, (3,)), assess(tables, (2,))
    assert (balance_of(even).deviation_s, balance_of(even).variation) == (0, 0)
    assert balance_of(uneven).mean_s == 6
    assert balance_of(uneven).deviation_s == 2
    assert balance_of(uneven).variation == pytest.approx(1 / 3)
    assert sigma_ratio(uneven, even) == math.inf
    assert sigma_ratio(even, even) == 1
    assert sigma_ratio(even, uneven) == 0
