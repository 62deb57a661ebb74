"""Who a rank sums with, and what does it: its replicas, who else holds its parameters, all ranks."""

import torch

from bireme.codec.sum_words import DENSE, SumCodec
from bireme.runtime.fabric import Fabric
from bireme.runtime.layout import Layout
from bireme.runtime.quorum.agreement import QuorumAgreement
from bireme.runtime.sharers import Sharers
from bireme.runtime.transport import Transport
from bireme.sync.coded import CodedSums
from bireme.sync.group import Group, SharingGroup, SingleRankGroup
from bireme.sync.reducer import Reducer, SumsBatches

__all__ = ["reducer_of"]


def reducer_of(
    fabric: Fabric,
    layout: Layout,
    transport: Transport,
    device: torch.device,
    codec: SumCodec = DENSE,
    agreement: QuorumAgreement | None = None,
    sharers: Sharers | None = None,
) -> SumsBatches:
    """What sums up this rank's batches. All ranks call it, and each finds the same kind.

    Sums over replicas go through `codec`, where these do not agree in another way. Where they are `sharers`
    of the optimiser, these are joined, and each replica gets the sums of its own parts.
    """
    if agreement is not None:
        return agreement.reducer(fabric, layout, transport, device)
    if layout.width == 1 and not layout.tied:
        sums = fabric.sums(transport)
        if sums is not None:
            return Reducer(sums, counted=layout.counted, in_background=False)
    replicas = _replicas(fabric, layout)
    if sharers is not None:
        # In other groups, for other threads.
        gathers = _replicas(fabric, layout)
        sharers.join(gathers, _replicas(fabric, layout) if sharers.gathers else None, device)
    control = fabric.group(range(fabric.size)) if fabric.size > 1 else SingleRankGroup()
    assert control is not None, "every rank is one of all"
    # Every rank makes all groups, in the same order, and keeps its own.
    of_ranks = {ranks: fabric.group(ranks) for ranks in sorted(set(layout.tied.values()))}
    tied: dict[str, Group] = {
        name: group for name, ranks in layout.tied.items() if (group := of_ranks[ranks]) is not None
    }
    if sharers is not None:
        # A rank's stages cut what they share at other places each, so all of it is summed on all replicas.
        tied |= {name: replicas for name in layout.repeated if name not in tied}
    return Reducer(
        control,
        replicas=replicas,
        tied=tied,
        counted=layout.counted,
        device=None if device.type == "cpu" else device,
        coded=None if codec == DENSE or layout.width == 1 else CodedSums(codec),
        sharers=None if sharers is None else replicas,
    )


def _replicas(fabric: Fabric, layout: Layout) -> SharingGroup:
    replicas: SharingGroup = SingleRankGroup()
    for pipeline_rank in range(layout.num_pipeline_ranks):
        ranks = layout.replicas_of(pipeline_rank)
        made = fabric.group(ranks) if len(ranks) > 1 else None
        if made is not None and pipeline_rank == layout.pipeline_rank:
            replicas = made
    return replicas
