"""The judge of placements: every rule, broken one at a time, and values that equal those counted by hand."""

import math
from itertools import product
from random import Random

import pytest

from bireme.placement.check import check, work_of
from bireme.placement.latency import pieces_of
from bireme.placement.workload import Edge, Node, Objective, Workload
from tests.support.placement_oracles import all_placements, can_stand_in_line, random_workload, value_by_hand

LOADS = (Objective.THROUGHPUT, Objective.TRAINING, Objective.FLUSH)


def chain(*, num_accelerators: int = 2, num_cpus: int = 1, accelerator_bytes: float = 10.0) -> Workload:
    """Four nodes in a row, each of 1 on an accelerator and 10 on a CPU, of 2 bytes; moving costs 0.5."""
    nodes = tuple(Node(number, 1.0, 10.0, 2.0) for number in range(4))
    edges = tuple(Edge(number, number + 1, 0.5) for number in range(3))
    return Workload(nodes, edges, num_accelerators, num_cpus, accelerator_bytes)


def diamond() -> Workload:
    """Node 0 feeds 1 and 2, which feed 3."""
    nodes = tuple(Node(number, 1.0, 10.0) for number in range(4))
    edges = (Edge(0, 1, 1.0), Edge(0, 2, 1.0), Edge(1, 3, 0.25), Edge(2, 3, 0.5))
    return Workload(nodes, edges, 4, 1, 10.0)


# --- values ------------------------------------------------------------------------------------------------


def test_loads_are_those_counted_node_by_node() -> None:
    random = Random(1)
    for _ in range(400):
        workload = random_workload(random)
        num_devices = workload.num_accelerators + workload.num_cpus
        devices = [random.randrange(num_devices) for _ in workload.nodes]
        for objective in LOADS:
            verdict = check(workload, devices, objective)
            assert verdict.value == pytest.approx(value_by_hand(workload, devices, objective))
        assert max(verdict.loads) == pytest.approx(value_by_hand(workload, devices, Objective.TRAINING))


def test_an_output_is_paid_once_by_each_device_that_makes_or_needs_it() -> None:
    loads = check(diamond(), (0, 1, 1, 2), Objective.THROUGHPUT).loads
    assert loads == (1 + 1, 2 + 1 + 0.25 + 0.5, 1 + 0.25 + 0.5, 0, 0)


def test_a_cpu_pays_for_no_moving_and_its_neighbors_do() -> None:
    assert check(diamond(), (0, 4, 4, 2), Objective.THROUGHPUT).loads == (2, 0, 1.75, 0, 20)


def test_pieces_of_one_accelerator_move_outputs_between_them() -> None:
    works = work_of(chain(), (0, 2, 0, 0), (0, 0, 1, 1))
    assert works[0].moved == [0.5 + 0.5, 0.0]
    assert works[0].compute == [3.0, 0.0]
    assert work_of(chain(), (0, 0, 0, 0), (0, 0, 1, 1))[0].moved == [0.5 + 0.5, 0.0]


def test_a_pipeline_that_drains_waits_for_the_busiest_device_of_each_pass() -> None:
    nodes = (Node(0, 1, 9), Node(1, 3, 9), Node(2, 4, 9, is_backward=True), Node(3, 5, 9, is_backward=True))
    workload = Workload(nodes, (), 2, 0, 1.0)
    assert check(workload, (0, 1, 1, 0), Objective.FLUSH).value == 3 + 5
    assert check(workload, (0, 1, 1, 0), Objective.TRAINING).value == 7


# --- rules -------------------------------------------------------------------------------------------------


def test_all_placements_that_keep_the_rules_are_valid() -> None:
    random = Random(2)
    for _ in range(40):
        workload = random_workload(random, most_nodes=6)
        for devices in all_placements(workload):
            assert check(workload, devices, Objective.TRAINING, contiguous=False).problems == ()


def test_all_placements_that_break_a_rule_are_told() -> None:
    random = Random(3)
    for _ in range(40):
        workload = random_workload(random, most_nodes=5, most_accelerators=2)
        num_devices = workload.num_accelerators + workload.num_cpus
        kept = {frozenset(_groups(devices, workload)) for devices in all_placements(workload)}
        for devices in product(range(num_devices), repeat=len(workload.nodes)):
            verdict = check(workload, devices, Objective.TRAINING, contiguous=False)
            assert verdict.valid == (frozenset(_groups(devices, workload)) in kept)


