"""Starting replicas that may die: a crew of processes for each incarnation of a replica, and a coordinator.

A rank's death ends its replica, which is started again as long as another one goes on: that one gives it what
it needs. Each crew has a store of its own, in names, so that the ranks of a replica know only each other. A
mistake of the user ends all where a first start meets it, as do a failure of the run itself and the death of
the last replica. A sample that cannot be read ends its replica; if it fails again, the run ends.

    waits for its other hosts ──▶ runs ──▶ ends ──▶ its processes are gone ──▶ the run ends, or
              ▲                                                                the next incarnation
              └───────────────────────────────────────────────────────────────────┘

An incarnation that has ended, here or on another host, stays ended in spite of later messages.
"""

import json
import pickle
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError, SampleError
from bireme.runtime.board import Board, Failure, FailureKind, RunFailed, WeightsLost
from bireme.runtime.coordinator_client import BEAT_S, Address, Observer
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.launch import LOCALHOST, Crew, Launcher, RankSetup, pickled, preload_own
from bireme.runtime.replicas.hosts import HostContact, LaunchHost, ReplicaPart
from bireme.sync.coordinator.messages import TERM, Absence, CoordinatorReply, Incarnation
from bireme.sync.coordinator.samples import CoordinatorSettings, in_force
from bireme.wire.listener import new_key, own_address

if TYPE_CHECKING:
    from bireme.devices import Backend


_MOST_IN_VAIN = 3
"""Incarnations of a replica in a row that end before they have trained, or of what is told as a mistake; then
it is not started again.
"""
_LEAST_ROUNDS = 5
"""That many batches count before an incarnation has trained; by then it is known whether its weights are
right.
"""
_ABSENT_S = 1.0
"""A launcher that no coordinator has heard of for so long is gone, and not just calling again."""
_PARTING_S = 30.0
"""How long replicas that train may take to end after the first one has."""


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """What the processes of a replica are told: which start of it they are, and where the coordinator is. The
    run began at `began_s`, by the clock of this machine (`time.monotonic`), with the batch `first`. One that
    `is_empty` is started after something has been committed, and gets its weights from another replica.
    """

    life: Incarnation
    hosts: tuple[Address, ...]
    token: str
    lease_s: float
    began_s: float
    is_empty: bool = False
    first: int = 0


