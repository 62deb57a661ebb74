"""Plans and answers made by hand, for what reads, writes and shows them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from bireme.plan.forecast import Answer, Candidate, Forecast, Origin, StageForecast
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from tests.support.estimates import estimated_once
from tests.support.tiny_profiles import LAPTOP, gpt

__all__ = ["answer_of", "candidate_of", "tiny_profile"]


@cache
def tiny_profile(layers: int = 4, tied: str = "false") -> Profile:
    """A small GPT's profile with estimated seconds: two units a layer, the embedding and the head."""
    return estimated_once(gpt(layers, tied=tied), LAPTOP, (1, 2, 4))


def candidate_of(
    plan: Plan,
    num_units: int = 10,
    *,
    batch_s: float = 0.25,
    batch_size: int = 32,
    penalty: float = 1.0,
    peak_bytes: Sequence[float] = (),
    limit_bytes: float = 2.0**30,
) -> Candidate:
    """A plan with a forecast made up for it; devices are gpu0, gpu1, … of server0 unless it names them."""
    program = plan.program(1)
    if not plan.devices:
        names = iter(f"server0/gpu{n}" for n in range(plan.num_ranks))
        widths = plan.stage_widths or (plan.width,) * program.num_ranks
        plan = replace(plan, devices=tuple(tuple(next(names) for _ in range(width)) for width in widths))
    stages = tuple(
        StageForecast(
            begin=begin,
            end=end,
            devices=plan.devices[stage if plan.stage_widths else program.rank_of_stage[stage]],
            recompute=stage in plan.recompute,
            busy_s=batch_s * 0.9,
            peak_bytes=peak_bytes[stage] if peak_bytes else limit_bytes / (stage + 2),
            limit_bytes=limit_bytes,
        )
        for stage, (begin, end) in enumerate(pairwise((0, *plan.cuts, num_units)))
    )
    bottleneck = plan.devices[0][0]
    return Candidate(plan, Forecast(batch_s, batch_size / batch_s, penalty, 0.9, bottleneck, stages))


def answer_of(*candidates: Candidate, graph: str = "0" * 16) -> Answer:
    """An answer with these candidates, which come best first."""
    origin = Origin(graph, "1" * 16, "2" * 16, 32, "made by hand")
    return Answer(candidates, origin, len(candidates))
