"""The accesses of a tier: which chunk is read or written at which step. What paging is planned from."""

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import NamedTuple

from bireme.schedule.instruction import Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.tiers import Chunk, RankTiers
from bireme.schedule.uses import ChunkUses, Mode, Use

__all__ = ["ChunkAccess", "accesses_of", "host_accesses_of"]


class ChunkAccess(NamedTuple):
    """One use of a chunk in a tier, at a step.

    `label` is the same in every batch, `batch` tells which it is. `takes` where the chunk must have a slot
    during the step, `ends` where it is gone from the tier afterwards. `is_below` where the step uses the
    chunk in the tier below, so that it must be there and not here; `is_kept_below` where all that write the
    chunk do, so that there is always a valid copy.
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
    is_below: bool = False
    is_kept_below: bool = False


ItemKey = tuple[Item, int, int]
"""An item by its stage and number; its chunks are all used alike."""


def accesses_of(
    program: Program, rank: int, tiers: RankTiers, *, is_summed: bool = False
) -> dict[int, list[ChunkAccess]]:
    """What the instructions of a track do to chunks on the device, by their place in the track.

    Each instruction that uses chunks is a step. Where gradients are summed over replicas, they are used all
    the time from REDUCE to UPDATE. An update on the host uses gradients and weights below; what it remembers
    is never on the device.
    """
    found: dict[int, list[ChunkAccess]] = {}
    made: set[ItemKey] = set()
    summed: dict[ItemKey, tuple[Chunk, ...]] = {}
    uses = ChunkUses(program, tiers)
    for index, step in enumerate(program.tracks[rank]):
        used = {(use.item, use.stage, use.number): (use, chunks) for use, chunks in uses.of(step)}
        if not used:
            continue
        at, label, batch = len(found), _label(step), step.batch
        others = sorted(chunk for key, chunks in summed.items() if key not in used for chunk in chunks)
        own = found[index] = [
            ChunkAccess(at, chunk, label, batch, step, reads=True, writes=False) for chunk in others
        ]
        for key, (use, chunks) in used.items():
            if use.tier:
                made.discard(key)
                own += chain.from_iterable(_seen_above(at, chunk, step, use) for chunk in chunks)
                continue
            is_kept_below = use.item is Item.WEIGHTS and use.stage in tiers.host_updates
            reads = not (use.mode is Mode.MAKE or (use.mode is Mode.ADD and key not in made))
            writes, ends = use.mode is not Mode.READ, use.ends
            made.add(key)
            if ends:
                made.discard(key)
                summed.pop(key, None)
            elif is_summed and step.kind is Kind.REDUCE:
                summed[key] = chunks
            own += [
                ChunkAccess(at, chunk, label, batch, step, reads, writes, ends, is_kept_below=is_kept_below)
                for chunk in chunks
            ]
    return found


def host_accesses_of(uses: ChunkUses, step: Instruction, at: int) -> list[ChunkAccess]:
    """What a step does to chunks on the host, as an access of that tier."""
    return [
        ChunkAccess(
            at,
            chunk,
            _label(step),
            step.batch,
            step,
            reads=use.mode is not Mode.MAKE,
            writes=use.mode is not Mode.READ,
            ends=use.ends,
        )
        for use, chunks in uses.of(step)
        if use.tier == 1
        for chunk in chunks
    ]


def _seen_above(at: int, chunk: Chunk, step: Instruction, use: Use) -> Iterator[ChunkAccess]:
    """What an update on the host is to the device: it needs gradients below, and makes weights there. What
    an optimiser remembers is never on the device, and of weights there is always a copy below.
    """
    is_made = use.item is Item.WEIGHTS and use.mode is not Mode.READ
    if is_made or use.item is Item.GRADIENT:
        yield ChunkAccess(
            at,
            chunk,
            _label(step),
            step.batch,
            step,
            reads=not is_made,
            writes=is_made,
            ends=use.ends,
            takes=False,
            is_below=True,
            is_kept_below=is_made,
        )


def _label(step: Instruction) -> Hashable:
    return step.kind, step.microbatch, step.half
