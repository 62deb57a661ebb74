"""`bireme coordinate` and `bireme join`: from nothing to a trained model, with machines that come back."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.killing.session import name_of
from bireme.machines.keys import HOME
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.joined_processes import RUNS
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.training import Running, metrics, settings, write_run

pytest.importorskip("cryptography", reason="keys of machines need it")
pytestmark = pytest.mark.slow
all_only = pytest.mark.skipif(not TRY_ALL, reason="it takes a minute: make test-all")


def command(
    folder: Path,
    home: str,
    *words: str,
    pace_s: float = 0.0,
    runs: Path | None = None,
    first: Callable[[], None] | None = None,
) -> Running:
    """`bireme WORDS…` on a machine of its own, as far as its key says, and with a folder for runs of its own
    if one is given.
    """
    variables = {HOME: str(folder / home), PACE: str(pace_s)} | ({RUNS: str(runs)} if runs else {})
    process = Copy(["-m", "bireme", *words], folder, variables=variables, first=first)
    return Running(process, folder / "runs" / "run", process.err)


def lines_of(coordinator: Running, count: int) -> list[list[str]]:
    """The words to type on the other machines, once all are printed."""
    coordinator.wait_for_words("A machine that has joined before")
    found = [text.split()[1:] for text in coordinator.said.splitlines() if text.startswith("  bireme join")]
    assert len(found) == count
    return found


def ended(one: Running) -> tuple[int, str, str]:
    out, err = one.process.communicate(timeout=patience_s())
    assert one.process.returncode is not None
    return one.process.returncode, out, err


def coordinating(folder: Path, run: Path, *words: str, pace_s: float = 0.0) -> Running:
    where = ("--listen", "127.0.0.1:0")
    return command(folder, "red", "coordinate", str(run), *where, *words, pace_s=pace_s)


def written(folder: Path, mode: str, width: int) -> Path:
    path = write_run(folder, "1f1b", 1, width=width, data="tests.support.paced_samples:paced")
    text = path.read_text().replace(f"workers = {width}", "workers = 1")
    path.write_text(f'{text}\n[sync]\nmode = "{mode}"\n')
    return path


def closing(stack: ExitStack, *found: Running) -> Sequence[Running]:
    """They are closed at the end. The failure of a test gets a note with all that each of them has said."""

    def close(one: Running, failure: BaseException | None) -> None:
        if failure is not None:
            failure.add_note(f"Process {one.process.pid}, status {one.process.poll()}, said:\n{one.said}")
        assert isinstance(one.process, Copy)
        one.process.close()

    for one in found:
        stack.push(lambda _, failure, __, one=one: close(one, failure))
    return found


def test_two_machines_join_a_coordinator_without_devices_and_train_a_model(tmp_path: Path) -> None:
    """The mode is the one that the planner has chosen for the plan."""
    run = written(tmp_path, "auto", 2)
    (plan,) = tmp_path.glob("plan-*.json")
    document = json.loads(plan.read_text())
    document["plan"] |= {"sync_mode": "diloco", "sum_codec": "none"}
    plan.write_text(json.dumps(document))
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, "--no-devices", "--json"))
        joins = [
            command(tmp_path, name, *words, "--name", name)
            for name, words in zip(("blue", "green"), lines_of(red, 2), strict=True)
        ]
        closing(stack, *joins)
        found = [ended(one) for one in (*joins, red)]
    assert [status for status, *_ in found] == [0, 0, 0], found
    document = json.loads(found[-1][1])
    assert document["status"] == 0
    assert document["run"]["steps"] == 12
    assert [one["members"] for one in document["run"]["membership"]] == [[0, 1]]
    assert {one["name"] for one in document["machines"]} == {"blue", "green"}
    assert ": step 12/12  " in found[-1][2]
    assert (tmp_path / "runs" / "run" / "model").is_dir()


@all_only
def test_a_machine_that_is_killed_and_joins_again_comes_back(tmp_path: Path) -> None:
    """The launcher of the other one is killed as well: its machine starts it again by itself."""
    run = written(tmp_path, "quorum", 3)
    with ExitStack() as stack:
        more = settings(training__steps=5000, sync__lease_s=5.0)
        (red,) = closing(stack, coordinating(tmp_path, run, "--machines", "3", *more, pace_s=0.2))
        lines = dict(zip(("blue", "green"), lines_of(red, 2), strict=True))
        blue, green = closing(
            stack,
            *(command(tmp_path, name, *lines[name], "--name", name, pace_s=0.2) for name in lines),
        )
        red.wait_for_step(2)
        blue.kill_all()
        red.wait_for_words("blue (127.0.0.1) is gone")
        red.wait_for_words("is gone after step")
        (blue,) = closing(stack, command(tmp_path, "blue", *lines["blue"][:2], pace_s=0.2))
        red.wait_for_words("blue (127.0.0.1) is back.")
        wait_for_returns(red, 1)
        number = 1 + (red.said.index("green (127") > red.said.index("blue (127"))
        os.kill(_process_of(green, f"phase 1 rank {number}"), signal.SIGKILL)
        green.wait_for_words("The launcher was killed by signal 9. It is started again.")
        wait_for_returns(red, 2)
        red.process.send_signal(signal.SIGINT)
        found = [ended(one) for one in (red, blue, green)]
    assert [status for status, *_ in found] == [0, 0, 0], found
    assert check_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").is_whole


@all_only
def test_a_coordinator_that_is_killed_and_started_again_takes_up_its_run(tmp_path: Path) -> None:
    run = written(tmp_path, "quorum", 3)
    words = ("--machines", "3", *settings(training__steps=5000, sync__lease_s=5.0))
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *words, pace_s=0.2))
        lines = dict(zip(("blue", "green"), lines_of(red, 2), strict=True))
        blue, green = closing(
            stack,
            *(command(tmp_path, name, *lines[name], "--name", name, pace_s=0.2) for name in lines),
        )
        red.wait_for_step(2)
        red.process.kill()
        red.process.wait(patience_s())
        for one in (blue, green):
            one.wait_for_words("does not answer. The training goes on. This machine calls until it does.")
        step = metrics(red.run, "train")[-1]["step"]
        blue.wait_for_step(step + 2)
        (red,) = closing(stack, coordinating(tmp_path, run, *words, pace_s=0.2))
        red.wait_for_words("The run that this coordinator has left is taken up.")
        for name in ("blue", "green"):
            red.wait_for_words(f"{name} (127.0.0.1) is back.")
        blue.wait_for_words("The coordinator answers again.")
        wait_for_returns(red, 1, beginning="bireme: blue: Replica")
        red.process.send_signal(signal.SIGINT)
        found = [ended(one) for one in (red, blue, green)]
    assert [status for status, *_ in found] == [0, 0, 0], found
    assert check_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").is_whole
    assert not [*(tmp_path / "red" / "runs").iterdir()]


def _process_of(join: Running, name: str) -> int:
    """The process of that name that a `bireme join` has started: a copy of its server."""
    copies = [copy for server in _children(join.process.pid) for copy in _children(server)]
    return next(pid for pid in copies if name_of(pid).strip() == name)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_returns(coordinator: Running, count: int, beginning: str = "bireme: Replica") -> None:
    """Until a launcher, by default that of the coordinator's machine, has seen as many replicas come back."""
    ends_s = time.monotonic() + patience_s()

    def is_return(text: str) -> bool:
        return text.startswith(beginning) and "is back at step" in text

    while sum(map(is_return, coordinator.said.splitlines())) < count:
        assert time.monotonic() < ends_s, coordinator.said
        assert coordinator.process.poll() is None, coordinator.said
        time.sleep(0.05)
