"""Trackers: where the curves of a run go besides its own log. One small interface, one file for each tracker.

What they get is a copy: what a run knows of itself is in its log. So a tracker that fails ends its curves,
and not the run. Only rank 0 has any.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, NamedTuple

from bireme.errors import BiremeError

__all__ = ["BackgroundTracker", "Tracker", "check_trackers", "curves_of"]

CURVES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "samples_per_s",
    "perplexity",
    "bits_per_byte",
)
KINDS = ("train", "evaluation")

UNUSUAL = re.compile(r"[^\w.:-]+")
"""What a name of a curve may not have everywhere."""

CLOSE_S = 30.0
"""So long may a tracker take, when a run is over, to send what it still has."""


class _Package(NamedTuple):
    """What a tracker needs: the module, what people call it, and the extra that installs it."""

    module: str
    title: str
    extra: str


PACKAGES = {
    "tensorboard": _Package("tensorboard", "TensorBoard", "track"),
    "wandb": _Package("wandb", "Weights & Biases", "wandb"),
    "mlflow": _Package("mlflow", "MLflow", "mlflow"),
}
"""The trackers, by their key in `[log]`."""


def check_trackers(asked: Mapping[str, bool]) -> None:
    """See whether each tracker that is asked for, by its key, is installed, before anything has been done."""
    for key, is_asked in asked.items():
        package = PACKAGES[key]
        if is_asked and find_spec(package.module) is None:
            raise BiremeError(
                f"log.{key} is set, and {package.title} is not installed: install it with pip install "
                f'"bireme[{package.extra}]".'
            )


def curves_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """What is a curve of a line of the log, by its name; none of a line of another kind."""
    if kind not in KINDS:
        return {}
    found = {f"{kind}/{name}": values[name] for name in CURVES if isinstance(values.get(name), float)}
    sources = values.get("sources") or {}
    return found | {
        f"{kind}/loss_of/{UNUSUAL.sub('_', name)}": loss for name, loss in sources.items() if loss is not None
    }


class Tracker(ABC):
    """Takes the lines of a run's log. `title` is what people call it."""

    title: str

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
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.failure = f"it did not take all within {CLOSE_S:g} s of the end"

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
