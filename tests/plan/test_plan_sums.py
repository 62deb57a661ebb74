"""A codec for sums over replicas in predictions: fewer bytes on the link, and what is kept in memory."""

import pytest

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import Device
from bireme.cluster.links import Card, Link
from bireme.cluster.server import Server
from bireme.codec.sum_words import SumCost, parse_sum_codec, sum_cost
from bireme.plan.forecast import Forecast
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import forecast_of
from tests.support.command import bireme
from tests.support.hand_plans import tiny_profile

SLOW = 1.25e6


def cluster() -> Cluster:
    """Two machines with a device each, and a slow link."""
    device = Device("small", "cuda", memory_bytes=2**30)
    card = Card("card", (0,), Link(SLOW, 0.0))
    return Cluster(tuple(Server(name, (device,), cards=(card,)) for name in ("one", "other")))


def forecast(codec: str, schedule: str = "1f1b") -> Forecast:
    plan = Plan((), 4, schedule, width=2, micro_batch_sizes=(1, 1), devices=(("one/gpu0", "other/gpu0"),))
    request = PlanRequest(batch_size=8, sums=cost(codec))
    return forecast_of(plan, tiny_profile(), cluster(), request)


def cost(codec: str) -> SumCost:
    return sum_cost(parse_sum_codec(codec), [(1000, 1000)])


def test_a_step_over_a_slow_link_takes_as_long_as_the_bytes_that_are_sent() -> None:
    dense = forecast("none")
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    assert dense.batch_s > 0.9 * gradients / SLOW
    for codec in ("int8", "int2", "threshold:0.01:50", "lowrank:4"):
        saved_s = dense.batch_s - forecast(codec).batch_s
        assert saved_s == pytest.approx((1 - cost(codec).hop_share(2)) * gradients / SLOW, rel=0.05), codec


def test_what_a_codec_keeps_is_counted() -> None:
    gradients = sum(unit.gradient_bytes for unit in tiny_profile().units)
    dense, kept = forecast("none").stages[0], forecast("threshold:0.01:50").stages[0]
    assert kept.peak_bytes - dense.peak_bytes == pytest.approx(2 * gradients)
    assert forecast("int8").stages[0].peak_bytes == dense.peak_bytes


def test_partitioners_count_what_a_codec_keeps_where_there_are_replicas() -> None:
    request = PlanRequest(batch_size=8, sums=cost("threshold:0.01:50"))
    problem = PlanningProblem(tiny_profile(), cluster(), request)
    one, two = (problem.merged(1, width).bytes for width in (1, 2))
    assert (two.optimizer - one.optimizer).tolist() == (2 * one.gradient).tolist()
    assert (two.gradient == one.gradient).all()


def test_a_wrong_codec_is_refused_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(
        capsys, "plan", "--model", "gpt:layers=2,width=16", "--batch-size", "4", "--sync-codec", "int0"
    )
    assert result.status == 2
    assert "lowrank:RANK" in result.err
