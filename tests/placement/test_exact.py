"""Contiguous placement: items, ideals, the dynamic program, cuts of lines; judged by going through all."""

import dataclasses
import math
import warnings
from itertools import combinations, pairwise
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import pytest

from bireme.errors import BiremeError
from bireme.placement.contiguous import Contiguous, NoSplitFoundError, cut_chain, cut_lines
from bireme.placement.contraction import Items, Weightless, fits, items_of, loads_of, simple_bound, value_of
from bireme.placement.ideals import DynamicProgram, lattice_of
from bireme.placement.workload import Edge, Node, Objective, Workload
from tests.support.extent import draws
from tests.support.placement_oracles import best_by_force, random_workload, value_by_hand

BOTH = (Objective.TRAINING, Objective.FLUSH)


def line(times: list[float], costs: list[float], *, accelerators: int, cpus: int = 0) -> Workload:
    """Operators in a row."""
    nodes = tuple(Node(number, time, 10 * time) for number, time in enumerate(times))
    edges = tuple(Edge(number, number + 1, cost) for number, cost in enumerate(costs))
    return Workload(nodes, edges, accelerators, cpus, 1e9)


def best(workload: Workload, objective: Objective = Objective.THROUGHPUT) -> float:
    """The dynamic program's value; infinite where nothing fits."""
    try:
        split = Contiguous(workload, objective).best()
    except BiremeError:
        return math.inf
    assert split is not None
    assert split.found.lower_bound == split.found.value
    assert fits(split.items, split.found.where)
    devices = by_node(workload, split.items, split.found.where)
    assert value_by_hand(workload, devices, objective) == pytest.approx(split.found.value, rel=1e-9)
    return split.found.value


def by_node(workload: Workload, items: Items, where: tuple[int, ...]) -> list[int]:
    """The device of each node."""
    devices = [-1] * len(workload.nodes)
    for members, device in zip(items.members, where, strict=True):
        for place in members:
            devices[place] = device
    return devices


def agrees_with_force(
    seed: int, count: int, *, most_nodes: int, most_accelerators: int = 3, most_cpus: int = 1
) -> None:
    random = Random(seed)
    for number in range(count):
        workload = random_workload(
            random, most_nodes=most_nodes, most_accelerators=most_accelerators, most_cpus=most_cpus
        )
        for objective in BOTH:
            force = best_by_force(workload, objective, contiguous=True)
            assert best(workload, objective) == pytest.approx(force, rel=1e-9), (seed, number, objective)


def test_the_dynamic_program_is_as_good_as_all_splits() -> None:
    agrees_with_force(0, draws(60, 25), most_nodes=6)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_dynamic_program_is_as_good_as_all_splits_of_many_graphs(seed: int) -> None:
    agrees_with_force(seed, draws(60, 15), most_nodes=8)


@pytest.mark.slow
def test_several_cpus_stand_anywhere_in_the_line() -> None:
    agrees_with_force(7, draws(40, 12), most_nodes=6, most_accelerators=2, most_cpus=3)


def test_a_cut_costs_each_side_once() -> None:
    # One producer, three consumers on another device: its output leaves once and comes once.
    nodes = tuple(Node(number, 1.0, 100.0) for number in range(4))
    edges = tuple(Edge(0, consumer, 5.0) for consumer in (1, 2, 3))
    items = items_of(Workload(nodes, edges, 2, 0, 1e9), contiguous=True)
    assert loads_of(items, [0, 1, 1, 1]).sum(axis=1).tolist() == [6.0, 8.0]


def test_each_device_that_uses_an_output_pays_for_it() -> None:
    nodes = tuple(Node(number, 1.0, 100.0) for number in range(3))
    edges = (Edge(0, 1, 5.0), Edge(0, 2, 5.0))
    items = items_of(Workload(nodes, edges, 3, 0, 1e9), contiguous=True)
    assert loads_of(items, [0, 1, 2]).sum(axis=1).tolist() == [6.0, 6.0, 6.0]


def test_a_cpu_pays_for_nothing_it_gets() -> None:
    nodes = tuple(Node(number, 1.0, 3.0) for number in range(2))
    items = items_of(Workload(nodes, (Edge(0, 1, 5.0),), 1, 1, 1e9), contiguous=True)
    assert loads_of(items, [0, 1]).sum(axis=1).tolist() == [6.0, 3.0]


