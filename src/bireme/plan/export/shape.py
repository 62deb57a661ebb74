"""What other frameworks cannot say of a plan, whatever its stages: refused with the reason."""

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.rule import Rule

__all__ = ["check_equal_replicas", "check_pipelined", "check_recompute", "check_synchronous"]


def check_pipelined(plan: Plan, framework: str) -> None:
    """Refuse what is no pipeline."""
    if plan.num_stages == 1:
        what = "data parallelism" if plan.width > 1 else "one device"
        raise BiremeError(
            f"The best plan is {what}, without a pipeline, so there is nothing to export to {framework}. Ask "
            "for a pipeline with --depth 2 or more if you want one anyway."
        )


def check_synchronous(plan: Plan, framework: str) -> None:
    """Refuse update rules that only Bireme has, and halves of micro-batches."""
    rule = schedule_named(plan.schedule).rule
    if rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f"{framework} cannot run {plan.schedule}: its update rule is {rule}, with weights of two batches "
            "at once, and other frameworks update when the pipeline has drained. Plan with --synchronous."
        )
    if schedule_named(plan.schedule).slices:
        raise BiremeError(
            f"{framework} cannot run {plan.schedule}, which slices micro-batches in halves. Plan with "
            "--schedule 1f1b, which computes the same."
        )


def check_equal_replicas(plan: Plan, framework: str) -> None:
    """Refuse replicas that get different numbers of samples."""
    if len(set(plan.micro_batch_sizes)) > 1:
        sizes = " and ".join(map(str, sorted(set(plan.micro_batch_sizes))))
        raise BiremeError(
            f"The replicas get micro-batches of {sizes} samples, as their devices differ, but {framework} "
            "gives all the same size. Plan with --micro-batch or --width 1."
        )


def check_recompute(plan: Plan, framework: str) -> None:
    """Refuse forwards that are run again on some stages alone."""
    if plan.recompute_units or 0 < len(plan.recompute) < plan.num_stages:
        where = ", ".join(map(str, plan.recompute)) or "parts of stages"
        raise BiremeError(
            f"The plan recomputes only on stages {where} of {plan.num_stages}, but {framework} "
            "recomputes on all stages or none. Plan with --recompute always or --recompute never."
        )
