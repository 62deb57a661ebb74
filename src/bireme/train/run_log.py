"""What rank 0 writes down and says: the log of a run, the trackers that copy it, and the terminal."""

from collections.abc import Callable, Mapping
from typing import Any

from bireme.train.folder import RunFolder
from bireme.train.metrics import MetricsLog
from bireme.train.mlflow_tracker import MLflow
from bireme.train.outcome import Outcome
from bireme.train.run_file import RunFile
from bireme.train.screen import Screen
from bireme.train.tensorboard import TensorBoard
from bireme.train.tracker import Tracker
from bireme.train.wandb_tracker import WandB

__all__ = ["RunLog"]


class RunLog:
    """The log of a run. `words` are its first values; with `is_shown` the terminal has it too."""

    def __init__(self, folder: RunFolder, run: RunFile, words: Mapping[str, Any], *, is_shown: bool) -> None:
        self._metrics = MetricsLog(folder.metrics, trackers=_trackers(folder, run))
        self._words = words
        self._screen = Screen(run.training.steps) if is_shown else None
        self._failed: set[str] = set()

    @property
    def tell(self) -> Callable[..., None]:
        """For the loop."""
        return self._tell

    def begin(self, step: int) -> None:
        """The run begins, or goes on."""
        self._tell("start", step, **self._words)

    def end(self, outcome: Outcome) -> None:
        """The run is over, for now."""
        self._tell("stop", outcome.steps, reason=outcome.reason)
        self._metrics.close()
        self._tell_failures(outcome.steps)

    def _tell(self, kind: str, step: int, **values: Any) -> None:
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
    return [make() for key, make in makers.items() if asked.trackers[key]]
