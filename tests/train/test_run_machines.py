"""Machines that share no folder: each has its own, and what a machine lacks it fetches from the others."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.training import Running, losses, metrics, settings, steps_of_checkpoints, write_run
from tests.train.test_checkpoint_folder import damage
from tests.train.test_train_joined import closing, command, coordinating, lines_of, written
from tests.train.test_train_joined import ended as ended_with
from tests.train.test_train_phases import planned
from tests.train.test_train_replica_hosts import LEASE_S

PACED = "tests.support.paced_samples:paced"


class _Machines:
    """Machines with a folder of their own each, which are groups of processes of this machine. Each has a
    stage, or two replicas that may die.
    """

    def __init__(self, folder: Path, count: int, *, mode: str = "allreduce") -> None:
        self.folder, self.count = folder, count
        depth, width = (count, 1) if mode == "allreduce" else (1, 2 * count)
        text = write_run(folder, "1f1b", depth, width=width).read_text()
        self.path = folder / "own.toml"
        text = text.replace(f"workers = {depth * width}", f"workers = {depth * width // count}")
        self.path.write_text(f'{text}\n[sync]\nmode = "{mode}"\n')

    def run(self, number: int) -> Path:
        return self.folder / f"machine-{number}" / "run"

    @contextmanager
    def started(self, *words: str, first: int = 0) -> Iterator[list[Running]]:
        port = str(free_port())
        with ExitStack() as stack:
            yield [
                stack.enter_context(self._launcher((first + place) % self.count, place, port, *words))
                for place in range(self.count)
            ]

    @contextmanager
    def _launcher(self, number: int, place: int, port: str, *words: str) -> Iterator[Running]:
        run = self.run(number)
        run.parent.mkdir(exist_ok=True)
        variables = {"RANK": str(place), "WORLD_SIZE": str(self.count), "GROUP_RANK": str(place)}
        variables |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, PACE: "0.1"}
        own = settings(log__folder=run.parent)
        process = Copy(
            ["-m", "bireme", "train", str(self.path), *own, *words], run.parent, variables=variables
        )
        try:
            yield Running(process, run, process.err)
        finally:
            process.close()


def files_of(run: Path, step: int) -> set[str]:
    return {path.name for path in (run / "checkpoints" / f"step-{step:08d}").iterdir()}


def bireme(*words: str, folder: Path) -> tuple[int | None, str, str]:
    process = Copy(["-m", "bireme", *words], folder)
    out, err = process.communicate(timeout=patience_s())
    process.close()
    return process.returncode, out, err


@pytest.mark.slow
def test_a_pipeline_over_machines_without_a_shared_folder_resumes_after_the_first_has_lost_its_disk(
    tmp_path: Path,
) -> None:
    """The other one has a copy of its files, of which one is damaged in the newest checkpoint. So the run
    goes on from the one before, with the losses that it had, and the first machine gets all again.
    """
    machines = _Machines(tmp_path, 2)
    with machines.started() as started:
        ended = [one.ended() for one in started]
    assert [one.status for one in ended] == [0, 0], ended
    first, second = (machines.run(number) for number in range(2))
    shards = {"manifest.json", "rank-0000.safetensors", "rank-0001.safetensors"}
    for run in (first, second):
        assert steps_of_checkpoints(run) == [4, 8, 12]
        for step in steps_of_checkpoints(run):
            assert shards <= files_of(run, step)
    before = losses(first)
    weights = (first / "model" / "model.safetensors").read_bytes()

    shutil.rmtree(first)
    damage(second / "checkpoints", 12)
    with machines.started() as started:
        ended = [one.ended() for one in started]
    assert [one.status for one in ended] == [0, 0], ended
    assert "resumes after step 8 of 12" in ended[0].err
    assert {step: loss for step, loss in losses(first).items() if step > 8} == {
        step: loss for step, loss in before.items() if step > 8
    }
    assert (first / "model" / "model.safetensors").read_bytes() == weights
    assert shards <= files_of(first, 8)

    status, _, err = bireme("export", str(second), "--to", str(tmp_path / "model"), folder=tmp_path)
    assert status == 0, err
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    for step in steps_of_checkpoints(second):
        (second / "checkpoints" / f"step-{step:08d}" / "rank-0000.safetensors").unlink()
    status, _, err = bireme("evaluate", str(second), folder=tmp_path)
    assert status == 2
    assert "lacks rank-0000.safetensors: rank-0000.safetensors was written on" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="a path that is another one in each process")
def test_another_machine_leads_with_the_data_that_it_has_fetched(tmp_path: Path) -> None:
    """The first machine alone had the text, which is nowhere now. It comes back, and fetches the tokens."""
    machines = _Machines(tmp_path, 2)
    text = machines.run(0).parent / "book.txt"
    text.parent.mkdir()
    text.write_text("".join(f"{number} is a number.\n" for number in range(3_000)))
    more = settings(data__source="/proc/self/cwd/book.txt")
    for first, steps in ((0, 8), (1, 12)):
        with machines.started(*more, *settings(training__steps=steps), first=first) as started:
            ended = [one.ended() for one in started]
        assert [one.status for one in ended] == [0, 0], ended
        if not first:
            shutil.rmtree(text.parent)
    assert "resumes after step 8 of 12" in ended[0].err
    for number in range(2):
        assert (machines.run(number) / "files" / "0-book.txt" / "tokens.bin").is_file()


@pytest.mark.slow
@pytest.mark.long
def test_replicas_that_may_die_share_no_folder_and_go_on_when_the_first_machine_is_lost(
    tmp_path: Path,
) -> None:
    """The machine that led is gone for good. Another one leads, and has what it had written."""
    machines = _Machines(tmp_path, 3, mode="quorum")
    more = settings(training__steps=5000, sync__lease_s=LEASE_S, data__source=PACED)
    with machines.started(*more) as started:
        started[0].wait_for_step(9)
        end_s = time.monotonic() + patience_s()
        while not any((machines.run(1) / "checkpoints").glob("step-*/rank-0000.safetensors")):
            assert time.monotonic() < end_s, started[1].said
            time.sleep(0.1)
        started[0].kill_all()
        shutil.rmtree(machines.run(0))
        before = max(losses(machines.run(1)))
        started[1].wait_for_step(before + 5)
        os.kill(started[2].process.pid, signal.SIGTERM)
        ended = [one.ended() for one in started[1:]]
    assert [one.status for one in ended] == [0, 0], ended
    assert any("A replica on another host led it" in one.err for one in ended), ended
    for number in (1, 2):
        run = machines.run(number)
        newest = steps_of_checkpoints(run)[-1]
        assert newest > before
        assert {"manifest.json", "rank-0000.safetensors"} <= files_of(run, newest)
        assert newest == max(losses(run))


@pytest.mark.slow
@pytest.mark.skipif(not TRY_ALL, reason="a whole run more: make test-all")
def test_machines_that_join_have_folders_of_their_own(tmp_path: Path) -> None:
    run = written(tmp_path, "allreduce", 2)
    own = {name: tmp_path / f"runs-{name}" for name in ("blue", "green")}
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, "--no-devices", "--json"))
        joins = [
            command(tmp_path, name, *words, "--name", name, runs=own[name])
            for name, words in zip(own, lines_of(red, 2), strict=True)
        ]
        closing(stack, *joins)
        found = [ended_with(one) for one in (*joins, red)]
    assert [status for status, *_ in found] == [0, 0, 0], found
    for folder in own.values():
        assert steps_of_checkpoints(folder / "run")[-1] == 12
    assert not [*(tmp_path / "runs").glob("run/*")]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not TRY_ALL, reason="three machines for some minutes: make test-all")
def test_a_pipeline_of_machines_with_own_folders_goes_on_without_one_of_them(tmp_path: Path) -> None:
    """The stage of the machine that is killed comes from the copy of its files on the next one."""
    path = planned(tmp_path, "allreduce")
    more = settings(training__steps=30, checkpoint__every_steps=4)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, path, "--machines", "3", *more, pace_s=0.2))
        joins = {}
        for name, words in zip(("blue", "green"), lines_of(red, 2), strict=True):
            runs = tmp_path / f"runs-{name}"
            joins[name] = command(tmp_path, name, *words, "--name", name, pace_s=0.2, runs=runs)
        closing(stack, *joins.values())
        red.wait_for_step(13)
        joins["blue"].kill_all()
        shutil.rmtree(tmp_path / "runs-blue")
        found = [ended_with(one) for one in (red, joins["green"])]
    assert [status for status, *_ in found] == [0, 0], found
    starts = metrics(tmp_path / "runs" / "run", "start")
    assert [one["num_stages"] for one in starts] == [3, 2]
    assert starts[1]["step"] >= 8
