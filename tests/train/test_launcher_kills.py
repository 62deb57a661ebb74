"""`kill -9` of the process that starts the ranks of a host: they end with it, and the run goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.killing.session import living, name_of
from bireme.cli.supervised import LAUNCHER
from tests.support.patience import patience_s
from tests.support.training import Gate, Running, losses, metrics, running, settings, write_run

pytestmark = pytest.mark.slow

GATED = "tests.support.paced_samples:gated"
STEPS = 8


def launcher_of(train: Running) -> int:
    """The process that starts the ranks of `bireme train`, a child of the process that was started."""
    (found,) = (pid for pid in living(train.process.pid) if name_of(pid).strip() == LAUNCHER)
    return found


def wait_until_gone(*pids: int) -> None:
    """Until these have ended, whether or not their parents have noticed."""
    end_s = time.monotonic() + patience_s()
    while left := [pid for pid in pids if name_of(pid) and not _is_zombie(pid)]:
        assert time.monotonic() < end_s, [name_of(pid) for pid in left]
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_launcher_that_is_killed_is_started_again_and_resumes_the_run(verb: str, tmp_path: Path) -> None:
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    more = settings(training__steps=STEPS, checkpoint__every_steps=2, data__num_workers=0)
    gate = Gate(tmp_path / "gate", 10**6)
    words = ["train", str(path), *more]
    if verb == "resume":
        with running(run, *words, *settings(training__steps=2), gate=gate) as train:
            assert train.ended().status == 0
        words = ["resume", str(run), *settings(training__steps=STEPS)]
    gate = Gate(tmp_path / "gate", 60)
    with running(run, *words, "--json", gate=gate) as train:
        train.wait_for_step(5)
        launcher, ranks = launcher_of(train), train.ranks
        os.kill(launcher, signal.SIGKILL)
        wait_until_gone(launcher, *ranks)
        train.wait_for_words("Another launcher resumes the run.")
        gate.let_in(10**6)
        ended = train.ended()
    assert ended.document["steps"] == STEPS
    assert f"killed by signal {int(signal.SIGKILL)} (SIGKILL), and its ranks with it" in ended.err
    assert len(losses(run)) == STEPS
    assert metrics(run, "start")[-1]["step"] in (2, 4, 6)


def test_without_a_run_to_resume_the_command_ends_as_its_launcher(tmp_path: Path) -> None:
    path, run = write_run(tmp_path), tmp_path / "runs" / "run"
    with running(run, "train", str(path)) as train:
        end_s = time.monotonic() + patience_s()
        while not any(name_of(pid).strip() == LAUNCHER for pid in living(train.process.pid)):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        os.kill(launcher_of(train), signal.SIGKILL)
        ended = train.ended()
    assert ended.status == -signal.SIGKILL
    assert not (run / "metrics.jsonl").exists()


def test_the_launcher_and_its_ranks_end_when_the_command_is_killed(tmp_path: Path) -> None:
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    with running(run, "train", str(path), gate=Gate(tmp_path / "gate", 60)) as train:
        train.wait_for_step(1)
        launcher, ranks = launcher_of(train), train.ranks
        os.kill(train.process.pid, signal.SIGKILL)
        wait_until_gone(launcher, *ranks)


def test_all_processes_of_a_run_stop_and_go_on_with_the_command(tmp_path: Path) -> None:
    """As with Ctrl-Z and `fg` in a terminal, which reach the group of the command."""
    path, run = write_run(tmp_path, data=GATED), tmp_path / "runs" / "run"
    gate = Gate(tmp_path / "gate", 60)
    with running(run, "train", str(path), *settings(training__steps=STEPS), "--json", gate=gate) as train:
        train.wait_for_step(1)
        both = [train.process.pid, launcher_of(train)]
        os.killpg(train.process.pid, signal.SIGTSTP)
        end_s = time.monotonic() + patience_s()
        while not all(") T" in Path(f"/proc/{pid}/stat").read_text() for pid in both):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.killpg(train.process.pid, signal.SIGCONT)
        gate.let_in(10**6)
        assert train.ended().document["steps"] == STEPS
