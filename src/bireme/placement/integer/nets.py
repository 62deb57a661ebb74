"""What it costs to cut nets, as columns and rows of an integer program.

For a place, an accelerator or a slot of a line, item `i` is there if its column is 1. A net is cut there if
the largest column of its pins differs from the smallest. So one column is held above all pins and one below
them, and the difference is paid: the tightest linear form, with two rows for a pin. For nets of two pins a
single column above both differences is the same.
"""

from dataclasses import dataclass

import numpy as np

from bireme.placement.integer.program import Columns, IntegerProgram
from bireme.placement.items import Floats, Integers, Items

__all__ = ["CutNets", "cut_nets"]


@dataclass(frozen=True, slots=True)
class CutNets:
    """Nets of as many pins each: their numbers, the columns of their pins, and what a cut of them is.

    `pins` is `[net, pin, place]`, `high` and `low` are `[net, place]`, and a cut is their difference. With
    two pins `high` alone is the cut, and `low` has no rows.
    """

    numbers: Integers
    pins: Columns
    high: Columns
    low: Columns

    def payers(self) -> Columns:
        """The columns that a place pays for, `[place, column]`."""
        return np.hstack([self.high.T, self.low.T])

    def prices(self, net_cost: Floats) -> Floats:
        """What it pays for each of them."""
        return np.concatenate([net_cost[self.numbers], -net_cost[self.numbers[: len(self.low)]]])

    def complete(self, values: Floats) -> None:
        """Set the columns of the cuts, where those of the pins are set."""
        pins = values[self.pins]
        high, low = pins.max(axis=1), pins.min(axis=1)
        values[self.high] = high if len(self.low) else high - low
        values[self.low] = low[: len(self.low)]


def cut_nets(program: IntegerProgram, items: Items, on: Columns) -> list[CutNets]:
    """Columns and rows for all nets; `on[i, place]` is the column that says that item `i` is there."""
    sizes = np.diff(items.pins.starts)
    groups = []
    for size in np.unique(sizes):
        numbers = (sizes == size).nonzero()[0].astype(np.int64)
        places = items.pins.starts[numbers][:, np.newaxis] + np.arange(size, dtype=np.int64)
        pins = on[items.pins.values[places]]
        groups.append(_cut_pairs(program, numbers, pins) if size == 2 else _cut(program, numbers, pins))
    return groups


def _cut_pairs(program: IntegerProgram, numbers: Integers, pins: Columns) -> CutNets:
    cut = program.add_columns((len(pins), pins.shape[2]), upper=1.0)
    first, second = pins[:, 0].ravel(), pins[:, 1].ravel()
    for one, other in ((first, second), (second, first)):
        program.add_rows(np.column_stack([cut.ravel(), one, other]), [1, -1, 1], lower=0.0)
    return CutNets(numbers, pins, cut, cut[:0])


def _cut(program: IntegerProgram, numbers: Integers, pins: Columns) -> CutNets:
    high, low = (program.add_columns((len(pins), pins.shape[2]), upper=1.0) for _ in range(2))
    for pin in range(pins.shape[1]):
        here = pins[:, pin].ravel()
        program.add_rows(np.column_stack([high.ravel(), here]), [1, -1], lower=0.0)
        program.add_rows(np.column_stack([here, low.ravel()]), [1, -1], lower=0.0)
    return CutNets(numbers, pins, high, low)
