"""All ideals of the order of some items: the sets that hold, with an item, everything that is before it.

They are numbered by their size, the empty one first and the whole one last, and joined into a lattice: from
each ideal a way leads down for every item that can be taken out of it. The ways of an ideal are in the order
of their items.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.plan.placement.compiled import compiled
from bireme.plan.placement.items import Integers, Items

__all__ = ["Lattice", "lattice_of"]

Bits = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """The ideals as rows of bits. The ways down of ideal `i` are `starts[i]` to `starts[i + 1]`: the items
    that can be taken out, and the ideals that are left. `levels[n]` is the first ideal of `n` items."""

    bits: Bits
    starts: NDArray[np.int64]
    taken: Integers
    below: Integers
    levels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bits)

    def between(self, upper: int, lower: int) -> list[int]:
        """The items of one ideal that are not in the other."""
        rest = (self.bits[upper] & ~self.bits[lower]).view(np.uint8)
        places: list[int] = np.unpackbits(rest, bitorder="little").nonzero()[0].tolist()
        return places


def lattice_of(items: Items, most: int) -> Lattice | None:
    """The lattice of the items' ideals, or None where there are more than `most` of them."""
    count = len(items)
    # Each item's share of a set's hash; fixed, so that a run can be repeated.
    shares = np.random.default_rng(0x2B3A).integers(1, 2**63 - 1, count, dtype=np.int64)
    bits, children, taken, parents, levels = _enumerate(
        count, items.before.starts, items.before.values, items.after.starts, items.after.values, shares, most
    )
    if not len(bits):
        return None
    order = np.lexsort((taken, children))
    starts = np.searchsorted(children[order], np.arange(len(bits) + 1))
    return Lattice(bits, starts.astype(np.int64), taken[order], parents[order], levels)


@compiled
def _enumerate(
    count: int,
    before_starts: Integers,
    before: Integers,
    after_starts: Integers,
    after: Integers,
    shares: NDArray[np.int64],
    most: int,
) -> tuple[Bits, Integers, Integers, Integers, NDArray[np.int64]]:
    """Level by level: each ideal grows by every item that can come next. Empty where there are too many."""
    num_words = (count + 63) // 64
    one = np.uint64(1)
    bits = np.zeros((1024, num_words), np.uint64)
    hashes = np.zeros(1024, np.int64)
    slots = np.full(4096, -1, np.int32)
    children = np.empty(4096, np.int32)
    taken = np.empty(4096, np.int32)
    parents = np.empty(4096, np.int32)
    levels = np.zeros(count + 2, np.int64)
    num_ideals, num_ways, begin = 1, 0, 0
    slots[0] = 0
    for level in range(count):
        levels[level] = begin
        end = num_ideals
        for ideal in range(begin, end):
            for item in range(count):
                if (bits[ideal, item >> 6] >> np.uint64(item & 63)) & one:
                    continue
                is_next = True
                for place in range(before_starts[item], before_starts[item + 1]):
                    other = before[place]
                    if not (bits[ideal, other >> 6] >> np.uint64(other & 63)) & one:
                        is_next = False
                        break
                if not is_next:
                    continue
                word = item >> 6
                grown = bits[ideal, word] | (one << np.uint64(item & 63))
                key = hashes[ideal] ^ shares[item]
                slot = key & (len(slots) - 1)
                child = slots[slot]
                while child >= 0:
                    if hashes[child] == key and bits[child, word] == grown:
                        is_same = True
                        for other_word in range(num_words):
                            if other_word != word and bits[child, other_word] != bits[ideal, other_word]:
                                is_same = False
                                break
                        if is_same:
                            break
                    slot = (slot + 1) & (len(slots) - 1)
                    child = slots[slot]
                if child < 0:
                    if num_ideals >= most:
                        return bits[:0], children[:0], taken[:0], parents[:0], levels
                    child = num_ideals
                    num_ideals += 1
                    if num_ideals > len(bits):
                        bits = np.concatenate((bits, np.zeros_like(bits)))
                        hashes = np.concatenate((hashes, np.zeros_like(hashes)))
                    bits[child] = bits[ideal]
                    bits[child, word] = grown
                    hashes[child] = key
                    slots[slot] = child
                    if 3 * num_ideals > len(slots):
                        slots = _larger(slots, hashes, num_ideals)
                if num_ways == len(children):
                    children = np.concatenate((children, np.empty_like(children)))
                    taken = np.concatenate((taken, np.empty_like(taken)))
                    parents = np.concatenate((parents, np.empty_like(parents)))
                children[num_ways] = child
                taken[num_ways] = item
                parents[num_ways] = ideal
                num_ways += 1
        begin = end
    levels[count] = begin
    levels[count + 1] = num_ideals
    return bits[:num_ideals], children[:num_ways], taken[:num_ways], parents[:num_ways], levels


@compiled
def _larger(slots: Integers, hashes: NDArray[np.int64], num_ideals: int) -> Integers:
    """The table of ideals by hash with four times the room."""
    larger = np.full(4 * len(slots), -1, np.int32)
    for ideal in range(num_ideals):
        slot = hashes[ideal] & (len(larger) - 1)
        while larger[slot] >= 0:
            slot = (slot + 1) & (len(larger) - 1)
        larger[slot] = ideal
    return larger
