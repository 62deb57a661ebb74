"""The chain of units that partitioners cut: seconds of each unit, and the exact bytes of every range of them.

It is made of a profile at one micro-batch size. A chain whose units are layers is a
chain of half-layers with fewer places to cut.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError
from bireme.plan.partition.range_bytes import Bytes, RangeBytes, range_bytes
from bireme.profile.profile import Profile
from bireme.sync.slices import PART_BYTES_IN_FLIGHT, beside_parts

__all__ = ["Chain", "Seconds", "chain_of", "layer_bounds"]

Seconds = npt.NDArray[np.float64]
"""Seconds, of one thing each."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The units in the order they run, on a device of speed 1.

    The seconds are per unit and mean what they do in a `UnitCost`; `boundary_bytes` goes over the cut after
    each unit, and `returned_bytes` comes back as gradients.
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
    returned_bytes: Bytes
    bytes: RangeBytes
    backward_weight_s: Seconds | None = None

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
        inputs, weights = self.backward_input_s, self.backward_weight_s
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
            returned_bytes=self.returned_bytes[[end - 1 for end in bounds[1:]]],
            bytes=self.bytes.between(bounds),
            backward_weight_s=None if weights is None else np.add.reduceat(weights, starts),
        )

    def with_newest(self) -> "Chain":
        """The chain whose newest weights are kept with the optimiser's state."""
        kept = self.bytes.optimizer + self.bytes.parameter
        return replace(self, bytes=replace(self.bytes, optimizer=kept))

    def with_residuals(self, share: float) -> "Chain":
        """The chain that keeps, in addition to the optimiser's state, so many bytes for each byte of
        gradients.
        """
        kept = np.round(share * self.bytes.gradient).astype(np.int64)
        return replace(self, bytes=replace(self.bytes, optimizer=self.bytes.optimizer + kept))

    def with_sharers(self, sharers: int) -> "Chain":
        """The chain of which so many replicas each keep and step a part of the optimiser's, with what summing
        gradients in parts takes besides.
        """
        own = self.bytes
        beside = beside_parts(sharers) * np.minimum(own.gradient, PART_BYTES_IN_FLIGHT)
        workspace = own.workspace + np.ceil(beside).astype(np.int64)
        kept = replace(own, optimizer=-(-own.optimizer // sharers), workspace=workspace)
        return replace(self, bytes=kept, update_s=self.update_s / sharers)


def chain_of(profile: Profile, micro_batch: int) -> Chain:
    """The chain of a profile's units at a micro-batch size that it knows."""
    units = profile.units
    costs = [unit.at(micro_batch) for unit in units]
    inputs = [cost.backward_input_s for cost in costs if cost.backward_input_s is not None]
    weights = [cost.backward_weight_s for cost in costs if cost.backward_weight_s is not None]
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
        returned_bytes=np.array([cost.back_bytes for cost in costs], np.int64),
        bytes=range_bytes(profile, micro_batch),
        backward_weight_s=np.array(weights) if len(weights) == len(costs) else None,
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
