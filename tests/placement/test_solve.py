"""From a request to a placement: every method on random workloads, against going through all placements."""

import math
from dataclasses import replace
from random import Random

import pytest

from bireme.errors import BiremeError
from bireme.placement.check import check
from bireme.placement.contiguous import Contiguous, NoSplitFoundError
from bireme.placement.solve import solve
from bireme.placement.table import advice_on
from bireme.placement.workload import Edge, Method, Node, Objective, Placement, Request, Workload
from tests.support.extent import draws
from tests.support.placement_oracles import best_by_force, random_workload

pytestmark = pytest.mark.slow

LONG_S = 1e4
"""For methods that end with a proof, which takes long where others compute too."""

LIMITS_S = {Method.ANNEAL: 0.2}
"""For those that use what they have."""

OF_ALL = tuple(method for method in Method if method is not Method.EXPERT)


def solved(workload: Workload, request: Request) -> Placement | None:
    try:
        return solve(workload, request)
    except BiremeError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.TRAINING, Objective.FLUSH])
@pytest.mark.parametrize("contiguous", [True, False])
def test_every_method_is_honest_and_those_that_can_are_best(objective: Objective, contiguous: bool) -> None:
    random = Random(77)
    for _ in range(draws(6, 4)):
        workload = random_workload(random, most_nodes=6)
        force = {kind: best_by_force(workload, objective, contiguous=kind) for kind in (True, False)}
        for method in OF_ALL:
            can_prove = method in (Method.AUTO, Method.MILP) or (method is Method.DP and contiguous)
            limit_s = LONG_S if can_prove else LIMITS_S.get(method, 10.0)
            found = solved(workload, Request(objective, method, contiguous=contiguous, time_limit_s=limit_s))
            if found is None:
                assert not can_prove or math.isinf(force[contiguous]), method
                continue
            best = force[found.contiguous]
            assert found.lower_bound <= best * (1 + 1e-9), method
            assert found.value >= best * (1 - 1e-9), method
            if can_prove:
                assert found.value == pytest.approx(best, rel=1e-6), method
                assert found.gap <= 1e-6, method
            verdict = check(workload, found.devices, objective, contiguous=found.contiguous)
            assert verdict.problems == (), method
            assert verdict.value == pytest.approx(found.value, rel=1e-9), method
            assert verdict.loads == pytest.approx(found.loads, rel=1e-9), method


def test_a_graph_of_too_many_ideals_is_cut_as_a_line_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.placement.solve.MOST_IDEALS", 100)
    apart = Workload(tuple(Node(number, 1.0, 9.0) for number in range(12)), (), 3, 0, 1e9)
    found = solve(apart, Request())
    assert found.method == Method.DPL
    assert found.num_ideals is None
    assert "cut as a line" in found.notes[0]
    assert found.value == pytest.approx(found.lower_bound) == 4.0
    with pytest.raises(BiremeError, match="too many for the dynamic program"):
        solve(apart, Request(method=Method.DP))


def test_who_cut_a_line_for_too_many_ideals_is_not_sent_to_the_dynamic_program() -> None:
    found = Placement(Objective.TRAINING, "dpl", True, (0,), 2.0, 1.0, (2.0,))
    assert "--method dp " in (advice_on(found) or "")
    assert "--method dp " not in (advice_on(replace(found, has_too_many_ideals=True)) or "")


def test_a_graph_too_large_for_the_integer_program_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bireme.placement.solve._MOST_ITEMS_IN_PROGRAM", 1_500)
    nodes = tuple(Node(number, 1.0, 1.0) for number in range(1_501))
    edges = tuple(Edge(number, number + 1, 0.1) for number in range(1_500))
    request = Request(method=Method.MILP, time_limit_s=0.1)
    with pytest.raises(BiremeError, match="takes 1,500 at most"):
        solve(Workload(nodes, edges, 1, 0, 1e9), request)


def test_an_experts_split_is_taken_as_it_is() -> None:
    nodes = tuple(Node(number, 1.0, 9.0) for number in range(4))
    workload = Workload(nodes, tuple(Edge(n, n + 1, 0.5) for n in range(3)), 2, 0, 1e9)
    found = solve(workload, Request(method=Method.EXPERT, expert=(0, 0, 0, 1)))
    assert (found.value, found.loads) == (3.5, (3.5, 1.5))
    with pytest.raises(BiremeError, match="leaves"):
        solve(workload, Request(method=Method.EXPERT, expert=(0, 1, 0, 1)))
    torn = solve(workload, Request(method=Method.EXPERT, expert=(0, 1, 0, 1), contiguous=False))
    assert not torn.contiguous
    with pytest.raises(BiremeError, match="go together"):
        Request(method=Method.EXPERT)


def test_methods_that_know_no_contiguity_say_so() -> None:
    workload = Workload(tuple(Node(number, 1.0, 9.0) for number in range(4)), (), 2, 0, 1e9)
    found = solve(workload, Request(method=Method.ANNEAL, time_limit_s=0.2))
    assert not found.contiguous
    assert "ignores contiguity" in found.notes[0]


def test_latency_is_placed_by_those_who_can() -> None:
    workload = Workload(tuple(Node(number, 1.0, 9.0) for number in range(3)), (), 2, 1, 1e9)
    with pytest.raises(BiremeError, match="does not place for latency"):
        solve(workload, Request(Objective.LATENCY, Method.GREEDY))


@pytest.mark.parametrize(
    ("objective", "contiguous"), [(Objective.LATENCY, True), (Objective.THROUGHPUT, False)]
)
def test_a_huge_time_may_say_cannot(objective: Objective, contiguous: bool) -> None:
    nodes = tuple(Node(n, 1e20 if n == 1 else 1.0, 3.0, supported=n != 1) for n in range(4))
    workload = Workload(nodes, tuple(Edge(n, n + 1, 0.1) for n in range(3)), 2, 1, 1e9)
    placement = solve(workload, Request(objective=objective, contiguous=contiguous, time_limit_s=2.0))
    assert placement.value < 10
    assert placement.gap < 1e-6


def test_what_no_line_fits_an_integer_program_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(contiguous: Contiguous) -> None:
        raise NoSplitFoundError("No line fits.")

    monkeypatch.setattr(Contiguous, "best", nothing)
    nodes = tuple(Node(number, 1.0, 1.0, size_bytes=size) for number, size in enumerate((6, 6, 4, 4)))
    placement = solve(Workload(nodes, (), 2, 0, 10.0), Request())
    assert (placement.method, placement.value) == (Method.MILP, 2.0)
    assert "No cut of a line was found" in placement.notes[0]


def test_an_expert_s_pieces_are_taken_as_they_are() -> None:
    workload = Workload((Node(0, 1.0, 9.0), Node(1, 1.0, 9.0)), (), 1, 0, 1e9)
    request = Request(Objective.LATENCY, Method.EXPERT, num_pieces=2, expert=(0, 0), expert_pieces=(0, 1))
    assert solve(workload, request).pieces == (0, 1)
