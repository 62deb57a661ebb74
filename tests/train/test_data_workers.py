"""Worker processes make the batches that a thread would, and none of them outlives its parent."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError, SampleError
from bireme.runtime.launch import launch
from bireme.runtime.microbatches import Rows
from bireme.runtime.processes import start_process
from bireme.runtime.world import World
from bireme.train.data import workers
from bireme.train.data.loader import RankBatches
from bireme.train.data.placing import Order
from bireme.train.data.samples import Batch
from bireme.train.data.source import OwnSamples, own_samples
from bireme.train.replica import DealtBatches
from tests.support.copies import Copy
from tests.support.patience import patience_s
from tests.support.ranks import until, wait_until_gone
from tests.support.together import run_threads
from tests.support.whole_batches import WholeBatches

pytestmark = pytest.mark.slow

TIMEOUT_S = 9.0
"""A worker may take a third of it for a batch."""


def made_by(num_workers: int, name: str, first: int = 0, count: int = 6) -> list[Batch]:
    samples = own_samples(f"tests.support.slow_samples:{name}")
    return list(WholeBatches(samples, Order(len(samples), 2**63), 8, first, count, num_workers=num_workers))


def test_batches_and_their_draws_do_not_depend_on_the_number_of_workers() -> None:
    alone, many = made_by(1, "numbered"), made_by(3, "numbered", first=2, count=4)
    for one, other in zip(alone[2:], many, strict=True):
        assert one.keys() == other.keys()
        assert all(
            torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
        )
    inline = made_by(0, "numbered")
    for one, other in zip(alone, inline, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("number", "pixels", "flag"))
    assert not torch.equal(alone[0]["drawn"], alone[5]["drawn"])


def test_what_a_sample_draws_does_not_depend_on_which_others_a_rank_reads() -> None:
    """Draws were seeded batch by batch: a rank that read half of one would have drawn otherwise."""
    samples = own_samples("tests.support.slow_samples:numbered")
    order, part = Order(len(samples), 2**63), Rows(("drawn",), 3, 6)
    [batch] = RankBatches(samples, order, 8, 1, 1, num_workers=1, wanted=lambda *_: (part,))
    assert torch.equal(batch.rows(part)["drawn"], made_by(1, "numbered", first=1, count=1)[0]["drawn"][3:6])


def test_an_error_in_a_worker_names_the_sample_and_keeps_its_trace() -> None:
    with pytest.raises(
        BiremeError, match=r"Sample 7 of tests\.support\.slow_samples:failing fails: ValueError"
    ) as caught:
        made_by(2, "failing")
    assert "in __getitem__" in "".join(caught.value.__notes__)


def test_a_worker_that_is_killed_is_started_again_and_makes_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its end was the end of the run."""
    undisturbed = made_by(2, "numbered")
    monkeypatch.setenv("BIREME_TEST_MARK", str(tmp_path / "mark"))
    for one, other in zip(undisturbed, made_by(2, "dying_once"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert re.search(
        r"bireme: The data worker \d of 2 was killed by signal 9 while it made batch \d; it is started",
        capfd.readouterr().err,
    )


def test_a_sample_that_kills_every_worker_is_named() -> None:
    with pytest.raises(
        SampleError,
        match=r"worker \d of 2 was killed by signal 9 while it made batch \d\. Started again, it was killed "
        r"by signal 9 at training sample 7\. If memory ran out, lower data\.num_workers",
    ) as caught:
        made_by(2, "dying")
    assert caught.value.samples == ("training sample 7",)


def test_a_worker_that_hangs_is_started_again_and_a_sample_at_which_all_hang_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both held the run until ranks gave up waiting for each other, or for ever where no rank did."""
    monkeypatch.setenv("BIREME_TEST_MARK", str(tmp_path / "mark"))

    def numbers_or_error(rank: int) -> list[int] | SampleError:
        samples = own_samples(f"tests.support.slow_samples:{('hanging_once', 'hanging')[rank]}")
        order = Order(len(samples), shuffled=False)
        try:
            with WholeBatches(
                samples, order, 5, num_batches=3, num_workers=2, timeout_s=TIMEOUT_S
            ) as batches:
                return [number for batch in batches for number in batch["number"].tolist()]
        except SampleError as error:
            return error

    once, always = run_threads(2, numbers_or_error)
    assert once == list(range(15))
    assert isinstance(always, SampleError)
    assert always.samples == ("training sample 7",)
    assert re.fullmatch(
        r"The data worker 2 of 2 took more than \d+ s while it made batch 1\. Started again, it took more "
        r"than \d+ s at training sample 7\. If a sample does take that long, raise cluster\.timeout_s\.",
        str(always),
    )


def test_closing_ends_workers_that_hang() -> None:
    samples = own_samples("tests.support.slow_samples:hanging")
    loader = WholeBatches(samples, Order(len(samples), shuffled=False), 5, num_workers=2)
    running = iter(loader)
    assert next(running)["number"].tolist() == [0, 1, 2, 3, 4]
    loader.close()
    assert next(running, None) is None
    assert loader.state() == 1


def test_the_same_workers_read_one_window_of_a_replica_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def noted(name: str, *words: Any) -> Any:
        started.append(name)
        return start_process(name, *words)

    monkeypatch.setattr(workers, "start_process", noted)
    samples, until = own_samples("tests.support.slow_samples:numbered"), 0
    order = Order(len(samples), shuffled=False)

    def deal(batch: int) -> list[range] | None:
        return [range(batch, batch + 1)] if batch < until else None

    with DealtBatches(samples, order, 1, 0, len(samples), num_workers=2, deal=deal) as loader:
        for until in (3, 5):
            num_read = len(list(loader))
            assert (num_read, loader.state()) == (3 if until == 3 else 2, until)
    assert len(started) == 2


def test_a_dataset_that_cannot_be_sent_is_refused() -> None:
    samples = OwnSamples("data", [{"x": 1}] * 4)
    samples.trouble = lambda: None  # type: ignore[attr-defined]  # makes no difference: only the dataset is sent
    [batch] = WholeBatches(samples, Order(4), 4, num_batches=1, num_workers=1)
    assert batch["x"].tolist() == [1] * 4

    class Local(list[dict[str, int]]):
        pass

    unsendable = OwnSamples("data", Local([{"x": 1}] * 4))
    with pytest.raises(BiremeError, match="cannot be sent to worker processes"):
        list(WholeBatches(unsendable, Order(4), 4, num_batches=1, num_workers=1))


def sums_of_batches(world: World) -> list[float]:
    """On every rank: what two workers made for it."""
    return [float(batch["number"].sum() + batch["drawn"].sum()) for batch in made_by(2, "numbered")]


def test_every_rank_of_a_launch_gets_the_same_batches_from_workers_of_its_own() -> None:
    one, other = launch(sums_of_batches, 2)
    assert one == other
    assert len(one) == 6


PARENT = """
import sys
from tests.support.whole_batches import WholeBatches
from bireme.train.data.placing import Order
from bireme.train.data.source import own_samples

if __name__ == "__main__":
    samples = own_samples("tests.support.slow_samples:noting")
    running = iter(WholeBatches(samples, Order(len(samples), shuffled=False), 2, num_workers=2))
    for _ in range(3):
        next(running)
    print("running", flush=True)
    {then}
"""


@contextmanager
def parent_that(then: str, folder: Path) -> Iterator[tuple[Copy, list[int]]]:
    """A parent in a session of its own with two workers that hang; and the numbers of these."""
    script = folder / "parent.py"
    script.write_text(PARENT.format(then=then))
    pids = folder / "pids"
    pids.mkdir()
    parent = Copy([str(script)], folder, variables={"BIREME_TEST_PIDS": str(pids)})
    try:
        until(lambda: parent.out.read_text() == "running\n")
        yield parent, [int(path.name) for path in pids.iterdir()]
    finally:
        parent.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@linux_only
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with parent_that("import time; time.sleep(1000)", tmp_path) as (parent, workers):
        assert len(workers) == 2
        parent.kill()
        wait_until_gone(workers)


@linux_only
def test_workers_take_no_notice_of_what_is_meant_for_the_parent(tmp_path: Path) -> None:
    then = (
        "import signal; [signal.signal(s, lambda *_: None) for s in (2, 15)]\n    while True: signal.pause()"
    )
    with parent_that(then, tmp_path) as (parent, workers):
        for number in (signal.SIGINT, signal.SIGTERM):
            for worker in workers:
                os.kill(worker, number)
        time.sleep(0.3)
        assert all(map(is_running, workers))
        parent.kill()
        wait_until_gone(workers)


@linux_only
@pytest.mark.parametrize("then", ["pass", "raise SystemExit(3)", "running = None"])
def test_a_parent_that_just_ends_does_not_hang(then: str, tmp_path: Path) -> None:
    with parent_that(then, tmp_path) as (parent, workers):
        assert parent.wait(patience_s()) == (3 if "3" in then else 0)
        wait_until_gone(workers)