class LedgerTail:
    """The lines that are added to a ledger after this was made: which replicas train, and how much counts.
    Each is of a batch of all members or, if the run averages weights (`averages`), of a batch of one replica.
    """

    def __init__(self, path: Path, *, averages: bool = False) -> None:
        self._path, self._averages = path, averages
        # A half line at the end goes when the coordinator opens the ledger.
        self._place = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._epochs: set[int] = set()
        self._last_term = -1
        self._rounds: list[tuple[int, int, int]] = []
        """Of each batch that counts its number, the term, and the samples that had come back in that term."""
        self._known = self._known_before = 0
        """The samples of the run that count, after the last line and before the first."""

    def read(self) -> Collection[int]:
        """The members of the last round that was added since the last call, or of all such rounds if the run
        averages weights.
        """
        members: set[int] = set()
        lines = dict(enumerate(map(json.loads, self._lines())))
        for record in in_force(lines, self._last_term).values():
            is_first, self._last_term = not self._epochs, record["epoch"] // TERM
            self._epochs.add(record["epoch"])
            self._known = record["fresh"] - sum(end - begin for begin, end in record["open"])
            num_samples = 0
            if record["kind"] == "round":
                members = {*record["members"], *(members if self._averages else ())}
                num_samples = sum(end - begin for own in record["samples"] for begin, end in own)
                self._rounds.append((record["batch"], self._last_term, record.get("returned", 0)))
            elif not self._averages:  # lines that no rank heard of before a coordinator died do not count
                self._rounds = [one for one in self._rounds if one[0] < record["batch"]]
            if is_first:
                self._known_before = self._known - num_samples
        return members

    @property
    def num_rounds(self) -> int:
        """The number of batches that count."""
        return len(self._rounds)

    @property
    def num_committed(self) -> int:
        """The number of samples that count."""
        return self._known - self._known_before

    @property
    def num_epochs(self) -> int:
        """The number of epochs of the membership up to the last line. The epochs of one coordinator are
        numbered in a row, so an epoch without a line is counted too.
        """
        terms = (list(own) for _, own in groupby(sorted(self._epochs), key=lambda epoch: epoch // TERM))
        return sum(own[-1] - own[0] + 1 for own in terms)

    @property
    def num_redone(self) -> int:
        """The number of samples that did not count in their batch, and were assigned again."""
        return sum({term: returned for _, term, returned in self._rounds}.values())

    def _lines(self) -> list[bytes]:
        """The whole lines that have been added."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.splitlines()


@dataclass(frozen=True, slots=True)
class _Launched:
    """What the ranks of each replica returned that came to its end, and what the ledger says. The run
    `is_lost` if its replicas ended before they had done all their batches, as far as is known here.
    """

    results: list[list[Any]]
    ledger: LedgerTail
    is_lost: bool = False


def launch_replicas(
    function: Callable[..., object],
    settings: CoordinatorSettings,
    *args: object,
    ledger: Path,
    tell: Callable[[str], None],
    timeout_s: float = 60.0,
    threads_per_process: int | None = None,
    backend: "Backend" = "gloo",
    device: str | None = None,
    host: LaunchHost | None = None,
) -> _Launched:
    """Run `function(world, order, *args)` in new processes for each replica, until one replica is done.

    `world` is of the replica's own ranks. `tell` is given a sentence for each death and each return. Raises
    what `launch` does where no replica is left to go on, and `RunFailed` where none could. With a `host`
    there are other hosts, whose launchers do the same with the other replicas. Its coordinator is closed.
    """
    from bireme.runtime.stores import PrefixStore, serve_store

    preload_own(function)
    here = host or _only_host(settings, ledger)
    reached_at = own_address() if here.spans else LOCALHOST
    store = serve_store(reached_at, key=here.token, timeout_s=timeout_s)
    contact = None
    if not here.is_alone:
        observer = Observer(here.hosts, here.token)
        contact = HostContact(here, observer, settings, tell, f"{own_address()}:{store.port}")

    def crew_of(part: ReplicaPart, life: Incarnation, store_of_rank_0: str, *, is_empty: bool) -> Crew:
        own = ReplicaOrder(
            life, here.hosts, here.token, settings.lease_s, here.began_s, is_empty, settings.first
        )
        has_store = here.number == part.hosts[0]
        address, _, port = ("", "", store.port) if has_store else store_of_rank_0.rpartition(":")
        order = RankSetup(
            host=address or LOCALHOST,
            port=int(port),
            num_processes=settings.num_stages,
            timeout_s=timeout_s,
            num_threads=threads_per_process or max(1, num_cores() // here.num_ranks),
            backend=backend,
            device=device,
            prefix=f"replica {life.replica} life {life.life}",
            ranks=() if part.is_whole else part.ranks,
            key=here.token,
            first_local=sum(len(one.ranks) for one in here.parts[: here.parts.index(part)]),
            first_rank=life.replica * settings.num_stages,
        )
        call = pickled(function, (own, *args))
        if not has_store:
            return Crew(order, call)
        own_part = PrefixStore(order.prefix, store)
        return Crew(order, call, Board(own_part, settings.num_stages), own_part)

    try:
        with Launcher() as launcher:
            tail = LedgerTail(ledger, averages=settings.averages)
            return _Supervision(launcher, here, settings, crew_of, contact, tail, tell).results()
    finally:
        if contact is not None:
            contact.observer.close()
        here.coordinator.close()


def _only_host(settings: CoordinatorSettings, ledger: Path) -> LaunchHost:
    """This host, if it has all replicas."""
    key, address = new_key(), own_address()
    coordinator = CoordinatorProcess(CoordinatorOrder(settings, 0, 1, key, ledger, address, begins=True))
    coordinator.start()
    ranks = tuple(range(settings.num_stages))
    parts = tuple(ReplicaPart(replica, ranks, (0,)) for replica in range(settings.num_replicas))
    return LaunchHost(0, coordinator, ((address, coordinator.port),), key, parts, time.monotonic())


class _Replica:
    """The ranks of a replica on this host, in all its incarnations."""

    def __init__(self, part: ReplicaPart, first_life: int) -> None:
        self.part, self.number = part, part.replica
        self.life = Incarnation(part.replica, first_life - 1)
        self.crew: Crew | None = None
        """The processes of this incarnation; None while it waits for its other hosts."""
        self.has_ended = False
        """Whether this incarnation is over, here or on another host, and the others know."""
        self.was_member = False
        """Whether it has trained in this incarnation."""
        self.first_round = 0
        """How many batches counted when it began to train."""
        self.num_in_vain = 0
        self.is_left_out = False
        """Whether it is not started again."""
        self.died_s: float | None = None
        """When it died, until it is back."""
        self.alone_s: float | None = None
        """Since when another host of this incarnation is gone."""
        self._request: signal.Signals | None = None

    def next_life(self, least: int = 0) -> None:
        """Be in the next incarnation, of that number at least, without processes yet."""
        self.life = Incarnation(self.number, max(self.life.life + 1, least))
        self._request, self.crew = self.request, None
        self.has_ended = self.was_member = False
        self.alone_s = None

    @property
    def request(self) -> signal.Signals | None:
        """The signal by which its processes were asked to stop. An incarnation that was asked and could not
        passes it on to the next one.
        """
        return self._request if self.crew is None else self.crew.request

    @property
    def lives(self) -> bool:
        """Whether its processes are there."""
        return self.crew is not None and not self.crew.is_over

    @property
    def cause(self) -> Failure | None:
        """Why its incarnation ended, if that is for something that happened to a rank."""
        return None if self.crew is None else self.crew.cause

    @property
    def results(self) -> list[Any] | None:
        """What its ranks returned, if they have come to their end."""
        if self.lives or self.crew is None or self.cause is not None:
            return None
        found = self.crew.results()
        return None if found is None else [pickle.loads(one) for one in found]


@dataclass(eq=False)
class _Supervision:
    """Watches over the replicas of a run until one of them is done."""

    launcher: Launcher
    here: LaunchHost
    settings: CoordinatorSettings
    crew_of: Callable[..., Crew]
    contact: HostContact | None
    tail: LedgerTail
    tell: Callable[[str], None]
    failed: dict[str, int] = field(default_factory=dict)
    """The samples that replicas failed with, and which replica that was."""

    def __post_init__(self) -> None:
        self.coordinator = self.here.coordinator
        self.replicas = [_Replica(part, self.here.first_life) for part in self.here.parts]

    def results(self) -> _Launched:
        """The results of the replicas, once one is done and the others that train have ended. There are none
        if no replica of this host trained when the run ended on the others.
        """
        if self.contact is not None:
            for one in self.replicas if self.here.first_life else ():
                self.contact.observer.ended(one.life)  # and those before it
        for one in self.replicas:
            self._begin(one)
        if self.contact is not None:
            self.contact.observer.start()  # so that its first notice has the proposals of this host
        while True:
            self._tend_coordinator()
            self._note_members()
            if self._done() or self._is_over_elsewhere or self._has_ended_unheard():
                self._part()
                self.tail.read()
                return _Launched(self._done(), self.tail, self._is_lost)
            for one in self.replicas:
                self._tend(one)
            self.launcher.look()

    @property
    def _word(self) -> CoordinatorReply | None:
        """The last word that was heard of the run's coordinators, if there are other hosts."""
        return None if self.contact is None else self.contact.observer.word

    def _has_begun(self) -> bool:
        """Whether something has been committed, so that who is started has to get it from another replica."""
        committed = () if (word := self._word) is None else word.committed
        if self.here.first_life and not committed:
            return True  # the others went on without this host
        first = 0 if self.settings.averages else self.settings.first
        return self.tail.num_rounds > 0 or max(committed, default=0) > first

    def _tend_coordinator(self) -> None:
        """Start it again if something is wrong with it, and say who counts no more."""
        if (trouble := self.coordinator.trouble()) is None:
            return
        self.coordinator.start_again()
        for one in self.replicas:
            if one.has_ended:
                self.coordinator.ended(one.life)
        self.tell(f"The coordinator {trouble}; it is started again, and the run continues.")

    @property
    def _is_over_elsewhere(self) -> bool:
        """Whether all replicas that trained have ended, except those of this host that were dropped."""
        if (word := self._word) is None or not word.is_lost:
            return False
        dropped = {one.own_life for one in word.gone if one.why is Absence.SILENT}
        return not any(one.lives and one.was_member and one.life not in dropped for one in self.replicas)

    @property
    def _is_lost(self) -> bool:
        """Whether all replicas have ended, and none of them because it had done all its batches."""
        if (word := self._word) is None or not word.is_lost:
            return False
        return all(one.why is not Absence.LEFT for one in word.gone)

    def _has_ended_unheard(self) -> bool:
        """Whether the run has ended while this host was cut off. Raises a `RunFailed` where this host is to
        wait no longer.
        """
        if self.contact is None:
            return False
        self.contact.note_word()
        return self.contact.has_ended(is_asked_to_stop=any(one.request for one in self.replicas))

    def _done(self) -> list[list[Any]]:
        """What the ranks of those replicas returned that have come to their end."""
        return [found for one in self.replicas if (found := one.results) is not None]

    def _note_members(self) -> None:
        """Notice who has a part in rounds, and say who is back."""
        members = self.tail.read()
        for one in self.replicas:
            if one.number in members and one.lives and not one.was_member:
                one.was_member, one.first_round = True, self.tail.num_rounds
                if one.died_s is not None:
                    away_s, one.died_s = time.monotonic() - one.died_s, None
                    self.tell(f"Replica {one.number} is back after {away_s:.1f} s.")

    def _tend(self, one: _Replica) -> None:
        """Start the processes of a replica once its hosts agree. If its incarnation ends, tell the others at
        once; once its processes are gone, do what follows.
        """
        if one.is_left_out:
            return
        if one.crew is None:
            self._meet_hosts(one)
            return
        is_over_there = self._has_ended_there(one)
        if one.cause is not None or is_over_there:
            self._tell_end(one)
        if is_over_there:
            rank = next(rank for rank in range(self.settings.num_stages) if rank not in one.part.ranks)
            one.crew.end(Failure.told("its host has ended or cannot be reached.", rank, None))
        if one.has_ended and not one.lives:
            self._after_end(one)

    def _begin(self, one: _Replica, least: int = 0) -> None:
        """Begin the next incarnation of a replica, of that number at least: now, or once its hosts agree."""
        one.next_life(least)
        if self.contact is None or one.part.is_whole:
            self._start(one, "")
        else:
            self.contact.propose(one.life)

    def _start(self, one: _Replica, store: str) -> None:
        """Start the processes of an incarnation; `store` is the address of the store of its rank 0."""
        request = one.request
        one.crew = self.crew_of(one.part, one.life, store, is_empty=self._has_begun())
        one.crew.request = request
        self.launcher.start(one.crew)

    def _meet_hosts(self, one: _Replica) -> None:
        """Start the ranks of a replica here if the launchers of all its hosts agree, and can be reached."""
        assert self.contact is not None, "a replica that waits has other hosts"
        found = self.contact.agreement(one.part)
        if found.number > one.life.life:
            self._begin(one, found.number)
        elif missing := found.missing or self.contact.unheard(one.part):
            self.contact.tell_missing(one.part, missing)
        else:
            self._start(one, found.store)

    def _has_ended_there(self, one: _Replica) -> bool:
        """Whether this incarnation of a replica is over on another host. A launcher that is gone has taken
        its ranks along.
        """
        if self.contact is None or one.part.is_whole:
            return False
        found, now_s = self.contact.agreement(one.part), time.monotonic()
        one.alone_s = (one.alone_s or now_s) if found.missing else None
        is_alone = one.alone_s is not None and now_s > one.alone_s + _ABSENT_S
        return found.number > one.life.life or is_alone

    def _tell_end(self, one: _Replica) -> None:
        """Tell all coordinators, once, that the incarnation of a replica is over."""
        if one.has_ended:
            return
        one.has_ended = True
        self.coordinator.ended(one.life)
        if self.contact is not None:
            self.contact.observer.ended(one.life)

    def _after_end(self, one: _Replica) -> None:
        """What follows from the end of a replica's incarnation: it begins again, or nothing goes on."""
        cause, others = one.cause, self._others(one)
        what = f"Replica {one.number} ended"
        if cause is not None:
            self._check_samples(one, cause)
            what += f": rank {one.number * self.settings.num_stages + cause.rank}, {cause.summary}"
        elif self.contact is not None:
            what += f" on {self.contact.addresses(self.contact.others(one.part))}."
        if self._has_begun() and not others:
            raise _without_weights(what) if cause is None else cause.to_starter() from None
        one.died_s = one.died_s or time.monotonic()
        if cause is not None:
            self._count_death(one, cause)
        if one.num_in_vain >= _MOST_IN_VAIN:
            one.is_left_out = True
            self.tell(f"{what} It has ended {_MOST_IN_VAIN} times in a row and is not started again.")
            return
        left = f"replica{'s' if len(others) > 1 else ''} {' and '.join(map(str, others))}"
        rest = f"The run continues with {left}" if others else "Nothing is lost"
        when = "" if one.part.is_whole else " once all of its hosts are there"
        self.tell(f"{what} {rest}; replica {one.number} starts again{when}.")
        self.tail.read()  # what counted before this incarnation does not say that it trains
        self._begin(one)

    def _count_death(self, one: _Replica, cause: Failure) -> None:
        """Count deaths in vain. Raises if this one ends the run: the next incarnation could do no better."""
        # What stops one that was started again, as a full disk there, need not stop the others.
        is_mistake = cause.blame is FailureKind.USER and not cause.samples
        is_of_all = cause.blame in (FailureKind.INTERRUPT, FailureKind.RUN)
        has_trained = one.was_member and self.tail.num_rounds >= one.first_round + _LEAST_ROUNDS
        one.num_in_vain = 0 if has_trained and not is_mistake else one.num_in_vain + 1
        is_last = all(other.is_left_out for other in self.replicas if other is not one)
        if is_of_all or (is_mistake and not one.life.life) or (one.num_in_vain >= _MOST_IN_VAIN and is_last):
            raise cause.to_starter() from None

    def _check_samples(self, one: _Replica, cause: Failure) -> None:
        """Raise if a replica here failed with one of these samples before: the data is at fault then."""
        before = next((self.failed[sample] for sample in cause.samples if sample in self.failed), None)
        if before is not None:
            raise SampleError(
                f"{cause.text} Replica {before} failed with the same samples before replica {one.number} "
                "did, so the data is at fault.",
                cause.samples,
            )
        self.failed |= dict.fromkeys(cause.samples, one.number)

    def _others(self, one: _Replica) -> list[int]:
        """The replicas that may go on without this one, here and elsewhere: those that train, or all that are
        there if nothing has been trained.
        """
        has_begun, here = self._has_begun(), {other.number for other in self.replicas}
        found = [each.number for each in self.replicas if each.lives and (each.was_member or not has_begun)]
        if (word := self._word) is not None and not word.is_lost:
            found += [each.replica for each in word.members if each.replica not in here]
        return sorted(found)

    def _part(self) -> None:
        """Let those that train come to their end too. Nobody needs the others any more, and none of them if
        there can be no coordinator.
        """
        are_done = bool(self._done())
        for one in self.replicas:
            if one.crew is not None and not (one.was_member and are_done):
                one.crew.end()
        ends_s = time.monotonic() + _PARTING_S
        with suppress(BiremeError):
            while self._is_needed() and time.monotonic() < ends_s:
                for one in self.replicas:
                    if not one.lives:
                        self._tell_end(one)
                self._tend_coordinator()
                self.launcher.look()

    def _is_needed(self) -> bool:
        """Whether a replica of this host has not ended yet, or another host may need the coordinator here
        until its replicas have left.
        """
        if any(one.lives for one in self.replicas):
            return True
        if (word := self._word) is None or not self.here.coordinates(word):
            return False
        if word.is_lost:
            time.sleep(2 * BEAT_S)  # for all to hear of it
        return not word.is_lost


def _without_weights(what: str) -> RunFailed:
    return WeightsLost(f"{what} No replica is left that has the weights.")
