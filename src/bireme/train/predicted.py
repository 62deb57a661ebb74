"""A few batches of a run as the simulator foresees them, to be drawn above those that were measured."""

from pathlib import Path

from bireme.plan.search.search import timeline_of
from bireme.report.page.recorded import write_recorded
from bireme.train.plan_search import plan_request_of
from bireme.train.prepare import PreparedRun

__all__ = ["write_predicted"]


def write_predicted(prepared: PreparedRun, path: Path, *, num_batches: int) -> None:
    """Write the predicted timeline; nothing where the plan does not name devices or nobody profiled."""
    if prepared.profile is None or not prepared.plan.plan.devices:
        return
    timeline = timeline_of(
        prepared.plan.plan,
        prepared.profile,
        prepared.machines.cluster,
        plan_request_of(prepared.run, prepared.graph),
        num_batches=num_batches,
    )
    write_recorded(timeline, path)
