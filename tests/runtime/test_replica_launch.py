"""What a launch of replicas makes of their ends and of other hosts, without any process."""

import signal
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from bireme.balance import ShareLimits
from bireme.runtime.board import Failure, RunFailed
from bireme.runtime.coordinator_client import Observer
from bireme.runtime.coordinator_process import CoordinatorProcess
from bireme.runtime.launch import Launcher
from bireme.runtime.replicas import launch as launching
from bireme.runtime.replicas.hosts import MOST_ALONE_S, HostContact, LaunchHost, ReplicaPart
from bireme.runtime.replicas.launch import LedgerTail, ReplicaOrder, launch_replicas
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Absence, CoordinatorReply, Gone, HostStart, Incarnation, Member
from bireme.sync.coordinator.samples import LEDGER, CoordinatorSettings, SyncMode


class Well:
    """A coordinator that nothing is wrong with."""

    port, is_closed = 0, False

    def trouble(self) -> None:
        """There is none."""

    def ended(self, life: Incarnation) -> None:
        """Nobody has to know."""

    def close(self) -> None:
        self.is_closed = True


class Processes:
    """In the place of a replica's processes: they end when they are asked to, or a little later."""

    cause: Failure | None = None
    made: ClassVar[list["Processes"]] = []
    looks_to_end = 0

    def __init__(self, *_: object) -> None:
        self.ranks: tuple[()] = ()
        self.request: signal.Signals | None = None
        self.is_over = self.is_asked = False
        self.made.append(self)

    def start(self) -> None:
        """There is nothing to start."""

    def results(self) -> None:
        """They return nothing."""

    def look(self) -> None:
        if self.is_asked:
            self.is_over = self.looks_to_end <= 0
            self.looks_to_end -= 1

    def end(self, _why: Failure | None = None) -> None:
        self.is_asked = True

    def close(self) -> None:
        self.is_over = True


class AllWait(Processes):
    """One of them has found that all replicas wait for each other."""

    cause = Failure.of(RunFailed("All replicas wait."), 0, None)

    def look(self) -> None:
        self.is_over = True


def never_runs(_world: World, _order: ReplicaOrder) -> None:
    raise AssertionError("there is no process")


def test_a_standstill_ends_the_run_by_no_mistake_of_the_user_and_no_replica_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life could do nothing else."""
    monkeypatch.setattr(launching, "Crew", AllWait)
    coordinator, told = Well(), list[str]()
    settings = CoordinatorSettings(SyncMode.GROUPS, 2, 1, 8, ShareLimits((1, 1), (8, 8)))
    host = LaunchHost(
        0, cast(CoordinatorProcess, coordinator), (("127.0.0.1", 0),), "secret", parts(0, 0, 1), 0.0
    )
    with pytest.raises(RunFailed, match=r"^All replicas wait\.$"):
        launch_replicas(never_runs, settings, ledger=tmp_path / LEDGER, tell=told.append, host=host)
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


def contact_of(heard: Heard, told: list[str], how_it_ended: str = "") -> HostContact:
    host = LaunchHost(
        2,
        cast(CoordinatorProcess, Well()),
        HOSTS,
        "secret",
        parts(2, 2),
        0.0,
        how_it_ended=lambda: how_it_ended,
    )
    return HostContact(host, cast(Observer, heard), QUORUM, told.append)


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


def launched(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, folder: Path, told: list[str], *own: ReplicaPart
) -> Any:
    monkeypatch.setattr(launching, "Crew", Processes)
    monkeypatch.setattr(launching, "Observer", lambda *_: heard)
    (folder / LEDGER).write_text("")
    host = LaunchHost(2, cast(CoordinatorProcess, Well()), HOSTS, "secret", own or parts(2, 2), 0.0)
    return launch_replicas(never_runs, QUORUM, ledger=folder / LEDGER, tell=told.append, host=host)


def test_a_replica_that_waits_is_ended_when_the_others_ended_the_run_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had trained, and did not hear that it was dropped: its launcher waited for it for ever."""
    heard, told = Heard(), list[str]()
    gone = (Gone(2, 0, 41, Absence.SILENT, ""),)
    heard.word = replace(heard.word, members=MEMBERS[:2], gone=gone, is_lost=True)
    monkeypatch.setattr(LedgerTail, "read", lambda _tail: (0, 1, 2))
    assert launched(heard, monkeypatch, tmp_path, told).results == []
    assert Processes.made[-1].is_asked


