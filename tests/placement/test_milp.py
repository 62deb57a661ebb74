"""Integer programs for placement: the layer over the solver, the bounds, and both kinds of program."""

import math
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from bireme.errors import BiremeError
from bireme.placement.contraction import (
    FoundPlacement,
    Items,
    Weightless,
    fits,
    items_of,
    loads_of,
    simple_bound,
    value_of,
)
from bireme.placement.integer import solve_any, solve_contiguous, spreading_bound
from bireme.placement.program import IntegerProgram, SolverOutcome, frame_of
from bireme.placement.workload import Edge, Node, Objective, Workload
from tests.support.extent import draws
from tests.support.placement_oracles import best_by_force, can_stand_in_line, random_workload, value_by_hand

pytest.importorskip("highspy")

OBJECTIVES = (Objective.TRAINING, Objective.FLUSH)
LONG_S = 60.0
NO_TIME_S = 1e-3

Solver = Callable[..., FoundPlacement]
both = pytest.mark.parametrize("solve", [solve_any, solve_contiguous])


def items_for(solve: Solver, workload: Workload) -> Items:
    """Items that no solution is lost by."""
    return items_of(workload, contiguous=solve is solve_contiguous, weightless=Weightless.STAY)


def chain(
    times: Sequence[float],
    *,
    cost: float = 0.0,
    accelerators: int = 2,
    cpus: int = 0,
    memory: float = math.inf,
) -> Workload:
    """Operators one after the other, of one byte each, three times slower on a CPU."""
    nodes = tuple(Node(place, time, 3 * time, size_bytes=1.0) for place, time in enumerate(times))
    edges = tuple(Edge(place, place + 1, cost) for place in range(len(times) - 1))
    return Workload(nodes, edges, accelerators, cpus, memory)


def devices_of(workload: Workload, items: Items, where: Sequence[int]) -> list[int]:
    """The device of each node."""
    devices = [0] * len(workload.nodes)
    for members, device in zip(items.members, where, strict=True):
        for place in members:
            devices[place] = device
    return devices


def hard_program(num_items: int = 60, num_bins: int = 5) -> tuple[IntegerProgram, int]:
    """Even bins out, which takes for ever to prove; and the number of the column that is made small."""
    program = IntegerProgram()
    chosen = program.add_columns((num_items, num_bins), upper=1.0, is_integer=True)
    largest = program.add_columns(1, cost=1.0)
    weights = np.random.default_rng(0).uniform(1, 10, num_items)
    program.add_rows(chosen, 1.0, lower=1.0, upper=1.0)
    loads = np.hstack([chosen.T, np.repeat(largest[:, np.newaxis], num_bins, axis=0)])
    program.add_rows(loads, np.append(weights, -1.0), upper=0.0)
    return program, int(largest[0])


def check_against_force(solve: Solver, seed: int) -> None:
    """The optimum is found and proven, with and without it as a start, and both oracles agree on it."""
    contiguous = solve is solve_contiguous
    workload = random_workload(Random(seed), most_nodes=7, most_cpus=2)
    items = items_for(solve, workload)
    for objective in OBJECTIVES:
        best = best_by_force(workload, objective, contiguous=contiguous)
        if math.isinf(best):
            with pytest.raises(BiremeError, match="No placement fits"):
                solve(items, objective, time_limit_s=LONG_S)
            continue
        found = solve(items, objective, time_limit_s=LONG_S)
        again = solve(items, objective, time_limit_s=LONG_S, start=found.where)
        for answer in (found, again):
            devices = devices_of(workload, items, answer.where)
            assert fits(items, answer.where)
            assert not contiguous or can_stand_in_line(workload, devices)
            assert answer.value == value_of(loads_of(items, answer.where), objective)
            assert answer.value == pytest.approx(value_by_hand(workload, devices, objective), rel=1e-9)
            assert answer.value == pytest.approx(best, rel=1e-6)
            assert answer.lower_bound <= best * (1 + 1e-12)
            assert answer.lower_bound == pytest.approx(best, rel=1e-6)


@pytest.mark.few(12)
@both
@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_all_placements(solve: Solver, seed: int) -> None:
    check_against_force(solve, seed)


