"""Placements found without proof: annealing and the baselines, against brute force and by hand."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest

from benchmarks.made_up.graphs import (
    Setting,
    inception_like,
    recurrent_like,
    resnet_like,
    transformer_like,
)
from benchmarks.placers.local_search import local_search
from benchmarks.placers.simple import pipedream, single
from bireme.errors import BiremeError
from bireme.placement import annealing_loops
from bireme.placement.contraction import FoundPlacement, Items, Weightless, fits, items_of, loads_of, value_of
from bireme.placement.solve import greedy, improve, random_start
from bireme.placement.workload import Edge, Node, Objective, Workload
from tests.support.extent import draws
from tests.support.placement_oracles import best_by_force, can_stand_in_line, random_workload

NO_LIMIT_S = 1e9

Baseline = Callable[[Items, Objective], FoundPlacement]


def objective_of(workload: Workload, random: Random) -> Objective:
    if not workload.is_training:
        return Objective.THROUGHPUT
    return random.choice([Objective.TRAINING, Objective.FLUSH])


def annealed(
    items: Items, objective: Objective, *, start: Sequence[int] | None = None, num_moves: int = 5_000
) -> FoundPlacement:
    return improve(items, objective, start=start, time_limit_s=NO_LIMIT_S, num_moves=num_moves)


def devices_of(workload: Workload, items: Items, where: Sequence[int]) -> list[int]:
    """The device of every node."""
    devices = [-1] * len(workload.nodes)
    for members, device in zip(items.members, where, strict=True):
        for place in members:
            devices[place] = device
    return devices


def is_valid(items: Items, found: FoundPlacement, objective: Objective) -> bool:
    return fits(items, found.where) and found.value == value_of(loads_of(items, found.where), objective)


def chain(
    times: Sequence[float],
    *,
    num_accelerators: int,
    memory: float = 1e9,
    size: float = 1.0,
    num_cpus: int = 0,
) -> Workload:
    nodes = tuple(Node(i, time, 10 * time, size_bytes=size) for i, time in enumerate(times))
    edges = tuple(Edge(i, i + 1, 0.0) for i in range(len(times) - 1))
    return Workload(nodes, edges, num_accelerators, num_cpus, memory)


def drawn_workloads(count: int, seed: int) -> list[tuple[Workload, Objective]]:
    random = Random(seed)
    drawn = [random_workload(random) for _ in range(count)]
    return [(workload, objective_of(workload, random)) for workload in drawn]


def check_against_force(count: int, seed: int) -> None:
    """All are asked for. With a quarter of the moves one of about 300 workloads is missed by a little."""
    for workload, objective in drawn_workloads(count, seed):
        items = items_of(workload, contiguous=False, weightless=Weightless.STAY)
        best = best_by_force(workload, objective, contiguous=False)
        if best == float("inf"):
            with pytest.raises(BiremeError, match="No placement was found"):
                annealed(items, objective, num_moves=20_000)
        else:
            found = annealed(items, objective, num_moves=20_000)
            assert is_valid(items, found, objective)
            assert found.value == pytest.approx(best)
            assert found.lower_bound <= best * (1 + 1e-9)


@pytest.mark.slow
def test_annealing_finds_the_best_of_all_small_workloads_drawn() -> None:
    check_against_force(draws(25, 8), seed=1)


@pytest.mark.slow
def test_annealing_finds_the_best_of_many_small_workloads() -> None:
    check_against_force(draws(80, 12), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.TRAINING, Objective.FLUSH])
def test_annealing_is_never_worse_than_its_start(objective: Objective) -> None:
    random = Random(3)
    workload = recurrent_like(2, 3, Setting(is_training=True, num_accelerators=3))
    items = items_of(workload, contiguous=False)
    for _ in range(5):
        start = random_start(items, random)
        found = annealed(items, objective, start=start, num_moves=random.choice([0, 200]))
        assert is_valid(items, found, objective)
        assert found.value <= value_of(loads_of(items, start), objective)


def test_annealing_repairs_a_start_that_does_not_fit() -> None:
    workload = resnet_like(3, Setting(num_accelerators=3, num_cpus=0))
    items = items_of(workload, contiguous=False)
    start = [0] * len(items)
    assert not fits(items, start)
    assert fits(items, annealed(items, Objective.THROUGHPUT, start=start, num_moves=2_000).where)


def test_annealing_packs_where_the_greedy_cut_does_not_fit() -> None:
    nodes = tuple(Node(i, 1.0, 1.0, size_bytes=size) for i, size in enumerate((3, 2, 3, 2, 2)))
    workload = Workload(nodes, (), 2, 0, accelerator_bytes=6)
    items = items_of(workload, contiguous=False)
    with pytest.raises(BiremeError, match="No split that fits was found in the order tried"):
        greedy(items, Objective.THROUGHPUT)
    assert annealed(items, Objective.THROUGHPUT).value == 3


@pytest.mark.slow
def test_annealing_gives_the_same_for_the_same_seed() -> None:
    items = items_of(resnet_like(3, Setting(num_accelerators=3)), contiguous=False)
    assert annealed(items, Objective.THROUGHPUT, num_moves=4_000) == annealed(
        items, Objective.THROUGHPUT, num_moves=4_000
    )


def test_annealing_stops_early_at_a_value_that_is_proven() -> None:
    items = items_of(chain([1.0] * 8, num_accelerators=4), contiguous=False)
    found = improve(items, Objective.THROUGHPUT, start=None, time_limit_s=NO_LIMIT_S)
    assert found.value == 2
    assert found.lower_bound == pytest.approx(2)
    alone = items_of(chain([1 / place for place in range(1, 200)], num_accelerators=1), contiguous=False)
    improve(alone, Objective.THROUGHPUT, start=None, time_limit_s=NO_LIMIT_S)  # sums differ by rounding


def test_annealing_with_a_time_limit_keeps_the_start() -> None:
    items = items_of(resnet_like(2, Setting(num_accelerators=2)), contiguous=False)
    start = greedy(items, Objective.THROUGHPUT)
    found = improve(items, Objective.THROUGHPUT, start=start.where, time_limit_s=0.01)
    assert found.value <= start.value


@pytest.mark.parametrize(("num_accelerators", "num_cpus"), [(1, 0), (0, 1), (0, 3), (64, 2)])
def test_annealing_takes_any_number_of_devices(num_accelerators: int, num_cpus: int) -> None:
    workload = chain([1.0, 2.0, 3.0], num_accelerators=num_accelerators, num_cpus=num_cpus)
    items = items_of(workload, contiguous=False)
    found = annealed(items, Objective.THROUGHPUT, num_moves=2_000)
    assert found.value == {1: 6, 64: 3}.get(num_accelerators, 60 if num_cpus == 1 else 30)


def test_loads_that_follow_moves_are_those_counted_afresh() -> None:
    random = Random(5)
    for workload, objective in drawn_workloads(20, seed=5):
        items = items_of(workload, contiguous=False)
        tables = annealing_loops.tables_of(items, objective)
        where = np.array([random.randrange(items.num_devices) for _ in range(len(items))], np.int64)
        state = annealing_loops.state_of(items, tables, where)
        for _ in range(20):
            item, target = random.randrange(len(items)), random.randrange(items.num_devices)
            annealing_loops.shift(tables, state, item, where[item], target)
            where[item] = target
        again = annealing_loops.state_of(items, tables, where)
        for followed, counted in zip(state, again, strict=True):
            np.testing.assert_allclose(followed, counted, atol=1e-9)
        expected = value_of(loads_of(items, where.tolist()), objective)
        assert annealing_loops.value_now(state) == pytest.approx(expected)


def test_a_huge_time_that_says_cannot_leaves_the_other_times_exact() -> None:
    def found(huge: float) -> FoundPlacement:
        nodes = tuple(Node(i, 1 + i % 3 / 3, huge if i % 2 else 3.0) for i in range(20))
        edges = tuple(Edge(i, i + step, 0.2) for step in (1, 7) for i in range(20 - step))
        items = items_of(Workload(nodes, edges, 2, 1, 1e9), contiguous=False)
        return improve(items, Objective.THROUGHPUT, start=None, time_limit_s=1.0, num_moves=1_000)

    assert found(1e18) == found(1e3)


def test_greedy_fills_devices_to_the_lowest_level() -> None:
    items = items_of(chain([3, 1, 2, 2, 4], num_accelerators=3), contiguous=True)
    found = greedy(items, Objective.THROUGHPUT)
    assert found.where == (0, 0, 1, 1, 2)
    assert found.value == 4


def test_greedy_gives_a_cpu_what_accelerators_do_not_support() -> None:
    nodes = tuple(Node(i, 1.0, 2.0, supported=i != 1) for i in range(4))
    edges = tuple(Edge(i, i + 1, 0.5) for i in range(3))
    items = items_of(Workload(nodes, edges, 2, 1, 1e9), contiguous=True)
    found = greedy(items, Objective.THROUGHPUT)
    assert fits(items, found.where)
    assert found.where[1] == 2


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [greedy, single])
def test_splits_of_baselines_stand_in_line_and_are_not_below_the_best(baseline: Baseline) -> None:
    num_found = 0
    for workload, objective in drawn_workloads(40, seed=7):
        items = items_of(workload, contiguous=True)
        try:
            found = baseline(items, objective)
        except BiremeError:
            continue
        num_found += 1
        assert is_valid(items, found, objective)
        assert can_stand_in_line(workload, devices_of(workload, items, found.where))
        assert found.value >= best_by_force(workload, objective, contiguous=True) - 1e-9
    assert num_found > 20


def test_local_search_ends_where_no_single_move_helps() -> None:
    num_found = 0
    for workload, objective in drawn_workloads(30, seed=8):
        items = items_of(workload, contiguous=False)
        try:
            found = local_search(items, objective)
        except BiremeError:
            continue
        num_found += 1
        assert is_valid(items, found, objective)
        for item in range(len(items)):
            for device in range(items.num_accelerators or items.num_devices):
                other = [*found.where[:item], device, *found.where[item + 1 :]]
                if fits(items, other):
                    assert value_of(loads_of(items, other), objective) > found.value - 1.1e-5
    assert num_found > 20


def test_local_search_uses_cpus_only_where_it_must() -> None:
    items = items_of(chain([1.0] * 6, num_accelerators=2, num_cpus=1), contiguous=False)
    assert local_search(items, Objective.THROUGHPUT).value == 3
    no_accelerators = items_of(chain([1.0] * 6, num_accelerators=0, num_cpus=2), contiguous=False)
    assert local_search(no_accelerators, Objective.THROUGHPUT).value == 30


def test_single_goes_to_a_cpu_where_memory_is_short_and_says_so_where_there_is_none() -> None:
    short = items_of(chain([1.0, 1.0], num_accelerators=2, memory=1.0, num_cpus=1), contiguous=True)
    assert single(short, Objective.THROUGHPUT).value == 20
    hopeless = items_of(chain([1.0, 1.0], num_accelerators=2, memory=1.0), contiguous=True)
    with pytest.raises(BiremeError, match="No single device takes it all: the operators take 2 bytes"):
        single(hopeless, Objective.THROUGHPUT)


@pytest.mark.parametrize("baseline", [greedy, local_search])
def test_baselines_say_that_nothing_fits(baseline: Baseline) -> None:
    items = items_of(chain([1.0] * 3, num_accelerators=2, memory=1.0), contiguous=True)
    with pytest.raises(BiremeError, match="fits"):
        baseline(items, Objective.THROUGHPUT)


def test_pipedream_keeps_branches_together_but_for_where_they_join() -> None:
    # 0 -> (1, 2) -> 3 -> 4: the branches and what they leave from are one, as the tails of a circle's edges.
    nodes = tuple(Node(i, 1.0, 10.0) for i in range(5))
    edges = tuple(Edge(*ends, 0.1) for ends in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)))
    found, items = pipedream(Workload(nodes, edges, 3, 0, 1e9), Objective.THROUGHPUT)
    assert items.members == ((0, 1, 2), (3,), (4,))
    assert found.value == pytest.approx(3.2)


def test_pipedream_is_valid_and_never_below_the_best() -> None:
    num_found = 0
    for workload, objective in drawn_workloads(40, seed=10):
        try:
            found, items = pipedream(workload, objective)
        except BiremeError:
            continue
        num_found += 1
        assert is_valid(items, found, objective)
        assert can_stand_in_line(workload, devices_of(workload, items, found.where))
        assert found.value >= best_by_force(workload, objective, contiguous=True) - 1e-9
    assert num_found > 20


def test_pipedream_says_which_branches_do_not_fit() -> None:
    nodes = tuple(Node(i, 1.0, 10.0, size_bytes=1.0) for i in range(4))
    edges = tuple(Edge(*ends, 0.1) for ends in ((0, 1), (0, 2), (1, 3), (2, 3)))
    with pytest.raises(BiremeError, match="branches that it keeps together take 3 bytes"):
        pipedream(Workload(nodes, edges, 4, 0, 2.0), Objective.THROUGHPUT)


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
def test_workloads_that_look_like_networks_are_ordered_best_method_first(is_training: bool) -> None:
    setting = Setting(is_training=is_training, num_accelerators=3, communication=0.3)
    objective = Objective.TRAINING if is_training else Objective.THROUGHPUT
    for workload in (
        transformer_like(1, setting, num_heads=2),
        inception_like(2, setting),
        recurrent_like(2, 3, setting),
        resnet_like(3, setting),
    ):
        assert workload.is_training == is_training
        items = items_of(workload, contiguous=False)
        found = annealed(items, objective, num_moves=20_000)
        assert found.value <= local_search(items, objective).value
        assert found.value < single(items, objective).value
