"""Chains of units made of numbers alone, such as published examples."""

import math
from collections.abc import Sequence

import numpy as np

from bireme.errors import BiremeError
from bireme.plan.partition.chain import Bytes, Chain, RangeBytes
from bireme.plan.partition.loads import DeviceRow, DeviceSlot, RowLink

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
        returned_bytes=boundary,
        bytes=_additive_bytes(
            state=state,
            gradient=state if gradient_bytes is None else whole(gradient_bytes),
            optimizer=whole(optimizer_bytes),
            kept=whole(kept_bytes),
            inputs=np.concatenate(([0], boundary[:-1])),
            workspace=whole(workspace_bytes),
        ),
    )


def _additive_bytes(
    *,
    state: Bytes,
    gradient: Bytes,
    optimizer: Bytes,
    kept: Bytes,
    inputs: Bytes,
    workspace: Bytes,
) -> RangeBytes:
    """The tables of units that share nothing; `inputs` is what comes into each, workspace is the greatest."""
    num_units = len(state)
    worst = np.zeros((num_units + 1, num_units + 1), np.int64)
    came = np.zeros_like(worst)
    for begin in range(num_units):
        worst[begin, begin + 1 :] = np.maximum.accumulate(workspace[begin:])
        came[begin, begin + 1 :] = inputs[begin]
    nothing = np.zeros_like(worst)
    whole = _sums(kept)
    state_bytes = _sums(state), _sums(gradient), _sums(optimizer), nothing
    return RangeBytes(*state_bytes, whole, whole, came, worst, nothing, nothing, nothing)


def _sums(values: Bytes) -> Bytes:
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return np.triu(sums[None, :] - sums[:, None])


def equal_devices(
    num_stages: int,
    *,
    memory_bytes: float = math.inf,
    link: RowLink | None = None,
    speeds: Sequence[float] = (),
) -> DeviceRow:
    """A row of devices that differ by nothing, or by their speed alone."""
    given = tuple(speeds) or (1.0,) * num_stages
    seats = tuple(DeviceSlot(f"device {stage}", speed, memory_bytes) for stage, speed in enumerate(given))
    return DeviceRow(seats, (link or RowLink(),) * (num_stages - 1))
