"""The chain of units that partitioners cut: seconds of each unit, and the exact bytes of every range of them.

It is made of a profile at one micro-batch size, or of numbers alone. A chain whose units are layers is a
chain of half-layers with fewer places to cut.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError
from bireme.plan.partition.range_bytes import Bytes, RangeBytes, additive_bytes, range_bytes
from bireme.profile.profile import Profile

__all__ = ["Chain", "Seconds", "chain_of", "chain_of_numbers", "layer_bounds"]

Seconds = npt.NDArray[np.float64]
"""Seconds, of one thing each."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The units in the order they run, on a device of speed 1.

    The seconds are per unit and mean what they do in a `UnitCost`; `boundary_bytes` goes over the cut behind
    each unit.
    """

    names: tuple[str, ...]
    micro_batch: int
    forward_s: Seconds
    backward_s: Seconds
    recompute_backward_s: Seconds
    backward_input_s: Seconds | None
    reduce_s: Seconds
    update_s: Seconds
    trial_s: Seconds
    boundary_bytes: Bytes
    bytes: RangeBytes

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self.names)

    def bounds(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The first unit of each stage, and the end."""
        bounds = (0, *cuts, self.num_units)
        if any(begin >= end for begin, end in pairwise(bounds)):
            raise BiremeError(
                f"The cuts {list(cuts)} leave a stage of a chain of {self.num_units} units empty: they must "
                f"rise, from 1 to {self.num_units - 1}."
            )
        return bounds

    def merged(self, bounds: Sequence[int]) -> "Chain":
        """The chain whose units are those between the bounds, such as layers of their halves.

        A cut of it at unit i is one of this chain at `bounds[i]`.
        """
        bounds = self.bounds(bounds[1:-1])
        starts = bounds[:-1]
        inputs = self.backward_input_s
        return Chain(
            names=tuple(
                self.names[a] if b == a + 1 else f"{self.names[a]} … {self.names[b - 1]}"
                for a, b in pairwise(bounds)
            ),
            micro_batch=self.micro_batch,
            forward_s=np.add.reduceat(self.forward_s, starts),
            backward_s=np.add.reduceat(self.backward_s, starts),
            recompute_backward_s=np.add.reduceat(self.recompute_backward_s, starts),
            backward_input_s=None if inputs is None else np.add.reduceat(inputs, starts),
            reduce_s=np.add.reduceat(self.reduce_s, starts),
            update_s=np.add.reduceat(self.update_s, starts),
            trial_s=np.add.reduceat(self.trial_s, starts),
            boundary_bytes=self.boundary_bytes[[end - 1 for end in bounds[1:]]],
            bytes=self.bytes.between(bounds),
        )


def chain_of(profile: Profile, micro_batch: int) -> Chain:
    """The chain of a profile's units at a micro-batch size that it knows."""
    units = profile.units
    costs = [unit.at(micro_batch) for unit in units]
    inputs = [cost.backward_input_s for cost in costs if cost.backward_input_s is not None]
    return Chain(
        names=tuple(unit.name for unit in units),
        micro_batch=micro_batch,
        forward_s=np.array([cost.forward_s for cost in costs]),
        backward_s=np.array([cost.backward_s for cost in costs]),
        recompute_backward_s=np.array([cost.recompute_backward_s for cost in costs]),
        backward_input_s=np.array(inputs) if len(inputs) == len(costs) else None,
        reduce_s=np.array([unit.reduce_s for unit in units]),
        update_s=np.array([unit.update_s for unit in units]),
        trial_s=np.array([unit.trial_s for unit in units]),
        boundary_bytes=np.array([cost.boundary_bytes for cost in costs], np.int64),
        bytes=range_bytes(profile, micro_batch),
    )


PerUnit = float | Sequence[float]
"""One number for every unit, or one for all."""


def chain_of_numbers(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    recompute_backward_s: Sequence[float] | None = None,
    update_s: PerUnit = 0.0,
    parameter_bytes: PerUnit = 0,
    gradient_bytes: PerUnit | None = None,
    optimizer_bytes: PerUnit = 0,
    kept_bytes: PerUnit = 0,
    boundary_bytes: PerUnit = 0,
    workspace_bytes: PerUnit = 0,
    names: Sequence[str] = (),
) -> Chain:
    """A chain of units that share nothing, such as a published example.

    What is left out is derived: running a forward again takes a forward, and gradients are as large as
    parameters.
    """
    num_units = len(forward_s)
    if num_units == 0 or len(backward_s) != num_units:
        raise BiremeError(
            f"A chain has one unit or more, and for each a forward and a backward, not {num_units} and "
            f"{len(backward_s)}."
        )

    def whole(values: PerUnit) -> Bytes:
        return np.broadcast_to(np.asarray(values, np.int64), num_units).copy()

    forward, backward = np.array(forward_s, np.float64), np.array(backward_s, np.float64)
    state, boundary = whole(parameter_bytes), whole(boundary_bytes)
    return Chain(
        names=tuple(names) or tuple(f"unit {place}" for place in range(num_units)),
        micro_batch=1,
        forward_s=forward,
        backward_s=backward,
        recompute_backward_s=(
            forward + backward if recompute_backward_s is None else np.array(recompute_backward_s, np.float64)
        ),
        backward_input_s=None,
        reduce_s=np.zeros(num_units),
        update_s=np.broadcast_to(np.asarray(update_s, np.float64), num_units).copy(),
        trial_s=np.broadcast_to(np.asarray(update_s, np.float64), num_units).copy(),
        boundary_bytes=boundary,
        bytes=additive_bytes(
            state=state,
            gradient=state if gradient_bytes is None else whole(gradient_bytes),
            optimizer=whole(optimizer_bytes),
            kept=whole(kept_bytes),
            inputs=np.concatenate(([0], boundary[:-1])),
            workspace=whole(workspace_bytes),
        ),
    )


def layer_bounds(names: Sequence[str]) -> tuple[int, ...]:
    """Where the layers begin, and the end: units whose names agree up to their first number are one layer.

    A unit without a number in its name is a layer of its own.
    """
    layers = [(match.group() if (match := LAYER.match(name)) else None) for name in names]
    begins = [
        place
        for place, layer in enumerate(layers)
        if place == 0 or layer is None or layer != layers[place - 1]
    ]
    return (*begins, len(names))


LAYER = re.compile(r".*?(?:^|\.)\d+(?=\.|$)")
"""A module's name up to its first number."""
