"""AutoPipe's partitioner: its recurrence is a simulation, its search never worse than where it starts."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.chains import chain_of_numbers, equal_devices
from bireme.cluster.cluster import Overlap
from bireme.plan.partition.autopipe import ChainTimes, Cuts, autopipe, iterate
from bireme.plan.partition.loads import (
    DeviceRow,
    DeviceSlot,
    Loads,
    Recompute,
    RowLink,
    StageSetting,
    loads_of,
)
from bireme.plan.partition.partition import assess, exact
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import Kind
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path
from bireme.simulate.simulator import pairs_that_talk, simulate
from bireme.timeline.timeline import Timeline
from tests.support.extent import examples
from tests.support.partitions import predict

pytestmark = pytest.mark.slow

TIMES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8)


def simulated(times: list[tuple[int, int]], num_microbatches: int, hop_s: float = 0.0) -> Timeline:
    """One batch of 1F1B, each stage standing still while a message comes in."""
    program = generate("1f1b", num_stages=len(times), num_microbatches=num_microbatches)
    forward_s, backward_s = zip(*times, strict=True)
    costs = Costs.per_stage(len(times), forward_s=forward_s, backward_s=backward_s, message_bytes=hop_s)
    network = Network.dedicated(pairs_that_talk(program), bytes_per_s=1.0, overlap=Overlap.RECEIVER)
    return simulate(program, costs, network)


# --- the recurrence ----------------------------------------------------------------------------------------


@examples(200)
@given(TIMES, st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_the_recurrence_is_the_simulation_exactly(
    times: list[tuple[int, int]], num_microbatches: int, hop_s: int, as_published: bool
) -> None:
    """In whole seconds to the last one, for any number of micro-batches and for twice the stages."""
    m = 2 * len(times) if as_published else num_microbatches
    forward_s, backward_s = np.array(times, np.float64).T
    gone = iterate(forward_s, backward_s, m, hop_s=np.full(len(times) - 1, float(hop_s)))
    assert gone.seconds[0] == simulated(times, m, hop_s).makespan_s


def test_a_stages_own_forwards_hold_its_first_backward_up() -> None:
    """The published recurrence lets the first backward of stage 0 begin once a gradient could be there.

    With a forward of 3 s before a stage of 1 s the gradient is back after 5 s, and the second forward only
    done after 6 s. Left out, the batch of four takes 16 s; it takes 17 s.
    """
    assert iterate(np.array([3.0, 1.0]), np.array([1.0, 1.0]), 4).seconds[0] == 17.0
    assert simulated([(3, 1), (1, 1)], 4).makespan_s == 17.0


@examples(100)
@given(TIMES, st.integers(1, 20))
def test_messages_that_overlap_never_take_longer_in_the_simulation_than_without(
    times: list[tuple[int, int]], num_microbatches: int
) -> None:
    """With latency alone the recurrence is what the simulation takes, or less where receives come late."""
    forward_s, backward_s = np.array(times, np.float64).T
    hop_s = np.full(len(times) - 1, 3.0)
    gone_s = iterate(forward_s, backward_s, num_microbatches, hop_s=hop_s, stops=False).seconds[0]
    still_s = iterate(forward_s, backward_s, num_microbatches, hop_s=hop_s).seconds[0]
    program = generate("1f1b", num_stages=len(times), num_microbatches=num_microbatches)
    network = Network.dedicated(pairs_that_talk(program), latency_s=3.0)
    costs = Costs.per_stage(len(times), forward_s=forward_s.tolist(), backward_s=backward_s.tolist())
    assert gone_s <= simulate(program, costs, network).makespan_s
    assert gone_s <= still_s


@examples(60)
@given(TIMES, st.integers(1, 12), st.lists(st.booleans(), min_size=7, max_size=7))
def test_each_link_stops_its_stages_or_does_not(
    times: list[tuple[int, int]], num_microbatches: int, stops: list[bool]
) -> None:
    """Between what it takes if all links do and if none does, and never more than the simulation."""
    forward_s, backward_s = np.array(times, np.float64).T
    own = stops[: len(times) - 1]
    hop_s = np.full(len(own), 3.0)
    all_s, own_s, none_s = (
        iterate(forward_s, backward_s, num_microbatches, hop_s=hop_s, stops=one).seconds[0]
        for one in (True, own, False)
    )
    assert all_s >= own_s >= none_s
    program = generate("1f1b", num_stages=len(times), num_microbatches=num_microbatches)
    paths = {
        pair: Path((), 3.0, Overlap.RECEIVER if own[min(pair)] else Overlap.FULL)
        for pair in pairs_that_talk(program)
    }
    costs = Costs.per_stage(len(times), forward_s=forward_s.tolist(), backward_s=backward_s.tolist())
    assert own_s <= simulate(program, costs, Network((), paths)).makespan_s


def master_of(timeline: Timeline) -> int | None:
    """The last stage that never waits from its first backward to the one after its last forward."""
    for rank in reversed(timeline.ranks):
        ran = [one for one in rank.intervals() if one.instruction.kind in (Kind.FORWARD, Kind.BACKWARD)]
        kinds = [one.instruction.kind for one in ran]
        first = kinds.index(Kind.BACKWARD)
        last = max(place for place, kind in enumerate(kinds) if kind is Kind.FORWARD) + 1
        if all(a.end_s == b.start_s for a, b in pairwise(ran[first : last + 1])):
            return rank.rank
    return None


@examples(200)
@given(TIMES, st.integers(0, 12))
def test_the_master_is_the_last_stage_that_never_waits_once_it_alternates(
    times: list[tuple[int, int]], more: int
) -> None:
    m = len(times) + 1 + more
    forward_s, backward_s = np.array(times, np.float64).T
    expected = master_of(simulated(times, m))
    found = iterate(forward_s, backward_s, m).master[0]
    busy = (forward_s + backward_s).tolist()
    assert found == (len(busy) - 1 - busy[::-1].index(max(busy)) if expected is None else expected)


def test_the_master_of_equal_stages_is_the_last_and_of_unequal_ones_the_slowest() -> None:
    equal = np.ones(4)
    assert iterate(equal, 2 * equal, 8).master[0] == 3
    slow = np.array([1.0, 1.0, 2.0, 1.0])
    assert iterate(slow, 2 * slow, 8).master[0] == 2


def test_many_partitions_at_once_take_what_each_takes_alone() -> None:
    random = np.random.default_rng(3)
    forward_s, backward_s, hop_s = (random.integers(1, 9, (20, n)).astype(float) for n in (5, 5, 4))
    together = iterate(forward_s, backward_s, 7, hop_s=hop_s)
    for row in range(20):
        alone = iterate(forward_s[row], backward_s[row], 7, hop_s=hop_s[row])
        assert (alone.seconds[0], alone.master[0]) == (together.seconds[row], together.master[row])


# --- the search --------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, *, schedule: str = "1f1b", unequal: bool = True) -> Loads:
    """Up to 12 units on up to 4 devices, with memory that is short now and then."""
    num_stages = draw(st.integers(1, 4))
    num_units = draw(st.integers(num_stages, 12))

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=num_units, max_size=num_units))

    forward_s = numbers(1, 30)
    backward_s = [draw(st.integers(2, 3)) * one_s for one_s in forward_s]
    chain = chain_of_numbers(
        forward_s, backward_s, parameter_bytes=numbers(0, 9), kept_bytes=numbers(0, 5), boundary_bytes=4
    )
    seats = tuple(
        DeviceSlot(
            f"device {stage}",
            draw(st.sampled_from([0.5, 1.0])) if unequal else 1.0,
            draw(st.sampled_from([60.0, 120.0, math.inf, math.inf])) if unequal else math.inf,
        )
        for stage in range(num_stages)
    )
    rate = draw(st.sampled_from([2.0, math.inf])) if unequal else math.inf
    link = RowLink(rate, overlap=draw(st.sampled_from([Overlap.RECEIVER, Overlap.FULL])))
    line = DeviceRow(seats, (link,) * (num_stages - 1))
    m = num_stages * draw(st.integers(1, 3)) if unequal else 2 * num_stages
    recompute = draw(st.sampled_from(Recompute)) if unequal else Recompute.NEVER
    return loads_of(chain, line, StageSetting(schedule, m, recompute))


def all_cuts(loads: Loads) -> list[Cuts]:
    """Of all partitions that fit."""
    every = combinations(range(1, loads.chain.num_units), loads.num_stages - 1)
    return [cuts for cuts in every if assess(loads, cuts).fits]


def least_batch_s(loads: Loads, cuts: list[Cuts]) -> float:
    times = ChainTimes(loads).times(cuts)
    return float(
        iterate(
            times.forward_s,
            times.backward_s,
            loads.setting.num_microbatches,
            hop_s=times.hop_s,
            stops=[link.stops for link in loads.line.links],
        ).seconds.min()
    )


@examples(150, derandomize=True)
@given(problems(unequal=False))
def test_on_equal_devices_the_search_finds_the_best_within_a_hundredth(loads: Loads) -> None:
    """Without going through them all."""
    found = autopipe(loads, most_at_once=0)
    assert found is not None
    assert found.batch_s <= found.start_batch_s
    assert found.batch_s <= 1.01 * least_batch_s(loads, all_cuts(loads))


@examples(150, derandomize=True)
@given(problems())
def test_on_any_devices_the_best_of_few_partitions_is_found(loads: Loads) -> None:
    """Speeds, memory, messages and what is run again included."""
    cuts = all_cuts(loads)
    found = autopipe(loads)
    if found is None:
        assert not cuts
        assert not exact(loads).fits
        return
    assert found.partition.fits
    assert all(stage.begin < stage.end for stage in found.partition.stages)
    assert found.batch_s <= found.start_batch_s
    assert found.batch_s == least_batch_s(loads, cuts)
    by_search = autopipe(loads, most_at_once=0)
    assert by_search is not None
    assert by_search.partition.fits
    assert found.batch_s <= by_search.batch_s <= by_search.start_batch_s
    assert autopipe(loads) == found


def test_no_stage_is_left_empty_where_there_are_as_many_units_as_stages() -> None:
    """The published search empties the master stage when it has one unit, and calls that fast."""
    random = np.random.default_rng(11)
    for num_stages in range(1, 9):
        forward_s = random.integers(1, 30, num_stages).astype(float)
        chain = chain_of_numbers(forward_s.tolist(), (2 * forward_s).tolist())
        found = autopipe(loads_of(chain, equal_devices(num_stages), StageSetting("1f1b", 2 * num_stages)))
        assert found is not None
        assert found.partition.cuts == tuple(range(1, num_stages))


def test_load_falls_after_the_master_stage() -> None:
    """So that the last micro-batch comes back without waiting: the best partition is not flat."""
    chain = chain_of_numbers([1.0] * 50, [3.0] * 50)
    found = autopipe(loads_of(chain, equal_devices(8), StageSetting("1f1b", 16)))
    assert found is not None
    assert found.batch_s < found.start_batch_s
    busy_s = [stage.busy_s for stage in found.partition.stages]
    master = busy_s.index(max(busy_s))
    assert sum(busy_s[master + 1 :]) < (len(busy_s) - master - 1) * busy_s[master]


def test_what_the_search_foretells_is_what_the_simulator_says() -> None:
    chain = chain_of_numbers(range(1, 13), [2.0 * one for one in range(1, 13)])
    loads = loads_of(chain, equal_devices(4, speeds=(1, 0.5, 1, 0.25)), StageSetting("1f1b", 8))
    found = autopipe(loads)
    assert found is not None
    assert found.batch_s == pytest.approx(predict(loads, found.partition).makespan_s, rel=1e-12)
