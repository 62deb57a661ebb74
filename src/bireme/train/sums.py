"""Sums of gradients over replicas as a run asks for them: what they cost, and whether there are any."""

from bireme.codec.sum_words import SumCost, parse_sum_codec, sum_cost
from bireme.model.graph import Graph
from bireme.model.linear_maps import chosen_maps
from bireme.plan.plan import Plan
from bireme.train.run_file import RunFile

__all__ = ["idle_keys", "sums_of"]


def sums_of(run: RunFile, graph: Graph) -> SumCost:
    """What the run's codec makes of the sums of a model's gradients."""
    form = run.training.gradient_form
    if form is None:
        return sum_cost(parse_sum_codec(run.sync.codec), graph.gradient_shapes)
    apart = chosen_maps(graph, form)  # these go by their components, and through no codec
    shapes = [one.shape for one in graph.parameters if one.trainable and one.name not in apart]
    return sum_cost(parse_sum_codec(run.sync.codec), shapes)


def idle_keys(run: RunFile, plan: Plan) -> tuple[str, ...]:
    """Sentences about what the run asks of its replicas, if its plan has just one."""
    found = []
    if run.sync.codec != "none":
        found.append(
            f"sync.codec = {run.sync.codec} has no effect: the plan has one replica, so there are no sums "
            "over replicas. Set plan.width to 2 or more, or leave the codec out."
        )
    if run.memory.shard != "none":
        found.append(
            f"memory.shard = {run.memory.shard} has no effect: the plan has one replica, with nobody to "
            "share with. Set plan.width to 2 or more, or leave it out."
        )
    return () if plan.width > 1 else tuple(found)
