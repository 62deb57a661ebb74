"""What a user asks of a plan can only make it slower, and all that a plan says gives that plan again."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search import search
from bireme.profile.profile import Profile
from tests.support.extent import examples
from tests.support.planning import small_clusters, small_profiles

CONSTRAINTS = [
    {"schedule": "1f1b"},
    {"schedule": "2bw-fresh"},
    {"synchronous": True},
    {"lookahead": False},
    {"depth": 2},
    {"depth": 1},
    {"width": 1},
    {"width": 2},
    {"micro_batch": 1},
    {"micro_batch": 2},
    {"stage_widths": "equal"},
    {"stage_widths": (2, 1)},
    {"stage_widths": (1, 2)},
]


def answered(profile: Profile, cluster: Cluster, request: PlanRequest) -> Answer | None:
    """What the search finds, if anything."""
    try:
        found = search.find_plan(profile, cluster, request, advises=False)
    except BiremeError:
        return None
    return found if isinstance(found, Answer) else None


@pytest.mark.slow
@examples(80, 8, suppress_health_check=list(HealthCheck))
@given(
    small_profiles(most_units=5),
    small_clusters(most_devices=3),
    st.sampled_from([8, 48]),
    st.lists(st.sampled_from(CONSTRAINTS), min_size=1, max_size=3),
)
def test_no_constraint_finds_a_faster_plan(
    profile: Profile, cluster: Cluster, batch_size: int, asked: list[dict[str, object]]
) -> None:
    """A search once stopped at a number of instructions, and with some shapes excluded it came further."""
    request = PlanRequest(batch_size)
    free = answered(profile, cluster, request)
    try:
        for constraint in asked:
            request = replace(request, **constraint)  # type: ignore[arg-type]  # named as in `PlanRequest`
    except BiremeError:
        return  # two that exclude each other
    constrained = answered(profile, cluster, request)
    if constrained is not None:
        assert free is not None
        least = free.best.forecast.cost_s_per_sample
        assert least <= constrained.best.forecast.cost_s_per_sample * (1 + 1e-9)


@pytest.mark.slow
@examples(40, 8, suppress_health_check=list(HealthCheck))
@given(small_profiles(most_units=5), small_clusters(most_devices=3), st.sampled_from([8, 48]))
def test_a_plan_is_found_again_if_all_that_it_says_is_asked(
    profile: Profile, cluster: Cluster, batch_size: int
) -> None:
    request = PlanRequest(batch_size)
    free = answered(profile, cluster, request)
    if free is None:
        return
    plan = free.best.plan
    asked = replace(
        request,
        schedule=plan.schedule,
        depth=plan.num_stages if plan.stage_widths else plan.source.num_ranks,
        width=None if plan.stage_widths else plan.width,
        stage_widths=plan.stage_widths or "equal",
        micro_batch=plan.micro_batch_sizes[0] if len(set(plan.micro_batch_sizes)) == 1 else None,
        lookahead=plan.lookahead > 0,
        delay_warmup=request.delay_warmup_share,
    )
    again = answered(profile, cluster, asked)
    assert again is not None
    assert again.best.plan == free.best.plan
    assert again.best.forecast == free.best.forecast
    assert search.forecast_of(plan, profile, cluster, request) == free.best.forecast
