"""A new plan for a run on its way, one of whose devices has become slow."""

from dataclasses import replace

from bireme.plan.hashes import planned_units
from bireme.plan.plan_file import saved_plan
from bireme.train.outcome import Outcome
from bireme.train.plan_search import planned
from bireme.train.prepare import PreparedRun
from bireme.train.slow_stages import slowed

__all__ = ["replanned"]


def replanned(prepared: PreparedRun, outcome: Outcome) -> PreparedRun:
    """The run with the best plan for its devices as they are now, or as it is if that would be no faster.

    What is known of the machines stays as it was: a device that is slow today may be its old self tomorrow.
    """
    if prepared.profile is None or outcome.slow is None:
        return prepared
    cluster = slowed(prepared.machines.cluster, prepared.plan.plan, outcome.slow)
    answer = planned(
        prepared.run,
        prepared.graph,
        prepared.profile,
        replace(prepared.machines, cluster=cluster),
        lambda _done, _what: None,
        is_brief=False,
    )
    if outcome.batch_s is not None and answer.best.forecast.batch_s >= outcome.batch_s:
        return prepared
    return replace(prepared, plan=saved_plan(answer, planned_units(prepared.profile)), answer=answer)
