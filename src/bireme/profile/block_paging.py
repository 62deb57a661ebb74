"""What paging would save on a traced iteration: the least device memory it could run in, and at which cost.

Parameters, gradients, optimiser state and activations are cut into chunks of one size, as `schedule/` does
with the items of a stage, and an operator needs the chunks of the blocks that it touches. So the least device
memory is that of the operator that needs most. What is evicted then is chosen by the same rules as for
programs. Unlike swaps for nothing, these copies may take longer than the iteration: both are told.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bireme.profile.behaviour import Behaviour, MemoryBlock
from bireme.profile.events import EventKind, Owner
from bireme.profile.swapping import Bandwidth
from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.chunks import best_chunk_bytes, is_paged, num_chunks
from bireme.schedule.eviction import OverfullError, decide
from bireme.schedule.gaps import gaps_of, settle
from bireme.schedule.instruction import Instruction, Item, Kind
from bireme.schedule.tiers import Chunk

__all__ = ["BlockPaging", "PagedBudget", "page_blocks"]

PAGED = {
    Owner.PARAMETER: Item.WEIGHTS,
    Owner.GRADIENT: Item.GRADIENT,
    Owner.OPTIMIZER: Item.OPTIMIZER,
    Owner.ACTIVATION: Item.STASH,
}
BUDGETS = (0.0, 0.25, 0.5, 0.75)
"""Where between the least device memory and the peak."""
STEP = Instruction(Kind.FORWARD, 0, 0)
"""Stands for an operator: what is evicted depends on when chunks are used, not on by whom."""


@dataclass(frozen=True, slots=True)
class PagedBudget:
    """An iteration within a budget: the bytes that leave the device and come back, and for how long the
    busier direction of the link carries them.
    """

    device_bytes: int
    out_bytes: int
    in_bytes: int
    copies_s: float


@dataclass(frozen=True, slots=True)
class BlockPaging:
    """The least device memory, of which `unpaged_bytes` is what is never paged, and budgets from there on."""

    chunk_bytes: int
    least_bytes: int
    unpaged_bytes: int
    budgets: tuple[PagedBudget, ...]


def page_blocks(behaviour: Behaviour, bandwidth: Bandwidth) -> BlockPaging | None:
    """What paging would do; None where no block can be paged."""
    blocks = [block for block in behaviour.blocks if block.owner in PAGED and block.accesses]
    if not any(block.num_bytes for block in blocks):
        return None
    chunk_bytes = best_chunk_bytes(Counter(float(block.num_bytes) for block in blocks))
    paged = [block for block in blocks if is_paged(block.num_bytes, chunk_bytes)]
    accesses, num_steps = _accesses(paged, chunk_bytes)
    needed = Counter(at for at, _ in {(access.at, access.chunk) for access in accesses})
    most = max(needed.values())
    unpaged_bytes = _unpaged_bytes(behaviour, {block.id for block in paged})
    least_bytes = unpaged_bytes + most * chunk_bytes
    budgets = []
    for share in BUDGETS:
        device_bytes = round(least_bytes + share * max(behaviour.peak.num_bytes - least_bytes, 0))
        gaps = gaps_of(accesses)
        capacity = max((device_bytes - unpaged_bytes) // chunk_bytes, most)
        try:
            settle(gaps, decide(accesses, gaps, num_steps, capacity, 0), num_steps)
        except OverfullError:
            continue
        evicted = [gap for gap in gaps if gap.is_evicted]
        out_bytes = sum(gap.is_copied for gap in evicted) * chunk_bytes
        in_bytes = sum(gap.is_fetched for gap in evicted) * chunk_bytes
        copies_s = max(out_bytes / bandwidth.out_bytes_per_s, in_bytes / bandwidth.in_bytes_per_s)
        budgets.append(PagedBudget(device_bytes, out_bytes, in_bytes, copies_s))
    return BlockPaging(chunk_bytes, least_bytes, unpaged_bytes, tuple(budgets))


def _accesses(blocks: Sequence[MemoryBlock], chunk_bytes: int) -> tuple[list[ChunkAccess], int]:
    """What operators do to chunks, in the order of time, and how many operators there are."""
    moments = sorted({access.start_s for block in blocks for access in block.accesses})
    step_at = {moment: step for step, moment in enumerate(moments)}
    found = [access for block in blocks for access in _of_block(block, step_at, chunk_bytes)]
    return sorted(found, key=lambda access: access.at), len(moments)


def _of_block(block: MemoryBlock, step_at: dict[float, int], chunk_bytes: int) -> Iterator[ChunkAccess]:
    by_step: dict[int, list[EventKind]] = {}
    for access in block.accesses:
        by_step.setdefault(step_at[access.start_s], []).append(access.kind)
    steps = sorted(by_step)
    for at in steps:
        is_born = at == steps[0] and block.birth_event >= 0
        is_written = is_born or EventKind.WRITE in by_step[at]
        is_last = at == steps[-1] and block.death_event is not None
        for number in range(num_chunks(block.num_bytes, chunk_bytes)):
            yield ChunkAccess(
                at,
                Chunk(PAGED[block.owner], 0, block.id, number),
                (at, block.id),
                0,
                STEP,
                reads=not is_born,
                writes=is_written,
                ends=is_last,
            )


def _unpaged_bytes(behaviour: Behaviour, paged: set[int]) -> int:
    """The most bytes of other blocks that live at once."""
    changes = [0] * (behaviour.num_events + 1)
    for block in behaviour.blocks:
        if block.id not in paged:
            changes[block.birth_event + 1] += block.num_bytes
            if block.death_event is not None:
                changes[block.death_event + 1] -= block.num_bytes
    return max(accumulate(changes))
