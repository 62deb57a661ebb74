"""The order of items for an integer program: its edges without those that follow from others, and how early
and how late in a line of devices an item can be, by the work and the bytes that must be before and after it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.placement.integer.loads import FULL_SCALE, Frame, sizes_in_scale
from bireme.placement.items import Floats, Integers, Items

__all__ = ["ItemOrder", "Windows", "order_of", "windows_of"]

TOLERANCE = 1e-6
"""The share of a device that work may be over before it is counted as needing another one."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemOrder:
    """The edges that are needed, from `leaders[e]` to `followers[e]`; and `upto[i, j]`: is `j` before `i`.

    An item counts as being before itself.
    """

    leaders: Integers
    followers: Integers
    upto: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The first and the last slot that each item can be in."""

    earliest: Integers
    latest: Integers


def order_of(items: Items) -> ItemOrder:
    """The order, closed and reduced."""
    upto = np.eye(len(items), dtype=np.bool_)
    leaders, followers = [], []
    for item in range(len(items)):
        before = np.array(items.before.row(item), np.int64)
        if before.size:
            upto[item] |= upto[before].any(axis=0)
            # A predecessor is before itself; whoever is before a second one too is implied by that one.
            needed = before[upto[np.ix_(before, before)].sum(axis=0) == 1]
            leaders += needed.tolist()
            followers += [item] * len(needed)
    return ItemOrder(np.array(leaders, np.int64), np.array(followers, np.int64), upto)


def windows_of(frame: Frame, order: ItemOrder, num_slots: int) -> Windows:
    """The slots that each item can be in where no device has more than the frame's ceiling."""
    needs = _devices_needed(frame, order.upto)
    needs_after = _devices_needed(frame, order.upto.T)
    earliest = np.minimum(needs - 1, num_slots - 1)
    latest = np.maximum(num_slots - needs_after, 0)
    return Windows(earliest.astype(np.int64), latest.astype(np.int64))


def _devices_needed(frame: Frame, sets: NDArray[np.bool_]) -> Integers:
    """How many devices the items of each row take at least."""
    least: Floats = np.where(frame.on_accelerator, frame.accelerator_time.sum(axis=0), np.inf)
    least = np.minimum(least, np.where(frame.on_cpu, frame.cpu_time.sum(axis=0), np.inf))
    shares = [sets @ least / frame.ceiling]
    if not frame.items.num_cpus:
        shares.append(sets @ sizes_in_scale(frame.items) / FULL_SCALE)
    needed: Integers = np.maximum(1, np.ceil(np.max(shares, axis=0) - TOLERANCE)).astype(np.int64)
    return needed
