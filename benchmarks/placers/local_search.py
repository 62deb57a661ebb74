"""Local search, a baseline: from random placements, always the best move of one item.

In the paper it knows nothing of memory and of CPUs. Here it keeps to the memory and to what accelerators
support, and gives CPUs what no accelerator can take, or everything where there are no accelerators.
"""

from random import Random

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.errors import BiremeError
from bireme.placement.annealing_loops import (
    LoadState,
    LoadTables,
    copy_loads,
    shift,
    state_of,
    tables_of,
    value_now,
)
from bireme.placement.contraction import FoundPlacement, Integers, Items, fits, loads_of, value_of
from bireme.placement.solve import random_start
from bireme.placement.workload import Objective

_LEAST_GAIN = 1e-7
"""Relative; the paper's is 1e-5 in its milliseconds, but times may have any unit."""


def local_search(items: Items, objective: Objective, *, restarts: int = 10, seed: int = 0) -> FoundPlacement:
    """The best of what so many random starts lead to. Raises `BiremeError` where none of them fits."""
    random = Random(seed)
    tables = tables_of(items, objective)
    best: FoundPlacement | None = None
    for _ in range(restarts):
        start = random_start(items, random)
        if not fits(items, start):
            continue
        places = np.array(start, np.int64)
        _descend(tables, state_of(items, tables, places), places, items.supported)
        where = tuple(places.tolist())
        found = FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)
        if best is None or found.value < best.value:
            best = found
    if best is None:
        raise BiremeError(
            f"None of {restarts} random starts fits: the operators take {items.size.sum():g} bytes, and "
            f"{items.num_accelerators} accelerators have {items.accelerator_bytes:g} each. Give more memory, "
            "or use a method that looks for room."
        )
    return best


@compiled
def _descend(tables: LoadTables, state: LoadState, where: Integers, supported: NDArray[np.bool_]) -> None:
    """Make the best move until none gains much.

    Only moves from or to a device with a largest load can gain at all.
    """
    num_targets = tables.num_accelerators if tables.num_accelerators else len(state.load)
    is_busiest = np.zeros(len(state.load), np.bool_)
    num_moves = 1
    while num_moves:
        _mark_busiest(state, is_busiest)
        num_moves = 0
        best, best_item, best_target = value_now(state) * (1 - _LEAST_GAIN), 0, 0
        for item in range(len(where)):
            source = where[item]
            for target in range(num_targets):
                if source == target or not (is_busiest[source] or is_busiest[target]):
                    continue
                is_taken = target >= tables.num_accelerators or (
                    supported[item] and state.held[target] + tables.size[item] <= tables.most_bytes
                )
                if is_taken:
                    copy_loads(state.load, state.before)
                    shift(tables, state, item, source, target)
                    value = value_now(state)
                    shift(tables, state, item, target, source)
                    copy_loads(state.before, state.load)
                    if value < best:
                        best, best_item, best_target = value, item, target
                        num_moves = 1
        if num_moves:
            shift(tables, state, best_item, where[best_item], best_target)
            where[best_item] = best_target


@compiled
def _mark_busiest(state: LoadState, is_busiest: NDArray[np.bool_]) -> None:
    """Mark the devices that have the largest load of a column."""
    is_busiest[:] = False
    for column in range(state.load.shape[1]):
        most = 0.0
        for device in range(len(state.load)):
            most = max(most, state.load[device, column])
        for device in range(len(state.load)):
            if state.load[device, column] >= most:
                is_busiest[device] = True
