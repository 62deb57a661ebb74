"""Whole runs go on from second copies: no checkpoint was written, and all state of a stage was lost."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.runtime.copies.copier import Copier, CopyOrders
from bireme.runtime.copies.keeper import Keeper, KeeperAddress
from bireme.runtime.processes import serve_from_here
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.machines import LaunchedProcess
from bireme.train.rank_zero_setup import has_copies
from bireme.train.rendezvous import until
from bireme.train.run_checkpoints import RunCopies, newest_state, start_name
from bireme.train.run_file import load_run_file
from tests.support.checkpoints import META, fill, snapshot_of
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.training import Running, losses, metrics, running, settings, write_run
from tests.train.test_checkpoint_folder import damage

PACED = "tests.support.paced_samples:paced"
PACE_S = 0.01
KILL_AFTER = 8


def lost_of(run: Path) -> tuple[int, int]:
    """The batches that were trained again after a death, and the age of the copy that the last line before
    it has. Fails unless the run began a second time after a step.
    """
    lines = metrics(run)
    _, again = (place for place, line in enumerate(lines) if line["kind"] == "start")
    last = [line for line in lines[:again] if line["kind"] == "train"][-1]
    assert lines[again]["step"] > 0, "it began from the beginning"
    return last["step"] - lines[again]["step"], last["copy_age"]


def train_until_a_copy_is_there(launcher: Running) -> None:
    launcher.wait_for_step(KILL_AFTER)
    step = KILL_AFTER
    while not any(line.get("copy_age") is not None for line in metrics(launcher.run, "train")):
        step += 1
        launcher.wait_for_step(step)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"] if TRY_ALL else ["2bw"])
def test_a_run_on_one_host_goes_on_from_its_copies_to_the_last_bit(schedule: str, tmp_path: Path) -> None:
    """Its ranks are gone, and the process that started them is not. It began again from its beginning."""
    path = write_run(tmp_path, schedule, 2, data=PACED)
    run = tmp_path / "runs" / "run"
    more = settings(training__steps=24, memory__copies=1, checkpoint__every_steps=0)
    with running(run, "train", str(path), "--json", *more, pace_s=PACE_S) as launcher:
        train_until_a_copy_is_there(launcher)
        os.kill(launcher.ranks[1], signal.SIGKILL)
        ended = launcher.ended()

    assert ended.document["steps"] == 24
    assert ended.document["second_copy"]["sent_bytes"] == 0, "there is no other host"
    assert 0 < ended.document["second_copy"]["step"] < 24
    assert "from second copies" in ended.err
    num_lost, age = lost_of(run)
    assert num_lost <= age
    assert losses(run).keys() == set(range(1, 25)), "a step that was trained again has the same loss"


class _Hosts:
    """Two hosts with a stage each, which are groups of processes of this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run, self._stack, self._port = folder / "runs" / "run", stack, str(free_port())
        path = write_run(folder, "1f1b", 2, data=PACED)
        text = path.read_text().replace("workers = 2", "workers = 1")
        path.write_text(f'{text}\n[sync]\nmode = "quorum"\nlease_s = 2.0\n')
        more = settings(training__steps=40, checkpoint__every_steps=0)
        self._words = ["-m", "bireme", "train", str(path), "--json", *more]
        self.run.parent.mkdir()
        self.launchers = [self.start(number) for number in range(2)]

    def start(self, number: int) -> Running:
        return self._stack.enter_context(self._launcher(number))

    @contextmanager
    def _launcher(self, number: int) -> Iterator[Running]:
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "GROUP_RANK": str(number), PACE: str(PACE_S)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
        process = Copy(self._words, self.run.parent, variables=variables, first=serve_from_here)
        try:
            yield Running(process, self.run, process.err)
        finally:
            process.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [1, 0], ids=["the_last_host", "the_host_of_coordinator_and_store"])
def test_a_pipeline_that_loses_a_host_goes_on_with_a_replacement_from_copies(
    lost: int, tmp_path: Path
) -> None:
    """Each host had the only first copy of its stage. Nothing of the lost host is left."""
    with ExitStack() as stack:
        hosts = _Hosts(tmp_path, stack)
        train_until_a_copy_is_there(hosts.launchers[0])
        hosts.launchers[lost].kill_all()
        hosts.launchers[lost] = hosts.start(lost)
        ended = [one.ended() for one in hosts.launchers]

    assert [one.status for one in ended] == [0, 0], ended
    (document,) = (json.loads(one.out) for one in ended if one.out)
    assert document["steps"] == 40
    assert document["second_copy"]["sent_bytes"] > 0
    assert any("from second copies" in one.err for one in ended)
    num_lost, age = lost_of(hosts.run)
    assert num_lost <= age
    assert losses(hosts.run).keys() == set(range(1, 41))
    found = check_ledger(hosts.run / "ledger.jsonl")
    assert found.is_whole


