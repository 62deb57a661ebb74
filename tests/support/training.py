"""Whole runs for tests: a small run file, `bireme` in processes of its own, and what such a run leaves."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.killing.session import living, name_of
from tests.support.copies import Copy
from tests.support.paced_samples import GATE, PACE
from tests.support.patience import patience_s

__all__ = [
    "Gate",
    "Running",
    "losses",
    "metrics",
    "running",
    "settings",
    "steps_of_checkpoints",
    "stopped",
    "write_run",
]

ROOT = Path(__file__).parents[2]
GPT = "gpt:layers=2,width=16,heads=2,vocab=257,context=32"
CUTS = {1: (), 2: (3,), 4: (1, 3, 5)}
"""Of its six units."""

TEXT = "".join(f"def add_{n}(value):\n    return value + {n * n % 97}\n\n\n" for n in range(400))

RUN = """format = 1

[model]
source = "{model}"

[data]
source = "{data}"
length = 32

[training]
steps = 12
batch_size = 8
learning_rate = 0.01
schedule = "constant"
warmup_fraction = 0.0
evaluate_every = 0

[plan]
file = "{plan}"

[cluster]
device = "cpu"
workers = {ranks}
threads_per_worker = 1
timeout_s = 60

[checkpoint]
every_steps = 4

[log]
folder = "{runs}"
name = "run"
every_steps = 1
sample_tokens = 0
"""


def write_run(
    folder: Path,
    schedule: str = "2bw",
    depth: int = 2,
    *,
    width: int = 1,
    widths: Sequence[int] = (),
    model: str = GPT,
    data: str = "",
) -> Path:
    """A run file of a tiny model with a plan made by hand, and a folder of text if there is no other data.
    `widths` are those of stages, if they are unequal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / f"plan-{schedule}-{depth}.json"
    table = {"cuts": CUTS[depth], "num_microbatches": 2, "schedule": schedule, "width": width}
    table |= {"stage_widths": list(widths)} if widths else {}
    plan.write_text(json.dumps({"format": 1, "plan": table}))
    if not data:
        texts = folder / "texts"
        texts.mkdir(exist_ok=True)
        (texts / "numbers.py").write_text(TEXT)
        data = str(texts)
    path = folder / f"run-{schedule}-{depth}.toml"
    ranks = sum(widths) or depth * width
    path.write_text(RUN.format(model=model, data=data, plan=plan, ranks=ranks, runs=folder / "runs"))
    return path


def settings(**values: object) -> list[str]:
    """`--set` for each; a key's table is before two underscores."""
    words = [f"{name.replace('__', '.')}={value}" for name, value in values.items()]
    return [word for text in words for word in ("--set", text)]


def metrics(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """The whole lines of a run's log, of one kind or all."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if not kind or line["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """The loss of every step. One that was trained again must have come out the same."""
    found: dict[int, float] = {}
    for line in metrics(run, "train"):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"], line["step"]
    return found


def steps_of_checkpoints(run: Path) -> list[int]:
    """Those that are there, rising."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def stopped(whole: Path, to: Path, step: int) -> Path:
    """A copy of a run as it was when it had its checkpoint of that step, but for the log."""
    shutil.copytree(whole, to)
    for newer in steps_of_checkpoints(to):
        if newer > step:
            shutil.rmtree(to / "checkpoints" / f"step-{newer:08d}")
    shutil.rmtree(to / "model", ignore_errors=True)
    return to


@dataclass(frozen=True, slots=True)
class Running:
    """A `bireme` of its own, first of its group of processes."""

    process: Copy | subprocess.Popen[str]
    run: Path
    err: Path
    """Where its standard error goes."""

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self.err.read_text()

    def wait_for_step(self, step: int) -> None:
        """Until the log has that step, in this start or one before."""
        end_s = time.monotonic() + patience_s()
        while not any(line["step"] >= step for line in metrics(self.run, "train")):
            assert time.monotonic() < end_s, f"no step {step}: {self.said}"
            assert self.process.poll() is None, self.said
            time.sleep(0.02)

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the log has the checkpoint of that step or a later one, which is then complete."""
        end_s = time.monotonic() + patience_s()
        while not any(line["step"] >= step for line in metrics(self.run, "checkpoint")):
            assert time.monotonic() < end_s, f"no checkpoint {step}: {self.said}"
            assert self.process.poll() is None, self.said
            time.sleep(0.02)

    def wait_for_words(self, words: str) -> None:
        """Until it says them."""
        end_s = time.monotonic() + patience_s()
        while words not in self.said:
            assert time.monotonic() < end_s, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.02)

    def wait_for_ranks(self, count: int) -> None:
        """Until so many of them have been started."""
        end_s = time.monotonic() + patience_s()
        while len(self.ranks) < count:
            assert time.monotonic() < end_s
            assert self.process.poll() is None, self.said
            time.sleep(0.01)

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks, in their order: not in that of their start, which replicas share."""
        names = {pid: name_of(pid) for pid in living(self.process.pid)}
        ranks = {pid: int(name.split()[-1]) for pid, name in names.items() if name.startswith("bireme rank")}
        return sorted(ranks, key=ranks.__getitem__)

    def ended(self) -> "Ended":
        """What came of it; nobody of its group may be left."""
        out, _ = self.process.communicate(timeout=patience_s())
        end_s = time.monotonic() + patience_s()
        while left := living(self.process.pid):
            assert time.monotonic() < end_s, [_command(pid) for pid in left]
            time.sleep(0.02)
        return Ended(self.process.returncode, out, self.said)

    def kill_all(self) -> None:
        """Every process of it at once, as a power cut would."""
        for pid in living(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(patience_s())


@dataclass(frozen=True, slots=True)
class Ended:
    status: int | None
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


class Gate:
    """How many samples each process of a run may read by now, of data `tests.support.paced_samples:gated`.

    A run that waits at its gate is in the middle of its training for as long as a test likes.
    """

    def __init__(self, path: Path, num_samples: int) -> None:
        self.path, self._num_samples = path, 0
        self.let_in(num_samples)

    def let_in(self, more: int) -> None:
        """So many more."""
        self._num_samples += more
        draft = self.path.with_suffix(".draft")
        draft.write_text(str(self._num_samples))
        draft.rename(self.path)


@contextmanager
def running(run: Path, *words: str, pace_s: float = 0.0, gate: Gate | None = None) -> Iterator[Running]:
    """`bireme WORDS…` in the background; whatever is left of it after the context is killed."""
    folder = run.parent if run.parent.is_dir() else ROOT
    variables = {PACE: str(pace_s)} if gate is None else {GATE: str(gate.path)}
    process = Copy(["-m", "bireme", *words], folder, variables=variables)
    try:
        yield Running(process, run, process.err)
    finally:
        process.close()


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
