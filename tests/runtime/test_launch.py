"""Launching on this machine: results by rank, what cannot be launched, one process as a world of its own."""

import functools
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch
import torch.distributed as dist

from bireme.cluster.machine import num_cores
from bireme.devices import num_accelerators
from bireme.errors import BiremeError
from bireme.runtime import launch as launching
from bireme.runtime.board import Board, RankFailed
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import Crew, Launcher, RankSetup, launch
from bireme.runtime.processes import Process
from bireme.runtime.stores import HashStore
from bireme.runtime.world import World
from tests.support.ranks import add_ranks, report_threads, run_script, torchrun, until

Value = TypeVar("Value")

ELASTIC = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.slow
def test_results_come_back_in_the_order_of_ranks() -> None:
    results = launch(add_ranks, 3, 10)

    assert torch.cat(results).tolist() == [12.0, 10.0, 11.0]


def test_processes_of_a_replica_are_called_by_the_ranks_that_messages_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas start side by side, so the numbers of processes do not say which is whose."""
    called: list[str] = []

    def start(name: str, *_: object) -> tuple[Process, Connection]:
        called.append(name)
        return cast(Process, None), Pipe()[0]

    monkeypatch.setattr(launching, "start_process", start)
    order = RankSetup(0, 2, timeout_s=1.0, num_threads=1, backend="gloo", first_rank=4)
    Crew(order, b"", cast(Board, None)).start()

    assert called == ["bireme rank 4", "bireme rank 5"]


class Deaf:
    """In the place of a process that ends of SIGKILL only."""

    def __init__(self) -> None:
        self.pid, self.status = 0, cast(int | None, None)
        self.sentinel, self._own_end = Pipe()
        self.signals = list[signal.Signals]()

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.status = -number
            self._own_end.close()

    def close(self) -> None:
        self.sentinel.close()


def test_a_crew_that_ends_hard_does_not_hold_up_another_crew_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas of a host are watched by one thread: while one is ended, the others must go on."""
    started = list[Deaf]()

    def start(*_: object) -> tuple[Process, Connection]:
        started.append(Deaf())
        return cast(Process, started[-1]), Pipe()[0]

    monkeypatch.setattr(launching, "start_process", start)
    order = RankSetup(0, 1, timeout_s=60.0, num_threads=1, backend="gloo")
    with Launcher() as launcher:
        ending, running = (launcher.start(Crew(order, b"")) for _ in range(2))
        ending.end(patience_s=0.0)
        while not ending.is_over:
            launcher.look()
        assert started[0].signals == [signal.SIGTERM, signal.SIGKILL]
        assert (launcher.crews, started[1].signals) == ([running], [])
        started[1].send_signal(signal.SIGKILL)
        while not running.is_over:
            launcher.look()

    assert ending.cause is None
    assert running.cause is not None
    assert "killed by signal 9" in running.cause.summary


def test_the_result_of_a_rank_on_another_host_comes_through_the_store() -> None:
    order = RankSetup(0, 2, timeout_s=1.0, num_threads=1, backend="gloo", ranks=(0,))
    store = HashStore()
    crew = Crew(order, b"", cast(Board, None), store)
    crew.ranks[0].result = b"own"
    store.set("shared/result/1", b64encode(b"other").decode())

    assert crew.results() == [b"own", b"other"]


@pytest.mark.slow
def test_one_process_is_a_launch_too_and_has_all_cores() -> None:
    assert launch(report_threads, 1) == [(num_cores(), str(num_cores()))]


@pytest.mark.slow
def test_processes_have_the_threads_they_are_given() -> None:
    assert launch(report_threads, 2, threads_per_process=3) == [(3, "3")] * 2


@pytest.mark.slow
def test_large_arguments_and_results_go_through() -> None:
    large = torch.arange(3_000_000)

    assert all(torch.equal(result, large) for result in launch(give_back, 2, large))


def give_back(world: World, what: Value) -> Value:
    return what


@pytest.mark.slow
def test_a_launch_from_another_thread_works() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(launch(give_back, 2, "hello")))
    thread.start()
    thread.join()

    assert results == ["hello", "hello"]


@pytest.mark.slow
def test_a_second_launch_does_not_meet_the_first() -> None:
    assert launch(share_in_the_store, 2, "a") == ["a", "a"]
    assert launch(share_in_the_store, 2, "b") == ["b", "b"]


def share_in_the_store(world: World, text: str) -> str:
    if world.rank == 0:
        assert not world.store.check(["text"])
        world.store.set("text", text)
    world.store.wait(["text"])
    return world.store.get("text").decode()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_launch_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launch(give_back, 2, None)  # The first one starts what Python keeps for all of them.
    before = held()
    launch(give_back, 2, None)
    with pytest.raises(RankFailed):
        launch(fail, 2)

    until(lambda: held() <= before)
    assert list(tmp_path.iterdir()) == []


