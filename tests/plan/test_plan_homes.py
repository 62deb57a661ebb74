"""Plans for private samples and for energy: the best that holds them, or a sentence why there is none."""

import math
from dataclasses import replace

import pytest

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, summarize
from bireme.plan.plan import Plan, check_homes, homes_of, servers_of_places
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan
from tests.plan.test_search import every_plan, fits

pytestmark = pytest.mark.slow

PROFILE = profile_of([3, 1, 2, 4], [5, 2, 3, 6], sizes=(1, 2), boundary_bytes=[1, 1, 1, 0])


def cluster_of(**servers: list[tuple[float, float]]) -> Cluster:
    """Servers of devices of these speeds and watts."""
    return Cluster(
        tuple(
            Server(
                name,
                tuple(Device("any", "emulated", 10**6, speed=speed, watts=watts) for speed, watts in own),
                cards=(Card("net", tuple(range(len(own))), Link(1.0, 0.5)),),
            )
            for name, own in servers.items()
        )
    )


SMALL = cluster_of(a=[(1.0, 10.0)], b=[(0.5, 2.0)])
LARGE = cluster_of(a=[(1.0, 10.0)] * 2, b=[(0.4, 2.0)] * 2)


def best(cluster: Cluster, request: PlanRequest) -> Plan:
    found = find_plan(PROFILE, cluster, request)
    assert isinstance(found, Answer), found
    for candidate in found.candidates:
        assert set(request.owners) <= set(homes_of(candidate.plan, cluster, (0, 3)))
    return found.best.plan


@pytest.mark.parametrize(
    ("schedule", "owners", "goal"),
    [
        ("sequential", ("b",), Goal.THROUGHPUT),
        ("sequential", ("a",), Goal.ENERGY),
        ("1f1b", ("b",), Goal.ENERGY),
        ("zbv", ("a",), Goal.ENERGY),
        ("zbv", ("b",), Goal.THROUGHPUT),
    ],
)
def test_the_plan_is_the_best_of_those_that_keep_samples_at_home(
    schedule: str, owners: tuple[str, ...], goal: Goal
) -> None:
    """Of all that there are, written down with nothing of the search."""
    request = PlanRequest(4, schedule=schedule, owners=owners, goal=goal)
    evaluator = PlanEvaluator(PlanningProblem(PROFILE, SMALL, request))

    def cost(plan: Plan) -> float:
        forecast = evaluator.forecast(draft_of(plan, SMALL))
        if not fits(forecast) or not set(owners) <= set(homes_of(plan, SMALL, (0, 3))):
            return math.inf
        assert forecast.joules_per_sample is not None
        return forecast.cost_s_per_sample if goal is Goal.THROUGHPUT else forecast.joules_per_sample

    least = min(map(cost, every_plan(PROFILE, SMALL, request)))
    assert cost(best(SMALL, request)) == pytest.approx(least, rel=1e-9)


def test_a_pipeline_over_two_servers_comes_back_to_the_owner() -> None:
    plan = best(SMALL, PlanRequest(4, schedule="zbv", depth=2, owners=("b",)))
    assert plan.devices == (("b/emulated0",), ("a/emulated0",))


def test_two_owners_are_homes_of_a_replica_each() -> None:
    found = best(LARGE, PlanRequest(8, schedule="1f1b", depth=2, owners=("a", "b")))
    assert sorted(map(str, homes_of(found, LARGE, (0, 3)))) == ["a", "b"]
    middle = best(LARGE, PlanRequest(8, schedule="1f1b", depth=3, owners=("b",)))
    assert middle.devices[0][0].startswith("b/")
    assert middle.devices[2][0].startswith("b/")


@pytest.mark.usefixtures("brief_searches")  # its claim is of all candidates, however good they are
def test_many_devices_are_searched_with_the_constraint_too() -> None:
    wide = cluster_of(a=[(1.0, 10.0)] * 6, b=[(0.5, 2.0)] * 6)
    best(wide, PlanRequest(24, owners=("a", "b")))
    best(wide, PlanRequest(24, schedule="2bw", depth=3, owners=("b",)))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (PlanRequest(4, schedule="1f1b", depth=2, owners=("b",)), "the schedule zbv"),
        (PlanRequest(4, schedule="1f1b", depth=2, owners=("b",)), "another depth than 2"),
        (PlanRequest(4, width=1, owners=("a", "b")), "another width than 1"),
        (PlanRequest(4, devices=("a/emulated0",), owners=("b",)), "none of the devices to use is there"),
        (PlanRequest(4, owners=("c",)), "data.private names the server 'c', which the cluster lacks"),
    ],
)
def test_a_plan_that_cannot_keep_samples_at_home_is_refused_with_what_would_do(
    asked: PlanRequest, told: str
) -> None:
    with pytest.raises(BiremeError, match=told):
        find_plan(PROFILE, SMALL, asked)


def test_a_plan_that_somebody_made_is_checked_in_the_same_way() -> None:
    over = Plan((2,), 2, "1f1b", devices=(("a/emulated0",), ("b/emulated0",)))
    assert servers_of_places(over, SMALL) == servers_of_places(replace(over, devices=()), SMALL) == ["a", "b"]
    assert homes_of(over, SMALL, (0, 3)) == (None,)
    with pytest.raises(BiremeError, match="does not keep the private samples of b"):
        check_homes(over, SMALL, (0, 3), ["b"])
    check_homes(replace(over, schedule="zbv", cuts=(1, 2, 3)), SMALL, (0, 3), ["a"])
    # Where units between the ends read inputs too, their stages must be at home as well.
    with pytest.raises(BiremeError, match="private samples of a"):
        check_homes(replace(over, schedule="zbv", cuts=(1, 2, 3)), SMALL, (0, 1, 3), ["a"])


def test_joules_are_what_the_devices_in_use_draw_and_unknown_where_any_is() -> None:
    found = find_plan(PROFILE, SMALL, PlanRequest(4, schedule="sequential", width=2))
    assert isinstance(found, Answer)
    forecast = found.best.forecast
    assert forecast.joules_per_sample == pytest.approx((10 + 2) / forecast.samples_per_s)
    assert summarize(found.best).joules_per_sample == forecast.joules_per_sample
    unknown = cluster_of(a=[(1.0, 10.0)], b=[(0.5, 0.0)])
    found = find_plan(PROFILE, unknown, PlanRequest(4, schedule="sequential", width=2))
    assert isinstance(found, Answer)
    assert found.best.forecast.joules_per_sample is None
    with pytest.raises(BiremeError, match="b/emulated0 has no watts"):
        find_plan(PROFILE, unknown, PlanRequest(4, goal=Goal.ENERGY))


def test_energy_leaves_out_the_device_that_draws_too_much() -> None:
    fast = best(SMALL, PlanRequest(4, goal=Goal.THROUGHPUT))
    frugal = best(SMALL, PlanRequest(4, goal=Goal.ENERGY))
    assert fast.num_ranks == 2
    assert frugal.devices == (("b/emulated0",),)
