"""What `make gpu` found, as `docs/gpu.md` and as verdicts."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.on_gpu.steps import Outcome

__all__ = ["BEGINNING", "markdown", "verdicts"]

BEGINNING = """\
# On GPUs

<!-- Made by benchmarks/gpu.py, not by hand. -->

`make gpu` is all it takes on a machine with one or more GPUs. It finds or makes a Python whose torch sees
them, runs the tests that are marked for them, trains, measures, and writes this file, within 25 minutes. Each
step is a process with a limit of its own; what fails is written down here with its error, and the rest goes
on. Without a GPU it says so, ends with status 2 and touches nothing.

- **Which Python.** One that has a torch that sees the GPU and all other packages is used as it is. One that
  has only such a torch lends it to `.venv-gpu`, which is told to keep it: the torch that `constraints.txt`
  pins may be one for CPUs where packages come from. Otherwise `.venv-gpu` gets a torch of its own;
  `make gpu TORCH_INDEX=URL` names the index that it comes from.
- **One GPU, several stages.** Each stage is a process of its own and they share the GPU, over gloo: NCCL
  takes no two ranks on one device. So messages really leave a process, through pinned memory of the host,
  and each stage's memory is counted by an allocator of its own. Processes take turns on the device, so a
  step takes as long as all stages together, and that is what the plan is told: each process has its share of
  the speed and of the memory.
- **Several GPUs.** One process for each, over NCCL.
- **Times** of instructions are those of the device's own events, bytes those of its allocator.
"""

NOTHING = "No machine with a GPU has run it yet, so there are no figures here.\n"

MOST_MEMORY_ERROR = 0.10
MOST_STEP_ERROR = 0.08
MOST_OVER_LOOP = 1.05
LEAST_OVER_TORCH = 1.02


def markdown(machine: dict[str, Any] | None, outcomes: Sequence[Outcome]) -> str:
    """The whole file; without a machine, the one that there is before anybody has run it."""
    if machine is None:
        return f"{BEGINNING}\n{NOTHING}"
    parts = [BEGINNING, "## The machine", "", *(f"- {key}: {value}" for key, value in machine.items()), ""]
    if found := verdicts(outcomes):
        parts += ["## Verdicts", "", *_table(found), ""]
    parts += ["## Steps", ""]
    parts += [
        *_table([{"step": o.title, "seconds": round(o.seconds), "came to": _end(o)} for o in outcomes]),
        "",
    ]
    for one in outcomes:
        parts += [f"## {one.title}", ""]
        if one.error:
            parts += ["```", one.error, "```", ""]
        parts += [*_table(one.rows), ""] if one.rows else []
    return "\n".join(parts).rstrip() + "\n"


def verdicts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Each figure that is asked for, with its limit and whether it is met."""
    return [
        {"name": name, "limit": limit, "value": value, "ok": ok}
        for one in outcomes
        for name, limit, value, ok in _of(one)
    ]


Judged = tuple[str, Any, Any, bool]
"""A claim, its limit, what was found, and whether that is enough."""


def _of(one: Outcome) -> Iterator[Judged]:
    yield f"{one.name}: runs to its end", "no error", _end(one), not one.error
    for place, row in enumerate(one.rows):
        yield from _near(one.name, "peak memory", row, "peak_bytes", MOST_MEMORY_ERROR)
        if not place:
            yield from _near(one.name, "step", row, "step_s", MOST_STEP_ERROR)
        if "over_loop" in row:
            name = f"{one.name}: times a plain loop, m = {row['microbatches']}"
            yield name, MOST_OVER_LOOP, row["over_loop"], row["over_loop"] <= MOST_OVER_LOOP
        if one.name == "peer":
            name = f"{one.name}: torch's time over ours, {row['schedule']}, m = {row['microbatches']}"
            value = row["torch_over_ours"]
            yield name, LEAST_OVER_TORCH, value, value >= LEAST_OVER_TORCH


def _near(step: str, what: str, row: dict[str, Any], key: str, most: float) -> Iterator[Judged]:
    """Whether a measured figure is as predicted, where there are both."""
    predicted, measured = row.get(f"predicted_{key}"), row.get(f"measured_{key}")
    if predicted and measured:
        which = "".join(f", {part} {row[part]}" for part in ("schedule", "rank", "stage") if part in row)
        error = measured / predicted - 1
        yield f"{step}{which}: {what}, error of the prediction", most, error, abs(error) <= most


def _end(one: Outcome) -> str:
    return one.error.splitlines()[0] if one.error else "done"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as a table; columns are all keys there are, in the order they come."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * len(keys) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(key)) for key in keys) + " |")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")
