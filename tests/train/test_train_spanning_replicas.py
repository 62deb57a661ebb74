"""Replicas over several hosts: a host dies, the other replica goes on, and a replacement heals the first.

All hosts are this machine, each with a launcher and processes of its own.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.killing.mortal_run import losses_of_one_process
from benchmarks.killing.session import living, name_of
from bireme.runtime.processes import serve_from_here
from bireme.sync.coordinator.ledger_check import check_ledger
from tests.support.copies import Copy
from tests.support.hosts import Host, hosts, set_cable
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.together import run_threads
from tests.support.training import Running, losses, settings, write_run
from tests.train.test_train_replica_hosts import (
    LEASE_S,
    PACE_S,
    TIMEOUT_SHARE,
    rounds_of,
    wait_for_members,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

UNTIED = "gpt:layers=2,width=16,heads=2,vocab=257,context=32,tied=false"
NUM_HOSTS, DEPTH = 4, 2
MORE_STEPS = 8


class Hosts:
    """The launchers of the hosts of a run, by their numbers."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        stack: ExitStack,
        words: Sequence[str],
        machines: Sequence[Host | None] = (None,) * NUM_HOSTS,
        depth: int = DEPTH,
    ) -> None:
        self.run = folder / "runs" / "run"
        self.run.parent.mkdir()
        path = write_run(folder, "1f1b", depth, model=UNTIED, data="tests.support.paced_samples:paced")
        plan = folder / f"plan-1f1b-{depth}.json"
        document = json.loads(plan.read_text())
        document["plan"]["width"] = NUM_HOSTS // depth
        plan.write_text(json.dumps(document))
        text = path.read_text().replace(f"workers = {depth}", "workers = 1")
        path.write_text(f'{text}\n[sync]\nmode = "{mode}"\nlease_s = {LEASE_S}\n')
        self._machines = machines
        self._stack, self._words, self._port = stack, [str(path), "--json", *words], str(free_port())
        self.launchers = dict[int, Running]()
        for number in range(NUM_HOSTS):
            self.start(number)

    def start(self, number: int) -> Running:
        """`bireme train` on a host, for the first time or again."""
        self.launchers[number] = self._stack.enter_context(self._launcher(number))
        return self.launchers[number]

    @contextmanager
    def _launcher(self, number: int) -> Iterator[Running]:
        variables = {"RANK": str(number), "WORLD_SIZE": str(NUM_HOSTS), "GROUP_RANK": str(number)}
        first, machine = self._machines[0], self._machines[number]
        address = "127.0.0.1" if first is None else first.address
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": self._port, PACE: str(PACE_S)}
        words = ["-m", "bireme", "train", *self._words]
        # With a server of its own all of the host's processes are in one session.
        begin = serve_from_here if machine is None else machine.begin
        process = Copy(words, self.run.parent, variables=variables, first=begin)
        try:
            yield Running(process, self.run, process.err)
        finally:
            process.close()


def wait_until_none(session: int) -> None:
    """Until no process of a session is left."""
    end_s = time.monotonic() + patience_s()
    while left := living(session):
        assert time.monotonic() < end_s, [name_of(pid) for pid in left]
        time.sleep(0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [3, 0], ids=["its_launcher_is_killed", "with_the_coordinator"])