@pytest.fixture
def kept() -> Iterator[KeeperAddress]:
    """A keeper with the only shard of the state after step 5."""
    keeper = Keeper(bytes_per_s=None, timeout_s=patience_s())
    copier = Copier(CopyOrders(keeper.address, start_name(3), 0), 0, 1, patience_s())
    copies = RunCopies(copier, 1, lambda: True)
    copies.begin(snapshot_of(0, 5), META, copied_s=0.0, ignored=0)
    assert until(lambda: copier.newest is not None, patience_s()), copier.failure
    yield keeper.address
    keeper.close()


@pytest.mark.parametrize(
    ("saved", "damaged", "expected", "read"),
    [
        ([], [], "second copies after step 5", []),
        ([3, 4], [], "second copies after step 5", []),
        ([3, 5], [], "step-00000005", [5]),
        ([3, 6], [], "step-00000006", [6]),
        ([3, 6], [6], "second copies after step 5", [6, 3]),
        ([3, 6], [3, 6], "second copies after step 5", [6, 3]),
    ],
)
def test_a_run_goes_on_from_its_newest_whole_state_and_reads_no_older_checkpoint_for_that(
    saved: list[int],
    damaged: list[int],
    expected: str,
    read: list[int],
    kept: KeeperAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all checkpoints were damaged, a run with whole copies ended. It read every checkpoint to its end,
    although its copies were newer.
    """
    fill(tmp_path, saved)
    for step in damaged:
        damage(tmp_path, step)
    opened: list[int] = []
    whole = Checkpoint.damage

    def noted(one: Checkpoint) -> tuple[str, ...]:
        opened.append(one.manifest.step)
        return whole(one)

    monkeypatch.setattr(Checkpoint, "damage", noted)
    found, number = newest_state(tmp_path, [kept], load_run_file(None, []))
    assert found is not None
    assert (found.folder.name, number) == (expected, 4)
    assert opened == read
    if found.copies is not None:
        assert found.snapshot().tensors.keys() == snapshot_of(0, 5).tensors.keys()


def _members(*counts: int) -> dict[str, list[LaunchedProcess]]:
    return {
        f"host{host}": [LaunchedProcess(rank, f"host{host}", f"host{host}", False) for rank in range(count)]
        for host, count in enumerate(counts)
    }


@pytest.mark.parametrize(
    ("sets", "width", "counts", "expected"),
    [
        (["sync.mode=quorum"], 1, (1, 1), True),
        (["sync.mode=quorum"], 2, (1, 1), False),
        (["sync.mode=quorum", "memory.copies=1"], 2, (1, 1), True),
        (["sync.mode=quorum", "memory.copies=0"], 1, (1, 1), False),
        ([], 1, (1, 1), False),
    ],
)
def test_a_run_has_copies_if_nothing_else_has_its_state(
    sets: list[str], width: int, counts: tuple[int, ...], expected: bool
) -> None:
    run = load_run_file(None, sets)
    assert has_copies(run, width, _members(*counts)) is expected


@pytest.mark.parametrize(
    ("sets", "counts", "words"),
    [
        (["memory.copies=1"], (1, 1), 'sync.mode is "allreduce", in which a launcher such as torchrun'),
        (["memory.copies=1", "sync.mode=quorum"], (2, 1), "2 processes were started on one host"),
        (["sync.mode=quorum"], (2, 2), "2 processes were started on one host"),
    ],
)
def test_copies_that_would_be_lost_with_the_ranks_are_refused(
    sets: list[str], counts: tuple[int, ...], words: str
) -> None:
    with pytest.raises(BiremeError, match=words):
        has_copies(load_run_file(None, sets), 1, _members(*counts))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["memory.copies=2"], "memory.copies"),
        (["memory.copies=0", "memory.copy_rate=5Mbit/s"], "memory.copies is 0, so nothing is copied"),
        (["memory.copy_rate=fast"], "50Mbit/s"),
        (["memory.copy_rate=0Mbit/s"], "a rate above 0"),
    ],
)
def test_keys_of_copies_that_mean_nothing_are_refused(sets: list[str], words: str) -> None:
    with pytest.raises(BiremeError, match=words):
        load_run_file(None, sets)


def test_a_rate_is_in_bits_or_bytes() -> None:
    found = [
        load_run_file(None, [f"memory.copy_rate={text}"]).memory.copy_bytes_per_s
        for text in ("50Mbit/s", "6MB/s", "1.5 kbit/s", "8Mb/s")
    ]
    assert found == [6.25e6, 6e6, 187.5, 1e6]
