"""The exact partition is that of brute force over everything, devices, memory and messages included."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.chains import chain_of_numbers, equal_devices
from bireme.cluster.cluster import Overlap
from bireme.plan.partition.chain import Chain
from bireme.plan.partition.loads import (
    DeviceRow,
    DeviceSlot,
    Loads,
    Recompute,
    RowLink,
    StageSetting,
    loads_of,
    overflows,
)
from bireme.plan.partition.partition import assess, exact, least_sum
from bireme.simulate.costs import Costs
from tests.support.extent import examples
from tests.support.partitions import costs_of, predict


@dataclass(frozen=True, slots=True)
class Problem:
    chain: Chain
    line: DeviceRow
    setting: StageSetting

    def loads(self) -> Loads:
        return loads_of(self.chain, self.line, self.setting)

    def all_cuts(self) -> Iterable[tuple[int, ...]]:
        return combinations(range(1, self.chain.num_units), self.line.num_stages - 1)


@st.composite
def problems(
    draw: st.DrawFn, *, limits: bool = True, schedules: tuple[str, ...] = ("1f1b", "2bw", "gpipe")
) -> Problem:
    num_units = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, min(num_units, 4)))

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=num_units, max_size=num_units))

    chain = chain_of_numbers(
        numbers(1, 9),
        numbers(1, 9),
        update_s=numbers(0, 4),
        parameter_bytes=numbers(0, 20),
        kept_bytes=numbers(0, 9),
        boundary_bytes=numbers(0, 4),
        workspace_bytes=numbers(0, 9),
        optimizer_bytes=numbers(0, 20),
    )
    memory = st.integers(1, 500) if limits else st.just(math.inf)
    seats = tuple(
        DeviceSlot(f"device {stage}", draw(st.sampled_from([0.5, 1.0, 2.0])), float(draw(memory)))
        for stage in range(num_stages)
    )
    links = tuple(
        RowLink(
            draw(st.sampled_from([0.5, 1.0, math.inf])),
            draw(st.integers(0, 2)),
            draw(st.sampled_from(Overlap)),
        )
        for _ in range(num_stages - 1)
    )
    setting = StageSetting(
        draw(st.sampled_from(schedules)),
        num_stages * draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(Recompute)),
    )
    return Problem(chain, DeviceRow(seats, links), setting)


def pace_s(problem: Problem, costs: Costs, again: tuple[int, ...]) -> float:
    """The busiest device or link, worked out from the simulator's costs alone."""
    line, m = problem.line, problem.setting.num_microbatches
    busy_s = []
    for stage, seat in enumerate(line.seats):
        one_s = costs.forward_s[stage] + costs.backward_s[stage] + costs.update_s[stage] / m
        one_s += costs.recompute_s[stage] if stage in again else 0.0
        busy_s.append(one_s / seat.speed)
    for stage, link in enumerate(line.links):
        message_s = costs.message_bytes[stage] / link.bytes_per_s
        if link.overlap is Overlap.FULL:
            busy_s.append(message_s)
        else:
            busy_s[stage] += message_s + link.latency_s
            busy_s[stage + 1] += message_s + link.latency_s
    return max(busy_s)


def by_hand(problem: Problem, loads: Loads) -> float:
    """The least pace of all partitions that fit, bytes as the simulator counts them."""
    least_s = math.inf
    for cuts in problem.all_cuts():
        partition = assess(loads, cuts)
        if partition.fits:
            least_s = min(least_s, pace_s(problem, costs_of(loads, cuts), partition.recompute))
    return least_s


@examples(250)
@given(problems())
def test_the_exact_partition_is_that_of_brute_force(problem: Problem) -> None:
    loads = problem.loads()
    least_s = by_hand(problem, loads)
    found = exact(loads)
    if not found.fits:
        assert least_s == math.inf
        worst = min(
            max(stage.missing_bytes for stage in assess(loads, cuts).stages) for cuts in problem.all_cuts()
        )
        assert max(stage.missing_bytes for stage in found.stages) == worst > 0
    else:
        assert not overflows(problem.chain, problem.line, problem.setting)
        assert found.pace_s == pytest.approx(least_s, rel=1e-12)
        assert all(stage.begin < stage.end for stage in found.stages)
        assert exact(loads) == found


@pytest.mark.slow
@examples(100)
@given(problems(schedules=("1f1b", "2bw", "2bw-fresh")))
def test_what_is_said_to_fit_fits_when_it_is_simulated(problem: Problem) -> None:
    """Where only some stages run their forward again the planner leaves room for a message on each side."""
    loads = problem.loads()
    partition = exact(loads)
    messages = [0, *(2 * problem.chain.boundary_bytes[cut - 1] for cut in partition.cuts), 0]
    for place, kept in enumerate(predict(loads, partition, 5).memory):
        stage = partition.stages[place]
        is_roomy = stage.recompute and problem.setting.recompute is Recompute.WHERE_NEEDED
        room = messages[place] + messages[place + 1] if is_roomy else 0
        assert stage.peak_bytes - room <= kept.peak_bytes <= stage.peak_bytes


