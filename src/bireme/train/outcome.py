"""The results of a run as plain data: each rank's part, and the whole beside its prediction."""

from dataclasses import dataclass, field
from typing import Any

from bireme.balance.slow_stage import SlowStage

__all__ = ["REPLAN", "Outcome", "RankOutcome"]

REPLAN = "new plan"
"""The reason of a run that has ended so that a new plan takes over."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank measured. `busy_share` is None where no batches were recorded; `control_s` is what the
    control took in the mean, None where it never ran.
    """

    rank: int
    peak_bytes: int | None
    busy_share: float | None
    control_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank can tell at the end. What is not of the rank itself is the same on all.

    `batch_s` is the median of the seconds of a batch, those first in a window left out. `checkpoint` is the
    step of the newest one. The figures of the last evaluation are None where they mean nothing. A run that
    ended to be planned anew says which stage is slow. `placement` is what an epoch takes of private and
    public samples, None where all are public.
    """

    steps: int
    reason: str
    train_loss: float | None
    eval_loss: float | None
    batch_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    num_skipped: int
    checkpoint: int | None
    own: RankOutcome
    eval_perplexity: float | None = None
    eval_bits_per_byte: float | None = None
    warnings: tuple[str, ...] = field(default=())
    slow: SlowStage | None = None
    placement: dict[str, Any] | None = None
