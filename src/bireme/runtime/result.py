"""What came of a batch, as a pipeline gives it to whoever trains."""

from dataclasses import dataclass

from bireme.runtime.microbatches import Portion
from bireme.runtime.updates import FinishedBatch

__all__ = ["BatchResult", "result_of"]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch; the same on every rank, but for `seconds`, which passed here since the last
    one. `votes` is the sum of what the ranks gave along with it. `shares` are the samples of each replica;
    `busy_s` says for how long the batch kept each rank busy, where shares follow that. The replicas that have
    a part in it are in `order`, the one that has trained for longest first.

    `is_skipped` says that the weights stay as they were, but for those of stages that had stepped apart: the
    gradient was not finite, or nothing in the batch counts for the loss. Then its `weight`, how much counts
    in it, is 0, its loss NaN and its norm 0.
    """

    batch: int
    loss: float
    grad_norm: float
    lr_factor: float
    is_skipped: bool
    num_samples: int
    seconds: float
    votes: float
    weight: float
    shares: tuple[int, ...]
    busy_s: tuple[float, ...] = ()
    order: tuple[int, ...] = (0,)

    @property
    def leader(self) -> int:
        """The replica that has trained for longest."""
        return self.order[0]


def result_of(
    finished: FinishedBatch, portion: Portion, seconds: float, *, is_agreed: bool = False
) -> BatchResult:
    """The result of a batch that is finished, of which this replica had a portion.

    It `is_agreed` where a replica knows no more than its own portion: then what all gave along are the weight
    of the whole batch, the samples of each replica in it, and the first batch of each.
    """
    weight, shares, busy_s = portion.weight, portion.shares, finished.more
    order: tuple[int, ...] = (0,)
    if is_agreed:
        weight, *rest = finished.more
        half = len(rest) // 2
        shares, firsts, busy_s = tuple(map(round, rest[:half])), rest[half:], ()
        parts = [one for one, num in enumerate(shares) if num]
        order = tuple(sorted(parts, key=lambda one: (firsts[one], one)))
    return BatchResult(
        batch=finished.batch,
        loss=finished.loss,
        grad_norm=finished.grad_norm,
        lr_factor=finished.lr_factor,
        is_skipped=finished.is_skipped,
        num_samples=sum(shares) if is_agreed else portion.num_samples,
        seconds=seconds,
        votes=finished.votes,
        weight=weight,
        shares=shares,
        busy_s=busy_s,
        order=order,
    )
