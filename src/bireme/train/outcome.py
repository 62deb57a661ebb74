"""The results of a run as plain data: each rank's part, and the whole with its prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bireme.balance.slow_stage import SlowStage
from bireme.runtime.paging.rank_paging import TierMoves

__all__ = ["REPLAN", "LinkBytes", "Outcome", "RankOutcome", "SyncFigures", "first_of"]

REPLAN = "new plan"
"""The reason of a run that has ended so that a new plan takes over."""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What a rank has sent over a border in one direction: without a codec, and with it."""

    border: int
    forward: bool
    raw_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank measured. `busy_share` is None where no batches were recorded; `control_s` is what the
    control took with its waits, None where it never ran. `raw_sum_bytes` is what the sums of its gradients
    would have sent without a codec, `sent_sum_bytes` what they did send; of both, `gathered_bytes` are
    weights for replicas that share them. `num_batches` are those that this process has trained. `tiers` are
    there if the rank pages. `kept_bytes` is the most that it held at a time for replicas that were late, away
    or coming back: sums of batches, and snapshots.
    """

    rank: int
    peak_bytes: int | None
    busy_share: float | None
    control_s: float | None = None
    links: tuple[LinkBytes, ...] = ()
    raw_sum_bytes: int = 0
    sent_sum_bytes: int = 0
    tiers: tuple[TierMoves, ...] = ()
    gathered_bytes: int = 0
    num_batches: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SyncFigures:
    """What came of a run whose replicas may die: epochs of the membership, committed rounds and samples, and
    samples that had to be trained again.
    """

    mode: str
    epochs: int
    rounds: int
    samples_committed: int
    samples_redone: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank can tell at the end. What is not of the rank itself is the same on all.

    `batch_s` is the median of the seconds of a batch, those first in a window left out. `checkpoint` is the
    step of the newest one. The figures of the last evaluation are None where they mean nothing;
    `eval_loss_through_codecs` also where borders have no codecs. A run that ended to be planned again says
    which stage is slow. `placement` is what an epoch takes of private and public samples, None where all are
    public. `leads` says whether the rank's replica speaks for the run.
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
    eval_loss_through_codecs: float | None = None
    warnings: tuple[str, ...] = field(default=())
    slow: SlowStage | None = None
    placement: dict[str, Any] | None = None
    sync: SyncFigures | None = None
    leads: bool = True


def first_of(outcomes: Sequence[Outcome]) -> Outcome:
    """That of rank 0, which has what all share."""
    return next(outcome for outcome in outcomes if outcome.own.rank == 0)
