"""Runs that are stopped, by signals and by force, and go on as if they had not been."""

import os
import random
import signal
from pathlib import Path

import pytest

from bireme.train.data.placing import NUM_PROBES
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.once import made_once
from tests.support.paced_samples import GATE
from tests.support.training import Gate, losses, metrics, running, settings, steps_of_checkpoints, write_run

pytestmark = pytest.mark.slow

SCHEDULE = "2bw-fresh"
"""It keeps the most that must survive: two versions, a trial and the clipping of the batch before."""

PACED = "tests.support.paced_samples:paced"
GATED = "tests.support.paced_samples:gated"
PACE_S = 0.01
"""Eight of them are a step."""

MANY = settings(training__steps=400)
LAST = 40
"""More steps than any gate lets through before a run is stopped."""


def _train_without_a_stop(folder: Path) -> None:
    path, run = write_run(folder, SCHEDULE, data=PACED), folder / "runs" / "run"
    with running(run, "train", str(path), *settings(training__steps=LAST), "--json") as train:
        assert train.ended().document["steps"] == LAST


@pytest.fixture(scope="module")
def never_stopped() -> dict[int, float]:
    """What a run learns that nobody stops."""
    return losses(made_once("never-stopped", _train_without_a_stop) / "runs" / "run")


@pytest.mark.parametrize(("number", "to"), [(signal.SIGINT, "everyone"), (signal.SIGUSR1, "rank 1")])
def test_a_signal_stops_all_ranks_at_one_step_with_a_checkpoint(
    number: signal.Signals,
    to: str,
    tmp_path: Path,
    never_stopped: dict[int, float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, run = write_run(tmp_path, SCHEDULE, data=GATED), tmp_path / "runs" / "run"
    more = [*MANY, *settings(data__num_workers=2, checkpoint__every_steps=0)]
    gate = Gate(tmp_path / "gate", NUM_PROBES + 40)
    monkeypatch.setenv(GATE, str(gate.path))  # for those who resume
    with running(run, "train", str(path), *more, "--json", gate=gate) as train:
        train.wait_for_step(3)
        if to == "everyone":
            os.killpg(train.process.pid, number)
            train.wait_for_words("stopping")
        else:
            os.kill(train.ranks[int(to[-1])], number)
        gate.let_in(10**6)
        ended = train.ended()
    document = ended.document
    assert document["reason"] == ("interrupted" if number == signal.SIGINT else "signal")
    assert f"bireme resume {run}" in ended.err
    (saved,) = {document["checkpoint"], *steps_of_checkpoints(run)[-1:]}
    assert 3 <= saved <= document["steps"] < LAST
    if to != "everyone" and not TRY_ALL:  # it goes on from such a checkpoint as the other does
        return
    rest = settings(training__steps=LAST, data__num_workers=0)
    result = bireme(capsys, "resume", str(run), *rest, "--json")
    assert result.status == 0, result.err
    again = [line["step"] for line in metrics(run) if line["kind"] == "start"]
    assert again == [0, saved]
    assert losses(run) == never_stopped


def test_a_run_that_is_asked_to_stop_before_its_first_step_stops_cleanly(tmp_path: Path) -> None:
    path, run = write_run(tmp_path, data=PACED), tmp_path / "runs" / "run"
    with running(run, "train", str(path), *MANY, "--json", pace_s=PACE_S) as train:
        train.wait_for_ranks(2)
        os.kill(train.process.pid, signal.SIGTERM)
        document = train.ended().document
    assert document["reason"] == "signal"
    assert steps_of_checkpoints(run)[-1] == document["steps"] <= 4


def test_a_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    with running(run, "train", str(path), *MANY, gate=Gate(tmp_path / "gate", 40)) as train:
        train.wait_for_step(1)
        os.killpg(train.process.pid, signal.SIGINT)
        train.wait_for_words("stopping")
        os.killpg(train.process.pid, signal.SIGINT)
        ended = train.ended()
    assert ended.status == 130
    assert f"bireme resume {run}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.long
def test_after_kills_of_everything_the_curve_is_the_same_to_the_last_bit(
    tmp_path: Path, never_stopped: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(os.environ.get("BIREME_TEST_SEED", "0"))
    path, run = write_run(tmp_path, SCHEDULE, data=PACED), tmp_path / "runs" / "run"
    verb = ["train", str(path), *MANY]
    for step in (draw.randint(5, 7), draw.randint(10, 13)):
        with running(run, *verb, *settings(checkpoint__every_steps=2), pace_s=PACE_S) as train:
            train.wait_for_step(step)
            train.kill_all()
        verb = ["resume", str(run)]
    durable = steps_of_checkpoints(run)[-1]
    before = len(metrics(run))
    result = bireme(capsys, "resume", str(run), *settings(training__steps=LAST), "--json")
    assert result.status == 0, result.err
    lines = [line for line in metrics(run)[before:] if line["kind"] == "train"]
    assert lines[0]["step"] == durable + 1
    assert losses(run) == never_stopped


def test_a_rank_that_is_killed_ends_the_run_with_a_sentence_and_the_way_on(tmp_path: Path) -> None:
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    with running(run, "train", str(path), *MANY, gate=Gate(tmp_path / "gate", NUM_PROBES + 80)) as train:
        train.wait_for_step(5)
        os.kill(train.ranks[1], signal.SIGKILL)
        ended = train.ended()
    assert ended.status == 1
    assert "killed by signal 9" in ended.err
    assert f"bireme resume {run}" in ended.err
    assert "This is a bug" not in ended.err
