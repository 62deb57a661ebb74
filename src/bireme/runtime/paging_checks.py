"""Whether a rank pages, and whether it can what its program asks for."""

from collections import Counter

import torch

from bireme.bounds import bytes_text
from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import Unit
from bireme.runtime.layout import Layout
from bireme.runtime.paging.rank_paging import RankPaging
from bireme.runtime.settings import PipelineSettings
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.residency import Holding
from bireme.schedule.source import ProgramSource
from bireme.schedule.tiers import Chunk, RankTiers


def paging_of(
    graph: Graph,
    source: ProgramSource,
    layout: Layout,
    settings: PipelineSettings,
) -> RankPaging | None:
    """The paging of this rank; None if its memory is not cut."""
    rank, program, device = layout.pipeline_rank, source.settled(), torch.device(settings.device)
    tiers = program.tiers_of(rank)
    if tiers is None:
        return None
    if tiers.host_updates and is_accelerator(device):
        raise BiremeError(
            f"The plan has the optimizer step on the host, which Bireme's engine does only where the device "
            f'is a processor, and rank {layout.rank} has {device}. Plan with memory.optimizer = "device".'
        )
    if settings.compile and any(item is Item.STASH for item, _ in tiers.chunks):
        raise BiremeError(
            "A stage that torch compiles keeps its activations itself, and the plan offloads them. Leave "
            "compile out, or plan with memory.stashes = false."
        )
    frozen_bytes = _frozen_bytes(graph, layout, tiers) // program.num_sharers
    if frozen_bytes > tiers.unpaged_bytes:
        raise BiremeError(
            f"Rank {layout.rank} has {bytes_text(frozen_bytes)} of frozen weights that the plan leaves on "
            f"the device, where it counts on {bytes_text(tiers.unpaged_bytes)} besides its chunks. Make a "
            "new plan for the part of the model that learns."
        )
    is_apart = program.updates_apart
    keeps = not is_apart and _keeps_gradients(program, rank)
    trained = {state.name for state in graph.parameters if state.trainable}
    names = Counter(name for units in layout.units.values() for name in _parameters(units) & trained)
    is_tied = layout.tied or any(count > 1 for count in names.values())
    # Replicas that share weights sum their parts before a batch ends.
    is_summed = is_tied or settings.agreement is not None or (layout.is_summed and program.num_sharers == 1)
    if is_apart and (is_tied or settings.form is not None or layout.is_summed):
        raise BiremeError(
            "The plan updates stages before the others have their gradients, so gradients cannot be summed "
            "over replicas or stages, and principal components cannot be found. Plan with memory.updates = "
            '"agreed".'
        )
    if is_summed and not keeps:
        raise BiremeError(
            f"Gradients of rank {layout.rank} are summed up with others, and {source.name} takes them off "
            "the device before. Page the program with is_summed = True, so that they stay until the UPDATE."
        )
    return RankPaging(program, rank, device, settings.paging, keeps_gradients=keeps)


def _frozen_bytes(graph: Graph, layout: Layout, tiers: RankTiers) -> int:
    """The bytes of weights that do not learn and stay on the device."""
    frozen = {state.name: state.num_bytes for state in graph.parameters if not state.trainable}
    paged = {stage for item, stage in tiers.chunks if item is Item.FROZEN}
    names = {
        name for stage, units in layout.units.items() if stage not in paged for name in _parameters(units)
    }
    return sum(frozen.get(name, 0) for name in names)


def _parameters(units: tuple[Unit, ...]) -> set[str]:
    return {name for unit in units for name in unit.parameters}


def _keeps_gradients(program: Program, rank: int) -> bool:
    """Whether every batch's gradients of all stages are on the device from the rank's last REDUCE of it to
    the UPDATE of each.
    """
    holding = Holding(program, rank)
    num_stages, reduced = len(program.stages_of(rank)), Counter[int]()
    waiting: set[Chunk] = set()
    for step in program.tracks[rank]:
        for _ in holding.start(step):
            pass
        own = {
            chunk for use, chunks in holding.uses.of(step) if use.item is Item.GRADIENT for chunk in chunks
        }
        if step.kind is Kind.REDUCE:
            reduced[step.batch] += 1
            waiting |= own
        elif step.kind is Kind.UPDATE:
            waiting -= own
        ended = {chunk for chunk in waiting if reduced[chunk.number] == num_stages}
        # A chunk that was fetched may still be on its way.
        if ended & holding.fetched or any(0 not in holding.where.get(chunk, ()) for chunk in ended):
            return False
        holding.end(step)
    return True
