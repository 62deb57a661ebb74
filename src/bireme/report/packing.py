"""Rows for blocks that come and go: each gets a range of bytes that no other block has while it lives.

It is what an allocator would do that knew the whole iteration, so a picture of it is about as high as the
peak. Real addresses are of no use there: they lie too far apart.
"""

from bisect import insort
from collections.abc import Iterable

from bireme.profile.behaviour import MemoryBlock

__all__ = ["packed"]


def packed(blocks: Iterable[MemoryBlock], num_events: int) -> dict[int, int]:
    """The lowest byte of each block, by its number: what stays at the bottom, then what takes most room."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, MemoryBlock]] = []
    for block in sorted(blocks, key=lambda block: _order(block, num_events)):
        offset = 0
        for low, _, other in placed:
            if low >= offset + block.num_bytes:
                break
            if _meet(block, other, num_events):
                offset = max(offset, low + other.num_bytes)
        offsets[block.id] = offset
        insort(placed, (offset, block.id, block))
    return offsets


def _order(block: MemoryBlock, num_events: int) -> tuple[bool, str, int, int]:
    owner = block.owner if block.is_persistent else ""
    lived = _end(block, num_events) - block.birth_event
    return not block.is_persistent, owner, -block.num_bytes * lived, block.id


def _meet(block: MemoryBlock, other: MemoryBlock, num_events: int) -> bool:
    """Whether both live at some moment."""
    return block.birth_event < _end(other, num_events) and other.birth_event < _end(block, num_events)


def _end(block: MemoryBlock, num_events: int) -> int:
    return num_events if block.death_event is None else block.death_event
