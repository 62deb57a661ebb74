"""`profile.json`: a `Profile` as a file. What is read equals what was written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bireme.cluster.engine_cost import EngineCost
from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.profile.profile import Held, Kept, Profile, UnitCost, UnitProfile

__all__ = ["FORMAT", "load_profile", "plain_profile", "save_profile"]

FORMAT = 1

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file: whole, or not at all."""
    write_text_atomically(path, json.dumps(plain_profile(profile), allow_nan=False, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """The profile in a file."""
    profile = read_json(path, _ProfileDocument).profile()
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
    """Whether the unit at `index` can be the same as that one, which comes before and stands for itself."""
    return 0 <= first < index and profile.units[first].same_as is None


def plain_profile(profile: Profile) -> dict[str, Any]:
    """The profile in the words of JSON."""
    return {"format": FORMAT, **asdict(profile)}


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _KeptDocument(_Document):
    names: Annotated[list[str], Field(min_length=1)]
    num_bytes: Bytes
    is_saved: bool


class _CostDocument(_Document):
    micro_batch: Annotated[int, Field(ge=1)]
    forward_s: Seconds
    backward_s: Seconds
    recompute_backward_s: Seconds
    backward_input_s: Seconds | None
    backward_weight_s: Seconds | None
    spread: Seconds
    saved_bytes: Bytes
    boundary_bytes: Bytes
    workspace_bytes: Bytes
    shared: list[_KeptDocument]


class _HeldDocument(_Document):
    name: str
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffer_bytes: Bytes


class _UnitDocument(_Document):
    name: str
    structure: str
    same_as: int | None
    receives: list[str]
    sends: list[str]
    inputs: list[str]
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffer_bytes: Bytes
    update_s: Seconds
    tied: list[_HeldDocument]
    costs: Annotated[list[_CostDocument], Field(min_length=1)]
    trial_s: Seconds | None = None
    reduce_s: Seconds = 0.0


class _EngineDocument(_Document):
    instruction_s: Seconds
    send_s: Seconds
    send_s_per_byte: Seconds
    receive_s: Seconds
    take_s: Seconds
    take_s_per_byte: Seconds
    late_s: Seconds
    late_s_per_byte: Seconds
    reduce_s: Seconds
    update_s: Seconds
    trial_s: Seconds
    batch_s: Seconds
    agree_s: Seconds
    process_bytes: Bytes
    control_s: Seconds
    num_processes: Annotated[int, Field(ge=0)]


class _ProfileDocument(_Document):
    format: Literal[1]
    model: str
    graph: str
    device: str
    device_kind: str
    num_threads: Annotated[int, Field(ge=0)]
    versions: str
    is_measured: bool
    optimizer: str
    num_operators: Annotated[int, Field(ge=0)]
    parameter_bytes: Bytes
    units: Annotated[list[_UnitDocument], Field(min_length=1)]
    engine: _EngineDocument | None = None

    def profile(self) -> Profile:
        plain = self.model_dump(exclude={"format", "units", "engine"})
        engine = None if self.engine is None else EngineCost(**self.engine.model_dump())
        return Profile(**plain, units=tuple(_unit(unit) for unit in self.units), engine=engine)


def _unit(document: _UnitDocument) -> UnitProfile:
    return UnitProfile(
        **document.model_dump(exclude={"receives", "sends", "inputs", "tied", "costs", "trial_s"}),
        receives=tuple(document.receives),
        sends=tuple(document.sends),
        inputs=tuple(document.inputs),
        tied=tuple(Held(**held.model_dump()) for held in document.tied),
        costs=tuple(_cost(cost) for cost in document.costs),
        # Older files know one kind of step.
        trial_s=document.update_s if document.trial_s is None else document.trial_s,
    )


def _cost(document: _CostDocument) -> UnitCost:
    shared = (Kept(tuple(kept.names), kept.num_bytes, kept.is_saved) for kept in document.shared)
    return UnitCost(**document.model_dump(exclude={"shared"}), shared=tuple(shared))
