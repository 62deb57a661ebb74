"""Who does what: from a plan and a number of ranks to each rank's stages, replica and groups.

Ranks are dealt out replica by replica: the first pipeline is ranks 0, 1, 2, …, the second follows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import Unit
from bireme.plan.program_plan import ProgramPlan

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's place. `tied` are the parameters that stages of other ranks hold too, with all their
    ranks.
    """

    rank: int
    replica: int
    pipeline_rank: int
    rank_of_stage: tuple[int, ...]
    width: int
    units: Mapping[int, tuple[Unit, ...]]
    """The units of each of this rank's stages."""
    tied: Mapping[str, tuple[int, ...]]
    counted: frozenset[str]
    """The parameters whose norm this rank adds to the whole."""
    owners: Mapping[str, int]
    """The first rank that holds each parameter and buffer."""
    repeated: frozenset[str]
    """The parameters with gradients that several of this rank's own stages hold."""

    @property
    def num_pipeline_ranks(self) -> int:
        """How many ranks one replica has."""
        return max(self.rank_of_stage) + 1

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this replica, in the order of the program's."""
        first = self.replica * self.num_pipeline_ranks
        return tuple(range(first, first + self.num_pipeline_ranks))

    def replicas_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The ranks that do the same work in all replicas."""
        return tuple(replica * self.num_pipeline_ranks + pipeline_rank for replica in range(self.width))


def layout_of(graph: Graph, units: Sequence[Unit], plan: ProgramPlan, rank: int, num_ranks: int) -> Layout:
    """The place of a rank among so many."""
    rank_of_stage = plan.source.rank_of_stage
    per_replica = max(rank_of_stage) + 1
    if num_ranks != per_replica * plan.width:
        raise BiremeError(
            f"The plan is for {per_replica * plan.width} processes ({plan.width} replicas of "
            f"{per_replica}), and there are {num_ranks}. Start as many, or plan for {num_ranks}."
        )
    holders: dict[str, set[int]] = {}
    for stage, owner in enumerate(rank_of_stage):
        for index in plan.units_of(stage, len(units)):
            for name in (*units[index].parameters, *units[index].buffers):
                holders.setdefault(name, set()).add(owner)
    replica, pipeline_rank = divmod(rank, per_replica)
    own = {
        stage: tuple(units[index] for index in plan.units_of(stage, len(units)))
        for stage, owner in enumerate(rank_of_stage)
        if owner == pipeline_rank
    }
    trainable = {state.name for state in graph.parameters if state.trainable}
    return Layout(
        rank=rank,
        replica=replica,
        pipeline_rank=pipeline_rank,
        rank_of_stage=rank_of_stage,
        width=plan.width,
        units=own,
        tied={
            name: tuple(
                sorted(other * per_replica + place for other in range(plan.width) for place in places)
            )
            for name, places in sorted(holders.items())
            if len(places) > 1 and name in trainable
        },
        counted=frozenset(
            name
            for name, places in holders.items()
            if replica == 0 and min(places) == pipeline_rank and name in trainable
        ),
        owners={name: min(places) for name, places in holders.items()},
        repeated=frozenset(name for name, count in _uses(own).items() if count > 1 and name in trainable),
    )


def _uses(stages: Mapping[int, Sequence[Unit]]) -> Counter[str]:
    """How many of some stages hold each parameter."""
    return Counter(
        name for units in stages.values() for name in {name for unit in units for name in unit.parameters}
    )
