"""Which weight version a micro-batch runs on: the part of a schedule that decides what is computed.

W(v) is the weights after v updates. Batches and micro-batches count from 0; d is the number of stages,
s the stage, m the micro-batches of a batch, t the batch, k = t·m + micro-batch.
"""

from enum import StrEnum

__all__ = ["Rule", "banks_needed", "updates_per_batch", "version_used"]


class Rule(StrEnum):
    """The update rules. All but STASHED give every stage the same delay."""

    SYNCHRONOUS = "synchronous"
    """Batch t runs on W(t): what one process would compute."""
    DELAYED = "delayed"
    """Batch t runs on W(max(t−1, 0)): a delay of one update, on every stage, in both passes."""
    FRESH = "fresh"
    """Batch t runs on a trial version t, made from W(t−1) and the gradients of batch t−1 seen so far."""
    STASHED = "stashed"
    """An update after every micro-batch; micro-batch k runs on W(k−(d−1−s)), stage by stage, or on the
    window's first version."""


def version_used(
    rule: Rule,
    *,
    stage: int,
    num_stages: int,
    batch: int,
    microbatch: int,
    num_microbatches: int,
    first_batch: int,
) -> int:
    """The version that both passes of a micro-batch run on.

    A window that starts at `first_batch` starts drained: W(first_batch) is made, and under DELAYED the
    version before it is still there.
    """
    match rule:
        case Rule.SYNCHRONOUS | Rule.FRESH:
            return batch
        case Rule.DELAYED:
            return max(batch - 1, 0)
        case Rule.STASHED:
            newest = first_batch * num_microbatches
            return max(batch * num_microbatches + microbatch - (num_stages - 1 - stage), newest)


def banks_needed(rule: Rule, stage: int, num_stages: int) -> int:
    """How many versions to compute with a stage must be able to hold at once.

    Under FRESH these are trial versions; W itself is kept in addition, in the optimiser's master copy
    where there is one.
    """
    match rule:
        case Rule.SYNCHRONOUS:
            return 1
        case Rule.DELAYED | Rule.FRESH:
            return 2
        case Rule.STASHED:
            return num_stages - stage


def updates_per_batch(rule: Rule, num_microbatches: int) -> int:
    """How many versions a batch makes."""
    return num_microbatches if rule is Rule.STASHED else 1
