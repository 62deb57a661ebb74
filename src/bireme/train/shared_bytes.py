"""What replicas that share an optimiser or weights have sent each other, beside what the plan said."""

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.plan.plan_file import SavedPlan
from bireme.simulate.gathering import REPLICAS
from bireme.train.outcome import Outcome, first_of
from bireme.train.run_file import RunFile

__all__ = ["SharedSummary", "shared_summary"]


@dataclass(frozen=True, slots=True)
class SharedSummary:
    """What all ranks have sent while they trained, since the run was started or resumed: weights that they
    make or keep for their replicas, and gradients to be summed. Predictions are None where the plan has none.
    """

    gathered_bytes: int
    predicted_gathered_bytes: float | None
    summed_bytes: int
    predicted_summed_bytes: float | None


def shared_summary(run: RunFile, saved: SavedPlan, outcomes: Sequence[Outcome]) -> SharedSummary | None:
    """That of a run; None where nothing is shared."""
    if run.memory.shard == "none" or saved.plan.width == 1:
        return None
    gathered = sum(one.own.gathered_bytes for one in outcomes)
    sent = sum(one.own.sent_sum_bytes for one in outcomes)
    times = first_of(outcomes).own.num_batches * saved.plan.width
    return SharedSummary(
        gathered,
        _predicted(saved, "device", times),
        sent - gathered,
        _predicted(saved, REPLICAS, times),
    )


def _predicted(saved: SavedPlan, tier: str, times: int) -> float | None:
    """What a forecast says goes there in so many batches, all ranks of a replica together."""
    tiers = () if saved.forecast is None else saved.forecast.tiers
    return sum(one.predicted_bytes_moved for one in tiers if one.tier == tier) * times if tiers else None
