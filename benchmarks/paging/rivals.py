"""What others would copy for the same accesses: the least recently used, PatrickStar's rule, fixed places.

Each goes through the accesses of one tier and counts copies in both directions. All of them fetch when a
chunk is used and know what ends; what they do not know of the program is what makes them what they are.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["fixed_places", "least_recently_used", "patrickstar"]

Value = Callable[[Chunk, int], float]
"""How much a chunk is worth to keep at a step; the least is evicted."""


def least_recently_used(accesses: Sequence[ChunkAccess], capacity: int) -> int:
    """Evict what was used longest ago. It knows what is clean, and nothing of the future."""
    used: dict[Chunk, int] = {}

    def value(chunk: Chunk, _now: int) -> float:
        return used.get(chunk, -1)

    return _paged(accesses, capacity, value, used, moves=False)


def patrickstar(accesses: Sequence[ChunkAccess], capacity: int) -> int:
    """Evict what a traced iteration used again last. A chunk is in one place: all that leaves is copied."""
    times: defaultdict[Chunk, list[int]] = defaultdict(list)
    for access in accesses:
        times[access.chunk].append(access.at)

    def value(chunk: Chunk, now: int) -> float:
        later = times[chunk][bisect_right(times[chunk], now) :]
        return -float(later[0]) if later else -float("inf")

    return _paged(accesses, capacity, value, {}, moves=True)


def fixed_places(accesses: Sequence[ChunkAccess]) -> int:
    """Optimizer, gradients and weights below, fetched for each use; activations stay."""
    return sum(one.reads + one.writes for one in accesses if one.chunk.item is not Item.STASH)


def _paged(
    accesses: Sequence[ChunkAccess], capacity: int, value: Value, used: dict[Chunk, int], *, moves: bool
) -> int:
    by_step: defaultdict[int, list[ChunkAccess]] = defaultdict(list)
    for access in accesses:
        by_step[access.at].append(access)
    first: dict[Chunk, ChunkAccess] = {}
    for access in accesses:
        first.setdefault(access.chunk, access)
    held: set[Chunk] = set()
    for chunk in [chunk for chunk, access in first.items() if access.reads][:capacity]:
        held.add(chunk)
    dirty = set(held)
    copies = 0
    for now in sorted(by_step):
        taken = {one.chunk for one in by_step[now]}
        while len(held | taken) > capacity:
            gone = min(held - taken, key=lambda chunk: (value(chunk, now), chunk))
            held.remove(gone)
            copies += moves or gone in dirty
            dirty.discard(gone)
        for one in by_step[now]:
            copies += one.reads and one.chunk not in held
            held.add(one.chunk)
            used[one.chunk] = now
            if one.writes:
                dirty.add(one.chunk)
            if one.ends:
                held.discard(one.chunk)
                dirty.discard(one.chunk)
    return copies
