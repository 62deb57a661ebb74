"""`sync.mode = "quorum"` with real processes: one is killed, one is stopped, and the run goes on."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.killing.mortal_run import Started, mortal_run
from benchmarks.kills import LEASE_S, MOST_DIFFERENCE, PACE_S, Walk, ended, row_of, walk_through
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.sync.coordinator.messages import TERM
from tests.support.command import bireme
from tests.support.copies import Copy
from tests.support.training import Gate, Running, running, settings, write_run
from tests.train.test_train_replica_hosts import rounds_of

pytestmark = pytest.mark.slow

PACED = "tests.support.paced_samples:paced"
DEPTH, WIDTH = 2, 2


def copied(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Started:
    """A process that has imported everything already."""
    return Copy(words, folder, variables=variables)


def write_quorum(folder: Path, schedule: str = "2bw", depth: int = DEPTH, data: str = PACED) -> Path:
    """A run file of two replicas."""
    path = write_run(folder, schedule, depth, data=data)
    plan = folder / f"plan-{schedule}-{depth}.json"
    document = json.loads(plan.read_text())
    document["plan"]["width"] = WIDTH
    plan.write_text(json.dumps(document))
    text = path.read_text().replace(f"workers = {depth}", f"workers = {depth * WIDTH}")
    path.write_text(f'{text}\n[sync]\nmode = "quorum"\n')
    return path


@pytest.mark.long
def test_a_run_goes_on_when_ranks_are_killed_or_stopped_or_fail_and_when_its_leader_dies_saving(
    tmp_path: Path,
) -> None:
    """Each comes back with its replica, though the first start of one fails by what is told as a mistake. One
    process learns the same of the ledger's samples.
    """
    walk = Walk(2, "2bw", 2)
    with mortal_run(tmp_path, 2, 2, walk.schedule, lease_s=LEASE_S, pace_s=PACE_S, start=copied) as run:
        kills = list(walk_through(run, walk))
        end = ended(run)
        row = row_of(walk, kills, run, end)
        rounds = rounds_of(run.folder)

    assert [one["signal"] for one in kills] == ["SIGKILL", "SIGSTOP"]
    assert (row["status"], row["orphans"], row["other_weights"]) == (0, 0, 0)
    assert row["greatest_difference_of_losses"] < MOST_DIFFERENCE
    assert row["steps_told"] >= row["steps"] - 2  # who speaks for the run may die with a line unwritten
    assert row["ledger_is_whole"]
    document, sync = end.document, end.document["sync"]
    assert document["reason"] == "signal"
    assert document["checkpoint"] == document["steps"] == sync["rounds"] == len(rounds)
    assert "killed by signal 9" in end.said
    assert (
        "The samples are out of reach. The run continues with replica 1; replica 0 starts again." in end.said
    )
    members = [one["members"] for one in document["membership"]]
    assert members[0] == [0, 1]
    assert [one for one in members if one in ([0], [1])][:2] == [[1], [0]]
    without_1, without_0 = members.index([1]), members.index([0])
    assert [0, 1] in members[without_1:without_0]
    assert [0, 1] in members[without_0:]
    places = [place for line in rounds for own in line["samples"] for one in own for place in range(*one)]
    assert len(set(places)) == len(places) == sync["samples_committed"]
    redone = {line["epoch"] // TERM: line.get("returned", 0) for line in rounds}
    assert sync["samples_redone"] == sum(redone.values()) > 0
    assert sync["epochs"] >= 5
    assert [one["replica"] for one in sync["recoveries"]] == [0, 1]
    for one in sync["recoveries"]:
        assert min(one[part] for part in ("detect_s", "transfer_s", "catch_up_s")) >= 0
        assert [0, 1] in [own["members"] for own in document["membership"] if own["step"] == one["step"] - 1]


ENDLESS = settings(training__steps=100_000, checkpoint__every_steps=1_000)
FAILS = "tests.support.paced_samples:failing_"
NUM_READ, ALL = 40, 1_000_000
"""Samples that each process may read before the test does anything, and when it has done all."""


@contextmanager
def failing_run(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Gate]]:
    """A run of two replicas of one stage that waits at its gate; a sample fails once it may continue."""
    mark, gate = folder / "mark", Gate(folder / "gate", NUM_READ)
    monkeypatch.setenv("BIREME_TEST_MARK", str(mark))
    path = write_quorum(folder, "1f1b", 1, FAILS + how)
    with running(folder / "runs" / "run", "train", str(path), "--json", *ENDLESS, gate=gate) as run:
        run.wait_for_step(1)
        mark.touch()
        yield run, gate


@pytest.mark.long
def test_a_replica_whose_data_fails_starts_again_even_if_the_fork_server_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of them ended the run."""
    with failing_run(tmp_path, "once", monkeypatch) as (run, gate):
        ranks = run.ranks
        [server] = {
            int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]) for rank in ranks
        }
        os.kill(server, signal.SIGKILL)
        while "is back after" not in run.said:
            assert run.process.poll() is None, run.said
            gate.let_in(1)
            time.sleep(0.05)
        run.process.send_signal(signal.SIGTERM)
        gate.let_in(ALL)
        end = run.ended()
    said = end.err
    assert re.search(
        rf"Replica (\d) ended: rank \d, Sample \d+ of {FAILS}once fails: OSError: the disk does not answer\. "
        r"The run continues with replica \d; replica \1 starts again\.",
        said,
    ), said
    assert said.count(" ended: ") == 1, "the other replica has not noticed that the server is gone"
    assert end.document["reason"] == "signal"
    assert check_ledger(run.run / "ledger.jsonl").is_whole


@pytest.mark.long
def test_a_sample_that_fails_again_after_a_replica_failed_with_it_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_run(tmp_path, "always", monkeypatch) as (run, gate):
        gate.let_in(ALL)
        end = run.ended()
    number = (tmp_path / "mark").read_text()
    assert end.status == 2
    assert re.search(
        rf"Sample {number} of {FAILS}always fails: OSError: the disk does not answer\. Replica \d failed "
        r"with the same samples before replica \d did, so the data is at fault\.",
        end.err.replace("\n", " "),
    ), end.err
    assert end.err.count("starts again") == 1, end.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (settings(balance__mode="start"), 'balance.mode is "start"'),
        (settings(balance__batch="grow"), 'balance.batch is "grow"'),
    ],
)
def test_what_quorum_does_not_do_is_refused_before_anything_starts(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bireme(capsys, "train", str(write_quorum(tmp_path)), *more)

    assert result.status == 2
    assert words in result.err
    assert not (tmp_path / "runs").exists()