def test_a_host_of_a_replica_is_cut_off_or_dies_the_other_replica_goes_on_and_the_first_is_healed(
    lost: int, tmp_path: Path
) -> None:
    """Both hosts of a replica end their ranks if one of them is cut off, and agree on the next incarnation
    with the network. Then a host of the other replica dies: `kill -9` of the launcher alone ends all
    processes of its host, and nothing else. A replacement heals that replica.
    """
    more = settings(training__steps=5000, training__optimizer="sgd", training__learning_rate=0.003)
    more += settings(checkpoint__every_steps=0, cluster__timeout_s=TIMEOUT_SHARE * patience_s())
    broken, whole = lost // DEPTH, 1 - lost // DEPTH
    with hosts(NUM_HOSTS) as machines, ExitStack() as stack:
        run_hosts = Hosts(tmp_path, "quorum", stack, more, machines)
        partner, other = run_hosts.launchers[lost ^ 1], run_hosts.launchers[whole * DEPTH]
        wait_for_members(other, 0, 1)
        set_cable(whole * DEPTH + 1, is_plugged=False)
        wait_for_members(partner, broken)
        other.wait_for_words(f"Replica {whole} waits for host {whole * DEPTH + 1}")
        set_cable(whole * DEPTH + 1, is_plugged=True)
        wait_for_members(other, 0, 1)
        if lost == 0:
            run_hosts.launchers[lost].kill_all()
        else:
            os.kill(run_hosts.launchers[lost].process.pid, signal.SIGKILL)
            wait_until_none(run_hosts.launchers[lost].process.pid)
        wait_for_members(other, whole)
        partner.wait_for_words(f"Replica {broken} waits for host {lost}")
        run_hosts.start(lost)
        wait_for_members(other, 0, 1)
        os.kill(other.process.pid, signal.SIGTERM)
        ended = [one.ended() for _, one in sorted(run_hosts.launchers.items())]

    assert [one.status for one in ended] == [0, 0, 0, 0], ended
    (document,) = (json.loads(one.out) for one in ended if one.out)
    assert (document["reason"], document["checkpoint"]) == ("signal", document["steps"])
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert {(0, 1), (0,), (1,)} <= {tuple(line["members"]) for line in rounds_of(run_hosts.run)}
    assert f"Replica {broken} is back after" in ended[lost ^ 1].err
    assert check_ledger(run_hosts.run / "ledger.jsonl").is_whole
    expected = losses_of_one_process(run_hosts.run)
    for step, loss in losses(run_hosts.run).items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-3), step


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["diloco", "groups"])
def test_a_rank_that_dies_ends_its_replica_only_and_a_run_without_a_whole_replica_ends(
    mode: str, tmp_path: Path
) -> None:
    """Two runs at once, for one of them waits for long."""

    def check(place: int) -> None:
        folder = tmp_path / str(place)
        folder.mkdir()
        if place:
            a_run_without_a_whole_replica_ends(folder)
        else:
            a_rank_that_dies_ends_its_replica_only(mode, folder)

    run_threads(2, check)


def a_run_without_a_whole_replica_ends(folder: Path) -> None:
    """Each replica has lost a host. The hosts that are left waited for replacements for ever."""
    more = settings(training__steps=5000, checkpoint__every_steps=0)
    with ExitStack() as stack:
        run_hosts = Hosts(folder, "quorum", stack, more)
        first, second, third, fourth = run_hosts.launchers.values()
        wait_for_members(first, 0, 1)
        for one in (second, fourth):
            one.kill_all()
        ended = [one.ended() for one in (first, third)]

    assert [one.status for one in ended] == [1, 1], ended
    assert all("the run resumes from its newest checkpoint" in one.err for one in ended), ended


def a_rank_that_dies_ends_its_replica_only(mode: str, folder: Path) -> None:
    """Replicas that average weights may span hosts."""
    more = settings(training__steps=5000, checkpoint__every_steps=0)
    more += settings(sync__diloco_every=4) if mode == "diloco" else []
    with ExitStack() as stack:
        run_hosts = Hosts(folder, mode, stack, more)
        first, _, third, fourth = run_hosts.launchers.values()
        first.wait_for_step(5)
        (rank,) = fourth.ranks
        os.kill(rank, signal.SIGKILL)
        for one in (third, fourth):
            one.wait_for_words("Replica 1 is back after")
        first.wait_for_step(max(losses(run_hosts.run)) + MORE_STEPS)
        os.kill(fourth.process.pid, signal.SIGTERM)
        ended = [one.ended() for one in run_hosts.launchers.values()]

    assert [one.status for one in ended] == [0, 0, 0, 0], ended
    (document,) = (json.loads(one.out) for one in ended if one.out)
    assert (document["reason"], document["checkpoint"]) == ("signal", document["steps"])
    assert "killed by signal 9" in ended[3].err
    assert check_ledger(run_hosts.run / "ledger.jsonl").is_whole
