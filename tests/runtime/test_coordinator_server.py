"""The coordinator's server in this process."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from bireme.balance import ShareLimits
from bireme.errors import BiremeError
from bireme.runtime import coordinator_client
from bireme.runtime import coordinator_process as coordinator_server
from bireme.runtime.coordinator_client import CoordinatorClient, Observer
from bireme.runtime.coordinator_process import CoordinatorServer, Ledger
from bireme.sync.coordinator.host import CoordinatorCandidate, Host, beginner
from bireme.sync.coordinator.messages import CoordinatorReply, HostStart, Incarnation, RankId
from bireme.sync.coordinator.samples import LEDGER, Began, Committed, CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import Tick
from bireme.train import host_launcher
from bireme.wire import text_server
from bireme.wire.listener import open_port
from tests.support.patience import patience_s

Found = TypeVar("Found")


def found_in_word(client: CoordinatorClient, find: Callable[[CoordinatorReply], Found | None]) -> Found:
    """What `find` finds in a word, once that is something."""
    end_s = time.monotonic() + patience_s()
    while (found := find(client.word)) is None:
        assert time.monotonic() < end_s, client.word
        time.sleep(0.005)
    return found


class OnFullDisk(Ledger):
    def append(
        self, lines: Sequence[Began | Committed], *, is_lasting: bool = True, takes_up: bool = False
    ) -> None:
        if list(lines):
            raise BiremeError("No space left on device.")


def test_a_ledger_that_cannot_be_written_ends_the_coordinator_with_its_reason(tmp_path: Path) -> None:
    """It is not the fault of the rank whose report leads to the line."""
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)))
    ledger = OnFullDisk(tmp_path / LEDGER)
    server = CoordinatorServer(beginner(settings, 1), open_port("127.0.0.1"), "secret", ledger)
    client = CoordinatorClient([("127.0.0.1", server.port)], "secret", RankId(0, 0, 0), lease_s=1.0)
    server.start()
    client.say(address="")
    try:
        end_s = time.monotonic() + patience_s()
        while server.failure is None and time.monotonic() < end_s:
            time.sleep(0.01)
    finally:
        client.close(is_leaving=False)
        server.close()
        ledger.close()

    assert str(server.failure) == "No space left on device."


def test_time_in_which_the_coordinator_was_stopped_does_not_count_against_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A laptop that was closed for longer than the lease lost all replicas at once."""
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)))
    server = CoordinatorServer(beginner(settings, 1), open_port("127.0.0.1"), "secret", None)
    clock, oversleeps_s = [1000.0], [0.0, 45.0, 0.0, 3600.0]

    def wait(wait_s: float) -> None:
        clock[0] += wait_s + oversleeps_s.pop(0)

    monkeypatch.setattr(coordinator_server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(server, "_poller", SimpleNamespace(wait=wait))
    times = [server._now_s()]
    while oversleeps_s:
        server._turn()
        times.append(server._now_s())
    steps = [after - before for before, after in pairwise(times)]
    assert all(0 < step <= text_server.LONGEST_S + 1e-6 for step in steps)
    server._listener.close()


def test_a_rank_leaves_a_host_that_does_not_coordinate_as_soon_as_another_one_answers() -> None:
    """A rank was cut off for five seconds, called its own host, and stayed there for two leases: by then the
    run had ended, and it waited for ever.
    """
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)), lease_s=3600.0)
    first = socket.socket()
    first.bind(("127.0.0.1", 0))  # it refuses calls until it listens
    second = CoordinatorServer(
        Host(settings, CoordinatorCandidate(1, 2)), open_port("127.0.0.1"), "secret", ledger=None
    )
    hosts = [first.getsockname(), ("127.0.0.1", second.port)]
    client = CoordinatorClient(hosts, "secret", RankId(0, 0, 0), lease_s=settings.lease_s)
    second.start()
    client.say(address="")
    servers = [second]
    try:
        end_s = time.monotonic() + patience_s()
        while client._report.number == 0 and time.monotonic() < end_s:
            time.sleep(0.01)  # it talks to the second host
        first.listen()
        servers.append(CoordinatorServer(beginner(settings, 2), first, "secret", ledger=None))
        servers[1].start()
        members = found_in_word(client, lambda word: word.members or None)
    finally:
        client.close(is_leaving=False)
        for server in servers:
            server.close()
    assert [one.replica for one in members] == [0]


