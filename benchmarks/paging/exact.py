"""The fewest copies that any plan of a small trace needs, by trying all of them.

A state is what the tier holds and which of it has no valid copy below. At every step it is enough to give
back no more slots than are needed: whoever gives back later knows more and pays no more.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.tiers import Chunk

__all__ = ["fewest_copies"]

State = tuple[frozenset[Chunk], frozenset[Chunk]]
"""What is held, and what of that is dirty."""


def fewest_copies(accesses: Sequence[ChunkAccess], num_steps: int, capacity: int) -> int:
    """The least number of copies, in both directions, with so many slots."""
    by_step: defaultdict[int, list[ChunkAccess]] = defaultdict(list)
    for access in accesses:
        by_step[access.at].append(access)
    costs = _beginnings(accesses, capacity)
    for now in range(num_steps):
        used = by_step[now]
        taken = frozenset(one.chunk for one in used)
        worth = _worth(accesses, now)
        following: dict[State, int] = {}
        for (held, dirty), cost in costs.items():
            others = sorted(held - taken)
            surplus = max(len(others) + len(taken) - capacity, 0)
            fetched = sum(one.reads and one.chunk not in held for one in used)
            for given_back in combinations(others, surplus):
                gone = frozenset(given_back)
                copied = sum(chunk in dirty and chunk in worth for chunk in gone)
                state = _after(held - gone, dirty - gone, used)
                spent = cost + fetched + copied
                following[state] = min(spent, following.get(state, spent))
        costs = following
    return min(costs.values())


def _beginnings(accesses: Sequence[ChunkAccess], capacity: int) -> dict[State, int]:
    """Every choice of what begins in the tier; the rest begins below, where its copy is valid."""
    first: dict[Chunk, ChunkAccess] = {}
    for access in accesses:
        first.setdefault(access.chunk, access)
    there = sorted(chunk for chunk, access in first.items() if access.reads)
    return {
        (frozenset(held), frozenset(held)): 0
        for number in range(min(capacity, len(there)) + 1)
        for held in combinations(there, number)
    }


def _worth(accesses: Sequence[ChunkAccess], now: int) -> set[Chunk]:
    """What is read after a step, or outlives the trace."""
    following: dict[Chunk, ChunkAccess] = {}
    for access in accesses:
        if access.at >= now:
            following.setdefault(access.chunk, access)
    everything = {access.chunk for access in accesses}
    return {chunk for chunk in everything if chunk not in following or following[chunk].reads}


def _after(held: frozenset[Chunk], dirty: frozenset[Chunk], used: Sequence[ChunkAccess]) -> State:
    held = held.union(one.chunk for one in used)
    dirty = dirty.union(one.chunk for one in used if one.writes)
    ended = {one.chunk for one in used if one.ends}
    return held - ended, dirty - ended