def _groups(devices: tuple[int, ...], workload: Workload) -> list[tuple[bool, frozenset[int]]]:
    """What runs together on which kind of device, as equal devices may be exchanged."""
    return [
        (device < workload.num_accelerators, frozenset(p for p, d in enumerate(devices) if d == device))
        for device in set(devices)
    ]


def test_a_device_that_is_not_there_breaks_a_rule() -> None:
    verdict = check(chain(), (0, 1, 3, 0), Objective.THROUGHPUT)
    assert verdict.problems == ("Node 2 is on device number 3, and there are 3, numbered from 0.",)
    assert verdict.value == math.inf
    assert not check(chain(), (0, 1, -1, 0), Objective.THROUGHPUT).valid


def test_a_node_without_a_device_breaks_a_rule() -> None:
    verdict = check(chain(), (0, 1), Objective.THROUGHPUT)
    assert verdict.problems == ("There are devices for 2 nodes, and the workload has 4.",)


def test_accelerators_run_only_what_they_support() -> None:
    workload = Workload((Node(0, 1, 1, supported=False, name="cos"),), (), 1, 1, 1.0)
    assert check(workload, (0,), Objective.THROUGHPUT).problems == (
        "Node 0 (cos) on acc0: accelerators do not support it.",
    )
    assert check(workload, (1,), Objective.THROUGHPUT).valid


def test_memory_counts_on_accelerators_only() -> None:
    workload = chain(accelerator_bytes=5.0)
    assert check(workload, (0, 0, 0, 1), Objective.THROUGHPUT).problems == (
        "The nodes on acc0 take 6 bytes, and it has 5.",
    )
    assert check(workload, (0, 2, 2, 2), Objective.THROUGHPUT).valid


def test_a_colour_shares_a_device() -> None:
    workload = Workload((Node(0, 1, 1, colour=5), Node(1, 1, 1, colour=5)), (), 1, 2, 1.0)
    verdict = check(workload, (0, 1), Objective.THROUGHPUT)
    assert verdict.problems == ("Colour 5 is torn apart: node 0 on acc0, node 1 on cpu0.",)
    assert not check(workload, (1, 2), Objective.THROUGHPUT).valid
    # For latency all CPUs are one machine.
    assert check(workload, (1, 2), Objective.LATENCY).valid


def test_a_path_that_leaves_a_device_and_enters_it_again_is_shown() -> None:
    verdict = check(chain(), (0, 1, 2, 0), Objective.THROUGHPUT)
    assert verdict.problems == (
        "acc0 is not contiguous: a path leaves it and enters it again, "
        "node 0 on acc0 -> node 1 on acc1 -> node 2 on cpu0 -> node 3 on acc0.",
    )
    assert not verdict.contiguous
    assert not verdict.ordered


def test_where_any_placement_will_do_a_torn_device_is_told_and_no_problem() -> None:
    verdict = check(chain(), (0, 1, 1, 0), Objective.THROUGHPUT, contiguous=False)
    assert verdict.valid
    assert not verdict.contiguous


def test_devices_in_a_circle_may_each_be_contiguous() -> None:
    nodes = tuple(Node(number, 1.0, 10.0) for number in range(4))
    workload = Workload(nodes, (Edge(0, 1, 1.0), Edge(2, 3, 1.0)), 2, 0, 10.0)
    verdict = check(workload, (0, 1, 1, 0), Objective.THROUGHPUT)
    assert verdict.contiguous
    assert not verdict.ordered


def test_backward_nodes_may_fall_where_they_will() -> None:
    nodes = (
        *(Node(number, 1, 1, colour=number) for number in range(2)),
        *(Node(3 - number, 1, 1, colour=number, is_backward=True) for number in (1, 0)),
    )
    workload = Workload(nodes, (Edge(0, 1, 1.0), Edge(1, 2, 1.0), Edge(2, 3, 1.0)), 2, 0, 10.0)
    verdict = check(workload, (0, 1, 1, 0), Objective.TRAINING)
    assert (verdict.valid, verdict.contiguous, verdict.ordered) == (True, True, True)


