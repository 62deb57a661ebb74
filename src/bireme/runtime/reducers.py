"""The reducer of a rank and the groups that it sums over: replicas, holders of tied parameters, all ranks."""

import torch

from bireme.codec.sum_description import DENSE
from bireme.runtime.exchange.round_reducer import RoundReducer
from bireme.runtime.fabric import Fabric
from bireme.runtime.layout import Layout
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.stage_messages import Transport
from bireme.sync.coded import GradientSummation
from bireme.sync.group import Group, SingleRankGroup
from bireme.sync.reducer import GroupReducer, Reducer


def reducer_of(
    fabric: Fabric,
    layout: Layout,
    transport: Transport,
    settings: PipelineSettings,
    sharers: Sharers | None,
    *,
    overlaps: bool,
) -> Reducer:
    """What sums up this rank's batches. All ranks call it, and each finds the same kind.

    Sums over replicas go through the codec of the settings. Where these are `sharers` of the optimizer, they
    are joined, and each replica gets the sums of its own parts. With an agreement they are a site, whose sums
    with others go through the codec. With `overlaps` sums between processors begin during the last backward
    of a batch.
    """
    device, codec, agreement = torch.device(settings.device), settings.codec, settings.agreement
    quick = fabric.sums(transport) if not layout.is_summed and (agreement or not layout.tied) else None
    if quick is not None and agreement is None:
        return GroupReducer(quick, counted=layout.counted, in_background=False)
    replicas = replicas_of(fabric, layout)
    of_group = DENSE if not layout.is_summed or agreement is not None else codec
    how = GradientSummation(of_group, in_parts=sharers is not None)
    if sharers is not None:
        # In other groups, for other threads.
        gathers = replicas_of(fabric, layout)
        sums = replicas_of(fabric, layout) if sharers.gathers else None
        sharers.join(gathers, sums, device, how)
    is_alone = quick is not None or fabric.size == 1
    everyone = SingleRankGroup() if is_alone else fabric.group(range(fabric.size), on_host=True)
    control = quick or everyone
    assert control is not None, "every rank is one of all"
    # Every rank makes all groups, in the same order, and keeps its own.
    of_ranks = {ranks: fabric.group(ranks) for ranks in sorted(set(layout.tied.values()))}
    tied: dict[str, Group] = {
        name: group for name, ranks in layout.tied.items() if (group := of_ranks[ranks]) is not None
    }
    if sharers is not None:
        # A rank's stages cut what they share at other places each, so all of it is summed on all replicas.
        tied |= {name: replicas for name in layout.repeated if name not in tied}
    at = None if device.type == "cpu" else device
    if agreement is None:
        # Replicas that share weights sum parts of gradients while they compute on other stages (SCATTER).
        sums_here = replicas.size > 1 and (sharers is None or not sharers.gathers)
        overlaps = overlaps and sums_here and not layout.repeated
        return GroupReducer(
            control,
            replicas=replicas,
            tied=tied,
            counted=layout.counted,
            device=at,
            sums=how,
            overlaps=overlaps and _are_processors(replicas, device),
        )
    return RoundReducer(
        control,
        agreement.agent,
        num_replicas=agreement.num_replicas,
        speaks=layout.rank == 0,
        device=at,
        counted=layout.counted,
        tied=tied,
        codec=codec,
        site=None if sharers is None else replicas,
    )


def _are_processors(replicas: Group, device: torch.device) -> bool:
    """Whether all replicas compute on processors. They may differ, and must cut their sums alike."""
    count = torch.full((1,), float(device.type == "cpu"), device=device)
    replicas.all_reduce(count).wait()
    return int(count) == replicas.size


def replicas_of(fabric: Fabric, layout: Layout) -> Group:
    """The replicas of this rank's stages. All ranks call it."""
    replicas: Group = SingleRankGroup()
    for ranks in layout.alike:
        made = fabric.group(ranks) if len(ranks) > 1 else None
        if made is not None and layout.rank in ranks:
            replicas = made
    return replicas
