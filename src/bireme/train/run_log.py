"""What rank 0 writes down and says: the log of a run, the trackers that copy it, and the terminal."""

import importlib
import json
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from time import perf_counter
from typing import Any

from bireme.documents import plain, read_json_lines
from bireme.errors import BiremeError, first_line
from bireme.files import cut_half_line, write_text_atomically
from bireme.report.live_view import RunLines
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome
from bireme.train.run_file import RunFile
from bireme.wire.text_server import HttpServer

# Trackers: where the curves of a run go besides its own log.
#
# A tracker gets a copy: the figures of a run are in its log. So a tracker that fails ends its curves, and not
# the run. Only rank 0 has any.

_CURVES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "samples_per_s",
    "perplexity",
    "bits_per_byte",
)
_KINDS = ("train", "evaluation")

_UNUSUAL = re.compile(r"[^\w.:-]+")
"""What a name of a curve may not have everywhere."""

_CLOSE_S = 30.0
"""So long may a tracker take, when a run is over, to send what it still has."""


def curves_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """What is a curve of a line of the log, by its name; none of a line of another kind."""
    if kind not in _KINDS:
        return {}
    found = {f"{kind}/{name}": values[name] for name in _CURVES if isinstance(values.get(name), float)}
    sources = values.get("sources") or {}
    return found | {
        f"{kind}/loss_of/{_UNUSUAL.sub('_', name)}": loss
        for name, loss in sources.items()
        if loss is not None
    }


class Tracker(ABC):
    """Takes the lines of a run's log. `title` is what people call it, `extra` what installs it."""

    title: str
    extra: str

    def __init__(self) -> None:
        self.failure: str | None = None
        """Why there are no more curves."""

    def note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take what is a curve from a line of the log; from any thread, and never an error."""
        if self.failure is None:
            with self._failing():
                self._note(kind, step, values)

    def close(self) -> None:
        """Send or write what there still is."""
        if self.failure is None:
            with self._failing():
                self._close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # it must not end the run, whatever it is
            self.failure = getattr(error, "strerror", None) or first_line(error)

    @abstractmethod
    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class BackgroundTracker(Tracker):
    """A tracker that may wait for a network: it does so in a thread, and training does not wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"bireme {self.title}", daemon=True)
        self._thread.start()

    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        curves = curves_of(kind, values)
        if curves:
            self._waiting.put((step, curves))

    def _close(self) -> None:
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self.failure = f"it did not take all within {_CLOSE_S:g} s of the end"

    def _work(self) -> None:
        with self._failing():
            self._begin()
            while (line := self._waiting.get()) is not None:
                self._send(*line)
            self._end()

    @abstractmethod
    def _begin(self) -> None:
        """Begin the run there, or go on with it."""

    @abstractmethod
    def _send(self, step: int, curves: dict[str, float]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


# The curves of a run for Weights & Biases.
#
# Where they go is said in the words of that package: WANDB_MODE=offline keeps them in the run's folder, from
# where `wandb sync` sends them later. A run that resumes goes on in the same curves.

_BEGIN_S = 60.0
"""So long may it take to reach the server."""


class WandB(BackgroundTracker):
    """Sends curves to a run of a project; `config` is what is shown of the run with them."""

    title, extra = "Weights & Biases", "wandb"

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        self._folder, self._project, self._config = folder, project, config
        self._wandb: Any = None
        self._run: Any = None
        super().__init__()

    def _begin(self) -> None:
        self._wandb = importlib.import_module("wandb")
        kept = self._folder / "wandb-id"
        if not kept.is_file():
            write_text_atomically(kept, secrets.token_hex(4))
        self._run = self._wandb.init(
            dir=str(self._folder),
            project=self._project,
            name=self._folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=self._config,
            settings=self._wandb.Settings(init_timeout=_BEGIN_S, console="off", silent=True),
        )
        # Its own count of steps only rises, and a run that resumes may train some again.
        self._run.define_metric("*", step_metric="step")

    def _send(self, step: int, curves: dict[str, float]) -> None:
        self._run.log({"step": step, **curves})

    def _end(self) -> None:
        self._run.finish()
        self._wandb.teardown()


# The curves of a run for MLflow: on the server that MLFLOW_TRACKING_URI names, or in a folder of files.

_URI = "MLFLOW_TRACKING_URI"
_FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
"""Without it newer versions write to servers and databases alone."""

_MOST_LETTERS, _MOST_PARAMETERS = 500, 100
"""What MLflow takes of a parameter, and of parameters at once."""


class MLflow(BackgroundTracker):
    """Sends curves to a run of an experiment; `config` are its parameters, by table and key.

    Where no server is named the files are in `mlruns` next to the run's folder, so that runs are compared.
    """

    title, extra = "MLflow", "mlflow"

    def __init__(self, folder: Path, experiment: str, config: dict[str, Any]) -> None:
        self._folder, self._experiment, self._config = folder, experiment, config
        self._entities: Any = None
        self._client: Any = None
        self._id = ""
        super().__init__()

    def _begin(self) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        uri = os.environ.get(_URI)
        if not uri:
            uri = (self._folder.parent / "mlruns").absolute().as_uri()
            os.environ.setdefault(_FILES_ALLOWED, "true")
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
        kept = self._folder / "mlflow-id"
        if kept.is_file():
            self._id = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._id = self._client.create_run(number, run_name=self._folder.name).info.run_id
        write_text_atomically(kept, self._id)
        parameters = [
            self._entities.Param(f"{table}.{key}", str(value)[:_MOST_LETTERS])
            for table, keys in self._config.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
            if value is not None
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])

    def _send(self, step: int, curves: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now_ms, step) for name, value in curves.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _end(self) -> None:
        self._client.set_terminated(self._id)