def test_a_line_without_communication_on_enough_devices_costs_its_greatest_node() -> None:
    assert best(line([3, 1, 4, 1, 5], [0] * 4, accelerators=5)) == 5


def test_one_device_costs_the_sum() -> None:
    assert best(line([3, 1, 4, 1, 5], [9] * 4, accelerators=1)) == 14


def test_a_line_is_cut_as_the_classic_recurrence_cuts_it() -> None:
    random = Random(3)
    for _ in range(20):
        times = [random.uniform(0.1, 5) for _ in range(12)]
        costs = [random.uniform(0, 3) for _ in range(11)]
        load = {
            (begin, end): sum(times[begin:end])
            + (costs[begin - 1] if begin else 0.0)
            + (costs[end - 1] if end < 12 else 0.0)
            for begin, end in combinations(range(13), 2)
        }
        classic = min(
            max(load[stretch] for stretch in pairwise((0, *cuts, 12)))
            for parts in range(1, 5)
            for cuts in combinations(range(1, 12), parts - 1)
        )
        workload = line(times, costs, accelerators=4)
        assert best(workload) == pytest.approx(classic)
        items = items_of(workload, contiguous=True)
        assert cut_chain(items, Objective.THROUGHPUT).value == pytest.approx(classic)


@pytest.mark.slow
def test_more_devices_or_memory_never_hurt_and_time_has_no_unit() -> None:
    random = Random(11)
    for _ in range(draws(25, 8)):
        workload = random_workload(random, most_nodes=7)
        value = best(workload)
        more = dataclasses.replace(workload, num_accelerators=workload.num_accelerators + 1)
        with_cpu = dataclasses.replace(workload, num_cpus=workload.num_cpus + 1)
        roomier = dataclasses.replace(workload, accelerator_bytes=workload.accelerator_bytes + 1)
        assert max(best(more), best(with_cpu), best(roomier)) <= value * (1 + 1e-9)
        longer = dataclasses.replace(
            workload,
            nodes=tuple(
                dataclasses.replace(n, accelerator_time=8 * n.accelerator_time, cpu_time=8 * n.cpu_time)
                for n in workload.nodes
            ),
            edges=tuple(dataclasses.replace(e, cost=8 * e.cost) for e in workload.edges),
        )
        assert best(longer) == pytest.approx(8 * value)


def test_names_of_nodes_do_not_matter() -> None:
    random = Random(12)
    for _ in range(20):
        workload = random_workload(random, most_nodes=7)
        new = dict(zip((n.id for n in workload.nodes), random.sample(range(1000), 100), strict=False))
        renamed = dataclasses.replace(
            workload,
            nodes=tuple(
                dataclasses.replace(n, id=new[n.id])
                for n in random.sample(workload.nodes, len(workload.nodes))
            ),
            edges=tuple(
                dataclasses.replace(e, source=new[e.source], target=new[e.target]) for e in workload.edges
            ),
        )
        assert best(renamed) == pytest.approx(best(workload))


def test_the_lattice_holds_every_ideal_and_every_way_down() -> None:
    random = Random(5)
    for _ in range(draws(40, 15)):
        workload = random_workload(random, most_nodes=8, training=False)
        items = items_of(workload, contiguous=True, weightless=Weightless.STAY)
        count = len(items)
        before = [set(items.before.row(item)) for item in range(count)]
        ideals = {
            frozenset(chosen)
            for size in range(count + 1)
            for chosen in combinations(range(count), size)
            if all(before[item] <= set(chosen) for item in chosen)
        }
        lattice = lattice_of(items, 10_000)
        assert lattice is not None
        sets = [frozenset(lattice.between(ideal, 0)) for ideal in range(len(lattice))]
        assert set(sets) == ideals
        assert len(sets) == len(ideals)
        assert [len(ideal) for ideal in sets] == sorted(len(ideal) for ideal in sets)
        ways = {
            (sets[ideal], int(lattice.taken[way]), sets[lattice.below[way]])
            for ideal in range(len(lattice))
            for way in range(lattice.starts[ideal], lattice.starts[ideal + 1])
        }
        assert ways == {
            (ideal, item, ideal - {item}) for ideal in ideals for item in ideal if ideal - {item} in ideals
        }


