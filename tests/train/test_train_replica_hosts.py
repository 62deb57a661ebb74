"""Replicas that may die over several hosts: one is cut off, another one dies, and the run goes on."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.killing.mortal_run import losses_of_one_process
from benchmarks.killing.session import living, name_of
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.sync.coordinator.samples import in_force
from bireme.train.run_file import load_run_file
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.hosts import Host, hosts, set_cable
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.torchrun_runs import torchrun_train
from tests.support.training import Running, losses, metrics, settings, write_run

pytestmark = pytest.mark.slow

PORT = "29400"
"""A host of these has all ports to itself."""
PACE_S = 0.05
"""While a test waits for leases to end, few steps are trained."""
NUM_HOSTS = 3
MORE_STEPS = 20
"""More than are dealt when a coordinator dies."""
LEASE_S = 4.0
"""A host whose lease ends is dropped. One that is dropped because its machine is busy comes back, which harms
no test, so the lease need not grow with what else runs.
"""
TIMEOUT_SHARE = 0.08
"""Of the time that a test waits on a machine as busy as this one. A host that is cut off starts again after
the timeout.
"""


def written(folder: Path, mode: str = "quorum", *, width: int = NUM_HOSTS, num_here: int = 1) -> Path:
    """A run file of replicas of one stage, of which a host has so many."""
    path = write_run(folder, "1f1b", 1, width=width, data="tests.support.paced_samples:paced")
    text = path.read_text().replace(f"workers = {width}", f"workers = {num_here}")
    path.write_text(f'{text}\n[sync]\nmode = "{mode}"\nlease_s = {LEASE_S}\n')
    return path


@contextmanager
def launcher(
    number: int, machine: Host | None, run: Path, *words: str, master: str, port: str = PORT
) -> Iterator[Running]:
    """`bireme train WORDS…` on a host, as its launcher; without a host it takes this machine for one."""
    variables = {"RANK": str(number), "WORLD_SIZE": str(NUM_HOSTS), "GROUP_RANK": str(number)}
    variables |= {"MASTER_ADDR": master, "MASTER_PORT": port, PACE: str(PACE_S)}
    first = None if machine is None else machine.begin
    process = Copy(["-m", "bireme", "train", *words], run.parent, variables=variables, first=first)
    try:
        yield Running(process, run, process.err)
    finally:
        process.close()


def wait_for_members(launcher: Running, *members: int) -> None:
    """Until these, and nobody else, have had a part in a round that was added to the ledger since."""
    end_s, num_before = time.monotonic() + patience_s(), len(rounds_of(launcher.run))
    while not any(tuple(one["members"]) == members for one in rounds_of(launcher.run)[num_before:]):
        assert time.monotonic() < end_s, launcher.said
        assert launcher.process.poll() is None, launcher.said
        time.sleep(0.2)


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The rounds that count, batch by batch. A line that no rank had heard of when its coordinator died is
    undone by the first line of the next coordinator, and a late line of an earlier coordinator never counts.
    """
    path = run / "ledger.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = dict(enumerate(map(json.loads, text[: text.rfind("\n") + 1].splitlines())))
    found: list[dict[str, Any]] = []
    for line in in_force(lines).values():
        if line["kind"] == "round":
            found.append(line)
        else:
            found = [one for one in found if one["batch"] < line["batch"]]
    return found


@pytest.mark.long
def test_the_hosts_with_the_quorum_go_on_without_one_that_is_cut_off_or_dies(tmp_path: Path) -> None:
    """The host that coordinates and leads is cut off, then the one that took up dies. Both come back. The run
    ends while the third one is cut off: it waited for ever for a coordinator that was gone, and its rank for
    a batch that was over.
    """
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    training = {"training__steps": 5000, "training__optimizer": "sgd", "training__learning_rate": 0.003}
    more = settings(**training, cluster__timeout_s=TIMEOUT_SHARE * patience_s(), checkpoint__every_steps=0)
    words = [str(written(tmp_path)), "--json", *more]
    with hosts(NUM_HOSTS) as machines, ExitStack() as stack:
        master = machines[0].address
        first, second, third = (
            stack.enter_context(launcher(number, machine, run, *words, master=master))
            for number, machine in enumerate(machines)
        )
        wait_for_members(first, 0, 1, 2)
        set_cable(0, is_plugged=False)
        wait_for_members(second, 1, 2)
        set_cable(0, is_plugged=True)
        wait_for_members(first, 0, 1, 2)
        second.kill_all()
        wait_for_members(third, 0, 2)
        second = stack.enter_context(launcher(1, machines[1], run, *words, master=master))
        wait_for_members(third, 0, 1, 2)
        set_cable(2, is_plugged=False)
        for one in (first, second):  # rounds go on without it before it is dropped
            one.wait_for_words(f"Replica 2 ({machines[2].address}) is gone after step")
        wait_for_members(first, 0, 1)
        os.kill(first.process.pid, signal.SIGTERM)
        ended = [one.ended() for one in (first, second, third)]

    assert [one.status for one in ended] == [0, 0, 0], ended
    (document,) = (json.loads(one.out) for one in ended if one.out)
    assert (document["reason"], document["checkpoint"]) == ("signal", document["steps"])
    rounds = rounds_of(run)
    assert {(0, 1, 2), (1, 2), (0, 2), (0, 1)} <= {tuple(line["members"]) for line in rounds}
    assert "Replica 0 is back after" in ended[0].err
    assert "No coordinator of the run has answered this host" in ended[2].err
    assert f"The run ended after step {document['steps']} (signal)" in ended[2].err
    told = {(one["event"], one["replica"], one.get("why")) for one in metrics(run, "membership")}
    assert ("gone", 2, "silent") in told
    assert check_ledger(run / "ledger.jsonl").is_whole
    expected = losses_of_one_process(run)
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-3), step


