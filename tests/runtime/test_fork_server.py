"""Processes of a launch are copies of one that has imported torch: each as if new, and none outlives it."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from bireme.runtime.launch import launch
from bireme.runtime.processes import CAN_FORK
from bireme.runtime.world import World
from bireme.train.rendezvous import Announcements
from tests.support.ranks import pids_in, run_script, sign_in, start_script, until, wait_until_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_FORK, reason="processes are not copies on this system"),
]


def report(world: World) -> tuple[str | None, str, int, tuple[float, float], str, str]:
    """What this process was given, and what it draws."""
    sys.stdout.write(f"rank {world.rank} speaks\n")
    word = os.environ.get("BIREME_TEST_WORD")
    name = Path("/proc/self/comm").read_text().strip()
    draws = random.random(), float(np.random.rand())
    return word, str(Path.cwd()), os.getppid(), draws, name, sys.path[-1]


def test_a_copy_has_what_a_new_process_would_have_whenever_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = launch(report, 1)
    monkeypatch.setenv("BIREME_TEST_WORD", "now")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # as torch does
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as scikit-learn does
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as for a model in a file of the user's
    monkeypatch.chdir(tmp_path)
    first, second = launch(report, 2)
    for one in (first, second):
        assert one[:2] == ("now", str(tmp_path))
        assert one[2] == before[0][2], "all are copies of one server"
        assert one[5] == str(tmp_path)
    assert before[0][0] is None
    draws = {draw for one in (*before, first, second) for draw in one[3]}
    assert len(draws) == 6, "each draws its own"
    assert [one[4] for one in (first, second)] == ["bireme rank 0", "bireme rank 1"]
    assert capfd.readouterr().out.count("rank 0 speaks") == 2


LOSES_ITS_SERVER = """
from bireme.runtime.board import RankFailed
from bireme.runtime.launch import launch
from tests.runtime.test_fork_server import lose_the_server, report

if __name__ == "__main__":
    print(launch(lose_the_server, 2))
    try:
        launch(lose_the_server, 2, True)
    except RankFailed as error:
        print(error)
    print([one[0] for one in launch(report, 1)])
"""


def test_ranks_outlive_their_server_their_ends_are_noticed_and_the_next_launch_has_another(
    tmp_path: Path,
) -> None:
    """All ranks were killed with it. A script has a server of its own; that of the tests has imported more
    than another would.
    """
    done = run_script(LOSES_ITS_SERVER, tmp_path)
    assert done.returncode == 0, done.stderr
    returned, ended, *_, next_launch = done.stdout.splitlines()
    assert returned == "[0, 1]"
    assert ended.startswith("Rank 1 failed: its process ended after the fork server, so its exit status")
    assert next_launch == "[None]"


def lose_the_server(world: World, is_killed: bool = False) -> int:
    """Kill the server of this rank, and go on once it is gone."""
    server = os.getppid()
    Announcements(world.store).gather(
        "here", None, world.rank, world.size
    )  # a rank that asks after the kill is a child of another process already
    if world.rank == 0:
        os.kill(server, signal.SIGKILL)
    until(lambda: os.getppid() != server)
    if is_killed and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.rank


LEAVES_ALL = """
import sys
from pathlib import Path
from bireme.runtime.launch import launch
from tests.runtime.test_fork_server import stop_without_the_server

if __name__ == "__main__":
    launch(stop_without_the_server, 2, Path(sys.argv[1]))
"""


def test_ranks_whose_server_was_killed_end_with_their_launcher_even_if_they_are_stopped(
    tmp_path: Path,
) -> None:
    launcher = start_script(LEAVES_ALL, tmp_path, str(tmp_path))
    try:
        ranks = pids_in(tmp_path, 2)
        until(
            lambda: all(
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in ranks
            )
        )
        launcher.kill()
        wait_until_gone(ranks)
    finally:
        launcher.close()


def stop_without_the_server(world: World, folder: Path) -> None:
    """Lose the server, and stop."""
    lose_the_server(world)
    sign_in(folder, world.rank)
    os.kill(os.getpid(), signal.SIGSTOP)
