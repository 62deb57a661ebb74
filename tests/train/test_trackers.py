"""Weights & Biases and MLflow: their own files read back, and a run that does not mind when they fail."""

import importlib
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bireme.train.run_log import BackgroundTracker, MetricsLog, MLflow, Tracker, WandB, curves_of
from tests.support.command import bireme
from tests.support.training import settings, write_run

pytestmark = pytest.mark.slow

CONFIG = {"training": {"steps": 12, "seed": None}, "log": {"project": "trial"}}


def trained(log: MetricsLog, first: int = 1, last: int = 3) -> None:
    for step in range(first, last + 1):
        log.note("train", step, loss=4.0 / step, grad_norm=0.5, tokens_per_s=None)
    log.note("evaluation", last, loss=1.5, sources={"a": 1.0, "b": None})
    log.close()


def test_curves_are_the_numbers_of_training_and_evaluation() -> None:
    assert curves_of("train", {"loss": 1.0, "seconds": 2.0, "tokens_per_s": None}) == {"train/loss": 1.0}
    evaluation = {"loss": 1.0, "sources": {"texts/": 0.5, "hf:x": None}}
    assert curves_of("evaluation", evaluation) == {"evaluation/loss": 1.0, "evaluation/loss_of/texts_": 0.5}
    assert curves_of("checkpoint", {"loss": 1.0}) == {}


def test_a_tracker_gets_one_line_at_a_time(tmp_path: Path) -> None:
    class Counting(Tracker):
        num_inside = most_inside = count = 0

        def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            time.sleep(0.005)
            self.num_inside -= 1
            self.count += 1

        def _close(self) -> None: ...

    counting = Counting()
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[counting])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda step: log.note("warning", step), range(20)))
    log.close()
    assert (counting.count, counting.most_inside) == (20, 1)


def test_mlflow_has_the_curves_of_a_run_and_of_its_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    for first, last in ((1, 3), (3, 4)):
        log = MetricsLog(folder / "metrics.jsonl", trackers=[MLflow(folder, "trial", CONFIG)])
        trained(log, first, last)
        assert log.tracker_failures == {}
    uri = (tmp_path / "runs" / "mlruns").as_uri()
    client: Any = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"training.steps": "12", "log.project": "trial"}
    losses = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(losses) == [(1, 4.0), (2, 2.0), (3, 4 / 3), (3, 4 / 3), (4, 1.0)]
    assert run.data.metrics["evaluation/loss_of/a"] == 1.0


def test_weights_and_biases_keeps_an_offline_run_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[WandB(tmp_path, "trial", CONFIG)])
    trained(log)
    assert log.tracker_failures == {}
    [kept] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = kept.read_bytes()
    assert content.count(b"train/loss") >= 3
    assert b"evaluation/loss_of/a" in content
    assert (tmp_path / "wandb-id").read_text() in kept.name


class Failing(BackgroundTracker):
    title = "Failing"

    def _begin(self) -> None:
        raise ConnectionError("no route to the server")

    def _send(self, step: int, curves: Mapping[str, float]) -> None:
        raise AssertionError

    def _end(self) -> None:
        raise AssertionError


def test_a_tracker_that_fails_ends_its_curves_and_nothing_else(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[Failing()])
    trained(log)
    assert log.tracker_failures == {"Failing": "no route to the server"}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_done(
    tracker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    result = bireme(capsys, "train", str(write_run(tmp_path)), *settings(**{f"log__{tracker}": "true"}))
    assert result.status == 2
    assert f'pip install "bireme[{tracker}]"' in result.err
    assert not (tmp_path / "runs").exists()
