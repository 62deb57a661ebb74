"""Steps without delayed updates at the beginning of a run: the same stages, under a schedule that flushes."""

from dataclasses import replace

from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.schedule.rule import Rule
from bireme.train.checkpoint.manifest import Manifest
from bireme.train.run_file import RunFile

__all__ = ["first_delayed_step", "flush_twin", "plans_of"]


def first_delayed_step(run: RunFile, saved: SavedPlan, resumed: Manifest | None = None) -> int:
    """The step after which updates are delayed, if the plan delays any: as asked, or as planned. A run that
    was `resumed` under the plan's own schedule, and was made longer, does not go back to another one.
    """
    step = run.plan.num_delay_warmup_steps(run.training.steps)
    if step is None:
        step = 0 if saved.forecast is None else round(saved.forecast.delay_warmup * run.training.steps)
    is_under_way = resumed is not None and resumed.schedule == saved.plan.schedule
    return min(step, resumed.step) if resumed is not None and is_under_way else step


def flush_twin(plan: Plan) -> Plan | None:
    """The same plan under 1f1b, which takes no more memory; None where no update is delayed anyway."""
    if plan.source.rule is Rule.SYNCHRONOUS:
        return None
    return replace(plan, schedule="1f1b")


def plans_of(run: RunFile, saved: SavedPlan) -> tuple[Plan, ...]:
    """The plans that a run trains with, one after the other."""
    twin = flush_twin(saved.plan) if first_delayed_step(run, saved) else None
    return (saved.plan,) if twin is None else (twin, saved.plan)
