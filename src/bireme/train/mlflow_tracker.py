"""The curves of a run for MLflow: on the server that MLFLOW_TRACKING_URI names, or in a folder of files."""

import importlib
import os
import time
from pathlib import Path
from typing import Any

from bireme.files import write_text_atomically
from bireme.train.tracker import BackgroundTracker

__all__ = ["MLflow"]

URI = "MLFLOW_TRACKING_URI"
FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
"""Without it newer versions write to servers and databases alone."""

MOST_LETTERS, MOST_PARAMETERS = 500, 100
"""What MLflow takes of a parameter, and of parameters at once."""


class MLflow(BackgroundTracker):
    """Sends curves to a run of an experiment; `config` are its parameters, by table and key.

    Where no server is named the files are in `mlruns` next to the run's folder, so that runs are compared.
    """

    title = "MLflow"

    def __init__(self, folder: Path, experiment: str, config: dict[str, Any]) -> None:
        self._folder, self._experiment, self._config = folder, experiment, config
        self._entities: Any = None
        self._client: Any = None
        self._id = ""
        super().__init__()

    def _begin(self) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        uri = os.environ.get(URI)
        if not uri:
            uri = (self._folder.parent / "mlruns").absolute().as_uri()
            os.environ.setdefault(FILES_ALLOWED, "true")
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
            self._entities.Param(f"{table}.{key}", str(value)[:MOST_LETTERS])
            for table, keys in self._config.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
            if value is not None
        ]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])

    def _send(self, step: int, curves: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now_ms, step) for name, value in curves.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _end(self) -> None:
        self._client.set_terminated(self._id)