def test_a_request_to_stop_reaches_the_next_life_too() -> None:
    """The life that was asked was dropped before it could agree on a step with the others."""
    (part,) = parts(2, 2)
    replica = launching._Replica(part, 0)
    replica.next_life()
    replica.crew = cast(Any, Processes())
    replica.crew.request = signal.SIGUSR1
    replica.next_life()
    assert replica.request is signal.SIGUSR1


class OfTwoHosts(Heard):
    """An observer on host 2, which has a replica with host 1. `of_1` is the life that host 1 proposes, None
    while nothing of that is heard; `is_reached` is whether host 1 answers by itself. Each look of a launcher
    takes the next of the `moments`; after the last one the run ends.
    """

    def __init__(self, *moments: tuple[int | None, bool]) -> None:
        super().__init__()
        self.word = replace(self.word, members=MEMBERS[:1])
        self.own = dict[int, HostStart]()
        self.proposed, self.num_started = list[int](), list[int]()
        self.moments = [*moments]

    def say_start(self, start: HostStart) -> None:
        self.own[2] = start
        self.proposed.append(start.incarnation.life)

    def starts(self, _limit_s: float) -> list[HostStart]:
        of_1, _ = self.moments[0]
        there = [] if of_1 is None else [HostStart(1, Incarnation(1, of_1), "10.0.0.2:5")]
        return [*self.own.values(), *there]

    def unheard_s(self, _host: int) -> float:
        return 0.0 if self.moments[0][1] else inf

    def pass_on(self) -> None:
        self.moments.pop(0)
        self.num_started.append(len(Processes.made))
        if not self.moments:
            raise RunFailed("The story is over.")


def told_of_two_hosts(heard: OfTwoHosts, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What a launcher says whose replica 1 has a rank on another host."""
    told = list[str]()
    look = Launcher.look

    def pass_on(launcher: Launcher) -> None:
        if heard.moments:
            heard.pass_on()
        look(launcher)

    monkeypatch.setattr(Launcher, "look", pass_on)
    monkeypatch.setattr(launching, "_ABSENT_S", 0.0)
    Processes.made.clear()
    with pytest.raises(RunFailed, match="The story is over"):
        launched(heard, monkeypatch, folder, told, ReplicaPart(1, (1,), (1, 2)))
    return told


def test_a_life_that_a_launcher_has_given_up_stays_over_if_the_other_host_is_back_before_its_ranks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hosts of a replica were cut off for longer than the lease, and gave up its life. The link was back
    before their ranks had ended: both took the life for whole again, and it never began again.
    """
    monkeypatch.setattr(Processes, "looks_to_end", 3)
    here, away, back = (0, True), (None, False), (0, True)
    heard = OfTwoHosts(here, here, away, away, back, back, back, back, back, back, back)
    told = told_of_two_hosts(heard, monkeypatch, tmp_path)
    assert heard.proposed == [0, 1]
    assert "Replica 1 ended on host 1 (10.0.0.2). The run continues with replica 0" in told[0]


def test_a_replica_does_not_start_while_its_hosts_hear_of_each_other_only_through_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life ended at once, for its ranks could not reach each other. After three it was left out."""
    relayed, reached = (0, False), (0, True)
    heard = OfTwoHosts(relayed, relayed, relayed, reached, reached)
    told_of_two_hosts(heard, monkeypatch, tmp_path)
    assert heard.num_started == [0, 0, 0, 1, 1]
