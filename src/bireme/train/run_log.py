"""What rank 0 writes down and says: the log of a run, the trackers that copy it, and the terminal."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from bireme.documents import read_json_lines
from bireme.report.run_lines import RunLines
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome
from bireme.train.prometheus import Prometheus
from bireme.train.run_file import RunFile
from bireme.train.trackers import MLflow, TensorBoard, Tracker, WandB

# What a run writes down while it goes: a line of JSON for everything that happens, and trackers if asked.
#
# Lines are appended one by one, so that whoever reads them sees whole ones, but for the last one of a run
# that was killed. A disk that takes none does not end a run: its lines wait until it does.

_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}
"""What some readers take for the end of a line. JSON leaves these as they are, but for others it escapes."""


class MetricsLog:
    """Appends to the log of a run, whose clock goes on where it stopped before; from any thread."""

    def __init__(self, path: Path, *, trackers: Sequence[Tracker] = ()) -> None:
        self._offset_s = _last_time_s(path) if path.exists() else 0.0
        self._begin_s = perf_counter()
        self._lock = Lock()
        self._file = FileIO(path, "ab")
        self._waiting = b""
        self.failure: str | None = None
        """Why lines could not be written, since the last one that was."""
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            _cut_half_line(path)
        self._trackers = trackers

    @property
    def tracker_failures(self) -> dict[str, str]:
        """Why trackers get no more curves, by their titles."""
        return {one.title: one.failure for one in self._trackers if one.failure is not None}

    @property
    def time_s(self) -> float:
        """Seconds of this run, resumes counted on."""
        return self._offset_s + perf_counter() - self._begin_s

    def note(self, kind: str, step: int, **values: Any) -> None:
        """One line. A number that is not finite becomes null."""
        line = {"kind": kind, "step": step, "time_s": round(self.time_s, 4), **values}
        text = json.dumps(_plain(line), ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            self._waiting += text.translate(_LINE_ENDS).encode()
            self._write()
            for tracker in self._trackers:
                tracker.note(kind, step, values)

    def close(self) -> None:
        """End the files."""
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            self.failure = str(error.strerror or error)


def _last_time_s(path: Path) -> float:
    """When the last line was written, as far as the log can be read: no log keeps a run from going on."""
    times = (one.get("time_s") for one in read_json_lines(path, start="start").records.values())
    return max((float(one) for one in times if isinstance(one, int | float)), default=0.0)


def _cut_half_line(path: Path) -> None:
    """Take away what a killed run has left of its last line, for the next would go on in it."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


class RunLog:
    """The log of a run. `words` are its first values; with `is_shown` the terminal has it too."""

    def __init__(self, folder: RunFolder, run: RunFile, words: Mapping[str, Any], *, is_shown: bool) -> None:
        self._metrics = MetricsLog(folder.metrics, trackers=_trackers(folder, run))
        self._words = words
        self._screen = RunLines(run.training.steps) if is_shown else None
        self._failed: set[str] = set()

    def begin(self, step: int) -> None:
        """The run begins, or goes on."""
        self.tell("start", step, **self._words)

    def end(self, outcome: Outcome) -> None:
        """The run is over, for now."""
        self.tell("stop", outcome.steps, reason=outcome.reason)
        self._metrics.close()
        self._tell_failures(outcome.steps)

    def tell(self, kind: str, step: int, **values: Any) -> None:
        """For the loop: something has happened."""
        before = self._metrics.failure
        self._metrics.note(kind, step, **values)
        if self._screen is None:
            return
        self._screen.show(kind, step, values)
        failure = self._metrics.failure
        if failure is not None and failure != before:
            text = f"The log cannot be written ({failure}); its lines wait, and the run continues."
            self._screen.show("warning", step, {"text": text})
        self._tell_failures(step)

    def _tell_failures(self, step: int) -> None:
        """Say once of each tracker that it gets no more curves."""
        for title, failure in self._metrics.tracker_failures.items():
            if title not in self._failed and self._screen is not None:
                self._failed.add(title)
                text = f"{title} gets no more curves ({failure}); the run and its log go on."
                self._screen.show("warning", step, {"text": text})


def _trackers(folder: RunFolder, run: RunFile) -> list[Tracker]:
    """Those that are asked for."""
    asked, config = run.log, run.model_dump(mode="json")
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder.path / "tensorboard"),
        "wandb": lambda: WandB(folder.path, asked.project, config),
        "mlflow": lambda: MLflow(folder.path, asked.project, config),
    }
    found = [make() for key, make in makers.items() if asked.trackers[key]]
    if asked.prometheus:
        found.append(
            Prometheus(asked.prometheus_host, asked.prometheus, folder.path.name, run.training.steps)
        )
    return found