def test_too_many_ideals_are_no_lattice() -> None:
    apart = Workload(tuple(Node(number, 1.0, 1.0) for number in range(20)), (), 2, 0, 1e9)
    items = items_of(apart, contiguous=True)
    assert lattice_of(items, 1000) is None
    assert Contiguous(apart, Objective.THROUGHPUT, most_ideals=1000).best() is None


@pytest.mark.slow
def test_lines_are_never_better_than_the_optimum_and_bounds_never_above_it() -> None:
    random = Random(21)
    for _ in range(draws(60, 15)):
        workload = random_workload(random, most_nodes=7)
        for objective in BOTH:
            optimum = best(workload, objective)
            anywhere = best_by_force(workload, objective, contiguous=False)
            bare = items_of(workload, contiguous=False, weightless=Weightless.VANISH)
            assert simple_bound(bare, objective) <= anywhere * (1 + 1e-9)
            assert anywhere <= optimum * (1 + 1e-9)
            try:
                split = Contiguous(workload, objective).best_of_lines()
            except BiremeError:
                continue
            assert split.found.value >= optimum * (1 - 1e-9)
            assert split.found.lower_bound <= optimum * (1 + 1e-9)
            assert split.found.value == value_of(loads_of(split.items, split.found.where), objective)


@pytest.mark.slow
def test_lines_are_within_five_percent_on_parallel_branches() -> None:
    random = Random(8)
    nodes, edges = [], []
    for branch in range(3):
        for place in range(12):
            number = 12 * branch + place
            nodes.append(Node(number, random.uniform(0.5, 5), 50.0))
            if place:
                edges.append(Edge(number - 1, number, random.uniform(0, 2)))
    workload = Workload(tuple(nodes), tuple(edges), 5, 1, 1e9)
    items = items_of(workload, contiguous=True)
    assert cut_lines(items, Objective.THROUGHPUT).value <= 1.05 * best(workload)


def test_the_same_seed_cuts_the_same_lines() -> None:
    workload = random_workload(Random(30), most_nodes=12)
    items = items_of(workload, contiguous=True)
    once = cut_lines(items, Objective.THROUGHPUT, seed=5)
    assert cut_lines(items, Objective.THROUGHPUT, seed=5) == once


def test_a_matrix_of_weights_goes_where_it_is_used() -> None:
    nodes = (Node(0, 1.0, 10.0), Node(1, 2.0, 20.0), Node(2, 0.0, 0.0, size_bytes=5))
    workload = Workload(nodes, (Edge(0, 1, 1.0), Edge(2, 1, 9.0)), 2, 0, 10)
    assert [len(members) for members in items_of(workload, contiguous=True).members] == [1, 2]
    stay = items_of(workload, contiguous=True, weightless=Weightless.STAY)
    assert len(stay) == 3
    assert items_of(workload, contiguous=True, weightless=Weightless.VANISH).size.sum() == 0


def test_where_memory_is_short_weights_may_stand_apart_and_that_is_found() -> None:
    # Together the consumer and its weights do not fit on one device; apart they do, for the price of a move.
    nodes = (Node(0, 1.0, 10.0), Node(1, 2.0, 20.0, size_bytes=6), Node(2, 0.0, 0.0, size_bytes=6))
    workload = Workload(nodes, (Edge(0, 1, 1.0), Edge(2, 1, 9.0)), 2, 0, 10)
    assert best(workload) == best_by_force(workload, Objective.THROUGHPUT, contiguous=True) == 12.0


def test_backward_nodes_alone_are_ordered_by_their_mirrored_edges() -> None:
    # Forward 0 -> 1; backward 3 -> 2 of colours of their own: the orphan 3 comes before nothing forward.
    nodes = (
        Node(0, 1.0, 10.0, colour=0),
        Node(1, 1.0, 10.0, colour=1),
        Node(2, 1.0, 10.0, is_backward=True, colour=0),
        Node(3, 1.0, 10.0, is_backward=True, colour=3),
        Node(4, 1.0, 10.0, is_backward=True, colour=1),
    )
    edges = (Edge(0, 1, 0.1), Edge(4, 3, 0.1), Edge(3, 2, 0.1))
    items = items_of(Workload(nodes, edges, 3, 0, 1e9), contiguous=True)
    assert [sorted(members) for members in items.members] == [[0, 2], [3], [1, 4]]
    assert items.before.row(1) == [0]
    assert items.before.row(2) == [0, 1]


