"""`plan.json`: a plan as a file, with what it promises, where it comes from and what else was found.

What is read equals what was written. Only the plan itself must be there, so that one can be written by hand.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import doc

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.plan.forecast import Answer, Candidate, Forecast, Origin
from bireme.plan.hashes import PlannedUnit
from bireme.plan.plan import Plan
from bireme.plan.summary import PlanSummary, summarize

__all__ = ["PLAN_FORMAT", "SavedPlan", "load_plan", "plain_plan", "saved_plan", "write_plan"]

PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a plan file holds. `units` is what it remembers of the model, `others` what was less good."""

    plan: Annotated[Plan, doc("cuts, num_microbatches and the rest of the plan itself")]
    forecast: Forecast | None = None
    origin: Origin | None = None
    units: tuple[PlannedUnit, ...] = ()
    others: tuple[PlanSummary, ...] = ()


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
    """A plan in the words of JSON. What only plans that page or share have is left out of others."""
    plain = {"format": PLAN_FORMAT, **asdict(saved)}
    if saved.plan.sweep == 1:
        del plain["plan"]["sweep"]
    if saved.plan.paging is None:
        del plain["plan"]["paging"]
    else:
        sizes = plain["plan"]["paging"]["sizes"]
        for name in ("frozen", "tied_gradient", "waiting", "halves"):
            if not sizes[name]:
                del sizes[name]
        if not saved.plan.paging.host_updates:
            del plain["plan"]["paging"]["host_updates"]
        if not saved.plan.paging.updates_apart:
            del plain["plan"]["paging"]["updates_apart"]
    if not saved.plan.updates_halfway:
        del plain["plan"]["updates_halfway"]
    if not saved.plan.whole_weights:
        del plain["plan"]["whole_weights"]
    if saved.forecast is not None and not saved.forecast.tiers:
        del plain["forecast"]["tiers"]
    return plain


def load_plan(path: Path) -> SavedPlan:
    """The plan in a file."""
    saved = read_dataclass(path, SavedPlan, number=PLAN_FORMAT)
    try:
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
