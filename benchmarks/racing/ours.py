"""Bireme: `bireme train` on every host, with a run file, and its log while it trains.

Its clock is that of the log: from the line that says that the pipeline is ready, and from the end of each
evaluation, to the beginning of the next one. The pipeline drains for an evaluation, and replicas that average
weights meet for it; both count. Bytes count to the last batch before it, or if replicas average, to its end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.paced import SPEED
from benchmarks.racing.field import IMPORTS, Field, wait_for
from benchmarks.racing.rank import Order, Reached, card_bytes
from benchmarks.racing.task import BATCH, NUM_EVALUATED, WARMUP_STEPS
from bireme.errors import BiremeError
from bireme.train.folder import RunFolder

_TASK = "benchmarks.racing.task"
_START_S = 180.0
"""For a run to be planned and to begin, beside the seconds that it may train."""
DELAY_WARMUP = 0.1
"""Share of the steps of a run, if its plan delays updates; docs/race.md has the reason."""
_RUN = """format = 1

[model]
source = "python:{task}:model"

[data]
source = "{task}:samples"
evaluation_source = "{task}:held_out"

[training]
batch_size = {batch}
optimizer = "adamw"
schedule = "constant"
warmup_steps = {warmup}
clip_norm = 0.0
evaluation_batches = {evaluated}

[cluster]
device = "cpu"
threads_per_worker = 1

[checkpoint]
every_steps = 0
at_end = false

[export]
at_end = false

[log]
name = "run"
every_steps = 1
sample_tokens = 0
"""


_PLANNED = ("plan.", "links.", "sync.mode", "sync.codec")
"""The beginnings of keys that a plan file settles; with one, the modes of `sync` are given as it has them."""


def plan(place: Field, order: Order, cache: Path) -> dict[str, Any]:
    """What `bireme plan` chooses for a setting, once for all runs there."""
    path = place.folder / "plan.json"
    words = ["-m", "bireme", "plan", str(_run_file(place)), *_sets(place, order, order.choice)]
    done = subprocess.run(
        [sys.executable, *words, f"--output={path}", "--json"],
        cwd=place.folder,
        env=os.environ | IMPORTS | {"BIREME_CACHE": str(cache), SPEED: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BiremeError(f"bireme plan fails: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def race(place: Field, order: Order, plan: Path, cache: Path) -> list[Reached]:
    """What a run with a plan reached."""
    own = {key: value for key, value in order.choice.items() if not key.startswith(_PLANNED)}
    own |= {key: order.choice[key] for key in ("sync.mode", "sync.codec")} | {"plan.file": plan}
    if (json.loads(plan.read_text())["forecast"] or {}).get("delay_warmup"):
        own["plan.delay_warmup_steps"] = round(order.steps * DELAY_WARMUP)
    words = ["-m", "bireme", "train", str(_run_file(place)), *_sets(place, order, own)]
    log = _Log(RunFolder(place.folder / "runs" / "run").metrics, place, order)
    with place.running(words, {"BIREME_CACHE": str(cache)}) as programs:
        wait_for(programs, log.is_over, order.seconds + _START_S + order.steps)
        log.read()
    return log.reached


def _run_file(place: Field) -> Path:
    """The run file of all runs, in the folder of the field."""
    path = place.folder / "run.toml"
    path.write_text(
        _RUN.format(task=_TASK, batch=BATCH, warmup=WARMUP_STEPS, evaluated=NUM_EVALUATED // BATCH)
    )
    (place.folder / "cluster.toml").write_text(place.setting.cluster)
    return path


def _sets(place: Field, order: Order, own: Mapping[str, Any]) -> list[str]:
    """The words that set the keys of an order. `own` has the learning rate and further keys."""
    keys = {
        "model.seed": order.seed,
        "data.seed": order.seed,
        "training.steps": order.steps,
        "training.evaluate_every": order.every,
        "cluster.source": place.folder / "cluster.toml",
        "log.folder": place.folder / "runs",
        **own,
    }
    keys["training.learning_rate"] = keys.pop("learning_rate")
    return [f"--set={key}={_value(value)}" for key, value in keys.items()]


class _Log:
    """The log of a run that goes on, and what it has reached."""

    def __init__(self, path: Path, place: Field, order: Order) -> None:
        self.reached: list[Reached] = []
        self._path, self._place, self._order = path, place, order
        self._at = 0
        self._seconds = self._window_s = 0.0
        self._averages = order.choice["sync.mode"] in ("groups", "diloco")
        self._bytes = self._window_bytes = 0

    def is_over(self) -> bool:
        """Whether the loss is reached, or steps or seconds are over."""
        self.read()
        if not self.reached:
            return False
        last, order = self.reached[-1], self._order
        return not order.target < last.loss or last.seconds > order.seconds or last.step >= order.steps

    def read(self) -> None:
        """Take in what the log has more."""
        for line in self._lines():
            match line["kind"]:
                case "start":
                    self._window_s, self._window_bytes = line["time_s"], self._counted()
                case "train" if not self._averages and not line["step"] % self._order.every:
                    self._count_bytes()
                case "evaluation":
                    self._seconds += line["time_s"] - line["seconds"] - self._window_s
                    if self._averages:
                        self._count_bytes()
                    self._window_s, self._window_bytes = line["time_s"], self._counted()
                    self.reached.append(
                        Reached(line["step"], self._seconds, self._bytes or None, line["loss"])
                    )

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        yield from map(json.loads, whole.splitlines())

    def _count_bytes(self) -> None:
        self._bytes += self._counted() - self._window_bytes

    def _counted(self) -> int:
        return self._place.card_bytes(card_bytes) or 0


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
