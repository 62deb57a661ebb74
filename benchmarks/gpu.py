"""Everything that wants a GPU, in one run: tests, training, the engine, predictions; into `docs/gpu.md`.

    python benchmarks/gpu.py [--quick] [--only STEP …] [--json]

`make gpu` calls it, with any Python of 3.11 or newer: neither torch nor Bireme need be installed. It takes
less than 25 minutes. Where there is no GPU it says so, ends with status 2 and touches nothing.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.on_gpu.document import markdown, verdicts
from benchmarks.on_gpu.machine import ROOT, NotReady, Python, gpus, python_for
from benchmarks.on_gpu.steps import Outcome, run_step, steps_for

TOTAL_S = 24 * 60.0
SETUP_S = 420.0
WRITTEN = ROOT / "docs" / "gpu.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer steps")
    parser.add_argument("--json", action="store_true", help="print what was found as one document")
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", help="run only these steps: tests, card, units …"
    )
    asked = parser.parse_args()
    found = gpus()
    if not found:
        say("There is no GPU here, and nothing that make gpu does makes sense without one.")
        return 2
    ends = time.monotonic() + TOTAL_S
    machine: dict[str, Any] = {
        "GPUs": ", ".join(found),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "system": platform.platform(),
    }
    outcomes: list[Outcome] = []
    python = _python(outcomes)
    if python is not None:
        machine |= {"torch": python.torch, "Python": platform.python_version()}
        for step in steps_for(python.num_gpus, quick=asked.quick):
            if asked.only and step.name not in asked.only:
                continue
            say(f"{step.title} …")
            outcomes.append(run_step(step, python, ends - time.monotonic()))
            if outcomes[-1].error:
                say(f"  {outcomes[-1].error.splitlines()[0]}")
            WRITTEN.write_text(markdown(machine, outcomes), encoding="utf-8")
    WRITTEN.write_text(markdown(machine, outcomes), encoding="utf-8")
    judged = verdicts(outcomes)
    if asked.json:
        rows = [{"step": one.name, **row} for one in outcomes for row in one.rows]
        errors = {one.name: one.error for one in outcomes if one.error}
        print(json.dumps({"machine": machine, "rows": rows, "errors": errors, "verdicts": judged}))
    else:
        missed = sum(not one["ok"] for one in judged)
        say(f"Wrote {WRITTEN.relative_to(ROOT)}: {missed} of {len(judged)} verdicts not met.")
    return int(any(one.error for one in outcomes))


def _python(outcomes: list[Outcome]) -> Python | None:
    """The Python to run everything in; None where none can be made ready, which is an outcome too."""
    begin = time.monotonic()
    say("Looking for a torch that sees the GPU …")
    python, error = None, ""
    try:
        python = python_for(SETUP_S)
    except (NotReady, OSError) as found:
        error = str(found)
        say(f"  {error}")
    outcomes.append(Outcome("setup", "A Python that is ready", time.monotonic() - begin, error=error))
    return python


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return told.stdout.strip() or "unknown"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
