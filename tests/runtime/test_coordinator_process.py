"""The coordinator over real sockets, in a process that is killed, and one that is stopped, in a run."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from bireme.balance import ShareLimits
from bireme.runtime.coordinator_client import CoordinatorClient
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.replicas.launch import ReplicaOrder, launch_replicas
from bireme.runtime.world import World
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.sync.coordinator.messages import CoordinatorReply, Incarnation, RankId, RoundAt
from bireme.sync.coordinator.samples import LEDGER, CoordinatorSettings, SyncMode
from tests.runtime.test_coordinator_server import found_in_word
from tests.support.patience import patience_s

pytestmark = pytest.mark.slow

ROUNDS, KILLED_AT, STOPPED_AT = 12, 4, 8


def trained(client: CoordinatorClient, own: int, at_round: Callable[[int], None]) -> list[int]:
    """Go through some rounds as a rank does, without tensors; returns how many samples it had in each."""
    sizes = []
    for number in range(ROUNDS):
        at_round(number)
        at = RoundAt(committed=number)
        client.say(address="", wants=number + 1, rounds=(at,))

        def deal(word: CoordinatorReply, number: int = number) -> int | None:
            found = (one.num_samples for one in word.deals if (one.replica, one.batch) == (own, number))
            return next(found, None)

        sizes.append(found_in_word(client, deal))
        at = replace(at, ready=number, busy_s=0.01)
        client.say(address="", rounds=(at,))
        summed: int | None = None
        while True:

            def news(word: CoordinatorReply, number: int = number, summed: int | None = summed) -> int | None:
                if any(one.round == number for one in word.commits) or word.committed[0] > number:
                    return -1
                grants = (one.attempt for one in word.grants if one.round == number)
                return next((one for one in grants if one != summed), None)

            summed = found_in_word(client, news)
            if summed < 0:
                break
            client.say(address="", rounds=(replace(at, summed=number, attempt=summed),))
        client.say(address="", rounds=(RoundAt(committed=number + 1),))
    return sizes


def test_a_coordinator_that_is_killed_or_stopped_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = CoordinatorSettings(SyncMode.QUORUM, 2, 1, 8, ShareLimits((1, 1), (8, 8)), lease_s=2.0)
    order = CoordinatorOrder(settings, 0, 1, "secret", tmp_path / LEDGER, "127.0.0.1", begins=True)
    coordinator = CoordinatorProcess(order)
    coordinator.start()
    clients = [
        CoordinatorClient(
            [("127.0.0.1", coordinator.port)], "secret", RankId(replica, 0, 0), lease_s=settings.lease_s
        )
        for replica in range(2)
    ]
    sizes: dict[int, list[int]] = {}

    def kill(number: int) -> None:
        if number == KILLED_AT - 1:
            assert coordinator.process is not None
            os.kill(coordinator.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        if number == KILLED_AT:
            assert coordinator.process is not None
            assert coordinator.process.status is None
            os.kill(coordinator.process.pid, signal.SIGKILL)
            coordinator.process.join()
            assert coordinator.trouble() == "has ended"
            coordinator.start_again()
        if number == STOPPED_AT:
            assert coordinator.process is not None
            os.kill(coordinator.process.pid, signal.SIGSTOP)
            end_s = time.monotonic() + patience_s()
            while (why := coordinator.trouble()) is None and time.monotonic() < end_s:
                time.sleep(0.05)
            assert why == "has not answered for a lease"
            coordinator.start_again()

    def run(replica: int) -> None:
        sizes[replica] = trained(clients[replica], replica, kill if replica == 0 else lambda number: None)

    try:
        threads = [Thread(target=run, args=(replica,), daemon=True) for replica in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience_s())
    finally:
        for client in clients:
            client.close(is_leaving=True)
        coordinator.close()
    assert [sum(both) for both in zip(sizes[0], sizes[1], strict=True)] == [8] * ROUNDS
    assert coordinator.starts == 3
    found = check_ledger(tmp_path / LEDGER)
    assert (found.rounds, found.is_whole) == (ROUNDS, True)


def rank_that_dies_first(world: World, order: ReplicaOrder) -> list[int]:
    """Replica 1 dies in its first life before it says anything."""
    if order.life == Incarnation(1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    assert not order.is_empty, "nothing counts yet"
    rank = RankId(order.life.replica, order.life.life, world.rank)
    client = CoordinatorClient(order.hosts, order.token, rank, lease_s=order.lease_s)
    sizes = trained(client, rank.replica, lambda number: None)
    client.close(is_leaving=True)
    return sizes


def test_a_replica_that_dies_before_anything_counts_is_waited_for(tmp_path: Path) -> None:
    told: list[str] = []
    settings = CoordinatorSettings(
        SyncMode.QUORUM, 2, 1, 8, ShareLimits((1, 1), (8, 8)), lease_s=patience_s()
    )
    launched = launch_replicas(
        rank_that_dies_first, settings, ledger=tmp_path / LEDGER, tell=told.append, timeout_s=patience_s()
    )
    assert launched.results
    assert [sentence.count("replica 1 starts again") for sentence in told[:1]] == [1]
    found = check_ledger(tmp_path / LEDGER)
    assert (found.rounds, [one.members for one in found.members]) == (ROUNDS, [(0, 1)])
