"""What `make gpu` found, as `docs/gpu.md` and as verdicts."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.on_gpu.steps import Outcome

__all__ = ["BEGINNING", "markdown", "verdicts"]

BEGINNING = """\
# On GPUs

<!-- Made by benchmarks/gpu.py, not by hand. -->

On a machine with one or more GPUs, run `make gpu`. It finds or makes a Python whose torch sees them, runs
the GPU tests, trains, measures, and writes this file, within 25 minutes. Each step is a process with its own
time limit. If a step fails, its error is written here and the rest continues. Without a GPU it says so,
exits with status 2 and changes nothing.

- **Which Python.** A Python with all packages and a torch that sees the GPU is used as it is. A Python with
  only such a torch lends it to `.venv-gpu`, because `constraints.txt` may pin a torch for CPUs. Otherwise
  `.venv-gpu` gets its own torch; `make gpu TORCH_INDEX=URL` names the package index for it.
- **One GPU, several stages.** Each stage is a process, and all share the GPU, over gloo: NCCL does not allow
  two ranks on one device. So messages really leave the process, through pinned host memory, and each
  stage's memory has its own allocator. Processes take turns on the device, so a step takes as long as all
  stages together. The plan knows this: each process has its share of the speed and the memory.
- **Several GPUs.** One process per GPU, over NCCL.
- **Times** of instructions come from the device's events, bytes from its allocator.
"""

NOTHING = "No machine with a GPU has run it yet, so there are no figures here.\n"

MOST_MEMORY_ERROR = 0.10
MOST_STEP_ERROR = 0.08
MOST_LOSS_ERROR = 0.01
"""Between a GPU and a CPU, which round in another order; of few batches."""
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
        if "capability" in row and "loss on cpu" in row:
            value = _loss_error(row)
            name = f"{one.name}: {row['capability']}, loss on a GPU compared with the CPU's"
            yield name, MOST_LOSS_ERROR, value, value is not None and abs(value) <= MOST_LOSS_ERROR
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


def _loss_error(row: dict[str, Any]) -> float | None:
    """How far the loss on an accelerator is from that on the CPU; None if one of the runs failed."""
    losses = {key: value for key, value in row.items() if key.startswith("loss on ")}
    there, own = (
        next((value for key, value in losses.items() if key != "loss on cpu"), None),
        losses.get("loss on cpu"),
    )
    return there / own - 1 if there is not None and own else None


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
