"""The accesses of a tier: which chunk is read or written at which step. What paging is planned from."""

from collections.abc import Hashable
from typing import NamedTuple

from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program
from bireme.schedule.tiers import Chunk, RankTiers
from bireme.schedule.uses import ChunkUses, Mode

__all__ = ["Access", "accesses_of"]


class Access(NamedTuple):
    """One use of a chunk in a tier, at a step.

    `label` is the same in every batch, `batch` tells which it is. `takes` where the chunk must have a slot
    during the step, `ends` where it is gone from the tier afterwards.
    """

    at: int
    chunk: Chunk
    label: Hashable
    batch: int
    step: Instruction
    reads: bool
    writes: bool
    takes: bool = True
    ends: bool = False


def accesses_of(
    program: Program, rank: int, tiers: RankTiers, *, is_summed: bool = False
) -> dict[int, list[Access]]:
    """What the instructions of a track do to chunks on the device, by their place in the track.

    Each instruction that uses chunks is a step. Where gradients are summed over replicas, they are used all
    the time from REDUCE to UPDATE.
    """
    found: dict[int, list[Access]] = {}
    made: set[Chunk] = set()
    summed: set[Chunk] = set()
    uses = ChunkUses(program, tiers)
    for index, step in enumerate(program.tracks[rank]):
        used = {chunk: use for use, chunks in uses.of(step) for chunk in chunks}
        if not used:
            continue
        at, label = len(found), (step.kind, step.microbatch, step.half)
        own = found[index] = [
            Access(at, chunk, label, step.batch, step, reads=True, writes=False)
            for chunk in sorted(summed - used.keys())
        ]
        for chunk, use in used.items():
            is_new = use.mode is Mode.MAKE or (use.mode is Mode.ADD and chunk not in made)
            made.add(chunk)
            if use.ends:
                made.discard(chunk)
                summed.discard(chunk)
            elif is_summed and step.kind is Kind.REDUCE:
                summed.add(chunk)
            writes = use.mode is not Mode.READ
            own.append(
                Access(at, chunk, label, step.batch, step, reads=not is_new, writes=writes, ends=use.ends)
            )
    return found
