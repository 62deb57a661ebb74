"""Trackers: where the curves of a run go besides its own log.

A tracker gets a copy: the figures of a run are in its log. So a tracker that fails ends its curves, and not
the run. Only rank 0 has any.
"""

import importlib
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bireme.errors import BiremeError
from bireme.files import write_text_atomically

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
        if self.failure is not None:
            return
        try:
            self._note(kind, step, values)
        except Exception as error:  # it must not end the run, whatever it is
            self._fail(error)

    def close(self) -> None:
        """Send or write what there still is."""
        if self.failure is not None:
            return
        try:
            self._close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
        self.failure = lines[0] if lines else type(error).__name__

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
        try:
            self._begin()
            while (line := self._waiting.get()) is not None:
                self._send(*line)
            self._end()
        except Exception as error:
            self._fail(error)

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
