"""Proofs about chunks: what is used is there, nothing is lost, and no tier holds more than it can.

What is proved: every use finds its chunks on the device, or on their way there; a FETCH finds a copy in the
tier below and an EVICT one in its own; nothing is evicted while it is being fetched; what nobody else has is
copied before its slot is given back, if it is read again; at no moment is a tier over capacity.
"""

from collections.abc import Iterator

from bireme.schedule.holding import Holding
from bireme.schedule.program import Program

__all__ = ["paging_problems"]


def paging_problems(program: Program) -> Iterator[str]:
    """What is wrong with the chunks of any rank. Every instruction must be in its place."""
    for rank, tiers in enumerate(program.tiers):
        if tiers is None:
            continue
        holding = Holding(program, tiers)
        for tier, held in zip(tiers.tiers, holding.held, strict=True):
            if tier.capacity is not None and held > tier.capacity:
                yield (
                    f"Rank {rank} begins with {held} chunks on {tier.name}, which has room for "
                    f"{tier.capacity}."
                )
        for step in program.tracks[rank]:
            yield from holding.start(step)
            holding.end(step)
        yield from holding.finish()