@pytest.mark.few(4)
@both
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 44))
def test_the_optimum_is_that_of_all_placements_of_many_workloads(solve: Solver, seed: int) -> None:
    check_against_force(solve, seed)


@both
def test_a_search_without_time_keeps_its_start(solve: Solver) -> None:
    items = items_for(solve, chain([5.0, 1.0, 4.0, 2.0, 3.0, 3.0], cost=0.5))
    start = (0, 0, 1, 1, 1, 1)
    found = solve(items, Objective.THROUGHPUT, time_limit_s=NO_TIME_S, start=start)
    assert found.where == start
    assert found.value == value_of(loads_of(items, start), Objective.THROUGHPUT)
    assert 0 < found.lower_bound <= 9.5


@both
def test_a_search_without_time_and_start_cuts_the_line(solve: Solver) -> None:
    items = items_for(solve, chain([5.0, 1.0, 4.0, 2.0, 3.0, 3.0], cost=0.5))
    assert solve(items, Objective.THROUGHPUT, time_limit_s=0.0).value == pytest.approx(10.5)


@both
def test_what_no_cut_of_the_line_fits_takes_time_to_be_found(solve: Solver) -> None:
    sizes = [2.0] * 12 + [1.0] * 12
    nodes = tuple(Node(place, 1.0, 1.0, size_bytes=size) for place, size in enumerate(sizes))
    items = items_for(solve, Workload(nodes, (), 12, 0, 3.0))
    with pytest.raises(BiremeError, match="no placement within its time limit"):
        solve(items, Objective.THROUGHPUT, time_limit_s=0.0)
    found = solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S)
    assert found.value == pytest.approx(2.0)
    assert fits(items, found.where)


@both
def test_a_start_may_number_equal_devices_in_any_way(solve: Solver) -> None:
    items = items_for(solve, chain([1.0, 2.0, 3.0, 4.0], cost=0.5, accelerators=3, cpus=2))
    for start in ((2, 2, 1, 0), (4, 2, 0, 1), (1, 1, 1, 1), (4, 3, 2, 2)):
        found = solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S, start=start)
        assert found.value == pytest.approx(4.5)


@both
def test_cpus_alone_take_everything_and_move_nothing(solve: Solver) -> None:
    items = items_for(solve, chain([1.0, 2.0, 3.0], cost=9.0, accelerators=0, cpus=2))
    assert solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S).value == pytest.approx(9.0)


@both
def test_accelerators_alone_pay_for_the_cut_on_both_sides(solve: Solver) -> None:
    items = items_for(solve, chain([1.0, 2.0, 3.0], cost=1.0))
    assert solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S).value == pytest.approx(4.0)


@both
def test_a_cpu_takes_what_memory_does_not_hold(solve: Solver) -> None:
    items = items_for(solve, chain([1.0, 1.0, 1.0], accelerators=1, cpus=1, memory=2.0))
    found = solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S)
    assert found.value == pytest.approx(3.0)
    assert sorted(found.where) == [0, 0, 1]


@both
def test_too_little_memory_for_all_is_said(solve: Solver) -> None:
    items = items_for(solve, chain([1.0, 1.0, 1.0, 1.0, 1.0], memory=2.0))
    with pytest.raises(BiremeError, match="No placement fits: the operators take 5 bytes"):
        solve(items, Objective.THROUGHPUT, time_limit_s=LONG_S)


@both
def test_work_that_takes_no_time_needs_no_search(solve: Solver) -> None:
    items = items_for(solve, chain([0.0, 0.0, 0.0]))
    found = solve(items, Objective.FLUSH, time_limit_s=LONG_S, start=(0, 0, 1))
    assert (found.value, found.lower_bound) == (0.0, 0.0)


@both
def test_times_of_any_scale_are_told_apart(solve: Solver) -> None:
    for scale in (1e-9, 1e9):
        workload = chain([scale * time for time in (1.0, 1.001, 1.002, 1.003)], cost=scale * 0.01)
        found = solve(items_for(solve, workload), Objective.THROUGHPUT, time_limit_s=LONG_S)
        best = best_by_force(workload, Objective.THROUGHPUT, contiguous=solve is solve_contiguous)
        assert found.value == pytest.approx(best, rel=1e-9)


