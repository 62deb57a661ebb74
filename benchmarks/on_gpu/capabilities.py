"""Every capability of `bireme capabilities` trained for some batches on a GPU, and on the CPU beside it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.machine import ROOT

__all__ = ["capabilities"]

STEPS = 4
LIMIT_S = 120.0
CORES_OF_A_RUN = 2
MODEL = "gpt:layers=4,width=64,heads=2,vocab=257,context=64"


def capabilities(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """A row for each: the loss on both, or why a run failed. `quick` leaves the CPU out."""
    listed = _ran("capabilities", "--json", limit_s=LIMIT_S)
    found = [(one["name"], one["settings"]) for one in json.loads(listed.stdout)["capabilities"]]
    kinds = [kind] if quick else [kind, "cpu"]
    at_once = max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        runs = {
            (name, on): pool.submit(
                _trained, {"model.source": MODEL} | settings, on, Path(folder) / name / on
            )
            for on in kinds
            for name, settings in found
        }
        rows = []
        for name, _ in found:
            row: dict[str, Any] = {"capability": name}
            for on in kinds:
                row |= {f"{key} on {on}": value for key, value in runs[name, on].result().items()}
            rows.append(row)
    return rows


def _trained(settings: dict[str, Any], on: str, folder: Path) -> dict[str, Any]:
    """The loss of a run, and its seconds of a batch; or the last line of what it said."""
    keys = settings | {
        "training.steps": STEPS,
        "training.batch_size": 16,
        "training.evaluation_batches": 1,
        "cluster.device": on,
        "cluster.backend": "gloo",
        "cluster.workers": settings.get("cluster.workers", 2),
        "cluster.threads_per_worker": 1,
        "log.folder": folder,
        "log.sample_tokens": 0,
        "export.at_end": "false",
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    ended = _ran("train", "--json", *sets, limit_s=LIMIT_S)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()
        return {"loss": None, "ended with": " ".join(said[-2:])[-400:] or f"status {ended.returncode}"}
    document = json.loads(ended.stdout)
    return {"loss": document["eval_loss"], "step ms": 1e3 * (document["measured_batch_s"] or 0.0)}


def _ran(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """A command of Bireme; its processes end with it."""
    command = [sys.executable, "-m", "bireme", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(command, process.returncode, out, said)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return subprocess.CompletedProcess(command, 1, "", f"It did not end within {limit_s:.0f} s.")
