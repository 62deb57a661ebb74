"""Ranks that share a machine's cores, and what the engine itself takes: closed forms."""

import pytest

from bireme.cluster.device import EngineCost
from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Processors
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline


def run(
    name: str, stages: int, microbatches: int, processors: Processors | None, batches: int = 12
) -> Timeline:
    program = generate(name, num_stages=stages, num_microbatches=microbatches, num_batches=batches)
    return simulate(program, Costs.per_stage(stages, forward_s=1, backward_s=2), processors=processors)


def on_one(cores: int, ranks: int, threads: int = 1) -> Processors:
    return Processors((cores,), (0,) * ranks, (threads,) * ranks)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_ranks_that_are_always_busy_take_as_much_longer_as_cores_are_fewer(ranks: int, cores: int) -> None:
    """Three workers on two cores were predicted as if each had its own: 214 ms where 354 were measured."""
    m = 2 * ranks
    timeline = run("2bw", ranks, m, on_one(cores, ranks))
    assert timeline.steady_batch_s == pytest.approx(m * (1 + 2) * ranks / cores)


def test_ranks_that_take_turns_need_one_core_between_them() -> None:
    shared, own = (run("sequential", 4, 3, where) for where in (on_one(1, 4), None))
    assert shared.makespan_s == pytest.approx(own.makespan_s)


def test_a_draining_batch_on_one_core_takes_the_work_of_all_ranks() -> None:
    d, m = 3, 4
    assert run("1f1b", d, m, on_one(1, d), 1).makespan_s == pytest.approx(m * d * (1 + 2))


def test_ranks_with_cores_of_their_own_do_not_feel_each_other() -> None:
    apart = Processors((2, 1), (0, 0, 1), (1, 1, 1))
    assert not apart.is_shared()
    assert run("2bw", 3, 3, apart).makespan_s == run("2bw", 3, 3, None).makespan_s


def test_machines_share_apart() -> None:
    """Two ranks on one core set the pace; the third has a core that the two cannot use."""
    timeline = run("2bw", 3, 6, Processors((1, 1), (0, 0, 1), (1, 1, 1)))
    assert timeline.steady_batch_s == pytest.approx(6 * (1 + 2) * 2)


def test_a_rank_takes_as_many_cores_as_it_has_threads_and_no_more() -> None:
    """Ranks of one and of two threads on two cores: each gets one, and the second needs two."""
    program = generate("2bw", num_stages=2, num_microbatches=8, num_batches=12)
    costs = Costs.per_stage(2, forward_s=1, backward_s=2)
    mixed = simulate(program, costs, processors=Processors((2,), (0, 0), (1, 2)))
    # While both are busy the first has done its batch when the second has done half of one. Then it waits.
    assert mixed.steady_batch_s == pytest.approx(8 * 3 + 8 * 3 / 2)
    wide = simulate(program, costs, processors=Processors((4,), (0, 0), (1, 2)))
    assert wide.steady_batch_s == pytest.approx(8 * 3)


def test_a_rank_that_is_woken_loses_time_of_a_core_only_if_all_are_wanted() -> None:
    """Of a narrow model three ranks on two cores left them idle for 14 % of a step that needed both."""
    program = generate("sequential", num_stages=4, num_microbatches=1, num_batches=1)
    engine = EngineCost(wake_share=0.5, wake_s=0.75)
    costs = Costs.per_stage(4, forward_s=1, backward_s=2, engine=engine)
    full, free = (simulate(program, costs, processors=on_one(cores, 4)).makespan_s for cores in (1, 2))
    assert free == pytest.approx(4 * 3)
    # Three forwards lose half of a second, and three backwards, which are long, no more than a process waits.
    assert full == pytest.approx(4 * 3 + 3 * 0.5 + 3 * 0.75)


def test_processors_are_whole_and_there() -> None:
    for cores, machines, threads in [((0.0,), (0,), (1,)), ((1,), (1,), (1,)), ((1,), (0,), (1, 1))]:
        with pytest.raises(BiremeError):
            Processors(cores, machines, threads)


ENGINE = EngineCost(
    instruction_s=1, send_s=2, send_s_per_byte=0.5, receive_s=3, take_s=4, take_s_per_byte=0.25,
    late_s=5, late_s_per_byte=0.125, batch_s=6, agree_s=7, reduce_s=8, update_s=9,
)  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_the_engine_is_counted_where_it_works(shared: bool) -> None:
    """One micro-batch through two stages and back: F, message, F B, message, B, and the batch's end."""
    program = generate("1f1b", num_stages=2, num_microbatches=1, num_batches=1)
    costs = Costs.per_stage(
        2, forward_s=10, backward_s=20, update_s=30, message_bytes=8, reduce_busy_s=40, engine=ENGINE
    )
    network = Links(ranks_per_server=1).network(program) if shared else None
    timeline = simulate(program, costs, network, agree=True)
    send_s, late_s, take_s = 1 + 2 + 0.5 * 8, 5 + 0.125 * 8, 4 + 0.25 * 8
    # The first rank posts its receive before it begins.
    there = (1 + 10) + (1 + 3) + send_s + late_s + take_s + (1 + 10)
    back = (1 + 20) + send_s + late_s + take_s + (1 + 20)
    end = (1 + 40 + 8 + 6) + 7 + (1 + 30 + 9)
    assert timeline.makespan_s == pytest.approx(there + back + end)


def test_an_engine_takes_no_negative_time() -> None:
    with pytest.raises(BiremeError, match="late_s of the engine is -1"):
        EngineCost(late_s=-1)
