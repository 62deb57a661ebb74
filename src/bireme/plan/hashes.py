"""Whether a plan was made for this model: hashes of what it was made of, and what differs where they do.

Graphs and clusters have hashes of their own (`model/graph_file.py`, `cluster/cluster_file.py`). All are the
same in every process and on every machine.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.model.units import units_of
from bireme.plan.forecast import Origin
from bireme.profile.profile import Profile
from bireme.profile.profile_file import plain_profile

__all__ = ["PlannedUnit", "check_plan_fits", "planned_units", "profile_hash"]

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
