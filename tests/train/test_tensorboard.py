"""Curves for TensorBoard, read back by TensorBoard itself."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bireme.documents import read_json_lines
from bireme.train.run_log import MetricsLog, TensorBoard
from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.training import losses, metrics, settings, write_run


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values as TensorBoard shows them."""
    reading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(one.step, one.value) for one in found.Scalars(name)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    return tmp_path / "tensorboard"


def started(folder: Path) -> MetricsLog:
    return MetricsLog(folder.parent / "metrics.jsonl", trackers=[TensorBoard(folder)])


def test_numbers_of_training_and_evaluation_are_curves(folder: Path) -> None:
    log = started(folder)
    log.note("start", 0, schedule="2bw")
    for step in (1, 2, 3):
        log.note("train", step, loss=4.0 / step, grad_norm=0.5, tokens_per_s=None, seconds=0.1)
    log.note("evaluation", 3, loss=1.5, num_samples=8)
    log.close()

    assert dict(curve(folder, "train/loss")) == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3})
    assert curve(folder, "train/grad_norm") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert curve(folder, "evaluation/loss") == [(3, 1.5)]


def test_steps_that_are_trained_again_are_there_once(folder: Path) -> None:
    for first, last, loss in ((1, 6, 1.0), (5, 8, 2.0)):
        log = started(folder)
        for step in range(first, last + 1):
            log.note("train", step, loss=loss)
        log.close()

    assert curve(folder, "train/loss") == [(step, 1.0 if step < 5 else 2.0) for step in range(1, 9)]


def test_what_is_before_a_checkpoint_is_on_the_disk(folder: Path) -> None:
    """A run that is killed continues after its checkpoint, and would never write those steps again."""
    log = started(folder)
    for step in range(1, 6):
        log.note("train", step, loss=1.0)
    log.note("checkpoint", 5, num_bytes=1)

    assert [step for step, _ in curve(folder, "train/loss")] == [1, 2, 3, 4, 5]
    log.close()


def test_a_disk_that_is_full_ends_the_curves_and_not_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    log = started(folder)
    log.note("train", 1, loss=1.0)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    log.note("train", 2, loss=1.0)
    log.note("train", 3, loss=1.0)
    log.close()

    assert log.tracker_failures == {"TensorBoard": "No space left on device"}
    lines = read_json_lines(folder.parent / "metrics.jsonl", start="start")
    assert [line["step"] for line in lines.records.values()] == [1, 2, 3]


def test_a_run_without_the_package_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once was refused by the first process that had been started, and left a folder of its name."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = bireme(capsys, "train", str(write_run(tmp_path)), *settings(log__tensorboard="true"))

    assert result.status == 2
    assert 'pip install "bireme[track]"' in result.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_and_its_continuation_are_one_curve(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "run"
    words = settings(log__tensorboard="true", training__steps=6, training__evaluate_every=3)
    with alone():
        assert bireme(capsys, "train", str(write_run(tmp_path, "2bw", 1)), *words).status == 0
        assert bireme(capsys, "resume", str(run), *settings(training__steps=8)).status == 0

    found = curve(run / "tensorboard", "train/loss")
    assert [step for step, _ in found] == list(range(1, 9))
    assert [loss for _, loss in found] == pytest.approx(list(losses(run).values()), rel=1e-6)
    evaluated = {line["step"]: line["loss"] for line in metrics(run, "evaluation")}
    assert dict(curve(run / "tensorboard", "evaluation/loss")) == pytest.approx(evaluated, rel=1e-6)
