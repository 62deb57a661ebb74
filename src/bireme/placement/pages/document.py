"""Placements and verdicts on them as JSON documents, for programs that read what the command line found."""

import math
from collections.abc import Sequence
from typing import Any

from bireme.placement.check import PlacementVerdict
from bireme.placement.placement import Placement
from bireme.placement.workload import Objective, Workload, device_names

__all__ = ["placement_document", "verdict_document"]


def placement_document(
    workload: Workload,
    placement: Placement,
    verdict: PlacementVerdict,
    seconds: float,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Who runs what, what it comes to, what is proven, and how long the search took."""
    names = device_names(workload)
    ids = [str(node.id) for node in workload.nodes]
    document: dict[str, Any] = {
        "objective": placement.objective.value,
        "method": str(placement.method),
        "contiguous": placement.contiguous,
        "ordered": verdict.ordered,
        "value": placement.value,
        "lower_bound": placement.lower_bound,
        "gap": placement.gap,
        "ideals": placement.num_ideals,
        "seconds": seconds,
        "loads": dict(zip(names, placement.loads, strict=True)),
        "assignment": {id_: names[device] for id_, device in zip(ids, placement.devices, strict=True)},
        "notes": list(notes),
    }
    if placement.objective is Objective.LATENCY:
        document["pieces"] = dict(zip(ids, placement.pieces, strict=True))
    return document


def verdict_document(
    workload: Workload, objective: Objective, verdict: PlacementVerdict, claimed: float | None
) -> dict[str, Any]:
    """What a check found; a value that cannot be counted is null."""
    loads = zip(device_names(workload), verdict.loads, strict=True) if verdict.loads else ()
    return {
        "valid": verdict.valid,
        "problems": list(verdict.problems),
        "objective": objective.value,
        "value": verdict.value if math.isfinite(verdict.value) else None,
        "claimed": claimed,
        "loads": dict(loads),
        "contiguous": verdict.contiguous,
        "ordered": verdict.ordered,
    }
