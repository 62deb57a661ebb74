"""Steps without delayed updates at the beginning of a run: the same stages, under a schedule that flushes."""

from dataclasses import replace

from bireme.plan.plan import Plan
from bireme.schedule.rule import Rule

__all__ = ["flush_twin"]


def flush_twin(plan: Plan) -> Plan | None:
    """The same plan under 1f1b, which takes no more memory; None where no update is delayed anyway."""
    if plan.program(1).rule is Rule.SYNCHRONOUS:
        return None
    return replace(plan, schedule="1f1b")