def test_colours_in_a_circle_are_one_item_where_devices_stand_in_line_and_several_where_not() -> None:
    nodes = (Node(0, 1.0, 9.0, colour=7), Node(1, 1.0, 9.0), Node(2, 1.0, 9.0, colour=7))
    workload = Workload(nodes, (Edge(0, 1, 0.1), Edge(1, 2, 0.1)), 2, 0, 1e9)
    assert len(items_of(workload, contiguous=True)) == 1
    assert len(items_of(workload, contiguous=False)) == 2


@pytest.mark.slow
def test_a_time_limit_keeps_the_best_split_and_says_what_is_proven() -> None:
    random = Random(2)
    nodes = tuple(Node(number, random.uniform(0.5, 5), 50.0) for number in range(120))
    edges = tuple(Edge(number - 3, number, random.uniform(0, 2)) for number in range(3, 120))
    workload = Workload(nodes, edges, 6, 1, 1e9)
    items = items_of(workload, contiguous=True)
    lattice = lattice_of(items, 200_000)
    assert lattice is not None
    start = cut_lines(items, Objective.THROUGHPUT, most_lines=2)
    found = DynamicProgram(items, lattice, stop_at=monotonic()).best(Objective.THROUGHPUT, start.where)
    assert found is not None
    assert found.where == start.where
    assert simple_bound(items, Objective.THROUGHPUT) == found.lower_bound < found.value


def test_times_may_have_any_unit_however_small() -> None:
    # Times below a microsecond were once taken for none, and a wrong optimum was called proven.
    nodes = (Node(0, 4e-7, 4e-7), Node(1, 4e-7, 4e-7))
    assert best(Workload(nodes, (Edge(0, 1, 0.0),), 2, 0, 1e9)) == 4e-7


def test_edges_that_cost_almost_the_same_are_paid_as_the_checker_pays_them() -> None:
    # One of a node's edges said 0 and was left out of its net, though the other's cost is due on both.
    nodes = (Node(0, 0.01, 1.0), Node(1, 0.3, 1.0), Node(2, 0.01, 1.0))
    workload = Workload(nodes, (Edge(0, 2, 9e-7), Edge(0, 1, 0.0)), 3, 0, 1e9)
    assert items_of(workload, contiguous=True).pins.row(0) == [0, 1, 2]
    assert best(workload) == pytest.approx(0.3000009)
    with pytest.raises(BiremeError, match="their costs must be equal"):
        Workload(nodes, (Edge(0, 2, 1.1e-6), Edge(0, 1, 0.0)), 3, 0, 1e9)


def test_whole_bytes_are_counted_to_the_last_one() -> None:
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=1_000_000_001) for number in range(4))
    workload = Workload(nodes, (), 2, 0, 2e9)
    assert best(workload) == math.inf
    assert best(dataclasses.replace(workload, accelerator_bytes=2_000_000_002)) == 2.0


def test_bytes_that_are_not_whole_have_room_for_rounding() -> None:
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=0.1) for number in range(6))
    assert best(Workload(nodes, (), 2, 0, 0.3)) == 3.0


def test_operators_without_time_and_neighbors_add_no_ideals() -> None:
    apart = tuple(Node(number, 0.0, 0.0) for number in range(3, 40))
    workload = line([1.0, 2.0, 3.0], [0.1, 0.1], accelerators=2)
    split = Contiguous(
        dataclasses.replace(workload, nodes=(*workload.nodes, *apart)), Objective.TRAINING
    ).best()
    assert split is not None
    assert split.num_ideals == 4


def test_isolated_weights_are_merged_only_where_no_placement_is_lost() -> None:
    weights = tuple(Node(number, 0.0, 0.0, size_bytes=2) for number in range(1, 5))
    nodes = (Node(0, 1.0, 9.0, size_bytes=1), *weights)
    roomy, tight = Workload(nodes, (), 3, 0, 9.0), Workload(nodes, (), 3, 0, 4.0)
    for weightless in Weightless:
        assert len(items_of(roomy, contiguous=True, weightless=weightless)) == 2
        assert len(items_of(tight, contiguous=True, weightless=weightless)) == 5
    assert best(roomy) == best(tight) == 1.0


