"""Real processes, real signals: whatever happens to a rank, all end, one is named, and nobody is left."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from bireme.errors import BiremeError
from bireme.runtime.board import RankFailed
from bireme.runtime.launch import launch
from bireme.runtime.world import World
from tests.support.copies import Copy
from tests.support.ranks import (
    fail_as_told,
    pids_in,
    run_script,
    sign_in,
    start_script,
    torchrun,
    until,
    wait_until_gone,
)
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

TIMEOUT_S = 12.0
"""A healthy rank may be silent for half of that, on a machine that does other things too."""
TRACEBACK = "Traceback (most recent call last)"

LAUNCHES = f"""
import sys
from pathlib import Path
from bireme.runtime.launch import launch
from tests.support.ranks import fail_as_told

if __name__ == "__main__":
    launch(fail_as_told, 2, sys.argv[1], Path(sys.argv[2]), timeout_s={TIMEOUT_S})
"""

UNDER_TORCHRUN = f"""
import os
import sys
from pathlib import Path
from bireme.runtime.world import World
from tests.support.ranks import end_when_another_has_told, fail_as_told

if sys.argv[1] == "raise" and os.environ["RANK"] == "1":
    end_when_another_has_told()
with World.from_environment(timeout_s={TIMEOUT_S}) as world:
    fail_as_told(world, sys.argv[1], Path(sys.argv[2]))
"""

Start = Callable[..., Copy]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script; when the test is over it is gone, and so are the ranks that signed in."""
    started: list[Copy] = []

    def begin(text: str, *words: str, launcher: tuple[str, ...] = ()) -> Copy:
        started.append(start_script(text, tmp_path, *words, launcher=launcher))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def failure(fault: str, folder: Path, num_processes: int = 2) -> BaseException:
    """What a launch ends with when its last rank fails so. No process is left after it."""
    with pytest.raises((RankFailed, BiremeError)) as caught:
        launch(fail_as_told, num_processes, fault, folder, timeout_s=TIMEOUT_S)
    wait_until_gone(pids_in(folder, num_processes))
    return caught.value


def test_a_rank_that_raises_ends_all_and_its_traceback_is_told_once(tmp_path: Path) -> None:
    error = failure("raise", tmp_path, 3)

    assert isinstance(error, RankFailed)
    assert (error.rank, error.instruction) == (2, "2F0 of batch 1 on version 0")
    assert error.text.count(TRACEBACK) == 1
    assert error.text.endswith("ArithmeticError: the sum is wrong")
    assert "fail_as_told" in error.text
    assert error.line == "Rank 2 failed at 2F0 of batch 1 on version 0: ArithmeticError: the sum is wrong"
    told = "".join(traceback.format_exception(error))
    assert told.count("the sum is wrong") == 2  # in the line of code that raises it, and as the error
    assert told.count(TRACEBACK) == 2  # there, and here


def test_a_users_mistake_in_a_rank_is_one_where_it_was_launched(tmp_path: Path) -> None:
    error = failure("mistake", tmp_path)

    assert type(error) is BiremeError
    assert str(error) == '{"depth": 8}'


def test_a_rank_that_leaves_by_exit_is_told_to_return(tmp_path: Path) -> None:
    assert "sys.exit(3) on rank 1" in str(failure("exit", tmp_path))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("SIGKILL", "killed by signal 9 (SIGKILL)"),
        ("SIGSEGV", "killed by signal 11 (SIGSEGV)"),
        ("crash", "ended with status 7"),
    ],
)
def test_a_rank_that_says_nothing_more_is_named(fault: str, words: str, tmp_path: Path) -> None:
    assert_named(failure(fault, tmp_path), words)


def assert_named(error: BaseException, words: str) -> None:
    assert isinstance(error, RankFailed)
    assert error.rank == 1
    assert words in error.text
    assert TRACEBACK not in error.text


@pytest.mark.long
def test_ranks_that_stop_or_never_answer_are_told_after_the_timeout(start: Start, tmp_path: Path) -> None:
    """Three runs at once, for each waits for its timeout."""
    claims = [a_stopped_rank_is_named, a_rank_that_never_answers_is_shown, a_stopped_rank_is_named_by_others]

    def check(place: int) -> None:
        folder = tmp_path / str(place)
        folder.mkdir()
        claims[place](start, folder)

    run_threads(len(claims), check)


def a_stopped_rank_is_named(_start: Start, folder: Path) -> None:
    assert_named(failure("SIGSTOP", folder), "has sent no heartbeat")


def a_rank_that_never_answers_is_shown(_start: Start, folder: Path) -> None:
    """With what all are doing."""
    error = failure("hang", folder)

    assert isinstance(error, RankFailed)
    assert error.rank == 0  # the one that waits in vain
    assert "Timed out" in error.text
    assert "All ranks are alive" in error.text
    assert "rank 1 at 1F0 of batch 1 on version 0" in error.text
    assert "raise the timeout" in error.text


