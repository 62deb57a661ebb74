"""One device that runs the model in parts: the fewest that fit, and what they cost."""

import pytest

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan

UNITS = 8
PROFILE = profile_of([1.0] * UNITS, [2.0] * UNITS, kept_bytes=[10] * UNITS, boundary_bytes=[1] * UNITS)


def found(memory_bytes: int, **asked: object) -> Answer | NothingFits:
    cluster = Cluster((Server("s", (Device("any", "emulated", memory_bytes, process_bytes=0),)),))
    return find_plan(PROFILE, cluster, PlanRequest(4, **asked), advises=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("memory_bytes", "parts"), [(80, 1), (60, 2), (30, 3), (20, 4), (10, 8)])
def test_the_fewest_parts_that_fit_are_found(memory_bytes: int, parts: int) -> None:
    answer = found(memory_bytes, in_parts=True)
    assert isinstance(answer, Answer)
    plan, forecast = answer.best.plan, answer.best.forecast
    assert plan.num_stages == parts
    assert plan.recompute == tuple(range(parts - 1)), "the backward of the last follows its forward"
    begun = plan.cuts[-1] if plan.cuts else 0
    assert forecast.batch_s == pytest.approx(4 * (3 * UNITS + begun))
    assert forecast.stages[0].peak_bytes <= memory_bytes


def test_without_parts_and_with_too_little_memory_nothing_fits() -> None:
    assert isinstance(found(60), NothingFits)
    assert isinstance(found(9, in_parts=True), NothingFits)
    assert isinstance(found(60, in_parts=True, micro_batch=1, schedule="sequential"), Answer)