def test_2bw_runs_at_the_pace_that_the_partition_foretells() -> None:
    chain = chain_of_numbers([1, 2, 1, 3, 2, 1], [2, 4, 2, 6, 4, 2])
    line = equal_devices(3, speeds=(1.0, 0.5, 2.0))
    loads = loads_of(chain, line, StageSetting("2bw", 6))
    found = exact(loads)
    assert found.fits
    assert predict(loads, found).steady_batch_s == pytest.approx(6 * found.pace_s)


def test_a_slow_device_gets_less_and_one_with_little_memory_too() -> None:
    chain = chain_of_numbers([1.0] * 12, [2.0] * 12, parameter_bytes=10, kept_bytes=1)
    slow = exact(loads_of(chain, equal_devices(3, speeds=(1, 0.5, 1)), StageSetting("2bw", 6)))
    assert slow.fits
    assert [stage.end - stage.begin for stage in slow.stages] == [5, 2, 5]
    seats = (DeviceSlot("large"), DeviceSlot("small", memory_bytes=90), DeviceSlot("large"))
    small = exact(loads_of(chain, DeviceRow(seats, (RowLink(), RowLink())), StageSetting("1f1b", 6)))
    assert small.fits
    assert small.stages[1].end - small.stages[1].begin == 4
    seats = (DeviceSlot("large"), DeviceSlot("small", memory_bytes=60), DeviceSlot("large"))
    smaller = exact(loads_of(chain, DeviceRow(seats, (RowLink(), RowLink())), StageSetting("1f1b", 6)))
    assert smaller.fits
    assert smaller.stages[1].end - smaller.stages[1].begin == 2


def test_only_stages_that_do_not_fit_run_their_forward_again() -> None:
    chain = chain_of_numbers([1.0] * 8, [2.0] * 8, kept_bytes=10, boundary_bytes=1)
    line = equal_devices(4, memory_bytes=36.0)
    assert not exact(loads_of(chain, line, StageSetting("1f1b", 8))).fits
    found = exact(loads_of(chain, line, StageSetting("1f1b", 8, Recompute.WHERE_NEEDED)))
    assert found.fits
    assert found.recompute == (0, 1, 2)


def test_devices_that_do_not_hold_a_model_at_all_are_seen_without_cutting_it() -> None:
    """A third of the search for 1,024 devices went into cuts of shapes whose state no device holds."""
    chain = chain_of_numbers([1] * 4, [1] * 4, parameter_bytes=[100] * 4)
    setting = StageSetting("1f1b", 2)
    for memory_bytes in (150, 1_000_000):
        assert overflows(chain, equal_devices(2, memory_bytes=memory_bytes), setting) == (memory_bytes == 150)


def test_a_stage_that_could_be_longer_does_not_hide_cuts_that_fit() -> None:
    """A first stage of two units left the second stage to begin with an input that it has no room for."""
    chain = chain_of_numbers([1] * 3, [1] * 3, parameter_bytes=[10] * 3, boundary_bytes=[2, 38, 2])
    seats = (DeviceSlot("first", memory_bytes=50), DeviceSlot("last", memory_bytes=150))
    setting = StageSetting("gpipe", 4, Recompute.ALWAYS)
    line = DeviceRow(seats, (RowLink(math.inf, 0),))
    found = exact(loads_of(chain, line, setting))
    assert found.fits
    assert found.cuts == (1,)
    assert not overflows(chain, line, setting)


def test_what_fits_nowhere_says_which_stage_misses_how_much() -> None:
    chain = chain_of_numbers([1.0] * 4, [1.0] * 4, optimizer_bytes=[10, 10, 10, 70])
    seats = (DeviceSlot("red", memory_bytes=40), DeviceSlot("blue", memory_bytes=30))
    found = exact(loads_of(chain, DeviceRow(seats, (RowLink(),)), StageSetting("1f1b", 4)))
    assert [stage.missing_bytes for stage in found.stages] == [0, 40]


@examples(100)
@given(problems(), st.sampled_from([1.0, 1.1, 1.5, math.inf]))
def test_the_shortest_way_through_is_that_of_brute_force(problem: Problem, factor: float) -> None:
    loads = problem.loads()
    found = exact(loads)
    if not found.fits:
        return
    most_s = factor * found.pace_s
    costs = [loads.cost_s(stage) for stage in range(loads.num_stages)]
    cuts = least_sum(costs, loads.link_s, most_s)
    assert cuts is not None
    ways = {
        others: sum(stage.busy_s for stage in partition.stages)
        for others in problem.all_cuts()
        if (partition := assess(loads, others)).fits and partition.pace_s <= most_s
    }
    assert ways[cuts] == pytest.approx(min(ways.values()))


def test_of_equal_partitions_the_one_with_the_most_at_the_end_is_taken() -> None:
    chain = chain_of_numbers([1.0] * 5, [1.0] * 5)
    found = exact(loads_of(chain, equal_devices(3), StageSetting("1f1b", 3)))
    assert found.fits
    bounds = (0, *found.cuts, 5)
    assert [b - a for a, b in pairwise(bounds)] == [1, 2, 2]
