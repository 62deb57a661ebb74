"""`plan.json`: a plan as a file, with what it promises, where it comes from and what else was found.

What is read equals what was written. Only the plan itself must be there, so that one can be written by hand.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.plan.forecast import Answer, Candidate, Forecast, Origin, StageForecast
from bireme.plan.hashes import PlannedUnit
from bireme.plan.plan import Plan
from bireme.plan.summary import Kind, Summary, summarize

__all__ = ["FORMAT", "SavedPlan", "load_plan", "plain_plan", "saved_plan", "write_plan"]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a plan file holds. `units` is what it remembers of the model, `others` what was less good."""

    plan: Plan
    forecast: Forecast | None = None
    origin: Origin | None = None
    units: tuple[PlannedUnit, ...] = ()
    others: tuple[Summary, ...] = ()


def saved_plan(found: Answer | Candidate | Plan, units: tuple[PlannedUnit, ...] = ()) -> SavedPlan:
    """What the file of a search's answer, of one of its candidates or of a bare plan holds."""
    match found:
        case Answer():
            best = found.best
            others = tuple(summarize(candidate) for candidate in found.candidates[1:])
            return SavedPlan(best.plan, best.forecast, found.origin, units, others)
        case Candidate():
            return SavedPlan(found.plan, found.forecast, units=units)
        case Plan():
            return SavedPlan(found, units=units)


def write_plan(
    path: Path, found: Answer | Candidate | Plan | SavedPlan, units: tuple[PlannedUnit, ...] = ()
) -> None:
    """Write a plan to a file: whole, or not at all. `units` lets it say later what differs in a model."""
    saved = found if isinstance(found, SavedPlan) else saved_plan(found, units)
    write_text_atomically(path, json.dumps(plain_plan(saved), allow_nan=False, indent=1) + "\n")


def plain_plan(saved: SavedPlan) -> dict[str, Any]:
    """A plan in the words of JSON."""
    return {"format": FORMAT, **asdict(saved)}


def load_plan(path: Path) -> SavedPlan:
    """The plan in a file."""
    document = read_json(path, _PlanDocument)
    try:
        saved = document.saved()
        _check(saved)
    except BiremeError as error:
        raise BiremeError(f"{path}: {error}") from None
    return saved


def _check(saved: SavedPlan) -> None:
    """What the parts of a file must agree on."""
    plan, forecast, units = saved.plan, saved.forecast, saved.units
    if forecast is not None:
        bounds = [(stage.begin, stage.end) for stage in forecast.stages]
        end = bounds[-1][1]
        planned = list(zip((0, *plan.cuts), (*plan.cuts, end), strict=True))
        if bounds != planned or any(one >= other for one, other in bounds):
            raise BiremeError(
                f"The forecast is for stages of the units {bounds}, and the cuts of the plan make {planned}. "
                "Leave out the forecast, or plan again."
            )
        for stage in forecast.stages:
            for known in (stage.device_peak_bytes, stage.device_limit_bytes):
                if known and len(known) != len(stage.devices):
                    raise BiremeError(
                        f"The forecast has bytes of {len(known)} devices for the {len(stage.devices)} of a "
                        "stage. Leave out the forecast, or plan again."
                    )
        if units and end != len(units):
            raise BiremeError(f"Its last stage ends before unit {end}, and it names {len(units)} units.")
    if units and plan.cuts and plan.cuts[-1] >= len(units):
        raise BiremeError(f"It cuts at unit {plan.cuts[-1]}, and names {len(units)} units.")


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Count = Annotated[int, Field(ge=1)]
Place = Annotated[int, Field(ge=0)]
Bytes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]


class _PlanTable(_Document):
    cuts: list[Place] = Field(description="the units at which a new stage begins, without the first 0")
    num_microbatches: Count = Field(description="micro-batches of a batch in each replica")
    schedule: str = "2bw"
    width: Count = 1
    stages_per_rank: Count | None = None
    num_sliced: Place | None = None
    lookahead: Place = 0
    recompute: list[Place] = Field(default_factory=list)
    recompute_units: list[Place] = Field(default_factory=list)
    micro_batch_sizes: list[Count] = Field(default_factory=list)
    devices: list[list[str]] = Field(default_factory=list)
    updates_early: bool | None = None

    def plan(self) -> Plan:
        plain = self.model_dump() | {"devices": tuple(tuple(names) for names in self.devices)}
        lists = ("cuts", "recompute", "recompute_units", "micro_batch_sizes")
        return Plan(**plain | {name: tuple(plain[name]) for name in lists})


class _StageTable(_Document):
    begin: Place
    end: Place
    devices: list[str]
    recompute: bool
    busy_s: Seconds
    peak_bytes: Bytes
    limit_bytes: Bytes
    device_peak_bytes: list[Bytes] = Field(default_factory=list)
    device_limit_bytes: list[Bytes] = Field(default_factory=list)

    def stage(self) -> StageForecast:
        plain = self.model_dump()
        lists = ("devices", "device_peak_bytes", "device_limit_bytes")
        return StageForecast(**plain | {name: tuple(plain[name]) for name in lists})


class _ForecastTable(_Document):
    batch_s: Positive
    samples_per_s: Positive
    penalty: Positive
    busy_share: Share
    bottleneck: str
    stages: Annotated[list[_StageTable], Field(min_length=1)]
    delay_warmup: Share = 0.0

    def forecast(self) -> Forecast:
        plain = self.model_dump(exclude={"stages"})
        return Forecast(**plain, stages=tuple(stage.stage() for stage in self.stages))


class _OriginTable(_Document):
    graph: str
    profile: str
    cluster: str
    batch_size: Count
    how: str


class _UnitTable(_Document):
    name: str
    structure: str


class _OtherTable(_Document):
    kind: str
    schedule: str
    depth: Count
    width: Count
    num_stages: Count
    micro_batch_sizes: list[Count]
    num_microbatches: Count
    num_recomputed: Place
    batch_size: Count
    batch_s: Positive
    samples_per_s: Positive
    penalty: Positive
    cost_s_per_sample: Positive
    busy_share: Share
    bottleneck: str

    def summary(self) -> Summary:
        plain = self.model_dump() | {"micro_batch_sizes": tuple(self.micro_batch_sizes)}
        if self.kind not in [kind.value for kind in Kind]:
            raise BiremeError(f"There is no kind of plan {self.kind!r}.")
        return Summary(**plain | {"kind": Kind(self.kind)})


class _PlanDocument(_Document):
    format: Literal[1]
    plan: _PlanTable = Field(description="cuts, num_microbatches and the rest of the plan itself")
    forecast: _ForecastTable | None = None
    origin: _OriginTable | None = None
    units: list[_UnitTable] = Field(default_factory=list)
    others: list[_OtherTable] = Field(default_factory=list)

    def saved(self) -> SavedPlan:
        return SavedPlan(
            self.plan.plan(),
            None if self.forecast is None else self.forecast.forecast(),
            None if self.origin is None else Origin(**self.origin.model_dump()),
            tuple(PlannedUnit(unit.name, unit.structure) for unit in self.units),
            tuple(other.summary() for other in self.others),
        )