def check_bounds(seeds: range) -> int:
    """No bound is above the best value; how often counting alone was below that which knows of moving."""
    num_raised = 0
    for seed in seeds:
        workload = random_workload(Random(seed), most_nodes=7, most_cpus=1)
        slow = tuple(replace(node, cpu_time=9 * node.accelerator_time) for node in workload.nodes)
        workload = replace(workload, nodes=slow)
        items = items_for(solve_any, workload)
        for objective in OBJECTIVES:
            best = best_by_force(workload, objective, contiguous=False)
            if math.isinf(best):
                continue
            found = solve_any(items, objective, time_limit_s=LONG_S)
            assert simple_bound(items, objective) <= best * (1 + 1e-12)
            for start in (found.where, None):
                frame = frame_of(items, objective, start)
                bound = spreading_bound(frame, time_limit_s=LONG_S)
                # If no placement is better than the start, no bound on the better ones is wrong.
                assert frame.floor <= bound
                assert min(bound, frame.ceiling) <= best * frame.scale * (1 + 1e-9)
                num_raised += bound > frame.floor * 1.001
    return num_raised


def test_bounds_are_below_the_best_and_communication_counts() -> None:
    assert check_bounds(range(10)) > 2


@pytest.mark.slow
def test_bounds_are_below_the_best_of_many_workloads() -> None:
    count = draws(80, 16)
    assert check_bounds(range(10, 10 + count)) > count // 4


def test_a_bound_counts_the_lightest_of_more_heavy_items_than_devices() -> None:
    items = items_for(solve_any, chain([5.0, 4.0, 3.0, 0.1]))
    assert simple_bound(items, Objective.THROUGHPUT) == pytest.approx(7.0)


def test_a_bound_shares_work_out_between_accelerators_and_cpus() -> None:
    items = items_for(solve_any, chain([1.0] * 10, accelerators=3, cpus=1))
    assert simple_bound(items, Objective.THROUGHPUT) == pytest.approx(3.0)


def test_a_program_without_integers_is_bounded_by_its_solution() -> None:
    program = IntegerProgram()
    shares = program.add_columns(2, upper=1.0, cost=[1.0, 2.0])
    program.add_rows(shares[np.newaxis, :], [1.0, 1.0], lower=1.5)
    solved = program.solve(time_limit_s=LONG_S)
    assert solved.outcome is SolverOutcome.OPTIMAL
    assert solved.bound == pytest.approx(2.0)


def test_prices_prove_the_bound_of_a_program_without_integrality() -> None:
    program = IntegerProgram()
    flags = program.add_columns(3, upper=1.0, is_integer=True, cost=[3.0, 1.0, 2.0])
    program.add_rows(flags[np.newaxis, :], [1.0, 1.0, 1.0], lower=1.5, upper=2.5)
    program.add_rows(flags[np.newaxis, :2], [1.0, -1.0], upper=0.5)
    assert program.relaxed_bound(time_limit_s=LONG_S) == pytest.approx(2.0, abs=1e-5)
    assert program.relaxed_bound(time_limit_s=LONG_S) <= 2.0 + 1e-12
    assert hard_program()[0].relaxed_bound(time_limit_s=0.0) == -math.inf


def test_a_program_without_a_solution_is_told_from_one_without_time() -> None:
    program = IntegerProgram()
    flags = program.add_columns(2, upper=1.0, is_integer=True, cost=1.0)
    program.add_rows(flags[np.newaxis, :], [1.0, 1.0], lower=2.5)
    assert program.solve(time_limit_s=LONG_S).outcome is SolverOutcome.INFEASIBLE
    assert hard_program()[0].solve(time_limit_s=0.0).outcome is SolverOutcome.STOPPED


def test_ctrl_c_stops_the_solver() -> None:
    program, _ = hard_program()
    # Who is started in the background ignores interrupts, and so would this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        program.solve(time_limit_s=LONG_S)
    alarm.join()
    signal.signal(signal.SIGINT, before)


@both
def test_without_the_solver_a_sentence_says_what_to_install(
    solve: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(BiremeError, match="The HiGHS solver needs the highspy package"):
        solve(items_for(solve, chain([5.0, 1.0, 4.0], cost=0.5)), Objective.THROUGHPUT, time_limit_s=LONG_S)
