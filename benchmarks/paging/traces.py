"""Accesses to plan for: small ones drawn by chance, and those of programs."""

from random import Random

from bireme.schedule.accesses import ChunkAccess, accesses_of
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import Instruction, Item, Kind
from bireme.schedule.tiers import Chunk, RankTiers

__all__ = ["program_trace", "small_trace"]

STEP = Instruction(Kind.UPDATE, 0, 0)
PARTS, MICROBATCHES, BATCHES = 8, 8, 3
CHUNKS = {Item.WEIGHTS: 2, Item.GRADIENT: 2, Item.OPTIMIZER: 12, Item.STASH: 1}
"""Of a part."""


def small_trace(seed: int, num_chunks: int, num_steps: int) -> list[ChunkAccess]:
    """Each step reads or writes one or two chunks; some are new and some end."""
    draw = Random(seed)
    there: set[int] = set(range(num_chunks)) - set(draw.sample(range(num_chunks), num_chunks // 3))
    accesses = []
    for at in range(num_steps):
        for number in sorted(draw.sample(range(num_chunks), draw.choice((1, 1, 2)))):
            reads = number in there and draw.random() < 0.8
            writes = not reads or draw.random() < 0.4
            ends = draw.random() < 0.1
            chunk = Chunk(Item.WEIGHTS, number, 0, 0)
            accesses.append(ChunkAccess(at, chunk, at, STEP, reads=reads, writes=writes, ends=ends))
            there.discard(number) if ends else there.add(number)
    return accesses


def program_trace(
    schedule: str, sweep: int, *, parts: int = PARTS, microbatches: int = MICROBATCHES
) -> tuple[list[ChunkAccess], int, int]:
    """The accesses of one rank that runs all parts, its steps, and the chunks that it would keep."""
    program = generate(
        schedule,
        num_stages=parts,
        num_microbatches=microbatches,
        num_batches=BATCHES,
        stages_per_rank=parts,
        sweep=sweep,
    )
    chunks = {(item, part): number for item, number in CHUNKS.items() for part in range(parts)}
    used = accesses_of(program, 0, RankTiers(1, (), chunks, {}, master=True)).on_device
    accesses = [access for own in used.values() for access in own]
    return accesses, len(used), _most_at_once(accesses)


def _most_at_once(accesses: list[ChunkAccess]) -> int:
    first: dict[Chunk, ChunkAccess] = {}
    for access in accesses:
        first.setdefault(access.chunk, access)
    held = {chunk for chunk, access in first.items() if access.reads}
    most = len(held)
    for access in accesses:
        held.add(access.chunk)
        most = max(most, len(held))
        if access.ends:
            held.discard(access.chunk)
    return most
