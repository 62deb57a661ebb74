"""The shares that a run begins with, measured by all ranks on their own devices before the first step."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from bireme.balance.knee import grown_shares, shares_by_times
from bireme.balance.shares import Shares
from bireme.runtime.measuring.replica_times import replica_times
from bireme.runtime.pipeline import Pipeline
from bireme.train.data.samples import Samples
from bireme.train.run_file import RunFile

__all__ = ["measured_shares"]


def measured_shares(pipeline: Pipeline, run: RunFile, samples: Samples) -> Shares:
    """The shares that follow the measured speeds; their sum is the batch, which may have grown.

    All ranks call it, and find the same.
    """
    assert pipeline.balancer is not None, "who measures shares shares out"
    limits, m = pipeline.balancer.limits, pipeline.plan.source.num_microbatches
    most = [share // m for share in limits.most]
    sizes = [1 << power for power in range(max(most).bit_length())]

    def rows(size: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        numbers = [number % len(samples) for number in range(size)]
        return samples.take(numbers, tuple(names)) if names else {}

    times = replica_times(pipeline, rows, sizes, most)
    if run.balance.batch == "grow":
        return grown_shares(m, times, limits)
    first = pipeline.balancer.balance.shares
    return shares_by_times(first, m, times, limits, margin=run.balance.margin)
