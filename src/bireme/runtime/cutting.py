"""What a rank takes of each batch: its cutter, from the graph, the plan and the rank's place in it."""

from collections.abc import Mapping

import torch

from bireme.model.counting import count_of
from bireme.model.graph import Graph
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.balancer import Balancer
from bireme.runtime.layout import Layout
from bireme.runtime.microbatches import Cutter
from bireme.runtime.quorum.agreement import QuorumAgreement
from bireme.runtime.stage import Stage

__all__ = ["cutter_of"]


def cutter_of(
    graph: Graph,
    plan: ProgramPlan,
    layout: Layout,
    stages: Mapping[int, Stage],
    seed: int,
    device: torch.device,
    balancer: Balancer | None,
    agreement: QuorumAgreement | None,
) -> Cutter:
    """The cutter of a rank. With an agreement its batches are parts of whole ones."""
    num_microbatches = plan.source.num_microbatches
    return Cutter(
        width=plan.width,
        replica=layout.replica,
        num_microbatches=num_microbatches,
        num_sliced=plan.source.num_sliced,
        count=count_of(graph),
        required=graph.inputs,
        needed=tuple(dict.fromkeys(name for stage in stages.values() for name in stage.function.inputs)),
        device=device,
        seed=seed,
        sizes=plan.micro_batch_sizes,
        shares=None if balancer is None else balancer.shares,
        num_samples=0 if agreement is None else agreement.num_samples,
        first_piece=0 if agreement is None else agreement.agent.own.replica * num_microbatches,
    )
