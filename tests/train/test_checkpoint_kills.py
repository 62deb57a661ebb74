"""Checkpoints among real processes: killed at any moment, on a full disk, and two that want one folder.

A script that has imported torch once forks itself for every process that is to die.
"""

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.runtime.board import RankFailed
from bireme.runtime.launch import launch
from bireme.runtime.world import World
from bireme.train.checkpoint import checkpoint as folder_module
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.checkpoint import Checkpoint, find_checkpoints, newest_good, open_checkpoint
from bireme.train.checkpoint.writer import CheckpointEvent, CheckpointSaved, CheckpointWriter
from tests.support.checkpoints import META, fill, is_step, ranks, snapshot_of
from tests.support.extent import draws
from tests.support.hosts import CLONE_NEWNS, CLONE_NEWUSER, check
from tests.support.ranks import run_script

pytestmark = pytest.mark.slow


NUM_KILLS = draws(30, 12)
"""At moments that are drawn, each later than the one before may be."""


def run_here(work: str, folder: Path, *words: object, first: Callable[[], None] | None = None) -> str:
    """Run a function of this module in a process of its own; what it printed."""
    text = f"import sys\nfrom tests.train.test_checkpoint_kills import {work}\n{work}(*sys.argv[1:])\n"
    told = run_script(text, folder, str(folder / "checkpoints"), *map(str, words), first=first)
    assert told.returncode == 0, told.stderr
    return told.stdout


def forked(work: Callable[[int], None], end: Callable[[int], None]) -> tuple[int, list[int]]:
    """Run `work` in a fork, then `end` with its process; its wait status, and the steps it told."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reading)
            work(writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    end(process)
    _, status = os.waitpid(process, 0)
    with open(reading) as pipe:  # noqa: PTH123 - it has no path
        return status, [int(line) for line in pipe]


def save_on(folder: Path, num_saves: int, told: int) -> None:
    """Go on from the newest checkpoint, and tell of every step that became one."""
    found = newest_good(folder)
    with ranks(folder, resumed_from=found) as run:
        run.writers[0]._on_event = lambda event: tell(event, told)
        step = 0 if found is None else found.manifest.step
        for _ in range(num_saves):
            step += 1
            run.save(step)


def tell(event: CheckpointEvent, told: int) -> None:
    assert isinstance(event, CheckpointSaved), event
    os.write(told, f"{event.step}\n".encode())


def check_after_kill(folder: Path, before: int, told: Sequence[int]) -> int:
    """What is there must be whole, at least as new as what was told, and at most one newer; its step."""
    bad: list[str] = []
    found = newest_good(folder, bad.append)
    assert bad == []
    newest = max([before, *told])
    if found is None:
        assert newest == 0
        return 0
    assert found.manifest.step in (newest, newest + 1), (found.manifest.step, newest)
    assert is_step(found.snapshot().tensors, found.manifest.step)
    there = find_checkpoints(folder)
    assert len(there) <= 3
    assert all(open_checkpoint(path).damage() == () for path in there)
    return found.manifest.step


def kill_at_random(name: str, num_kills: str) -> None:
    """Kill a run at random moments, until it was often enough and the run has come on."""
    folder, draws, step, num_killed = Path(name), random.Random(5), 0, 0

    def end(process: int) -> None:
        # Later and later, so that some get far on a slow machine too.
        time.sleep(draws.uniform(0.0, 0.25 + 0.01 * num_killed))
        os.kill(process, signal.SIGKILL)

    while num_killed < int(num_kills) or step < 10:
        status, told = forked(lambda pipe: save_on(folder, 10**6, pipe), end)
        assert os.WTERMSIG(status) == signal.SIGKILL
        step = check_after_kill(folder, step, told)
        num_killed += 1
    say(num_killed, step)


def test_a_run_killed_at_random_moments_always_finds_its_newest_checkpoint_whole(tmp_path: Path) -> None:
    num_killed, step = map(int, run_here("kill_at_random", tmp_path, NUM_KILLS).split())
    assert num_killed >= NUM_KILLS
    assert step >= 10


def say(*words: object) -> None:
    """To who runs a function of this module in a process of its own."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


OPERATIONS = ("create", "write", "sync", "sync_folder", "rename", "digest_of")


