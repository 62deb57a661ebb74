"""`bireme resume`: from where a run was, with another plan, past what is damaged, and not for ever."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bireme.model.graph_file import load_graph
from bireme.plan.plan import Plan
from bireme.runtime.board import RankFailed
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.train.data.placing import NUM_PROBES, Order
from bireme.train.model import RunModel
from bireme.train.rank_part import RunStart
from bireme.train.run_data import data_of
from bireme.train.run_file import load_run_file
from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.once import made_once
from tests.support.training import (
    Gate,
    losses,
    metrics,
    running,
    settings,
    steps_of_checkpoints,
    stopped,
    write_run,
)

pytestmark = pytest.mark.slow

GATED = "tests.support.paced_samples:gated"
STEPS = 16


def _train_all_steps(folder: Path) -> None:
    more = settings(training__steps=STEPS, checkpoint__keep=0)
    words = ["train", str(write_run(folder, "1f1b")), *more, "--json"]
    with running(folder / "runs" / "run", *words) as train:
        assert train.ended().document["steps"] == STEPS


@pytest.fixture(scope="module")
def whole() -> Path:
    """A run of all steps; who wants one that was stopped takes newer checkpoints away from a copy."""
    return made_once("to-be-resumed", _train_all_steps) / "runs" / "run"


def test_a_run_goes_on_to_the_last_bit_as_if_it_had_never_stopped(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run", 8)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind":"train","step":')  # what a run leaves that is killed amid a line
    result = bireme(capsys, "resume", str(run), "--json")
    assert result.status == 0, result.err
    assert result.document["steps"] == STEPS
    assert [line["step"] for line in metrics(run, "train")] == [*range(1, STEPS + 1), *range(9, STEPS + 1)]
    assert losses(run) == losses(whole)
    newest = f"checkpoints/step-{STEPS:08d}"
    for rank in range(2):
        name = f"{newest}/rank-{rank:04d}.safetensors"
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_another_plan_goes_on_with_the_same_curve(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run", 8)
    (run / "metrics.jsonl").unlink()
    more = settings(plan__file="", plan__depth=1, plan__schedule="1f1b", plan__micro_batch=2)
    with alone():
        result = bireme(capsys, "resume", str(run), *more, *settings(cluster__workers=1), "--json")
    assert result.status == 0, result.err
    assert len(result.document["stages"]) == 1
    expected = {step: loss for step, loss in losses(whole).items() if step > 8}
    assert losses(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("harm", ["truncated", "damaged"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    harm: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the run goes on from a checkpoint to the last bit, another test says: none is trained here."""
    starts: list[RunStart] = []

    def launch(_work: object, _num_ranks: int, start: RunStart, **_options: object) -> None:
        starts.append(start)
        raise RankFailed(0, None, "that is enough.")

    monkeypatch.setattr("bireme.train.launching.launch", launch)
    run = stopped(whole, tmp_path / "run", 12)
    part = run / "checkpoints" / "step-00000012" / "rank-0001.safetensors"
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data[:-3] if harm == "truncated" else data)
    result = bireme(capsys, "resume", str(run), "--json")
    assert result.status == 1, result.err
    assert str(part) in result.err
    assert harm in result.err
    (start,) = starts
    assert start.checkpoint == run / "checkpoints" / "step-00000008"
    assert start.passed_over == (part.parent,)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("data.seed=5", "data.seed = 0, but now it is 5"),
        ("checkpoint.folder=elsewhere", "the run would start again without them"),
        ("training.batch_size=16", "training.batch_size = 8, but now it is 16"),
        ("data.evaluation_fraction=0.5", "the number of samples"),
        ("training.optimizer=sgd", "has the state of adamw, but training.optimizer is sgd"),
        ("model.source=gpt:layers=1,width=16,heads=2,vocab=257,context=32", "another model"),
    ],
)
def test_a_checkpoint_of_another_model_or_place_in_the_data_is_refused(
    change: str, part: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run", 8)
    before = (run / "run.toml").read_text()
    result = bireme(capsys, "resume", str(run), "--set", change)
    assert result.status == 2
    assert part in result.err
    assert (run / "run.toml").read_text() == before


def test_a_finished_run_says_how_to_train_further(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "resume", str(whole))
    assert result.status == 2
    assert "--set training.steps=32" in result.err


def test_a_run_that_was_killed_amid_its_end_exports_its_model(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run", STEPS)
    result = bireme(capsys, "resume", str(run), "--json")
    assert result.status == 0, result.err
    assert result.document["eval_loss"] is not None
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()


def test_three_starts_without_a_new_checkpoint_are_the_last(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_args: object, **_options: object) -> None:
        raise RankFailed(1, None, "its process was killed by signal 9 (SIGKILL).")

    monkeypatch.setattr("bireme.train.launching.launch", launch)
    run = stopped(whole, tmp_path / "run", 8)
    results = [bireme(capsys, "resume", str(run)) for _ in range(4)]
    assert [result.status for result in results] == [1, 1, 1, 3]
    assert "started 3 times from step 8" in results[-1].err
    assert bireme(capsys, "resume", str(run), "--anyway").status == 1
    shutil.copytree(whole / "checkpoints" / "step-00000012", run / "checkpoints" / "step-00000012")
    assert bireme(capsys, "resume", str(run)).status == 1


WARMUP = settings(plan__delay_warmup_steps=6, training__steps=12)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"] if TRY_ALL else ["2bw"])
def test_updates_are_delayed_after_the_warm_up_however_often_a_run_resumes(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a checkpoint before that step and from one after it."""
    path, run = write_run(tmp_path, schedule, 1), tmp_path / "runs" / "run"
    with alone():
        result = bireme(capsys, "train", str(path), *WARMUP, "--json")
        assert result.status == 0, result.err
        for step in (4, 8):
            again = stopped(run, tmp_path / str(step), step)
            result = bireme(capsys, "resume", str(again), "--json")
            assert result.status == 0, result.err
            assert len(metrics(again, "train")) == 12 + 12 - step
            assert [line["step"] for line in metrics(again, "schedule")] == ([6, 6] if step < 6 else [6])
            assert losses(again) == losses(run)
    if schedule == "2bw":
        expected = _in_two_phases(run)
        assert [loss for _, loss in sorted(losses(run).items())] == pytest.approx(expected, rel=1e-5)


def _in_two_phases(folder: Path) -> list[float]:
    """What one process learns that takes each schedule after the other."""
    run = load_run_file(folder / "run.toml")
    graph = load_graph(folder / "graph.json")
    model = RunModel.of(run, 1)
    samples = data_of(run, model).training
    order = Order(len(samples), run.data.seed)
    numbers = [
        list(order.numbers(number * run.training.batch_size, run.training.batch_size))
        for number in range(run.training.steps)
    ]
    batches = [samples.take(places) for places in numbers]
    plan, saved, found = Plan((), 2, "1f1b"), None, []
    for phase, part in ((plan, batches[:6]), (replace(plan, schedule="2bw"), batches[6:])):
        pipeline = Pipeline(
            graph,
            phase,
            weights=model.weights(graph),
            optimizer=named_optimizer("adamw", lr=run.training.learning_rate, betas=run.training.betas),
            settings=PipelineSettings(clip_norm=run.training.clip_norm),
        )
        if saved is not None:
            pipeline.restore(saved)
        found += [result.loss for result in pipeline.train(part)]
        saved = pipeline.snapshot()
    return found


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small disk of its own takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_checkpoints_and_no_run(tmp_path: Path) -> None:
    """The disk is full at step 4, when the first checkpoint is due, and until after the last step. The run
    then waits for room.
    """
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    gate = Gate(tmp_path / "gate", NUM_PROBES + 28)
    with _small_disk(run):
        with running(run, "train", str(path), *settings(training__steps=40), "--json", gate=gate) as train:
            train.wait_for_step(1)
            filler = run / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
            while "failed; there is none yet" not in train.said:
                gate.let_in(8)  # a failure is told with a step
                time.sleep(0.3)
                assert train.process.poll() is None, train.said
            gate.let_in(10**6)
            train.wait_for_words("waits up to 12 hours for room")
            filler.unlink()
            document = train.ended().document
        assert document["steps"] == 40
        assert sorted(losses(run)) == list(range(1, 41))
        assert steps_of_checkpoints(run) == [40]
        assert any("No space left" in text for text in document["warnings"])
        assert (run / "model" / "model.safetensors").is_file()
