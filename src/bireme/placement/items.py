"""What the solvers work on: `Items`, groups of nodes that go to one device together, as arrays.

A *net* is the output of one or more nodes: the items that make and use it are its pins. A device with some
of the pins but not all of them moves that output, in or out, and pays for it once; with none or all of them
it pays nothing. So the load of a set of items is what they compute plus the costs of the nets it cuts, which
holds for outputs and inputs alike and needs no directions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Integers", "Items", "Ragged", "room"]

BYTES_SLACK = 1e-12
"""Relative room for the rounding of sums of bytes, where these are not whole numbers."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
"""Of one kind, that of numbers in loops too: numba compiles a loop once for each kind that it is given."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths, one after the other: row `i` is `values[starts[i] : starts[i + 1]]`."""

    starts: Integers
    values: Integers

    @classmethod
    def of(cls, rows: list[list[int]]) -> "Ragged":
        """The rows of a list of lists."""
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(starts, np.array([value for row in rows for value in row], np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, place: int) -> list[int]:
        """One of the rows."""
        values: list[int] = self.values[self.starts[place] : self.starts[place + 1]].tolist()
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Items numbered in a topological order: whatever must be before an item has a lower number.

    Times and costs have two columns: 0 is forward work, 1 is backward work. `size` is what an item takes on
    an accelerator, `supported` whether one can run it; where none can run or hold it, its time on one is 0.
    `before` are an item's direct predecessors, `after`
    its direct successors, through forward nodes and through what stands for them; where any placement will
    do, both are without meaning and empty. `pins` are the items of each net and `nets` the nets of each item.
    `members[i]` are the places of its nodes in the workload.

    A device is a number: the accelerators come first, then the CPUs.
    """

    members: tuple[tuple[int, ...], ...]
    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    supported: NDArray[np.bool_]
    before: Ragged
    after: Ragged
    pins: Ragged
    nets: Ragged
    net_cost: Floats
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_devices(self) -> int:
        """Of both kinds."""
        return self.num_accelerators + self.num_cpus

    @property
    def room(self) -> float:
        """The bytes that an accelerator may be given."""
        return room(self.size, self.accelerator_bytes)


def room(size: Floats, accelerator_bytes: float) -> float:
    """The bytes that an accelerator may be given of these sizes: a hair more than it has, for rounding.

    Sums of whole numbers are exact, so there it is what it has.
    """
    is_exact = size.sum() < 2**53 and bool((size == np.floor(size)).all())
    return float(accelerator_bytes) if is_exact else accelerator_bytes * (1 + BYTES_SLACK)
