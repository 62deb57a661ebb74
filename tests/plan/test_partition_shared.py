"""Tables of stages whose replicas share an optimizer: they have the bytes that are predicted for plans."""

import pytest

from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.cutting import loads_on
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import forecast_of
from bireme.plan.search.shapes import Outline
from tests.support.hand_plans import tiny_profile

WIDTH = 3


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw-fresh"])
def test_partitioners_count_the_bytes_that_are_predicted(schedule: str, shard: str) -> None:
    device, card = Device("small", "cuda", 2**30), Card("card", (0,), Link(1.25e6, 0.0))
    cluster = Cluster(tuple(Server(f"s{place}", (device,), cards=(card,)) for place in range(WIDTH)))
    request = PlanRequest(batch_size=4 * WIDTH, shard=shard)
    problem = PlanningProblem(tiny_profile(), cluster, request)
    loads = loads_on(problem, Outline(schedule, 1, 1, (1,) * WIDTH, 4), (tuple(range(WIDTH)),))
    plan = Plan((), 4, schedule, width=WIDTH, micro_batch_sizes=(1,) * WIDTH, devices=(problem.names,))
    predicted = forecast_of(plan, tiny_profile(), cluster, request).stages[0].peak_bytes
    assert loads.bytes_of(0, 0, problem.num_units) == pytest.approx(predicted, abs=2.0)
