"""The arrays that the compiled loops of the search for a short latency work on.

A *slot* is a piece of an accelerator: slot `s` is piece `s % num_pieces` of accelerator `s // num_pieces`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.placement.items import Floats, Integers
from bireme.placement.latency.steps import LatencySteps

__all__ = ["CIRCLE", "CPU", "StepScratch", "Wiring", "scratch_for", "wiring_of"]

CIRCLE = -1.0
"""In place of a latency, where pieces wait for each other."""

CPU = -1
"""The slot of all that is on a CPU."""


class Wiring(NamedTuple):
    """The arrays of some `LatencySteps`, in the form that compiled loops take."""

    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    family: Integers
    family_starts: Integers
    family_steps: Integers
    can_accelerate: NDArray[np.bool_]
    before_starts: Integers
    before: Integers
    after_starts: Integers
    after: Integers
    net_source: Integers
    user_starts: Integers
    users: Integers
    net_cost: Floats
    num_slots: int
    num_pieces: int
    has_cpu: bool
    room: float


class StepScratch(NamedTuple):
    """Room for what the loops count; its contents mean nothing between two calls."""

    duration: Floats
    ready: Floats
    waiting: Integers
    first: Integers
    following: Integers
    stamp: Integers
    queue: Integers
    used: Floats
    moved: Integers
    old: Integers
    marks: Integers


def wiring_of(steps: LatencySteps, num_pieces: int) -> Wiring:
    """The arrays of these steps, for accelerators of so many pieces."""
    return Wiring(
        steps.accelerator_time,
        steps.cpu_time,
        steps.size,
        steps.family,
        steps.families.starts,
        steps.families.values,
        steps.can_accelerate,
        steps.before.starts,
        steps.before.values,
        steps.after.starts,
        steps.after.values,
        steps.net_source,
        steps.net_users.starts,
        steps.net_users.values,
        steps.net_cost,
        steps.num_accelerators * num_pieces,
        num_pieces,
        steps.num_cpus > 0,
        steps.room,
    )


def scratch_for(wiring: Wiring) -> StepScratch:
    """Room for workloads of this extent."""
    num_steps, num_slots = len(wiring.size), wiring.num_slots
    num_jobs = num_steps + num_slots
    return StepScratch(
        np.zeros(num_slots + 1),
        np.zeros(num_jobs),
        np.zeros(num_jobs, np.int64),
        np.zeros(num_slots + 1, np.int64),
        np.zeros(num_steps, np.int64),
        np.zeros(num_slots + 1, np.int64),
        np.zeros(num_jobs, np.int64),
        np.zeros(num_slots // wiring.num_pieces + 1),
        np.zeros(num_steps, np.int64),
        np.zeros(num_steps, np.int64),
        np.zeros(num_steps, np.int64),
    )