def die_at(number: int) -> None:
    """Die by SIGKILL at the operation on the disk of that number, amid a writing or a deleting."""
    count = 0

    def dying(operation: Callable[..., object], *arguments: object, **named: object) -> object:
        nonlocal count
        count += 1
        if count == number:
            if operation.__name__ == "write":
                file, data = arguments
                assert isinstance(file, FileIO)
                assert isinstance(data, memoryview)
                file.write(data[: len(data) // 2])
            if operation.__name__ == "rmtree":
                next(Path(str(arguments[0])).glob("rank-*")).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **named)

    def patched(operation: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments, **named: dying(operation, *arguments, **named)

    for name in OPERATIONS:
        setattr(disk, name, patched(getattr(disk, name)))
    shutil.rmtree = patched(shutil.rmtree)  # type: ignore[assignment]  # only called


def kill_at_each_operation(name: str) -> None:
    """Kill a run at its first operation on the disk, the next at its second, until one comes through."""
    folder, step, number, status = Path(name), 2, 0, -1
    fill(folder, [1, 2])

    while status != 0:
        number += 1

        def work(pipe: int, number: int = number) -> None:
            found = newest_good(folder)
            assert found is not None
            die_at(number)
            save_on(folder, 1, pipe)

        status, told = forked(work, lambda _process: None)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
        step = check_after_kill(folder, step, told)
    say(number, step)


def test_a_run_killed_at_any_operation_on_the_disk_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    number, step = map(int, run_here("kill_at_each_operation", tmp_path).split())
    assert number > 25
    assert step >= 3


def hold_and_kill(name: str) -> None:
    """Let another process hold the folder, be refused it, kill that one, and have it."""
    folder_module.GRACE_S = 0.2
    folder = Path(name)
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with ranks(folder, 1):
            os.write(writing, b"1")
            time.sleep(1000)
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    with pytest.raises(BiremeError, match=f"process {process} on"), ranks(folder, 1):
        pass
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    fill(folder, [1])


def test_a_folder_is_refused_while_another_process_holds_it_and_not_once_that_is_killed(
    tmp_path: Path,
) -> None:
    run_here("hold_and_kill", tmp_path)
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 1


def exceed_file_size(name: str) -> None:
    """Let the system refuse files as large as the checkpoints are; then let it not."""
    folder = Path(name)
    with ranks(folder) as run:
        run.save(1)
        run.save(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        run.save(3)
        assert "File too large" in run.warnings(0)[0]
        assert run.warnings(0) == run.warnings(1)
        assert not list(folder.glob(".draft*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        check_after_kill(folder, 2, [])
        run.save(4)
        say(run.saved(0), run.saved(1))


def test_files_that_the_system_lets_not_grow_cost_that_checkpoint_only(tmp_path: Path) -> None:
    assert run_here("exceed_file_size", tmp_path) == "[1, 2, 4] [1, 2, 4]\n"


def fill_disk(_name: str, disk: str) -> None:
    """Save on a disk with room for little more than two checkpoints, and then with room again."""
    folder = Path(disk, "run", "checkpoints")
    folder.parent.mkdir()
    with ranks(folder) as run:
        run.save(1)
        run.save(2)
        ballast = folder.parent / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                say(error.strerror)
        run.save(3)
        run.save(4)
        assert "No space left on device" in run.warnings(0)[1]
        assert run.warnings(0) == run.warnings(1)
        assert not list(folder.glob(".draft*"))
        check_after_kill(folder, 2, [])
        ballast.unlink()
        run.save(5)
        say(run.saved(0), run.saved(1))


SMALL = b"size=256k"
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def mount_small_disk(folder: Path) -> None:
    """Have this process, which has one thread, see a small disk in that folder, as `UNSHARE` allows it to."""
    system = ctypes.CDLL(None, use_errno=True)
    own = {"uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    check(system.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    for name, words in {"setgroups": "deny", **own}.items():
        Path("/proc/self", name).write_text(words)
    check(system.mount(b"none", os.fsencode(folder), b"tmpfs", 0, SMALL))


def test_a_disk_that_is_really_full_costs_that_checkpoint_only(tmp_path: Path) -> None:
    where = tmp_path / "small"
    where.mkdir()
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here, which says whether who is not root may mount a small disk")
    if tried.returncode != 0:
        pytest.skip(f"this system lets nobody mount a small disk: {tried.stderr.strip()}")
    told = run_here("fill_disk", tmp_path, where, first=partial(mount_small_disk, where))
    assert told == "No space left on device\n[1, 2, 5] [1, 2, 5]\n"


def save_in_world(
    world: World, folder: Path, steps: Sequence[int], resumed_from: Checkpoint | None, dying: bool
) -> list[int]:
    """On every rank: save these steps; the last rank, if it is to die, amid the last one's tensors."""
    events: list[CheckpointEvent] = []
    with CheckpointWriter(
        folder,
        world.rank,
        world.size,
        world.store,
        on_event=events.append,
        resumed_from=resumed_from if world.rank == 0 else None,
    ) as writer:
        for step in steps:
            if dying and step == steps[-1] and world.rank == world.size - 1:
                writer.wait()
                die_at(3)
            writer.save(snapshot_of(world.rank, step), META)
        writer.wait()
    return [event.step for event in events if isinstance(event, CheckpointSaved)]


def test_processes_of_a_world_agree_over_its_store_and_go_on_after_one_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(RankFailed):
        launch(save_in_world, 2, folder, [1, 2, 3], None, True, timeout_s=60.0)
    found = newest_good(folder)
    assert found is not None
    assert found.manifest.step == 2
    assert is_step(found.snapshot().tensors, 2)
    assert launch(save_in_world, 2, folder, [3, 4], found, False, timeout_s=60.0) == [[3, 4]] * 2
    assert not list(folder.glob(".draft*"))
    found = newest_good(folder)
    assert found is not None
    assert is_step(found.snapshot().tensors, 4)
