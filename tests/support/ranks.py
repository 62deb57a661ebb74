"""What processes do in the tests of launching and of faults, and how a test makes sure that none is left."""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bireme.errors import BiremeError
from bireme.runtime.world import World
from tests.support.copies import TORCHRUN, Copy
from tests.support.patience import patience_s

__all__ = [
    "add_ranks",
    "end_when_another_has_told",
    "fail_as_told",
    "pids_in",
    "report_threads",
    "run_script",
    "sign_in",
    "start_script",
    "torchrun",
    "until",
    "wait_until_gone",
]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a script."""

    returncode: int | None
    stdout: str
    stderr: str


def sign_in(folder: Path, rank: int) -> None:
    """Leave this process's number where the test finds it."""
    half = folder / f".{rank}"
    half.write_text(str(os.getpid()))
    half.rename(folder / f"{rank}.pid")


def pids_in(folder: Path, num_ranks: int) -> list[int]:
    """The numbers of all ranks, as soon as they have signed in."""
    until(lambda: len(list(folder.glob("*.pid"))) == num_ranks)
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(num_ranks)]


def wait_until_gone(pids: Sequence[int]) -> None:
    """Wait until there is none of these processes any more, or fail."""
    until(lambda: not any(map(_exists, pids)))


def until(predicate: object) -> None:
    """Wait until that is so, or fail."""
    assert callable(predicate)
    end = time.monotonic() + patience_s()
    while not predicate():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    try:
        # Of a process that has ended, and which nobody asked how, there is still the name.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ended after the file was opened
        return False


def start_script(
    text: str,
    folder: Path,
    *words: str,
    launcher: Sequence[str] = (),
    first: Callable[[], None] | None = None,
) -> Copy:
    """Start a Python script as a user would, in a process group of its own, where `first` was called."""
    script = folder / "script.py"
    script.write_text(text)
    return Copy([*launcher, str(script), *words], folder, first=first)


def run_script(
    text: str,
    folder: Path,
    *words: str,
    launcher: Sequence[str] = (),
    first: Callable[[], None] | None = None,
) -> Done:
    """Run a Python script to its end."""
    process = start_script(text, folder, *words, launcher=launcher, first=first)
    try:
        out, err = process.communicate(timeout=patience_s())
        return Done(process.returncode, out, err)
    finally:
        process.close()


def torchrun(num_ranks: int) -> list[str]:
    """The words that make torchrun run a script, and look often whether all ranks are there."""
    return ["-m", TORCHRUN, "--standalone", "--monitor-interval", "0.1", "--nproc-per-node", str(num_ranks)]


def end_when_another_has_told() -> None:
    """Have this process, one of torchrun's ranks, stay at its end until another has said why that one ends:
    torchrun ends all others as soon as one has gone.
    """
    said = Path("/proc/self/fd/2").resolve()
    atexit.register(lambda: until(lambda: "bireme: rank " in said.read_text()))


def add_ranks(world: World, more: int) -> torch.Tensor:
    """Send the own number around, and return the neighbor's and some more."""
    received = torch.zeros(1)
    world.join_torch()
    last = dist.isend(torch.tensor([float(world.rank)]), (world.rank + 1) % world.size)
    dist.recv(received, (world.rank - 1) % world.size)
    assert last is not None
    last.wait()
    return received + more


def report_threads(world: World) -> tuple[int, str]:
    """How many threads this process may use."""
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fail_as_told(world: World, fault: str, folder: Path) -> None:
    """On the last rank: fail in that way, while the others wait for a message from it."""
    sign_in(folder, world.rank)
    world.join_torch()
    failing, nothing = world.size - 1, torch.zeros(1)
    world.watch.doing = f"{world.rank}F0 of batch 1 on version 0"
    if world.rank != failing:
        dist.recv(nothing, failing)
        dist.recv(nothing, failing)
        return
    pids_in(folder, world.size)
    for other in range(failing):
        dist.send(nothing, other)
    match fault:
        case "raise":
            raise ArithmeticError("the sum is wrong")
        case "mistake":
            raise BiremeError(json.dumps({"depth": 8}))
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(10 * patience_s())
        case "crash":
            os._exit(7)
        case _:
            os.kill(os.getpid(), signal.Signals[fault])
            time.sleep(10 * patience_s())