# The curves of a run for TensorBoard: files in a folder of the run.

_FLUSH_S = 10


class TensorBoard(Tracker):
    """Writes curves into a folder, which may have those of earlier starts of the run.

    The first step hides what an earlier start has written from it on, for it is trained again. Once there is
    a checkpoint all before it is on the disk, since no start will write it again.
    """

    title, extra = "TensorBoard", "track"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from torch.utils.tensorboard import SummaryWriter  # takes a second that others need not wait

        self._open = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        curves = curves_of(kind, values)
        if curves and self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=step, flush_secs=_FLUSH_S)
        for name, value in curves.items():
            self._writer.add_scalar(name, value, step)
        if kind == "checkpoint" and self._writer is not None:
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


_TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""By their key in `[log]`, which is the name of the package too."""


def check_trackers(asked: Mapping[str, bool]) -> None:
    """See whether each tracker that is asked for, by its key, is installed, before anything has been done."""
    for key, kind in _TRACKERS.items():
        if asked[key] and find_spec(key) is None:
            raise BiremeError(
                f"log.{key} is set, and {kind.title} is not installed: install it with pip install "
                f'"bireme[{kind.extra}]".'
            )


# A run's figures for Prometheus: `http://HOST:PORT/metrics`, in its text format.
#
# Names follow the conventions of Prometheus: base units (seconds, bytes), `_total` for counters. Collectors
# of OpenTelemetry read the same format.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[Mapping[str, str], float]
"""Labels and a value."""

_HELP = {
    "bireme_run_info": "The run, as labels; the value is 1.",
    "bireme_step": "Steps that the run has trained.",
    "bireme_planned_steps": "Steps that the run is to train.",
    "bireme_loss": "Loss of the newest logged step.",
    "bireme_gradient_norm": "Norm of the gradient of the newest logged step.",
    "bireme_learning_rate": "Learning rate of the newest logged step.",
    "bireme_step_seconds": "Mean seconds of a step since the logged step before.",
    "bireme_predicted_step_seconds": "Seconds of a step that the plan predicts.",
    "bireme_tokens_per_second": "Tokens trained per second since the logged step before.",
    "bireme_samples_per_second": "Samples trained per second since the logged step before.",
    "bireme_evaluation_loss": "Loss of the newest evaluation.",
    "bireme_memory_peak_bytes": "Most memory that a rank has had.",
    "bireme_sent_bytes_total": "Bytes that a rank has sent to other ranks since this start of the run.",
    "bireme_skipped_steps_total": "Steps skipped since this start of the run.",
    "bireme_checkpoints_total": "Checkpoints written since this start of the run.",
    "bireme_checkpoint_step": "Step of the newest checkpoint.",
    "bireme_checkpoint_pause_seconds_total": "Seconds that training stood still for checkpoints since this "
    "start of the run.",
    "bireme_replicas_lost_total": "Losses of replicas since this start of the run.",
    "bireme_warnings_total": "Warnings since this start of the run.",
}

_TRAINING = {
    "loss": "bireme_loss",
    "grad_norm": "bireme_gradient_norm",
    "learning_rate": "bireme_learning_rate",
    "seconds": "bireme_step_seconds",
    "tokens_per_s": "bireme_tokens_per_second",
    "samples_per_s": "bireme_samples_per_second",
}
"""Gauges by the names that they have in the log."""


class Prometheus(Tracker):
    """Keeps the newest figures of a run, and serves them while the run trains."""

    title, extra = "Prometheus", ""

    def __init__(self, host: str, port: int, run: str, num_steps: int) -> None:
        super().__init__()
        self._found: dict[str, list[_Sample]] = {
            "bireme_run_info": [({"run": run}, 1.0)],
            "bireme_planned_steps": [({}, float(num_steps))],
        }
        for name in _HELP:
            if name.endswith("_total") and name != "bireme_sent_bytes_total":
                self._set(name, 0.0)
        self._run, self._devices = run, list[str]()
        self.server: HttpServer | None = None
        """None if the port is taken."""
        with self._failing():
            self.server = HttpServer(host, port, self._answered)
            threading.Thread(target=self.server.serve_forever, name="bireme prometheus", daemon=True).start()

    def text(self) -> str:
        """All figures, in the text format of Prometheus."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, help_text in _HELP.items():
            samples = self._found.get(name)
            if not samples:
                continue
            yield f"# HELP {name} {help_text}"
            yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
            for labels, value in samples:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                yield f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"

    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind in ("start", "train"):
            self._set("bireme_step", step)
        match kind:
            case "start":
                self._devices = list(values.get("devices") or ())
                labels = {
                    "run": self._run,
                    **{key: str(values.get(key, "")) for key in ("version", "schedule")},
                }
                self._found["bireme_run_info"] = [(labels, 1.0)]
                self._set("bireme_predicted_step_seconds", values.get("predicted_batch_s"))
            case "train":
                for key, name in _TRAINING.items():
                    self._set(name, values.get(key))
                self._add("bireme_skipped_steps_total", values["num_skipped"])
                first = values.get("replica", 0) * len(values["memory_bytes"])
                self._of_ranks("bireme_memory_peak_bytes", values["memory_bytes"], first)
                self._of_ranks("bireme_sent_bytes_total", values.get("sent_bytes") or (), first)
            case "evaluation":
                self._set("bireme_evaluation_loss", values["loss"])
            case "checkpoint":
                self._add("bireme_checkpoints_total", 1)
                self._set("bireme_checkpoint_step", step)
                self._add("bireme_checkpoint_pause_seconds_total", values["stall_s"])
            case "membership" if values["event"] == "gone":
                self._add("bireme_replicas_lost_total", 1)
            case "warning":
                self._add("bireme_warnings_total", 1)

    def _close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _answered(self, _host: str, path: str) -> tuple[int, str, str]:
        is_known = path.split("?")[0] == "/metrics"
        text = self.text() if is_known else "The figures are at /metrics.\n"
        return 200 if is_known else 404, text, CONTENT_TYPE

    def _set(self, name: str, value: float | None) -> None:
        self._found[name] = [] if value is None else [({}, float(value))]

    def _add(self, name: str, more: float) -> None:
        self._set(name, self._found[name][0][1] + more)

    def _of_ranks(self, name: str, values: Sequence[float | None], first: int) -> None:
        """A sample for each rank whose value is known. The first value is of rank `first`."""
        self._found[name] = [
            ({"rank": str(rank), "device": self._devices[rank] if rank < len(self._devices) else ""}, value)
            for rank, value in enumerate(values, first)
            if value is not None
        ]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    text = f"{value:.17g}"
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


# What a run writes down while it goes: a line of JSON for everything that happens, and trackers if asked.
#
# Lines are appended one by one, so that readers see whole lines, but for the last one of a run
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
        cut_half_line(path)
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
        text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n"
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
