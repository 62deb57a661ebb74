"""Faults in the middle of a training, with real processes and signals: one cause, named, and nobody left."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.board import RankFailed
from bireme.runtime.launch import launch
from bireme.runtime.stage import Place
from bireme.runtime.world import World
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.patience import patience_s
from tests.support.ranks import pids_in, run_script, sign_in, start_script, torchrun, wait_until_gone
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import (
    Batch,
    Model,
    real_batches,
)
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

TIMEOUT_S = 12.0
"""A healthy rank may be silent for half of that, on a machine that does other things too."""
FAILING = 1


def train_and_fail(world: World, model: Model, schedule: str, fault: str, folder: Path) -> None:
    """Rank 1 fails in the middle of batch 2, in its backward of micro-batch 1."""
    sign_in(folder, world.rank)
    pipeline = pipeline_of(model, Setting(regression_plan(schedule, world.size)), world)
    stage = pipeline.stages[world.rank]
    backward = stage.backward

    def failing(place: Place, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if place == Place(2, 1):
            fail(fault)
        return backward(place, gradients)

    if world.rank == FAILING:
        stage.backward = failing  # type: ignore[method-assign]
    list(pipeline.train(real_batches(8, 5, WIDTH)))


def fail(fault: str) -> None:
    if fault == "raise":
        raise ArithmeticError("the sum is wrong")
    # What it does is told with its next sign of life, of which there is one a second.
    time.sleep(3.0)
    os.kill(os.getpid(), signal.Signals[fault])
    time.sleep(600.0)


def failure(fault: str, schedule: str, folder: Path, num_ranks: int = 2) -> RankFailed:
    """What such a training ends with; none of its processes is left."""
    with pytest.raises(RankFailed) as caught:
        launch(
            train_and_fail,
            num_ranks,
            regression(),
            schedule,
            fault,
            folder,
            timeout_s=TIMEOUT_S,
            threads_per_process=1,
        )
    wait_until_gone(pids_in(folder, num_ranks))
    return caught.value


def test_a_stage_that_raises_is_told_once_with_its_rank_and_instruction(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = failure("raise", "1f1b", tmp_path, 3)

    assert error.rank == FAILING
    assert error.instruction is not None
    assert error.instruction.startswith("1B1 of batch 2 on version")
    assert error.summary == "ArithmeticError: the sum is wrong"
    assert str(error).count("Traceback (most recent call last)") == 1
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_what_is_seen_after_the_timeout_is_told(tmp_path: Path) -> None:
    """A rank that is gone in the middle of a training, and fewer batches on one rank: all at once, for two
    wait for their timeouts.
    """
    claims = [a_killed_rank_is_named, a_stopped_rank_is_named, fewer_batches_are_one_clear_error]

    def check(place: int) -> None:
        folder = tmp_path / str(place)
        folder.mkdir()
        claims[place](folder)

    run_threads(len(claims), check)


def a_killed_rank_is_named(folder: Path) -> None:
    assert_named(failure("SIGKILL", "2bw", folder), "killed by signal 9")


def a_stopped_rank_is_named(folder: Path) -> None:
    assert_named(failure("SIGSTOP", "2bw", folder), "has sent no heartbeat")


def assert_named(error: RankFailed, words: str) -> None:
    assert error.rank == FAILING
    assert words in error.text
    assert error.instruction is not None
    assert " of batch " in error.instruction


def fewer_batches_are_one_clear_error(_folder: Path) -> None:
    told = mistake([real_batches(8, 3, WIDTH), real_batches(8, 2, WIDTH)])

    assert "same batches" in told
    assert "Traceback" not in told


def train_on_own(world: World, model: Model, data: list[list[Batch]]) -> list[float]:
    pipeline = pipeline_of(model, Setting(regression_plan("1f1b", world.size)), world)
    return [result.loss for result in pipeline.train(data[world.rank])]


def mistake(data: list[list[Batch]]) -> str:
    with pytest.raises((BiremeError, RankFailed)) as caught:
        launch(train_on_own, len(data), regression(), data, timeout_s=TIMEOUT_S, threads_per_process=1)
    return str(caught.value)


def test_batches_of_other_shapes_on_another_rank_are_one_clear_error() -> None:
    told = mistake([real_batches(8, 3, WIDTH), real_batches(12, 3, WIDTH)])

    assert "give all ranks the same batches" in told.lower()
    assert "Traceback" not in told


# --- interrupts, torchrun


TRAINS = """
import sys
from pathlib import Path
from bireme.runtime.launch import launch
from tests.runtime.test_engine_faults import train_on_and_on

if __name__ == "__main__":
    launch(train_on_and_on, 2, Path(sys.argv[1]), timeout_s=20, threads_per_process=1)
"""

UNDER_TORCHRUN = """
import os
import sys
from pathlib import Path
from bireme.runtime.stage import Place
from bireme.runtime.world import World
from tests.support.regression import regression
from tests.runtime.test_engine_faults import FAILING, train_and_fail
from tests.support.ranks import end_when_another_has_told

if os.environ["RANK"] == str(FAILING):
    end_when_another_has_told()
with World.from_environment(timeout_s=20) as world:
    train_and_fail(world, regression(), "2bw", "raise", Path(sys.argv[1]))
"""


def train_on_and_on(world: World, folder: Path) -> None:
    """Without end; sign in once the training is under way."""
    pipeline = pipeline_of(regression(), Setting(regression_plan("2bw", world.size)), world)

    def endless() -> Iterator[Batch]:
        (batch,) = real_batches(8, 1, WIDTH)
        while True:
            yield batch

    for result in pipeline.train(endless()):
        if result.batch == 2:
            sign_in(folder, world.rank)


def test_an_interrupt_ends_a_training_cleanly(tmp_path: Path) -> None:
    parent = start_script(TRAINS, tmp_path, str(tmp_path))
    try:
        ranks = pids_in(tmp_path, 2)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does it: to the ranks too
        _, errors = parent.communicate(timeout=patience_s())
        assert parent.returncode == -signal.SIGINT
    finally:
        parent.close()

    wait_until_gone(ranks)
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


def test_under_torchrun_the_others_name_the_rank_that_failed_and_its_instruction(tmp_path: Path) -> None:
    run = run_script(UNDER_TORCHRUN, tmp_path, str(tmp_path), launcher=torchrun(2))

    wait_until_gone(pids_in(tmp_path, 2))
    assert run.returncode == 1
    lines = run.stderr.splitlines()
    told = [line for line in lines if line.startswith("bireme: rank 0 ends. Rank 1 failed at 1B1 of batch 2")]
    assert len(told) == 1
    assert told[0].endswith("ArithmeticError: the sum is wrong")
    assert lines.count("ArithmeticError: the sum is wrong") == 1
