"""The noun of this room: a `Profile`, what every unit of a graph costs at some micro-batch sizes.

It is data and imports no torch. Units that do the same work are measured once and share their costs; what
differs between them, the names of the tensors they keep, is with each.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from bireme.bounds import Bytes, Count, Place, Positive, Seconds
from bireme.cluster.device import KINDS, EngineCost
from bireme.codec.description import CodecRate
from bireme.documents import as_dataclass, read_json_object
from bireme.errors import BiremeError
from bireme.files import write_text_atomically


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """A piece of memory of a unit that a neighbor may know by one of its names too.

    `is_saved` tells whether this unit keeps it for its backward.
    """

    names: Annotated[tuple[str, ...], MinLen(1)]
    num_bytes: Bytes
    is_saved: bool


@dataclass(frozen=True, slots=True)
class SharedState:
    """A parameter or buffer of a unit that has a place in other units too (tied weights, a common table)."""

    name: str
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffer_bytes: Bytes
    frozen_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of a unit's forward, which no device changes: `flops` and `product_bytes` of its products,
    `other_bytes` that its other operators read and write, and `num_calls` of operators.
    """

    flops: Bytes
    product_bytes: Bytes
    other_bytes: Bytes
    num_calls: Place


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit at one micro-batch size.

    `recompute_backward_s` is a backward that runs the forward again first. With `forward_s` it is the time of
    both forwards and the backward. If a forward makes gradients, the first takes less than `forward_s`, and
    the second as much more. The two halves of the backward are None where nobody asked for them. `spread` is
    the width of the middle half of all measurements of forward and backward, relative to their median; zero
    where the seconds are an estimate.

    `saved_bytes` is what the unit alone keeps for its backward, its parameters and buffers not counted. What
    `shared` names are pieces that its neighbors may know and keep as well, and that are then there once.
    `boundary_bytes` goes to the next unit; `returned_bytes` comes back from it as gradients, None where that
    is as much. `workspace_bytes` is what else is alive at the worst moment, besides what is saved, what came
    in and what goes out. Where the backward runs in halves, the first one keeps `waiting_bytes` of gradients
    for the second, and `halves_workspace_bytes` is what else is alive during the first; None where nobody
    asked for halves. `work` scales the seconds to other devices; None in files that do not give it.
    """

    micro_batch: Count
    forward_s: Seconds
    backward_s: Seconds
    recompute_backward_s: Seconds
    backward_input_s: Seconds | None
    backward_weight_s: Seconds | None
    spread: Seconds
    saved_bytes: Bytes
    boundary_bytes: Bytes
    workspace_bytes: Bytes
    shared: tuple[KeptMemory, ...]
    returned_bytes: Bytes | None = None
    waiting_bytes: Bytes | None = None
    halves_workspace_bytes: Bytes | None = None
    work: UnitWork | None = None

    @property
    def back_bytes(self) -> int:
        """What comes back from the next unit as gradients."""
        return self.boundary_bytes if self.returned_bytes is None else self.returned_bytes


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One unit. `same_as` is the index of the first unit of the same work, None where it is that itself.

    `receives` and `sends` name the tensors that cross its boundaries, `inputs` those of the model's inputs
    that it reads. `parameter_bytes` are those of the parameters that learn, of which a stage keeps one copy
    for every weight version; frozen ones count as `buffer_bytes`, which are there once, and are its
    `frozen_bytes`. `optimizer_bytes` are those of the optimizer's state, and of its own copy of the weights
    where it keeps one. At a batch's end `reduce_s` goes over its gradients, `update_s` is one step of the
    optimizer and `trial_s` one that leaves the newest weights. `tied` are the parameters and buffers that
    others use too.
    """

    name: str
    structure: str
    same_as: int | None
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    inputs: tuple[str, ...]
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffer_bytes: Bytes
    update_s: Seconds
    tied: tuple[SharedState, ...]
    costs: Annotated[tuple[UnitCost, ...], MinLen(1)]
    trial_s: Seconds
    reduce_s: Seconds
    frozen_bytes: Bytes = 0

    def at(self, micro_batch: int) -> UnitCost:
        """The costs at a micro-batch size."""
        for cost in self.costs:
            if cost.micro_batch == micro_batch:
                return cost
        known = ", ".join(str(cost.micro_batch) for cost in self.costs)
        raise BiremeError(
            f"The profile has micro-batches of {known} samples, not of {micro_batch}. Profile that size too."
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The arithmetic rate of a device with numbers of a type, and the bandwidth of its memory."""

    dtype: str
    flops_per_s: Positive
    bytes_per_s: Positive


@dataclass(frozen=True, slots=True)
class KindProfile:
    """The profile of the same model on another kind of device, and the name that these devices have."""

    name: str
    profile: "Profile"


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of a graph's units on a device.

    `is_measured` tells whether the seconds were measured there, or estimated from its description. `versions`
    says of which software, `num_threads` with how many threads where that matters. `engine` is what the
    engine takes besides, `codecs` what codecs of boundaries take, where these were measured too.
    `master_weights` says whether the `optimizer_bytes` of units contain a float32 copy of their weights; None
    in files that do not say it. `rates` are those of the device, None if they are not known. `kinds` are the
    profiles of other kinds of devices, whose seconds count there; bytes are those of this profile everywhere.
    """

    model: str
    graph: str
    device: str
    device_kind: str
    num_threads: Place
    versions: str
    is_measured: bool
    optimizer: str
    num_operators: Place
    parameter_bytes: Bytes
    units: Annotated[tuple[UnitProfile, ...], MinLen(1)]
    engine: EngineCost | None = None
    codecs: tuple[CodecRate, ...] = ()
    master_weights: bool | None = None
    rates: Rates | None = None
    kinds: tuple[KindProfile, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The micro-batch sizes that it knows."""
        return tuple(cost.micro_batch for cost in self.units[0].costs)

    @property
    def spread(self) -> float:
        """The widest that measurements of a unit lie apart: how sure its seconds are."""
        return max((cost.spread for unit in self.units for cost in unit.costs), default=0.0)


# `profile.json`: a `Profile` as a file. What is read equals what was written.

_FORMAT = 1


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file: whole, or not at all."""
    write_text_atomically(path, json.dumps(plain_profile(profile), allow_nan=False, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """The profile in a file."""
    profile = as_dataclass(read_json_object(path), Profile, number=_FORMAT, source=str(path))
    if profile.device_kind not in KINDS:
        raise BiremeError(f"{path}: device_kind is {profile.device_kind!r}; it must be {' or '.join(KINDS)}.")
    for index, unit in enumerate(profile.units):
        sizes = [cost.micro_batch for cost in unit.costs]
        if sizes != list(dict.fromkeys(profile.micro_batches)):
            raise BiremeError(
                f"{path} is damaged: unit {index} has costs for micro-batches of {sizes} samples, where each "
                f"unit must have those of {list(dict.fromkeys(profile.micro_batches))} once."
            )
        if unit.same_as is not None and not _is_first(profile, unit.same_as, index):
            raise BiremeError(f"{path} is damaged: unit {index} cannot be the same as unit {unit.same_as}.")
    return profile


def _is_first(profile: Profile, first: int, index: int) -> bool:
    """Whether the unit at `index` can be the same as that one, which comes before and is a first one."""
    return 0 <= first < index and profile.units[first].same_as is None


_IF_KNOWN: dict[str, Any] = {"codecs": (), "kinds": (), "frozen_bytes": 0} | dict.fromkeys(
    ("master_weights", "rates", "returned_bytes", "waiting_bytes", "halves_workspace_bytes", "work")
)
"""The values with which a file leaves out these fields."""


def plain_profile(profile: Profile) -> dict[str, Any]:
    """The profile in the words of JSON."""
    return {"format": _FORMAT, **asdict(profile, dict_factory=_known)}


def _known(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if name not in _IF_KNOWN or value != _IF_KNOWN[name]}
