"""`plan.json`: a plan as a file, with what it promises, where it comes from and what else was found.

What is read equals what was written. Only the plan itself must be there, so that one can be written by hand.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from annotated_types import doc

from bireme.bounds import Count, Place
from bireme.documents import read_dataclass
from bireme.errors import BiremeError, errors_of
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.model.units import units_of
from bireme.plan.forecast import Answer, Candidate, Forecast, Origin, PlanSummary, summarize
from bireme.plan.plan import Plan, know_window
from bireme.profile.profile import Profile, plain_profile
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.source import LONG, SETTLED
from bireme.schedule.tiers import Chunk

# Whether a plan was made for this model: hashes of what it was made of, and what differs where they do.
#
# Graphs and clusters have hashes of their own (`model/graph_file.py`, `cluster/cluster_file.py`). All are the
# same in every process and on every machine.

REMEDY = "Plan again for this model, or train the model that it was made for."


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """What a plan remembers of a unit: what it is called, and the hash of the work it does."""

    name: str
    structure: str


def profile_hash(profile: Profile) -> str:
    """Sixteen hexadecimal digits that are the same for equal profiles only, measured seconds included."""
    plain = json.dumps(plain_profile(profile), allow_nan=False, sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def planned_units(profile: Profile) -> tuple[PlannedUnit, ...]:
    """What a plan made from this profile remembers of its units."""
    return tuple(PlannedUnit(unit.name, unit.structure) for unit in profile.units)


def check_plan_fits(origin: Origin, graph: Graph, units: Sequence[PlannedUnit] = ()) -> None:
    """Refuse a plan that was not made for the model of `graph`.

    Equal hashes settle it. A graph that holds for one batch size only has another hash at another; so where
    the plan remembers its `units`, it also fits a model whose units all do that work.
    """
    _check_same("plan", origin.graph, units, graph, REMEDY)


def check_profile_fits(profile: Profile, graph: Graph) -> None:
    """Refuse a profile that was not measured of the model of `graph`."""
    remedy = "Profile this model, or name the one that was profiled."
    _check_same("profile", profile.graph, planned_units(profile), graph, remedy)


def check_kind_fits(profile: Profile, other: Profile) -> None:
    """Refuse the profile of another kind of device that was not measured of the same model."""
    difference = _difference(planned_units(profile), planned_units(other))
    if difference is not None:
        raise BiremeError(
            f"It is the profile of another model than {profile.model}. {difference} Profile this model there."
        )


def check_plan_of(saved: "SavedPlan", profile: Profile) -> None:
    """Refuse a plan that was not made for the model of a profile, or that cuts where it has no unit."""
    units = planned_units(profile)
    difference = _difference(saved.units, units) if saved.units else None
    if difference is not None and (saved.origin is None or saved.origin.graph != profile.graph):
        raise BiremeError(f"The plan was made for another model than {profile.model}. {difference} {REMEDY}")
    for stage in range(saved.plan.num_stages):
        saved.plan.units_of(stage, len(units))


def _check_same(what: str, graph_was: str, units: Sequence[PlannedUnit], graph: Graph, remedy: str) -> None:
    here = graph_hash(graph)
    if here == graph_was:
        return
    difference = _difference(units, [PlannedUnit(unit.name, unit.structure) for unit in units_of(graph)])
    if difference is None:
        return
    about = f" {difference}" if units else ""
    raise BiremeError(
        f"The {what} was made for another model: the hash of its graph is {graph_was}, and {graph.name} "
        f"has {here}.{about} {remedy}"
    )


def _difference(planned: Sequence[PlannedUnit], found: Sequence[PlannedUnit]) -> str | None:
    """The first thing in which two models differ, as a sentence."""
    for place, (one, other) in enumerate(zip_longest(planned, found)):
        if one is None or other is None:
            return f"It has {len(planned)} units, but this model has {len(found)}."
        if one.name != other.name:
            return f"Its unit {place} is {one.name}, but here it is {other.name}."
        if one.structure != other.structure:
            return f"Unit {place} ({one.name}) differs here: other operators, shapes or constants."
    return None


# The windows of a plan that pages, in a file: who starts a run plans copies once, and its ranks read them.
#
# A file of another plan, or one that lacks a window, does no harm: what it does not say is planned.

_WINDOWS_FORMAT = 2


@dataclass(frozen=True, slots=True)
class _RankWindow:
    """A track, and on which tier each chunk lies when the window begins; None where the rank pages none."""

    track: Track
    begin: tuple[tuple[Chunk, Place], ...] | None


@dataclass(frozen=True, slots=True)
class _Window:
    plan: str
    num_batches: Count
    first_batch: Place
    ranks: tuple[_RankWindow, ...]


@dataclass(frozen=True, slots=True)
class _Windows:
    windows: tuple[_Window, ...]


def write_windows(path: Path, plans: Sequence[Plan]) -> None:
    """Write what the ranks of a run ask for; nothing if none of its plans pages."""
    paged = [plan for plan in plans if plan.paging is not None]
    if paged:
        windows = [
            _window(_digest(plan), plan.program(num_batches, first_batch))
            for plan in paged
            for num_batches, first_batch in _asked_for(plan)
        ]
        document = {"format": _WINDOWS_FORMAT, "windows": windows}
        write_text_atomically(path, json.dumps(document, separators=(",", ":")) + "\n")


def read_windows(path: Path, plans: Sequence[Plan]) -> None:
    """Have the windows in a file at hand, as far as they are of these plans."""
    digests = {_digest(plan): plan for plan in plans if plan.paging is not None}
    if digests and path.is_file():
        for window in read_dataclass(path, _Windows, number=_WINDOWS_FORMAT).windows:
            plan = digests.get(window.plan)
            if plan is not None:
                tracks = [own.track for own in window.ranks]
                begins = [None if own.begin is None else dict(own.begin) for own in window.ranks]
                know_window(plan, window.num_batches, window.first_batch, tracks, begins)


def _asked_for(plan: Plan) -> list[tuple[int, int]]:
    """The windows that an engine asks for: a settled one, and the loops of the first and of later ones."""
    later = [(LONG, 1)] if plan.source.rule is Rule.DELAYED else []
    return [(SETTLED, 0), (LONG, 0), *later]


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode()).hexdigest()


def _window(plan: str, program: Program) -> dict[str, object]:
    ranks = [
        {
            "track": {one.name: getattr(track, one.name) for one in fields(track)},
            "begin": None if tiers is None else sorted(tiers.begin.items()),
        }
        for track, tiers in zip(program.tracks, program.tiers, strict=True)
    ]
    return {
        "plan": plan,
        "num_batches": program.num_batches,
        "first_batch": program.first_batch,
        "ranks": ranks,
    }


_PLAN_FORMAT = 1


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
    write_text_atomically(path, json.dumps(_plain_plan(saved), allow_nan=False, indent=1) + "\n")


def _plain_plan(saved: SavedPlan) -> dict[str, Any]:
    """A plan in the words of JSON. What only plans that page or share have is left out of others."""
    plain = {"format": _PLAN_FORMAT, **asdict(saved)}
    plan, paging = plain["plan"], plain["plan"]["paging"]
    own = ("paging", "updates_halfway", "whole_weights", "shard", "sync_mode", "sum_codec", "stage_widths")
    parts = [
        (plan, own),
        ((paging or {}).get("sizes", {}), ("frozen", "tied_gradient", "waiting", "halves")),
        (paging or {}, ("host_updates", "updates_apart")),
        (plain["forecast"] or {}, ("tiers",)),
    ]
    left_out = [(part, name) for part, names in parts for name in names if name in part and not part[name]]
    left_out += [(plan, name) for name in ("sweep", "sites") if plan[name] == 1]
    left_out += [(plan, "stage_shares")] if not plan["stage_widths"] else []
    for part, name in left_out:
        del part[name]
    return plain


def load_plan(path: Path) -> SavedPlan:
    """The plan in a file."""
    saved = read_dataclass(path, SavedPlan, number=_PLAN_FORMAT)
    with errors_of(path):
        _check(saved)
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
