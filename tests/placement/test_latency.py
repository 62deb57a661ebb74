"""The latency of one sample: its evaluation, the search and the integer program, against going through all.

What they are held against is at the end of the file. It is written for itself, on nodes and edges as the
problem is stated, and shares nothing with what it judges.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from benchmarks.made_up.graphs import Setting, recurrent_like, transformer_like
from bireme.errors import BiremeError
from bireme.placement.latency import (
    LatencyFound,
    latency_lower_bound,
    latency_of,
    pieces_of,
)
from bireme.placement.latency_program import solve_latency
from bireme.placement.latency_search import search_latency
from bireme.placement.workload import Edge, Node, Workload
from tests.support.extent import draws
from tests.support.placement_oracles import all_placements, random_workload

CLOSE = 1e-6
NO_LIMIT_S = 1e6
"""The search ends by itself; where its loops must be compiled first, that takes longer than any limit."""


def _workload(
    times: Sequence[float],
    edges: Sequence[tuple[int, int, float]],
    *,
    accelerators: int = 2,
    cpus: int = 1,
    memory: float = 1e9,
    sizes: Sequence[float] = (),
    colours: Sequence[int | None] = (),
) -> Workload:
    nodes = tuple(
        Node(
            number,
            accelerator_time=time,
            cpu_time=10 * time,
            size_bytes=sizes[number] if sizes else 0.0,
            colour=colours[number] if colours else None,
        )
        for number, time in enumerate(times)
    )
    return Workload(nodes, tuple(Edge(*edge) for edge in edges), accelerators, cpus, memory)


def test_a_piece_takes_its_work_and_what_moves_in_and_out() -> None:
    workload = _workload([1, 2, 4], [(0, 1, 0.5), (1, 2, 0.25)])
    report = latency_of(workload, (0, 0, 1))
    assert report.finish == (3.25, 3.25, 7.5)
    assert report.device_finish == (3.25, 7.5, 0.0)
    assert report.latency == 7.5


def test_an_output_moves_once_to_a_piece_and_once_out_of_one() -> None:
    # Node 0 feeds two nodes of accelerator 1 and one on the CPU: out once, in once, and the CPU pays nothing.
    workload = _workload([1, 1, 1, 1], [(0, 1, 0.5), (0, 2, 0.5), (0, 3, 0.5)])
    report = latency_of(workload, (0, 1, 1, 2))
    assert report.finish == (1.5, 4.0, 4.0, 11.5)


def test_cpus_are_one_machine_that_runs_everything_at_once() -> None:
    workload = _workload([1, 1, 1], [], cpus=2)
    assert latency_of(workload, (2, 2, 3)).latency == 10


def test_pieces_of_an_accelerator_run_one_after_the_other() -> None:
    workload = _workload([1, 2, 4], [])
    assert latency_of(workload, (0, 0, 0), (0, 1, 0)).finish == (5, 7, 5)
    assert latency_of(workload, (0, 0, 0), (1, 0, 1)).finish == (7, 2, 7)


def test_what_moves_between_two_pieces_of_an_accelerator_is_paid_at_both_ends() -> None:
    workload = _workload([1, 2], [(0, 1, 0.5)])
    assert latency_of(workload, (0, 0), (0, 1)).finish == (1.5, 4.0)


def test_a_path_that_returns_is_cut_into_pieces() -> None:
    workload = _workload([1, 1, 1, 1, 1], [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0), (0, 4, 0)])
    devices = (0, 1, 0, 2, 0)
    assert pieces_of(workload, devices) == (0, 0, 1, 0, 2)
    assert latency_of(workload, devices).latency == 14


def test_a_piece_that_a_path_leaves_and_enters_again_never_runs() -> None:
    workload = _workload([1, 1, 1], [(0, 1, 0), (1, 2, 0)])
    report = latency_of(workload, (0, 2, 0), (0, 0, 0))
    assert report.latency == math.inf
    assert report.reason is not None
    assert "piece 0 of acc0 waits for node 1 on cpu0" in report.reason


def test_pieces_that_wait_for_each_other_in_a_circle_never_run() -> None:
    workload = _workload([0, 0, 0, 0], [(0, 1, 0), (2, 3, 0)])
    assert latency_of(workload, (0, 1, 1, 0)).reason is not None
    assert latency_of(workload, (0, 1, 1, 0), (1, 0, 0, 0)).reason is not None
    assert latency_of(workload, (0, 1, 1, 0), (0, 1, 0, 1)).reason is None
    assert latency_of(workload, (0, 0, 1, 1)).reason is None


def test_evaluation_agrees_with_waiting_by_hand() -> None:
    random = Random(3)
    for _ in range(40):
        workload = random_workload(random, most_nodes=6)
        for devices in list(all_placements(workload))[::7]:
            pieces = [random.randrange(2) if d < workload.num_accelerators else 0 for d in devices]
            expected = _by_hand(workload, devices, pieces)
            assert latency_of(workload, devices, pieces).latency == pytest.approx(expected)


def test_cut_pieces_are_contiguous() -> None:
    # A piece that is not contiguous waits for itself even where all other nodes have pieces of their own.
    random = Random(4)
    for _ in range(60):
        workload = random_workload(random, most_nodes=8, most_accelerators=1, most_cpus=1, tight_memory=False)
        devices = [random.randrange(workload.num_accelerators + workload.num_cpus) for _ in workload.nodes]
        report = latency_of(workload, devices)
        assert report.reason is None or "circle" not in report.reason


def test_without_cpus_the_bound_is_a_share_of_the_work() -> None:
    workload = _workload([3, 3, 3, 3], [], accelerators=2, cpus=0)
    assert latency_lower_bound(workload) == 6


def test_the_bound_counts_what_leads_to_work_that_must_be_shared() -> None:
    # The CPU takes 10 times as long, so nodes 1 to 4 must be accelerated to be done before 21.
    edges = [(0, target, 0.0) for target in (1, 2, 3, 4)]
    workload = _workload([1, 2, 2, 2, 2], edges, accelerators=1)
    assert latency_lower_bound(workload) == 9


def test_the_bound_is_infinite_where_nothing_fits() -> None:
    workload = _workload([1, 1, 1], [], cpus=0, memory=3, sizes=[3, 3, 3])
    assert latency_lower_bound(workload) == math.inf


def test_the_bound_is_never_above_the_best_latency() -> None:
    random = Random(5)
    for _ in range(60):
        workload = random_workload(random, most_nodes=5)
        assert latency_lower_bound(workload) <= _best_by_force(workload, 1) + CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(("num_pieces", "most_nodes", "count"), [(1, 6, 15), (2, 4, 8)])
def test_the_search_finds_the_best_of_small_workloads(num_pieces: int, most_nodes: int, count: int) -> None:
    random = Random(6 + num_pieces)
    for _ in range(draws(count, 4)):
        workload = random_workload(random, most_nodes=most_nodes)
        _check_search(workload, num_pieces)


def _check_search(workload: Workload, num_pieces: int) -> None:
    best = _best_by_force(workload, num_pieces)
    if best == math.inf:
        with pytest.raises(BiremeError, match="no placement that fits"):
            search_latency(workload, num_pieces=num_pieces, time_limit_s=0.2)
        return
    found = search_latency(workload, num_pieces=num_pieces, time_limit_s=NO_LIMIT_S)
    assert found.value == pytest.approx(best)
    assert found.value == pytest.approx(_by_hand(workload, found.devices, found.pieces))
    assert found.lower_bound <= best + CLOSE
    assert max(found.pieces) < num_pieces


@pytest.mark.slow
def test_the_search_gets_out_of_starts_that_cannot_run() -> None:
    # Every cut of an order into equal parts makes the two colours wait for each other, and there is no CPU.
    workload = _workload(
        [1, 1, 1, 1], [(0, 1, 0), (2, 3, 0)], cpus=0, memory=2, sizes=[1, 1, 1, 1], colours=[0, 1, 1, 0]
    )
    found = search_latency(workload, num_pieces=2, time_limit_s=NO_LIMIT_S)
    assert found.value == pytest.approx(_best_by_force(workload, 2))


@pytest.mark.slow
def test_the_search_is_the_same_for_the_same_seed() -> None:
    workload = recurrent_like(1, 2, Setting(num_accelerators=2))
    one, other = (search_latency(workload, time_limit_s=NO_LIMIT_S, seed=3) for _ in range(2))
    assert one == other


@pytest.mark.slow
def test_the_search_takes_no_more_bytes_than_there_are() -> None:
    workload = transformer_like(2, Setting(num_accelerators=3), num_heads=2)
    total = sum(node.size_bytes for node in workload.nodes)
    scarce = replace(workload, accelerator_bytes=total / 4)
    found = search_latency(scarce, time_limit_s=0.3)
    assert latency_of(scarce, found.devices, found.pieces).latency == found.value
    greedy_like = sum(node.cpu_time for node in workload.nodes)
    assert found.lower_bound <= found.value < greedy_like


@pytest.mark.slow
@pytest.mark.parametrize(("num_pieces", "most_nodes", "count"), [(1, 5, 20), (2, 4, 8)])
def test_the_program_finds_the_best_of_small_workloads(num_pieces: int, most_nodes: int, count: int) -> None:
    _check_programs(Random(8 + num_pieces), num_pieces, most_nodes, count)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_pieces", "most_nodes", "count"), [(1, 7, 60), (1, 6, 60), (2, 5, 20), (3, 4, 8)]
)
def test_the_program_finds_the_best_of_many_workloads(num_pieces: int, most_nodes: int, count: int) -> None:
    _check_programs(Random(11), num_pieces, most_nodes, count)


def _check_programs(random: Random, num_pieces: int, most_nodes: int, count: int) -> None:
    pytest.importorskip("highspy")
    for _ in range(draws(count, 6)):
        workload = random_workload(random, most_nodes=most_nodes)
        best = _best_by_force(workload, num_pieces)
        for start in (None, _far(workload)):
            if best == math.inf:
                with pytest.raises(BiremeError, match="No placement fits"):
                    solve_latency(workload, num_pieces=num_pieces, time_limit_s=60, start=start)
                continue
            found = solve_latency(workload, num_pieces=num_pieces, time_limit_s=60, start=start)
            assert found.value == pytest.approx(best, rel=CLOSE)
            assert found.value == pytest.approx(_by_hand(workload, found.devices, found.pieces))
            assert best * (1 - 10 * CLOSE) - CLOSE <= found.lower_bound <= best + CLOSE


def _far(workload: Workload) -> LatencyFound | None:
    """Everything on the CPU, where there is one: a start that is far from the best."""
    if not workload.num_cpus:
        return None
    devices = (workload.num_accelerators,) * len(workload.nodes)
    latency = latency_of(workload, devices).latency
    return LatencyFound(devices, (0,) * len(devices), latency, 0.0)


def test_the_program_keeps_its_start_where_time_is_over() -> None:
    pytest.importorskip("highspy")
    workload = transformer_like(2, Setting(num_accelerators=3), num_heads=2)
    start = _far(workload)
    assert start is not None
    found = solve_latency(workload, time_limit_s=0.0, start=start)
    assert found.lower_bound <= found.value <= start.value


def test_the_program_takes_no_start_that_cannot_run() -> None:
    pytest.importorskip("highspy")
    workload = _workload([1, 1], [(0, 1, 0.5)], memory=1, sizes=[1, 1])
    with pytest.raises(BiremeError, match=r"cannot run\. The nodes on acc0 take 2 bytes"):
        solve_latency(workload, time_limit_s=1, start=LatencyFound((0, 0), (0, 0), 1.0, 0.0))
    roomy = replace(workload, accelerator_bytes=2)
    with pytest.raises(BiremeError, match="acc0 runs 2 pieces in turn, and may run 1"):
        solve_latency(roomy, time_limit_s=1, start=LatencyFound((0, 0), (0, 1), 1.0, 0.0))


def test_a_circle_that_takes_no_time_is_no_solution() -> None:
    # Without time or costs, only the order forbids that two pieces wait for each other.
    pytest.importorskip("highspy")
    workload = _workload(
        [0, 0, 0, 0], [(0, 1, 0), (2, 3, 0)], cpus=0, memory=2, sizes=[1, 1, 1, 1], colours=[0, 1, 1, 0]
    )
    with pytest.raises(BiremeError, match="No placement fits"):
        solve_latency(workload, time_limit_s=10)
    found = solve_latency(workload, num_pieces=2, time_limit_s=10)
    assert latency_of(workload, found.devices, found.pieces).reason is None


def _by_hand(workload: Workload, devices: Sequence[int], pieces: Sequence[int]) -> float:
    """Starts are raised until all rules hold; infinite where that does not end."""
    ids = [node.id for node in workload.nodes]
    place = {number: i for i, number in enumerate(ids)}
    edges = sorted({(place[e.source], place[e.target], e.cost) for e in workload.edges})
    on_cpu = [device >= workload.num_accelerators for device in devices]
    group = [("node", i, 0) if on_cpu[i] else ("piece", devices[i], pieces[i]) for i in range(len(ids))]
    takes = dict.fromkeys(group, 0.0)
    for i, node in enumerate(workload.nodes):
        takes[group[i]] += node.cpu_time if on_cpu[i] else node.accelerator_time
    for key in takes:
        if key[0] == "piece":
            inward = {(u, cost) for u, v, cost in edges if group[v] == key != group[u]}
            outward = {(u, cost) for u, v, cost in edges if group[u] == key != group[v]}
            takes[key] += sum(cost for _, cost in inward) + sum(cost for _, cost in outward)
    waits = {(group[u], group[v]) for u, v, _ in edges if group[u] != group[v]}
    waits |= {
        (a, b) for a in takes for b in takes if a[0] == b[0] == "piece" and a[1] == b[1] and a[2] < b[2]
    }
    # A round count stands in for time, too: a circle that takes no time never ends either.
    done = {key: (takes[key], 1) for key in takes}
    for _ in range(len(takes) + 1):
        changed = False
        for a, b in waits:
            new = max(done[a][0] + takes[b], done[b][0]), max(done[a][1] + 1, done[b][1])
            changed |= new != done[b]
            done[b] = new
        if not changed:
            return max(finish for finish, _ in done.values())
    return math.inf


def _all_pieces(workload: Workload, devices: Sequence[int], num_pieces: int) -> Iterator[tuple[int, ...]]:
    """Every way to number the pieces of the accelerators' nodes."""
    choices = [range(num_pieces) if device < workload.num_accelerators else (0,) for device in devices]
    yield from product(*choices)


def _best_by_force(workload: Workload, num_pieces: int) -> float:
    """The shortest latency of all placements; infinite where none fits."""
    return min(
        (
            _by_hand(workload, devices, pieces)
            for devices in all_placements(workload)
            for pieces in _all_pieces(workload, devices, num_pieces)
        ),
        default=math.inf,
    )