def test_what_stands_in_a_line_is_contiguous() -> None:
    random = Random(5)
    for _ in range(300):
        workload = random_workload(random)
        num_devices = workload.num_accelerators + workload.num_cpus
        devices = [random.randrange(num_devices) for _ in workload.nodes]
        verdict = check(workload, devices, Objective.TRAINING)
        assert verdict.contiguous or not verdict.ordered
        assert verdict.contiguous == _is_contiguous(workload, devices)
        if can_stand_in_line(workload, devices):
            assert verdict.ordered


def _is_contiguous(workload: Workload, devices: list[int]) -> bool:
    """No path of forward nodes from a device to itself has another one in between: all paths are walked."""
    place = {node.id: number for number, node in enumerate(workload.nodes)}
    after: dict[int, list[int]] = {number: [] for number in range(len(devices))}
    for edge in workload.edges:
        if not workload.nodes[place[edge.target]].is_backward:
            after[place[edge.source]].append(place[edge.target])

    def returns(number: int, home: int, *, has_left: bool) -> bool:
        if has_left and devices[number] == home:
            return True
        is_out = has_left or devices[number] != home
        return any(returns(target, home, has_left=is_out) for target in after[number])

    return not any(returns(number, devices[number], has_left=False) for number in after)


# --- latency -----------------------------------------------------------------------------------------------


def test_pieces_are_cut_where_a_path_comes_back() -> None:
    assert pieces_of(chain(), (0, 2, 0, 0)) == (0, 0, 1, 1)
    random = Random(6)
    for _ in range(200):
        workload = random_workload(random)
        num_devices = workload.num_accelerators + workload.num_cpus
        devices = [random.randrange(num_devices) for _ in workload.nodes]
        assert list(pieces_of(workload, devices)) == _entries_before(workload, devices)


def _entries_before(workload: Workload, devices: list[int]) -> list[int]:
    """For each node on an accelerator, how often a path to it has entered that accelerator again, at most."""
    place_of = {node.id: place for place, node in enumerate(workload.nodes)}
    before: dict[int, set[int]] = {place: set() for place in place_of.values()}
    for edge in workload.edges:
        before[place_of[edge.target]].add(place_of[edge.source])

    def entries(place: int, device: int) -> int:
        inside = devices[place] == device
        found = [entries(one, device) + (inside and devices[one] != device) for one in before[place]]
        return max([*found, int(inside)])

    return [
        entries(place, device) - 1 if device < workload.num_accelerators else 0
        for place, device in enumerate(devices)
    ]


def test_an_accelerator_runs_as_many_pieces_as_it_may() -> None:
    verdict = check(chain(), (0, 2, 0, 0), Objective.LATENCY)
    assert verdict.problems == ("acc0 runs 2 pieces in turn, and may run 1. --pieces allows more.",)
    verdict = check(chain(), (0, 2, 0, 0), Objective.LATENCY, num_pieces=2)
    assert verdict.valid
    # Each piece moves an output once; the CPU works between the two.
    assert verdict.value == (1 + 0.5) + 10 + (0.5 + 2)


def test_a_piece_that_a_path_leaves_and_enters_again_cannot_run() -> None:
    verdict = check(chain(), (0, 2, 0, 0), Objective.LATENCY, pieces=(0, 0, 0, 0))
    assert not verdict.contiguous
    assert verdict.problems == (
        "Piece 0 of acc0 is not contiguous: a path leaves it and enters it again, "
        "node 0 on acc0 -> node 1 on cpu0 -> node 2 on acc0.",
    )
    assert verdict.value == math.inf


def test_pieces_that_wait_for_each_other_cannot_run() -> None:
    nodes = tuple(Node(number, 1.0, 10.0) for number in range(4))
    workload = Workload(nodes, (Edge(0, 1, 1.0), Edge(2, 3, 1.0)), 2, 0, 10.0)
    verdict = check(workload, (0, 1, 1, 0), Objective.LATENCY)
    assert verdict.contiguous
    assert not verdict.valid
    assert "wait for each other" in verdict.problems[0]