def test_what_became_due_while_the_server_was_not_running_is_done_when_it_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine it did not run for a moment between two waits, and missed the end of a lease. A
    coordinator that was cut off then never resigned, and its host waited for ever.
    """
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)))
    now_s = [0.0]
    monkeypatch.setattr(coordinator_server, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(
        coordinator_server, "host_wake_s", lambda _host, since_s: 1.0 if since_s <= 1.0 else 9.0
    )
    monkeypatch.setattr(coordinator_server, "LONGEST_S", 0.001)
    server = CoordinatorServer(beginner(settings, 1), open_port("127.0.0.1"), "secret", ledger=None)
    events = list[object]()
    monkeypatch.setattr(server, "_step", events.append)
    now_s[0] = 0.9
    server._turn()
    assert events == []
    now_s[0] = 1.1
    server._turn()
    assert events == [Tick()]
    server._listener.close()


def test_launchers_hear_of_each_other_over_a_coordinator_that_does_not_coordinate_until_one_ends() -> None:
    """A replica over several hosts starts without the host that coordinated, which may have died."""
    settings = CoordinatorSettings(SyncMode.QUORUM, 2, 2, 8, ShareLimits((1, 1), (8, 8)), lease_s=3600.0)
    candidate = CoordinatorCandidate(1, 2)
    server = CoordinatorServer(Host(settings, candidate), open_port("127.0.0.1"), "secret", ledger=None)
    observers = [Observer([("127.0.0.1", server.port)], "secret") for _ in range(2)]
    said = [HostStart(host, Incarnation(0, 7), f"host{host}:1") for host in range(2)]

    def wait_until_known(*expected: HostStart) -> None:
        end_s = time.monotonic() + patience_s()
        while set(observers[0].starts(settings.lease_s)) != set(expected):
            assert time.monotonic() < end_s, observers[0].starts(settings.lease_s)
            time.sleep(0.01)

    server.start()
    try:
        for observer, start in zip(observers, said, strict=True):
            observer.say_start(start)
            observer.start()
        wait_until_known(*said)
        observers[1].close()
        wait_until_known(said[0])
    finally:
        for observer in observers:
            observer.close()
        server.close()


def test_a_host_that_comes_back_does_not_wait_for_the_next_beat_once_the_run_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each machine that joined again waited for half a second here."""
    monkeypatch.setattr(coordinator_client, "BEAT_S", 10 * patience_s())
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)), lease_s=3600.0)
    server = CoordinatorServer(beginner(settings, 1), open_port("127.0.0.1"), "secret", None)
    hosts, found = [("127.0.0.1", server.port)], list[bool]()
    client = CoordinatorClient(hosts, "secret", RankId(0, 0, 0), lease_s=3600.0)
    asking = threading.Thread(target=lambda: found.append(host_launcher._answers(hosts, "secret")))
    server.start()
    try:
        client.say(address="")
        found_in_word(client, lambda word: word.members or None)
        asking.start()
        asking.join(patience_s())
        assert found == [True]
    finally:
        client.close(is_leaving=False)
        server.close()
        asking.join()


def test_a_rank_that_has_the_newest_word_gets_its_place_alone_and_one_that_calls_anew_gets_all() -> None:
    """With 1,000 members a word has 200 kB, and each rank reports five times in a lease."""
    settings = CoordinatorSettings(SyncMode.QUORUM, 1, 1, 8, ShareLimits((1,), (8,)))
    server = CoordinatorServer(beginner(settings, 1), open_port("127.0.0.1"), "secret", None)
    encode, sent = server._encode, list[CoordinatorReply]()

    def noted(word: CoordinatorReply) -> bytes:
        sent.append(word)
        return encode(word)

    server._encode = noted
    server.start()
    try:
        for _ in range(2):
            hosts, rank = [("127.0.0.1", server.port)], RankId(0, 0, 0)
            client = CoordinatorClient(hosts, "secret", rank, lease_s=0.5)
            client.say(address="here")
            found_in_word(client, lambda word: word.is_installed or None)
            before, end_s = len(sent), time.monotonic() + patience_s()
            while len(sent) < before + 3:
                assert time.monotonic() < end_s
                time.sleep(0.005)
            assert sent[-1] == CoordinatorReply(*client.word.place)
            assert client.word.members[0].addresses == ("here",)
            client.close(is_leaving=False)
    finally:
        server.close()
