"""The accesses of a tier: which chunk is read or written at which step. What paging is planned from."""

from collections.abc import Hashable
from typing import NamedTuple

from bireme.schedule.instruction import Instruction, Item, Kind
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
    ends: bool = False
    takes: bool = True


ItemKey = tuple[Item, int, int]
"""An item by its stage and number; its chunks are all used alike."""


def accesses_of(
    program: Program, rank: int, tiers: RankTiers, *, is_summed: bool = False
) -> dict[int, list[Access]]:
    """What the instructions of a track do to chunks on the device, by their place in the track.

    Each instruction that uses chunks is a step. Where gradients are summed over replicas, they are used all
    the time from REDUCE to UPDATE.
    """
    found: dict[int, list[Access]] = {}
    made: set[ItemKey] = set()
    summed: dict[ItemKey, tuple[Chunk, ...]] = {}
    uses = ChunkUses(program, tiers)
    for index, step in enumerate(program.tracks[rank]):
        used = {(use.item, use.stage, use.number): (use, chunks) for use, chunks in uses.of(step)}
        if not used:
            continue
        at, label, batch = len(found), (step.kind, step.microbatch, step.half), step.batch
        others = sorted(chunk for key, chunks in summed.items() if key not in used for chunk in chunks)
        own = found[index] = [
            Access(at, chunk, label, batch, step, reads=True, writes=False) for chunk in others
        ]
        for key, (use, chunks) in used.items():
            reads = not (use.mode is Mode.MAKE or (use.mode is Mode.ADD and key not in made))
            writes, ends = use.mode is not Mode.READ, use.ends
            made.add(key)
            if ends:
                made.discard(key)
                summed.pop(key, None)
            elif is_summed and step.kind is Kind.REDUCE:
                summed[key] = chunks
            own += [Access(at, chunk, label, batch, step, reads, writes, ends) for chunk in chunks]
    return found