def a_stopped_rank_is_named_by_others(start: Start, folder: Path) -> None:
    """Under torchrun, where each rank tells for itself."""
    run = start(UNDER_TORCHRUN, "SIGSTOP", str(folder), launcher=tuple(torchrun(2)))
    ranks = pids_in(folder, 2)
    wait_until_gone(ranks[:1])
    os.kill(ranks[1], signal.SIGKILL)  # torchrun would do it, but only half a minute later
    _, errors = run.communicate()

    told = [line for line in errors.splitlines() if line.startswith("bireme: rank 0 ends. Rank 1 failed")]
    assert len(told) == 1
    assert "it has sent no heartbeat" in told[0]


def test_a_rank_deaf_to_the_failure_of_another_is_ended(tmp_path: Path) -> None:
    """It neither talks to the one that failed nor ends of SIGTERM."""
    with pytest.raises(RankFailed, match="ArithmeticError"):
        launch(ignore_everything, 2, tmp_path, timeout_s=TIMEOUT_S)
    wait_until_gone(pids_in(tmp_path, 2))


def ignore_everything(world: World, folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sign_in(folder, world.rank)
    pids_in(folder, 2)
    if world.rank == 1:
        raise ArithmeticError
    while True:
        signal.pause()


def test_one_rank_that_fails_after_another_has_finished_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="late"):
        launch(fail_late, 2, tmp_path, timeout_s=TIMEOUT_S)


def fail_late(world: World, folder: Path) -> None:
    finished = folder / "finished"
    if world.rank == 1:
        until(finished.exists)
        raise ArithmeticError("late")
    finished.touch()


def test_what_frees_a_waiting_rank_is_called_when_another_fails(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ArithmeticError"):
        launch(free_the_waiting, 2, tmp_path, timeout_s=TIMEOUT_S)
    assert (tmp_path / "freed").exists()


@dataclass(eq=False)
class Freed:
    file: Path

    def abort(self) -> None:
        self.file.touch()


def free_the_waiting(world: World, folder: Path) -> None:
    freed = Freed(folder / "freed")
    world.watch.abort_on_failure(freed)
    sign_in(folder, world.rank)
    pids_in(folder, 2)  # on a busy machine the other may only just begin, and would be ended as it is
    if world.rank == 1:
        raise ArithmeticError
    until(freed.file.exists)
    raise dist.DistNetworkError("the wait has ended, without a word of why")


def test_an_interrupt_ends_all_without_a_storm_of_tracebacks(start: Start, tmp_path: Path) -> None:
    parent = start(LAUNCHES, "hang", str(tmp_path))
    ranks = pids_in(tmp_path, 2)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does it: to the ranks too
    _, errors = parent.communicate()

    wait_until_gone(ranks)
    assert parent.returncode == -signal.SIGINT, errors
    assert errors.count(TRACEBACK) == 1
    assert errors.strip().endswith("KeyboardInterrupt")


def test_an_interrupt_of_the_launcher_alone_reaches_the_ranks(start: Start, tmp_path: Path) -> None:
    parent = start(LAUNCHES, "hang", str(tmp_path))
    ranks = pids_in(tmp_path, 2)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate()

    wait_until_gone(ranks)
    assert parent.returncode == -signal.SIGINT, errors
    assert errors.count(TRACEBACK) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_ranks_end_with_the_launcher(end: signal.Signals, start: Start, tmp_path: Path) -> None:
    parent = start(LAUNCHES, "hang", str(tmp_path))
    ranks = pids_in(tmp_path, 2)
    parent.send_signal(end)

    wait_until_gone(ranks)


def test_a_stopped_rank_ends_with_the_launcher(start: Start, tmp_path: Path) -> None:
    parent = start(LAUNCHES, "hang", str(tmp_path))
    ranks = pids_in(tmp_path, 2)
    os.kill(ranks[0], signal.SIGSTOP)
    parent.kill()

    wait_until_gone(ranks)


def test_under_torchrun_the_error_is_told_once_and_named_by_the_others(tmp_path: Path) -> None:
    run = run_script(UNDER_TORCHRUN, tmp_path, "raise", str(tmp_path), launcher=torchrun(2))

    wait_until_gone(pids_in(tmp_path, 2))
    assert run.returncode == 1
    lines = run.stderr.splitlines()
    assert sum(line.startswith("[rank") and TRACEBACK in line for line in lines) == 1
    assert lines.count("[rank1]: ArithmeticError: the sum is wrong") == 1
    told = "Rank 1 failed at 1F0 of batch 1 on version 0: ArithmeticError: the sum is wrong"
    assert lines.count(f"bireme: rank 0 ends. {told}") == 1
    assert "rank      : 1 (local_rank: 1)" in run.stderr.partition("Root Cause")[2]


def test_the_ranks_end_with_torchrun(start: Start, tmp_path: Path) -> None:
    agent = start(UNDER_TORCHRUN, "hang", str(tmp_path), launcher=tuple(torchrun(2)))
    ranks = pids_in(tmp_path, 2)
    agent.kill()

    wait_until_gone(ranks)
