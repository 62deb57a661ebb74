"""Small made-up traces of one tier: each step reads or writes one or two chunks, drawn by chance."""

from random import Random

from bireme.schedule.eviction import Access
from bireme.schedule.instruction import Instruction, Item, Kind
from bireme.schedule.tiers import Chunk

__all__ = ["small_trace"]

STEP = Instruction(Kind.UPDATE, 0, 0)


def small_trace(seed: int, num_chunks: int, num_steps: int) -> list[Access]:
    """Accesses in the order of time; some chunks are made anew and some end."""
    draw = Random(seed)
    there: set[int] = set(range(num_chunks)) - set(draw.sample(range(num_chunks), num_chunks // 3))
    accesses = []
    for at in range(num_steps):
        for number in sorted(draw.sample(range(num_chunks), draw.choice((1, 1, 2)))):
            reads = number in there and draw.random() < 0.8
            writes = not reads or draw.random() < 0.4
            ends = draw.random() < 0.1
            chunk = Chunk(Item.WEIGHTS, number, 0, 0)
            accesses.append(Access(at, chunk, at, 0, STEP, reads=reads, writes=writes, ends=ends))
            there.discard(number) if ends else there.add(number)
    return accesses
