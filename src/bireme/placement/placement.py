"""The noun: a `Placement`, the device of every node of a workload, what it comes to, and what is proven."""

from dataclasses import dataclass

from bireme.placement.workload import Objective

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Who runs what. `devices[i]` is the number of the device of node `i`, accelerators first, then CPUs.

    `value` is what the objective comes to, `loads` the load of each device (for latency, when it is done).
    `lower_bound` is proven: no placement of the kind asked for is below it. `pieces[i]` tells, for latency,
    which run of its accelerator node `i` belongs to. `num_ideals` is known where they were counted,
    `has_too_many_ideals` set where the dynamic program gave up on them.
    """

    objective: Objective
    method: str
    contiguous: bool
    devices: tuple[int, ...]
    value: float
    lower_bound: float
    loads: tuple[float, ...]
    pieces: tuple[int, ...] = ()
    num_ideals: int | None = None
    has_too_many_ideals: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far the value may be from the best one, relative to it."""
        return max(0.0, (self.value - self.lower_bound) / self.value) if self.value else 0.0