def test_a_cpu_that_takes_no_time_is_worth_any_number_of_accelerators() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert best(Workload((Node(0, 1.0, 0.0), Node(1, 2.0, 5.0)), (), 1, 1, 1e9)) == 2.0


def test_the_items_of_every_ideal_are_weighed() -> None:
    workload = random_workload(Random(4), most_nodes=8)
    items = items_of(workload, contiguous=True)
    lattice = lattice_of(items, 1000)
    assert lattice is not None
    weight = np.arange(1.0, len(items) + 1)
    by_hand = [sum(weight[item] for item in lattice.between(ideal, 0)) for ideal in range(len(lattice))]
    assert lattice.sums(weight).tolist() == by_hand


def test_a_list_of_ideals_ends_when_the_time_does() -> None:
    items = items_of(line([1.0] * 50, [0.1] * 49, accelerators=2), contiguous=True)
    assert lattice_of(items, 1000, lambda: True) is None
    assert len(lattice_of(items, 1000) or ()) == 51


def test_without_time_nothing_is_said_to_be_impossible() -> None:
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=size) for number, size in enumerate((6, 6, 6, 4, 4, 4)))
    edges = (Edge(0, 1, 0.0), Edge(1, 2, 0.0), Edge(2, 3, 0.0), Edge(3, 4, 0.0), Edge(4, 5, 0.0))
    late = Contiguous(Workload(nodes, edges, 3, 0, 10.0), Objective.THROUGHPUT, stop_at=0.0)
    with pytest.raises(NoSplitFoundError, match="and there may be one"):
        late.best_of_lines()


def test_a_line_that_fills_the_memory_is_tried() -> None:
    sizes = [7, 3] * 20
    Random(1).shuffle(sizes)
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=size) for number, size in enumerate(sizes))
    items = items_of(Workload(nodes, (), 20, 0, 10.0), contiguous=True)
    assert cut_lines(items, Objective.THROUGHPUT, is_over=lambda: True).value == 2.0


def test_what_fits_on_no_devices_together_is_refused() -> None:
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=6) for number in range(3))
    workload = Workload(nodes, (), 2, 0, 10)
    with pytest.raises(BiremeError, match="No placement fits: the operators take 18 bytes"):
        Contiguous(workload, Objective.THROUGHPUT).best()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"edges": (Edge(0, 1, 1.0), Edge(1, 0, 1.0))}, "cycle.*node 0"),
        ({"edges": (Edge(0, 5, 1.0),)}, "0 -> 5 ends at node 5, which is not there"),
        ({"edges": (Edge(0, 1, 1.0), Edge(0, 2, 2.0))}, "Edges of node 0 cost 1 and 2"),
        ({"edges": (Edge(0, 1, -1.0),)}, "costs -1"),
        ({"nodes": (Node(0, 1.0, 1.0), Node(0, 1.0, 1.0)), "edges": ()}, "Two nodes have the id 0"),
        ({"nodes": (Node(0, math.nan, 1.0),), "edges": ()}, "time on an accelerator of node 0 is nan"),
        ({"nodes": (Node(0, 1e308, 1.0),), "edges": ()}, "of node 0 is 1e.308; it must be 1e.100 at most"),
        ({"nodes": (), "edges": ()}, "no nodes"),
        ({"num_cpus": 0, "accelerator_bytes": 0.5}, "no device for node 1 .* 1 bytes"),
        ({"num_cpus": 0, "num_accelerators": 0}, "no device"),
        ({"num_accelerators": -1}, "-1 accelerators"),
        ({"num_cpus": 0, "nodes": (Node(0, 1, 1, supported=False),), "edges": ()}, "do not support it"),
        (
            {"nodes": (Node(0, 1, 1, is_backward=True), Node(1, 1, 1)), "edges": (Edge(0, 1, 1.0),)},
            "0 -> 1 goes from a backward node",
        ),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    nodes = (Node(0, 1.0, 1.0), Node(1, 1.0, 1.0, size_bytes=1, name="matmul"), Node(2, 1.0, 1.0))
    sound = Workload(nodes, (Edge(0, 1, 1.0),), 2, 1, 10.0)
    with pytest.raises(BiremeError, match=sentence):
        dataclasses.replace(sound, **change)
