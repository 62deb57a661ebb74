"""What a launch of replicas makes of their ends and of other hosts, without any process."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from bireme.balance import ShareLimits
from bireme.runtime.board import Failure, RunFailed
from bireme.runtime.coordinator_client import Observer
from bireme.runtime.coordinator_process import CoordinatorProcess
from bireme.runtime.quorum import launch as launching
from bireme.runtime.quorum.launch import ReplicaOrder, launch_replicas
from bireme.runtime.quorum.ledger_tail import LedgerTail
from bireme.runtime.quorum.site import MOST_ALONE_S, Contact, ReplicaPart, Site, Starts
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Absence, CoordinatorReply, Gone, Incarnation, Member
from bireme.sync.coordinator.samples import LEDGER, CoordinatorSettings, SyncMode
from bireme.sync.coordinator.starts import StartAgreement


class Well:
    """A coordinator that nothing is wrong with."""

    port, is_closed = 0, False

    def trouble(self) -> None:
        """There is none."""

    def ended(self, life: Incarnation) -> None:
        """Nobody has to know."""

    def close(self) -> None:
        self.is_closed = True


class AllWait:
    """In the place of a replica's processes: one of them has found that all replicas wait for each other."""

    ranks, is_given_up = (), False
    cause = Failure.of(RunFailed("All replicas wait."), 0, None)

    def __init__(self, *_: object) -> None:
        """It has no order."""

    def __enter__(self) -> "AllWait":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def start(self) -> None:
        """There is nothing to start."""

    supervise = start


def never_runs(_world: World, _order: ReplicaOrder) -> None:
    raise AssertionError("there is no process")


def test_a_standstill_ends_the_run_by_no_mistake_of_the_user_and_no_replica_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life could do nothing else."""
    monkeypatch.setattr(launching, "Crew", AllWait)
    coordinator, told = Well(), list[str]()
    settings = CoordinatorSettings(SyncMode.GROUPS, 2, 1, 8, ShareLimits((1, 1), (8, 8)))
    site = Site(0, cast(CoordinatorProcess, coordinator), (("127.0.0.1", 0),), "secret", parts(0, 0, 1), 0.0)
    with pytest.raises(RunFailed, match=r"^All replicas wait\.$"):
        launch_replicas(never_runs, settings, ledger=tmp_path / LEDGER, tell=told.append, site=site)
    assert told == []
    assert coordinator.is_closed


def parts(host: int, *replicas: int) -> tuple[ReplicaPart, ...]:
    """Replicas of one rank on a host."""
    return tuple(ReplicaPart(replica, (0,), (host,)) for replica in replicas)


HOSTS = (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3))
QUORUM = CoordinatorSettings(SyncMode.QUORUM, 3, 1, 8, ShareLimits((1,) * 3, (8,) * 3), lease_s=10.0)
MEMBERS = tuple(Member(one, 0, (f"10.0.0.{one + 1} 4711",)) for one in range(3))


class Heard:
    """In the place of an observer: what it has heard, and how long ago."""

    def __init__(self, *_: object) -> None:
        self.word, self.silent_s, self.refusals = (
            CoordinatorReply(epoch=1, number=1, members=MEMBERS, is_installed=True),
            0.0,
            dict[int, float](),
        )

    def refused_s(self, number: int) -> float:
        return self.refusals.get(number, 0.0)

    def ended(self, life: Incarnation) -> None:
        """Nobody has to know."""

    def start(self) -> None:
        """It hears without a thread."""

    close = start


def contact_of(heard: Heard, told: list[str], how_it_ended: str = "") -> Contact:
    site = Site(
        2,
        cast(CoordinatorProcess, Well()),
        HOSTS,
        "secret",
        parts(2, 2),
        0.0,
        how_it_ended=lambda: how_it_ended,
    )
    return Contact(site, cast(Observer, heard), QUORUM, told.append)


def test_a_launcher_names_the_replicas_of_other_hosts_that_are_gone_and_back() -> None:
    heard, told = Heard(), list[str]()
    contact = contact_of(heard, told)
    contact.note_word()
    gone = (
        Gone(1, 0, 41, Absence.SILENT, "10.0.0.2 4711"),
        Gone(2, 0, 41, Absence.ENDED, "10.0.0.3 4711"),
    )
    heard.word = replace(heard.word, number=2, members=MEMBERS[:1], gone=gone)
    contact.note_word()
    contact.note_word()
    back = (MEMBERS[0], Member(1, 1, ("10.0.0.2 4712",), first=59))
    heard.word = replace(heard.word, number=3, members=back)
    contact.note_word()
    assert told == [
        "Replica 1 (10.0.0.2) is gone after step 41: it was not heard of for 10 s (sync.lease_s). The run "
        "continues with replica 0.",
        "Replica 1 (10.0.0.2) is back at step 60.",
    ]


def test_a_host_that_is_cut_off_says_so_once_and_goes_on_when_it_hears_of_the_others() -> None:
    heard, told = Heard(), list[str]()
    contact = contact_of(heard, told)
    for silent_s in (3.0, 11.0, 12.0, 0.5):
        heard.silent_s = silent_s
        contact._looked_s = 0.0
        assert not contact.has_ended(is_asked_to_stop=silent_s < 10)
    assert len(told) == 2
    assert "has answered this host for 11 s" in told[0]
    assert "10.0.0.1, 10.0.0.2" in told[0]


def test_a_host_that_was_cut_off_ends_when_the_run_s_folder_says_how_the_run_ended() -> None:
    heard, told = Heard(), list[str]()
    heard.silent_s = 11.0
    assert contact_of(heard, told, "The run ended after step 400.").has_ended(is_asked_to_stop=False)
    assert told == []  # the launcher prints that sentence at its end


@pytest.mark.parametrize(
    ("silent_s", "refusals", "is_asked", "sentence"),
    [
        (11.0, {}, True, "asked to stop while no coordinator of the run answered, for 11 s"),
        (11.0, {0: 10.5, 1: 10.5}, False, "The bireme train of all other hosts .* has ended"),
        (MOST_ALONE_S + 1, {0: 10.5}, False, "has answered this host for 30 minutes"),
    ],
)
def test_a_host_without_the_others_does_not_wait_for_ever(
    silent_s: float, refusals: dict[int, float], is_asked: bool, sentence: str
) -> None:
    heard = Heard()
    heard.silent_s, heard.refusals = silent_s, refusals
    with pytest.raises(RunFailed, match=sentence):
        contact_of(heard, []).has_ended(is_asked_to_stop=is_asked)


class Waits:
    """In the place of a replica's processes: they wait until they are given up."""

    cause = None
    made: ClassVar[list["Waits"]] = []

    def __init__(self, *_: object) -> None:
        self.ranks: tuple[()] = ()
        self.request: signal.Signals | None = None
        self.is_given_up = False
        self.made.append(self)

    def __enter__(self) -> "Waits":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def start(self) -> None:
        """There is nothing to start."""

    def supervise(self) -> None:
        while not self.is_given_up:
            threading.Event().wait(0.01)


