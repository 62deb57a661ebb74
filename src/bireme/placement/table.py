"""A placement for people: a row for each device, what is proven, and what may bring more."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bireme.bounds import bytes_text, seconds_text
from bireme.placement.check import PlacementVerdict, work_of
from bireme.placement.workload import Objective, Placement, Workload, device_names
from bireme.report.terminal import columns

# Placements and verdicts on them as JSON documents, for programs that read what the command line found.


def placement_document(
    workload: Workload, placement: Placement, verdict: PlacementVerdict, seconds: float, notes: Sequence[str]
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


_NO_GAP = 1e-6
"""A gap below this is the rounding of sums."""

_LEAST_SHOWN = 5e-5
"""A smaller gap would look like none, in percent."""

_BAR = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"

_MEANINGS = {
    Objective.THROUGHPUT: "per sample, at the pace of the busiest device",
    Objective.TRAINING: "per sample, forward and backward, at the pace of the busiest device",
    Objective.FLUSH: "the largest forward load and the largest backward load",
    Objective.LATENCY: "until one sample is through",
}

_LIMITED = ("auto", "dp", "dpl", "milp", "anneal")
"""The methods that more seconds can help."""


def number_text(number: float) -> str:
    """A time without a unit, to four or five digits."""
    return f"{number:,.0f}" if 10_000 <= number < 1e9 else f"{number:.4g}"


def _is_proven(placement: Placement) -> bool:
    """Whether no placement of the kind asked for is better."""
    return placement.gap < _NO_GAP


def advice_on(placement: Placement) -> str | None:
    """What to try where a better placement may be left; None where none can be."""
    if _is_proven(placement):
        return None
    words = []
    if placement.method in _LIMITED:
        words.append("a longer --time-limit")
    if placement.method not in ("auto", "milp"):
        words.append("--method milp (it proves a bound)")
    is_dp_left = placement.method != "dp" and not placement.has_too_many_ideals
    if placement.contiguous and is_dp_left and placement.objective is not Objective.LATENCY:
        words.append("--method dp (exact, for graphs of few ideals)")
    if placement.objective is Objective.LATENCY:
        words.append("more --pieces")
    return f"A better placement may exist. Try: {', '.join(words)}."


def print_placement(workload: Workload, placement: Placement, seconds: float, console: Console) -> None:
    """The devices, and the value with what is known of it."""
    console.print(_devices(workload, placement.devices, placement.pieces, placement.loads))
    console.print()
    console.print(f"[bold]{placement.value:.6g}[/bold] {_MEANINGS[placement.objective]}.")
    ideals = "" if placement.num_ideals is None else f", {placement.num_ideals:,} ideals"
    console.print(f"{_proof(placement)} Found by {placement.method} in {seconds_text(seconds)}{ideals}.")
    advice = advice_on(placement)
    for note in (*placement.notes, *([] if advice is None else [advice])):
        console.print(note, style="dim", markup=False)


def print_verdict(
    workload: Workload,
    devices: Sequence[int],
    pieces: Sequence[int],
    objective: Objective,
    verdict: PlacementVerdict,
    console: Console,
) -> None:
    """The devices as the checker counts them, and every broken rule."""
    if verdict.loads:
        console.print(_devices(workload, devices, pieces, verdict.loads))
        console.print()
    if math.isfinite(verdict.value):
        console.print(f"[bold]{verdict.value:.6g}[/bold] {_MEANINGS[objective]}.")
    line = "can be put in an order" if verdict.ordered else "cannot be put in an order"
    console.print(f"{'Contiguous' if verdict.contiguous else 'Not contiguous'}; the devices {line}.")
    for problem in verdict.problems:
        console.print(problem, style="red", markup=False)
    if verdict.valid:
        console.print("[green]Every rule is kept.[/green]")


def _proof(placement: Placement) -> str:
    if _is_proven(placement):
        return "Proven optimal."
    if placement.lower_bound <= 0:
        return "No bound is known."
    gap = f"{placement.gap:.2%}" if placement.gap > _LEAST_SHOWN else f"{placement.gap:.0e}"
    return f"No placement is below {placement.lower_bound:.6g}: a gap of {gap}."


def _devices(
    workload: Workload, devices: Sequence[int], pieces: Sequence[int], loads: Sequence[float]
) -> Table:
    works = work_of(workload, devices, pieces)
    headings = ["device", "nodes", *(["pieces"] if pieces else []), "compute", "moved"]
    headings += ["done at" if pieces else "load", "", "memory", "of limit"]
    table = columns(headings, words=("device", ""))
    most = max(loads)
    for number, name in enumerate(device_names(workload)):
        work = works[number]
        on_accelerator = number < workload.num_accelerators
        num_pieces = len(
            {p for p, device in zip(pieces, devices, strict=True) if device == number} if pieces else ()
        )
        table.add_row(
            name,
            f"{work.num_nodes:,}",
            *([str(num_pieces) if on_accelerator and num_pieces else ""] if pieces else []),
            number_text(sum(work.compute)),
            number_text(sum(work.moved)) if on_accelerator else "",
            number_text(loads[number]),
            _bar(loads[number] / most if most else 0.0),
            bytes_text(work.size_bytes),
            _share(work.size_bytes, workload.accelerator_bytes) if on_accelerator else "",
            style="bold" if loads[number] == most else None,
        )
    return table


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _share(size_bytes: float, limit_bytes: float) -> str:
    if not limit_bytes:
        return "" if size_bytes else "0%"
    share = size_bytes / limit_bytes
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"