@pytest.mark.long
@pytest.mark.skipif(not TRY_ALL, reason="takes long: BIREME_TESTS=all")
@pytest.mark.parametrize("mode", ["groups", "diloco"])
def test_replicas_that_average_weights_go_on_when_the_host_that_coordinates_dies(
    mode: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    more = settings(training__steps=5000, checkpoint__every_steps=0)
    more += settings(sync__diloco_every=4) if mode == "diloco" else []
    words = [str(written(tmp_path, mode)), "--json", *more]
    where = {"master": "127.0.0.1", "port": str(free_port())}
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(launcher(number, None, run, *words, **where)) for number in range(NUM_HOSTS)
        )
        first.wait_for_step(5)
        first.kill_all()
        second.wait_for_step(max(losses(run)) + MORE_STEPS)
        os.kill(third.process.pid, signal.SIGTERM)
        ended = [one.ended() for one in (second, third)]

    assert [one.status for one in ended] == [0, 0], ended
    (document,) = (json.loads(one.out) for one in ended if one.out)
    assert (document["reason"], document["checkpoint"]) == ("signal", document["steps"])
    assert document["membership"][-1]["members"] == [1, 2]
    ledger = run / "ledger.jsonl"
    assert check_ledger(ledger).is_whole
    assert ledger.read_text().count('"kind":"start"') == 2


@pytest.mark.long
def test_where_torchrun_starts_a_process_for_each_rank_one_of_them_starts_all_ranks(tmp_path: Path) -> None:
    """A rank that dies is started again, which torchrun never sees: it would end all others. The mode is the
    one that the planner has chosen for the plan.
    """
    run = tmp_path / "runs" / "run"
    words = [str(written(tmp_path, "auto", width=2, num_here=2)), *settings(training__steps=5000)]
    (plan,) = tmp_path.glob("plan-*.json")
    document = json.loads(plan.read_text())
    document["plan"] |= {"sync_mode": "quorum", "sum_codec": "none"}
    plan.write_text(json.dumps(document))
    with torchrun_train(run, *words, pace_s=PACE_S) as started:
        started.running.wait_for_step(2)
        launcher, *others = started.ranks
        ranks = [pid for pid in living(launcher) if name_of(pid).startswith("bireme rank 1")]
        os.kill(ranks[0], signal.SIGKILL)
        started.running.wait_for_words("Replica 1 is back after")
        os.kill(launcher, signal.SIGTERM)
        ended = started.ended()

    assert len(others) == 1
    assert ended.status == 0, ended
    assert {(0, 1), (0,)} <= {tuple(line["members"]) for line in rounds_of(run)}
    assert check_ledger(run / "ledger.jsonl").is_whole


_SLOW = """format = 1

[[server]]
name = "one"
[[server.device]]
kind = "cpu"
memory_bytes = 4_000_000_000
[[server.card]]
bytes_per_s = 10

[[server]]
name = "other"
[[server.device]]
kind = "cpu"
memory_bytes = 4_000_000_000
[[server.card]]
bytes_per_s = 10
"""


@pytest.mark.long
@pytest.mark.skipif(not TRY_ALL, reason="takes long: BIREME_TESTS=all")
def test_torchrun_s_processes_average_weights_if_the_planner_chooses_that(tmp_path: Path) -> None:
    """On links that are so slow that any sum of gradients takes minutes."""
    run, cluster = tmp_path / "runs" / "run", tmp_path / "slow.toml"
    cluster.write_text(_SLOW)
    words = [str(written(tmp_path, "auto", width=2, num_here=2)), "--json"]
    words += settings(plan__file="", plan__depth=1, plan__width=2, cluster__workers="", training__steps=12)
    words += settings(cluster__source=cluster, sync__diloco_every=10)
    with torchrun_train(run, *words) as started:
        told = started.ended()
    assert told.status == 0, told.err
    assert told.document["steps"] == 12
    assert load_run_file(run / "run.toml").sync.mode == "diloco"