def held() -> int:
    """How many open files, threads and processes this process has."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return sum(len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")) + len(children)


def fail(world: World) -> None:
    raise ArithmeticError(world.rank)


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    def inner(world: World) -> None:
        pass

    for function in (inner, lambda world: None, functools.partial(inner)):
        with pytest.raises(BiremeError, match="a new process cannot import it"):
            launch(function, 2)


def test_arguments_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(BiremeError, match="arguments of give_back cannot be handed to new processes"):
        launch(give_back, 2, threading.Lock())


@pytest.mark.parametrize(("num_processes", "timeout_s"), [(0, 60.0), (-1, 60.0), (2, 0.0)])
def test_numbers_that_make_no_sense_are_refused(num_processes: int, timeout_s: float) -> None:
    with pytest.raises(BiremeError, match="must be positive"):
        launch(give_back, num_processes, None, timeout_s=timeout_s)


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_a_mistake_of_the_user() -> None:
    with pytest.raises(BiremeError, match="result of rank 1 cannot be handed to the process that launched"):
        launch(return_a_lock, 2)


def return_a_lock(world: World) -> object:
    return threading.Lock() if world.rank == 1 else None


@pytest.mark.slow
@pytest.mark.skipif(num_accelerators() >= 2, reason="there is a CUDA device for each process")
def test_processes_without_a_cuda_device_of_their_own_are_refused() -> None:
    with pytest.raises(BiremeError, match="needs a CUDA device of its own"):
        launch(give_back, 2, None, backend="nccl")


@pytest.mark.slow
@pytest.mark.gpu
def test_a_rank_has_its_cuda_device_and_sums_what_is_there_and_on_the_host() -> None:
    (device,) = launch(sum_on_both, 1, backend="nccl")

    assert device == "cuda:0"


def sum_on_both(world: World) -> str:
    fabric = DistFabric(world)
    for on_host in (False, True):
        group = fabric.group([0], on_host=on_host)
        assert group is not None
        for device in (torch.device("cpu"), world.device):
            group.all_reduce(torch.ones(2, device=device)).wait()
        group.close()
    return str(world.device)


@pytest.mark.slow
def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(BiremeError, match="There is no backend 'mpi'"):
        launch(give_back, 1, None, backend="mpi")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_script_that_launches_while_it_is_imported_is_told_what_to_do(tmp_path: Path) -> None:
    script = "from bireme.runtime.launch import launch\nfrom tests.support.ranks import report_threads\n"
    run = run_script(script + "launch(report_threads, 2)\n", tmp_path)

    assert run.returncode == 1
    assert 'Put the part that must run once under `if __name__ == "__main__":`.' in run.stderr
    assert run.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_script_that_breaks_when_it_is_imported_shows_where(tmp_path: Path) -> None:
    script = (
        "from bireme.runtime.launch import launch\nfrom tests.support.ranks import report_threads\n"
        "if __name__ == '__main__':\n    launch(report_threads, 1)\nelse:\n    1 / 0\n"
    )
    run = run_script(script, tmp_path)

    assert "ZeroDivisionError" in run.stderr
    assert "Rank 0 failed: its process ended with status 1 before it could start its work" in run.stderr


@pytest.mark.slow
def test_a_function_that_was_typed_in_is_refused() -> None:
    text = "from bireme.runtime.launch import launch\ndef f(world): pass\nlaunch(f, 2)\n"
    run = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, check=False)

    assert "f cannot be launched: it was typed in" in run.stderr


@pytest.mark.slow
def test_functions_of_the_script_itself_can_be_launched(tmp_path: Path) -> None:
    script = (
        "from bireme.runtime.launch import launch\ndef f(world): return world.rank\n"
        "if __name__ == '__main__':\n    print(launch(f, 2))\n"
    )
    run = run_script(script, tmp_path)

    assert (run.stdout, run.stderr) == ("[0, 1]\n", "")


@pytest.mark.slow
def test_two_worlds_one_after_the_other_work_under_torchrun(tmp_path: Path) -> None:
    script = """
from bireme.runtime.world import World
from tests.support.ranks import add_ranks

for more in (10, 20):
    with World.from_environment(timeout_s=20) as world:
        print(f"{world.rank} of {world.size} on {world.device}: {add_ranks(world, more).item():g}\\n", end="")
"""
    run = run_script(script, tmp_path, launcher=torchrun(2))

    assert run.returncode == 0, run.stderr
    expected = ["0 of 2 on cpu: 11", "0 of 2 on cpu: 21", "1 of 2 on cpu: 10", "1 of 2 on cpu: 20"]
    assert sorted(run.stdout.splitlines()) == expected


def test_a_world_alone_needs_no_other_process() -> None:
    with World.alone() as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert not dist.is_initialized(), "nothing here needs it"
        world.join_torch()
        values = torch.ones(2)
        dist.all_reduce(values)
        assert values.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()


def test_an_error_in_a_world_alone_is_that_error() -> None:
    with pytest.raises(ArithmeticError, match="the sum is wrong"), World.alone():
        raise ArithmeticError("the sum is wrong")
    assert not dist.is_initialized()


def test_only_one_world_joins_torch_at_a_time() -> None:
    with World.alone() as outer, World.alone() as inner:
        outer.join_torch()
        outer.join_torch()
        with pytest.raises(BiremeError, match="already initialized"):
            inner.join_torch()


@pytest.mark.parametrize("missing", ELASTIC)
def test_a_missing_variable_of_torchrun_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ELASTIC:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing)

    with pytest.raises(BiremeError, match=f"environment variable {missing} is not set"):
        World.from_environment()


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")

    with pytest.raises(BiremeError, match="RANK must be a whole number, but it is 'first'"):
        World.from_environment()
