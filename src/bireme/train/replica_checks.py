"""Whether the replicas of a run can go on without each other: known before anything starts."""

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.runtime.averaging.averaging import check_untied
from bireme.runtime.layout import layout_of
from bireme.train.data.samples import Samples
from bireme.train.data.stream import StreamSamples
from bireme.train.run_file import RunFile

__all__ = ["check_paged", "check_replicas", "check_tied"]


def check_replicas(run: RunFile, plan: Plan, samples: Samples) -> None:
    """Refuse a run whose replicas may die, but could not go on without each other."""
    mode = run.sync.mode
    if mode == "all":
        return
    if plan.width < 2:
        raise BiremeError(
            f'sync.mode is "{mode}", but the plan has one replica, so none is left if it dies. Set '
            'plan.width to 2 or more, or use sync.mode = "all".'
        )
    if isinstance(samples, StreamSamples):
        raise BiremeError(
            f'sync.mode is "{mode}", in which samples may be trained in another order than they come, but '
            "the data are a stream. Download them, or leave out streaming=true."
        )
    if plan.paging is not None:
        what = "weights" if run.sync.averages else "gradients"
        raise BiremeError(
            f'sync.mode is "{mode}", in which whole {what} are sent from where they lie, but the plan '
            'pages. Leave paging out of the plan, or use sync.mode = "all".'
        )
    most = max(len(plan.source.stages_of(rank)) for rank in range(plan.source.num_ranks))
    if run.sync.averages and most > 1:
        raise BiremeError(
            f'sync.mode is "{mode}", in which weights are averaged rank by rank, but {plan.schedule} has '
            f'{most} stages on a rank. Use a schedule with one, such as 1f1b or 2bw, or sync.mode = "quorum".'
        )


def check_tied(run: RunFile, plan: Plan, graph: Graph) -> None:
    """Refuse weights that ranks of a replica share, where replicas average weights rank by rank."""
    if run.sync.averages:
        program = plan.by_program
        check_untied(layout_of(graph, units_of(graph), program, 0, program.num_ranks))


def check_paged(run: RunFile, plan: Plan) -> None:
    """Refuse a plan that pages or shares weights, as one from a file may, where the run asks for what
    does not go with that.
    """
    if plan.whole_weights and run.memory.shard != "weights":
        raise BiremeError(
            f"In the plan replicas share weights (whole_weights = {plan.whole_weights}), but memory.shard is "
            f'"{run.memory.shard}". Set memory.shard = "weights", or use a plan that was made without it.'
        )
    if plan.paging is None:
        return
    asked = {
        "memory.shard": (run.memory.shard, "none"),
        "training.gradient": (run.training.gradient, "whole"),
    }
    for key, (value, usual) in asked.items():
        if value != usual:
            raise BiremeError(
                f'{key} is "{value}", but the plan pages, which goes with "{usual}" only. Set {key} to '
                f'"{usual}", or use a plan that does not page.'
            )