def launched(heard: Heard, monkeypatch: pytest.MonkeyPatch, folder: Path, told: list[str]) -> Any:
    monkeypatch.setattr(launching, "Crew", Waits)
    monkeypatch.setattr(launching, "Observer", lambda *_: heard)
    monkeypatch.setattr(launching._Replica, "results", None)
    (folder / LEDGER).write_text("")
    site = Site(2, cast(CoordinatorProcess, Well()), HOSTS, "secret", parts(2, 2), 0.0)
    return launch_replicas(never_runs, QUORUM, ledger=folder / LEDGER, tell=told.append, site=site)


def test_a_replica_that_waits_is_ended_when_the_others_ended_the_run_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had trained, and did not hear that it was dropped: its launcher waited for it for ever."""
    heard, told = Heard(), list[str]()
    gone = (Gone(2, 0, 41, Absence.SILENT, ""),)
    heard.word = replace(heard.word, members=MEMBERS[:2], gone=gone, is_lost=True)
    monkeypatch.setattr(LedgerTail, "read", lambda _tail: (0, 1, 2))
    assert launched(heard, monkeypatch, tmp_path, told).results == []
    assert Waits.made[-1].is_given_up


def test_a_request_to_stop_reaches_the_next_life_too(tmp_path: Path) -> None:
    """The life that was asked was dropped before it could agree on a step with the others."""
    crews = [Waits(), Waits()]
    (part,) = parts(2, 2)
    replica = launching._Replica(part, lambda _part, life, _store: cast(Any, crews[life.life]), 0, None)
    replica.begin()
    crews[0].request = signal.SIGUSR1
    replica.give_up()
    replica.join()
    replica.begin()
    replica.give_up()
    replica.join()
    assert crews[1].request is signal.SIGUSR1
    assert replica.is_asked_to_stop


class Agreed:
    """What the hosts of a replica agree on; the lives that this host proposes are noted."""

    def __init__(self) -> None:
        self.now = StartAgreement(0, (), "")
        self.proposed: list[Incarnation] = []

    def agreement(self, _part: ReplicaPart) -> StartAgreement:
        return self.now

    def propose(self, life: Incarnation) -> None:
        self.proposed.append(life)

    def addresses(self, hosts: object) -> str:
        return f"{hosts}"


def test_a_replica_that_was_given_up_starts_again_though_its_hosts_are_all_there_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut ended after both launchers had given the replica up and before its processes had ended. Each saw
    the other host propose the old life still, and waited for ever.
    """
    monkeypatch.setattr(launching, "_ABSENT_S", -1.0)
    (tmp_path / LEDGER).write_text("")
    part, agreed = ReplicaPart(0, (0,), (0, 1)), Agreed()
    starts, told = cast(Starts, agreed), list[str]()
    replica = launching._Replica(part, lambda *_: cast(Any, Waits()), 0, starts)
    site = Site(0, cast(CoordinatorProcess, Well()), HOSTS, "secret", (part,), 0.0)
    tail = LedgerTail(tmp_path / LEDGER)
    supervision = launching._Supervision([replica], site, None, tail, told.append, lambda: False, starts, 2)
    replica.begin()
    replica.start("")
    monkeypatch.setattr(launching._Replica, "results", None)
    agreed.now = StartAgreement(0, (1,), "")
    supervision._meet_hosts(replica)
    replica.join()
    agreed.now = StartAgreement(0, (), "")
    supervision._meet_hosts(replica)
    assert agreed.proposed == [Incarnation(0, 0), Incarnation(0, 1)]
    assert len(told) == 1
