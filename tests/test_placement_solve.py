"""From a request to a placement: every method on random workloads, against going through all placements."""

import math
from random import Random

import pytest

from bireme.errors import BiremeError
from bireme.plan.placement.check import check
from bireme.plan.placement.placement import Placement
from bireme.plan.placement.request import Method, Request
from bireme.plan.placement.solve import solve
from bireme.plan.placement.workload import Edge, Node, Objective, Workload
from tests.placement_oracles import best_by_force, random_workload

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
    for _ in range(12):
        workload = random_workload(random, most_nodes=6)
        force = {kind: best_by_force(workload, objective, contiguous=kind) for kind in (True, False)}
        for method in OF_ALL:
            found = solved(
                workload,
                Request(
                    objective,
                    method,
                    contiguous=contiguous,
                    time_limit_s=1.0 if method is Method.ANNEAL else 10.0,
                ),
            )
            can_prove = method in (Method.AUTO, Method.MILP) or (method is Method.DP and contiguous)
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
    monkeypatch.setattr("bireme.plan.placement.solve.MOST_IDEALS", 100)
    apart = Workload(tuple(Node(number, 1.0, 9.0) for number in range(12)), (), 3, 0, 1e9)
    found = solve(apart, Request())
    assert found.method == Method.DPL
    assert found.num_ideals is None
    assert "cut as a line" in found.notes[0]
    assert found.value == pytest.approx(found.lower_bound) == 4.0
    with pytest.raises(BiremeError, match="too many for the dynamic program"):
        solve(apart, Request(method=Method.DP))


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
    found = solve(workload, Request(method=Method.LOCAL_SEARCH))
    assert not found.contiguous
    assert "knows no contiguity" in found.notes[0]


def test_latency_is_placed_by_those_who_can() -> None:
    workload = Workload(tuple(Node(number, 1.0, 9.0) for number in range(3)), (), 2, 1, 1e9)
    with pytest.raises(BiremeError, match="does not place for latency"):
        solve(workload, Request(Objective.LATENCY, Method.GREEDY))
