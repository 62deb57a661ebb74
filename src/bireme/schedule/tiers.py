"""Memory as chunks in tiers: how a rank's memory is cut where not all of it stays on the device.

Tier 0 is the device's memory, tier 1 the one below it (host or disk), tier 2 the disk below the host. Items
are cut into chunks of one size, so that any chunk fits any slot.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.schedule.instruction import Item

# How large a chunk is: the size that wastes least of the slots that a rank's items fill.
#
# The last chunk of an item fills its slot only in part. Small chunks waste little, but every one is an
# instruction and a copy; so of the sizes that waste hardly more than the best, the largest is taken. An item
# that would fill its chunks less than half is not worth paging: it stays on the device.

ALIGNED = 64
"""Chunks are a multiple of so many bytes, which suits every type of number."""
PAGE_BYTES = 4096
"""Larger ones are a multiple of this: a page of memory of most machines, and what a disk moves at a time.
Where pages are larger, the engine makes chunks larger (`Plan.on_pages`)."""
LARGE_PAGE_BYTES = 2**21
"""Those of many such pages are a multiple of it: what accelerators map memory by."""
SMALL_CHUNK_BYTES = 2**19
"""A processor's rank copies chunks up to this size to and from the host itself: to hand them to a thread
takes longer than the copy, and the two threads then wait for each other."""
_MANY = 16
MOST_CHUNKS = 1024
"""That a rank's items are cut into; with more a program gets long."""
_TRIED = 64
"""Into how many chunks an item is cut for a size to try."""
_MORE_WASTE = 0.01
"""The share of all bytes that a larger chunk may waste more than the best."""


def num_chunks(num_bytes: float, chunk_bytes: int) -> int:
    """How many chunks so many bytes fill."""
    return math.ceil(num_bytes / chunk_bytes)


def is_paged(num_bytes: float, chunk_bytes: int) -> bool:
    """Whether an item of so many bytes fills at least half of its chunks."""
    return 0 < num_chunks(num_bytes, chunk_bytes) * chunk_bytes <= 2 * num_bytes


def best_chunk_bytes(items: Mapping[float, int], most: int = MOST_CHUNKS, page_bytes: int = 0) -> int:
    """The chunk size for items of so many bytes, each with how many there are at once, in `most` chunks, and
    in whole pages where those are known.
    """
    sizes = {num_bytes: count for num_bytes, count in items.items() if num_bytes > 0 and count > 0}
    if not sizes:
        raise BiremeError(
            "Nothing can be offloaded: weights, gradients, optimizer and activations have no bytes."
        )
    tried = sorted(
        {_aligned(num_bytes / parts, page_bytes) for num_bytes in sizes for parts in range(1, _TRIED + 1)}
    )
    few = [size for size in tried if _num_of_all(sizes, size) <= most] or tried[-1:]
    whole = sum(num_bytes * count for num_bytes, count in sizes.items())
    waste = {size: _waste(sizes, size) for size in few}
    allowed = min(waste.values()) + _MORE_WASTE * whole
    return max(size for size in few if waste[size] <= allowed)


def _num_of_all(sizes: Mapping[float, int], chunk_bytes: int) -> int:
    return sum(
        num_chunks(num_bytes, chunk_bytes) * count
        for num_bytes, count in sizes.items()
        if is_paged(num_bytes, chunk_bytes)
    )


def _waste(sizes: Mapping[float, int], chunk_bytes: int) -> float:
    """The bytes of slots that nothing fills, and of items that stay on the device."""
    return sum(
        min(num_chunks(num_bytes, chunk_bytes) * chunk_bytes - num_bytes, num_bytes) * count
        for num_bytes, count in sizes.items()
    )


def _aligned(num_bytes: float, page_bytes: int) -> int:
    step = page_bytes or ALIGNED
    if num_bytes > PAGE_BYTES / 2:
        step = max(LARGE_PAGE_BYTES if num_bytes >= _MANY * LARGE_PAGE_BYTES else PAGE_BYTES, page_bytes)
    return max(math.ceil(num_bytes / step), 1) * step


class Chunk(NamedTuple):
    """A chunk by the memory that it is in.

    `number` is the bank of weights, the batch of gradients (or micro-batch, counted through all batches) and
    the micro-batch of a stash, counted so; of an optimizer and of frozen weights it is 0.
    """

    item: Item
    stage: int
    number: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a rank: its name, its budget, and the chunks that it can hold. None is without a limit."""

    name: str
    budget_bytes: int | None
    capacity: int | None


@dataclass(frozen=True, slots=True)
class RankTiers:
    """How one rank's memory is cut.

    `chunks` says how many chunks an item of a stage has, `begin` on which tier each chunk lies that there is
    when the window begins. `master` says that weights are made from the optimizer's own master copy, and not
    from the version before. `unpaged_bytes` have their place on the device in addition to the chunks. The
    stages in `host_updates` are updated on the host, which is then tier 1: what an UPDATE of them uses is
    there.
    """

    chunk_bytes: int
    tiers: tuple[Tier, ...]
    chunks: Mapping[tuple[Item, int], int]
    begin: Mapping[Chunk, int]
    master: bool
    unpaged_bytes: float = 0.0
    host_updates: frozenset[int] = frozenset()

    def chunks_of(self, item: Item, stage: int, number: int) -> tuple[Chunk, ...]:
        """The chunks of an item; none if it is not paged."""
        return tuple(Chunk(item, stage, number, place) for place in range(self.chunks.get((item, stage), 0)))

    def later(self, versions: int, banks: Sequence[int]) -> "RankTiers":
        """The same for a window that begins so many versions later, whose weights may be in other banks."""
        if not versions or not self.begin:
            return self
        return replace(
            self,
            begin={
                chunk._replace(number=(chunk.number + versions) % banks[chunk.stage])
                if chunk.item is Item.WEIGHTS
                else chunk: tier
                for chunk, tier in self.begin.items()
            },
        )
