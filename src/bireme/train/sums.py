"""Sums of gradients over replicas as a run asks for them, or averages of weights: what they cost, and whether
there are any.
"""

from dataclasses import replace

from bireme.codec.sum_words import DENSE, QUORUM_SUMS, SumCost, averages_with, parse_sum_codec, sum_cost
from bireme.model.graph import Graph
from bireme.plan.plan import Plan
from bireme.profile.kept_gradients import sum_cost_of
from bireme.profile.optimizers import moments_share
from bireme.train.run_file import RunFile

__all__ = ["idle_keys", "sums_of"]


def sums_of(run: RunFile, graph: Graph) -> SumCost:
    """What the run's codec makes of the sums of a model's gradients. An average of weights is as large."""
    if run.sync.averages and run.sync.average_optimizer:
        return averages_with(moments_share(graph.parameters, run.training.optimizer))
    if run.sync.mode == "quorum":
        return QUORUM_SUMS
    codec, form = parse_sum_codec(run.sync.codec), run.training.gradient_form
    return sum_cost(codec, graph.gradient_shapes) if form is None else sum_cost_of(graph, codec, form)


def idle_keys(run: RunFile, plan: Plan) -> tuple[str, ...]:
    """Sentences about what the run asks of its replicas in vain: there is just one, or it ends too soon."""
    codec = parse_sum_codec(run.sync.codec)
    if plan.width > 1:
        if codec.whole_steps < run.training.steps or not codec.whole_steps:
            return ()
        return (
            f"sync.codec = {run.sync.codec} has no effect: the first {codec.whole_steps} steps send whole "
            f"gradients, and the run has {run.training.steps}. Set training.steps to more, or write "
            f"{replace(codec, whole_steps=0)} to begin at once.",
        )
    found = []
    if codec != DENSE:
        found.append(
            f"sync.codec = {run.sync.codec} has no effect: the plan has one replica, so there are no sums "
            "over replicas. Set plan.width to 2 or more, or leave the codec out."
        )
    if run.memory.shard != "none":
        found.append(
            f"memory.shard = {run.memory.shard} has no effect: the plan has one replica, with nobody to "
            "share with. Set plan.width to 2 or more, or leave it out."
        )
    return tuple(found)
