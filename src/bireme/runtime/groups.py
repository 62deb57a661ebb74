"""The groups that one rank sums with: its replicas, all ranks, and who else holds a parameter of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from bireme.runtime.fabric import Fabric
from bireme.runtime.layout import Layout
from bireme.sync.group import Group, LonelyGroup

__all__ = ["Groups", "groups_of"]


@dataclass(frozen=True, slots=True)
class Groups:
    """`control` and `spare` have all ranks, one for the reducer's thread and one for the rank's own.

    `tied` has, by name, the group of all ranks that hold a parameter which stages on several ranks use.
    """

    replicas: Group
    control: Group
    spare: Group
    tied: Mapping[str, Group]


def groups_of(fabric: Fabric, layout: Layout) -> Groups:
    """Every rank makes all groups, in the same order, and keeps its own."""
    replicas: Group = LonelyGroup()
    for pipeline_rank in range(layout.num_pipeline_ranks):
        ranks = layout.replicas_of(pipeline_rank)
        made = fabric.group(ranks) if len(ranks) > 1 else None
        if made is not None and pipeline_rank == layout.pipeline_rank:
            replicas = made
    everyone = range(fabric.size)
    both = [fabric.group(everyone) if fabric.size > 1 else LonelyGroup() for _ in range(2)]
    assert both[0] is not None
    assert both[1] is not None
    of_ranks = {ranks: fabric.group(ranks) for ranks in sorted(set(layout.tied.values()))}
    tied = {name: group for name, ranks in layout.tied.items() if (group := of_ranks[ranks]) is not None}
    return Groups(replicas, both[0], both[1], tied)
