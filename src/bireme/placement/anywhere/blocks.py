"""Blocks: items that much flows between, two together, then four, then eight, and so on.

A search that moves one item at a time cannot carry a part of the graph over to another device where any half
of the way is worse. Blocks are what it tries to move at once.
"""

from collections import defaultdict
from random import Random
from typing import NamedTuple

import numpy as np

from bireme.placement.items import Floats, Integers, Items

__all__ = ["ItemBlocks", "blocks_of"]

MOST_LEVELS = 12

LARGEST_NET = 30
"""A net of more blocks says little about which two of them belong together."""

LEAST_SHRINKAGE = 0.95
"""Levels end where there would be more than this part of the blocks of the level before."""


class ItemBlocks(NamedTuple):
    """`of[level, item]` is the block of an item; `items[starts[block] : starts[block + 1]]` are its items."""

    of: Integers
    starts: Integers
    items: Integers


def blocks_of(items: Items, random: Random) -> ItemBlocks:
    """Blocks of several levels, each level parting the items; at least one level."""
    block_of = np.arange(len(items), dtype=np.int64)
    members = [[item] for item in range(len(items))]
    rows = [items.pins.row(net) for net in range(len(items.pins))]
    cost = items.net_cost.sum(axis=1)
    levels = [block_of.copy()]
    flat = [members]
    while len(members) > 2 and len(levels) <= MOST_LEVELS:
        fewer = _paired(members, _ties(block_of, rows, cost, len(members)), random)
        if len(fewer) > LEAST_SHRINKAGE * len(members):
            break
        members = fewer
        for block, row in enumerate(members):
            block_of[row] = block
        levels.append(block_of.copy())
        flat.append(members)
    if len(levels) > 1:
        # Single items are moved anyhow.
        levels, flat = levels[1:], flat[1:]
    return _flattened(levels, flat)


def _ties(block_of: Integers, rows: list[list[int]], cost: Floats, num_blocks: int) -> list[dict[int, float]]:
    """What flows between a block and each other one."""
    ties: list[dict[int, float]] = [defaultdict(float) for _ in range(num_blocks)]
    for net, row in enumerate(rows):
        blocks = sorted({int(block_of[pin]) for pin in row})
        if 2 <= len(blocks) <= LARGEST_NET:
            share = float(cost[net]) / (len(blocks) - 1)
            for place, one in enumerate(blocks):
                for other in blocks[place + 1 :]:
                    ties[one][other] += share
                    ties[other][one] += share
    return ties


def _paired(members: list[list[int]], ties: list[dict[int, float]], random: Random) -> list[list[int]]:
    """Each block with the free one that it has the strongest tie to, small ones before large ones."""
    order = list(range(len(members)))
    random.shuffle(order)
    is_free = [True] * len(members)
    pairs = []
    for block in order:
        if not is_free[block]:
            continue
        is_free[block] = False
        free = [other for other in ties[block] if is_free[other]]
        if not free:
            pairs.append(members[block])
            continue
        strengths = [ties[block][other] / len(members[other]) ** 0.5 for other in free]
        partner = free[strengths.index(max(strengths))]
        is_free[partner] = False
        pairs.append(members[block] + members[partner])
    return pairs


def _flattened(levels: list[Integers], members: list[list[list[int]]]) -> ItemBlocks:
    """All levels as one, with blocks numbered throughout."""
    counts = [len(level) for level in members]
    firsts = np.cumsum([0, *counts[:-1]])
    rows = [row for level in members for row in level]
    return ItemBlocks(
        np.stack([level + first for level, first in zip(levels, firsts, strict=True)]).astype(np.int64),
        np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64),
        np.array([item for row in rows for item in row], np.int64),
    )
