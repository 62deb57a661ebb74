"""Whether the replicas of a run can go on without each other: known before anything starts."""

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.train.data.samples import Samples
from bireme.train.data.stream import StreamSamples
from bireme.train.run_file import RunFile

__all__ = ["check_replicas"]


def check_replicas(run: RunFile, plan: Plan, samples: Samples) -> None:
    """Refuse a run whose replicas may die, but could not go on without each other."""
    if run.sync.mode != "quorum":
        return
    if plan.width < 2:
        raise BiremeError(
            'sync.mode is "quorum", but the plan has one replica, which nobody could go on without. Set '
            'plan.width to 2 or more, or use sync.mode = "all".'
        )
    if isinstance(samples, StreamSamples):
        raise BiremeError(
            'sync.mode is "quorum", in which samples may be trained in another order than they come, but the '
            "data are a stream. Download them, or leave out streaming=true."
        )
