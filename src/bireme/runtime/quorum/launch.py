"""Starting replicas that may die: a crew of processes for each life of a replica, and a coordinator.

A rank's death ends its replica, which is started again as long as another one goes on: that one gives it what
it needs. Each crew has a store of its own, in names, so that the ranks of a replica know only each other. A
mistake of the user ends all where a first start meets it, as do a failure of the run itself and the death of
the last replica. A sample that cannot be read ends its replica; if it fails again, the run ends.
"""

import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError, SampleError
from bireme.runtime.board import Board, Failure, FailureKind, RunFailed
from bireme.runtime.coordinator_client import BEAT_S, Address, Observer
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.launch import LOCALHOST, Crew, RankSetup, RemoteBoard, pickled, preload_own
from bireme.runtime.quorum.ledger_tail import AveragingTail, LedgerTail
from bireme.runtime.quorum.site import Contact, ReplicaPart, Site, Starts
from bireme.sync.coordinator.messages import Absence, Incarnation
from bireme.sync.coordinator.samples import CoordinatorSettings
from bireme.sync.coordinator.starts import StartAgreement
from bireme.wire.listener import new_key, own_address

if TYPE_CHECKING:
    from bireme.devices import Backend


LOOK_S = 0.1
_MOST_IN_VAIN = 3
"""Lives of a replica in a row that end before they have trained, or of what is told as a mistake; then it is
not started again.
"""
_LEAST_ROUNDS = 5
"""So many batches count before a life has trained; by then it is known whether its weights are right."""
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


@dataclass(frozen=True, slots=True)
class _Launched:
    """What the ranks of each replica returned that came to its end, and what the ledger says."""

    results: list[list[Any]]
    ledger: LedgerTail


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
    site: Site | None = None,
) -> _Launched:
    """Run `function(world, order, *args)` in new processes for each replica, until one replica is done.

    `world` is of the replica's own ranks. `tell` is given a sentence for each death and each return. Raises
    what `launch` does where no replica is left to go on, and `RunFailed` where none could. With a `site`
    there are other hosts, whose launchers do the same with the other replicas. Its coordinator is closed.
    """
    from bireme.runtime.stores import PrefixStore, open_store

    preload_own(function)
    here = site or _only_site(settings, ledger)
    reached_at = own_address() if here.spans else LOCALHOST
    store = open_store(reached_at, 0, serve=True, timeout_s=timeout_s)
    tail = AveragingTail(ledger) if settings.averages else LedgerTail(ledger)
    observer = None if here.is_alone else Observer(here.hosts, here.token)
    own_store = f"{own_address()}:{store.port}"

    def has_begun() -> bool:
        committed = () if observer is None else observer.word.committed
        if here.first_life and not committed:
            return True  # the others went on without this host
        first = 0 if settings.averages else settings.first
        return tail.num_rounds > 0 or max(committed, default=0) > first

    def crew_of(part: ReplicaPart, life: Incarnation, address: str) -> Crew:
        own = ReplicaOrder(
            life, here.hosts, here.token, settings.lease_s, here.began_s, has_begun(), settings.first
        )
        has_store = here.number == part.hosts[0]
        host, _, port = ("", "", store.port) if has_store else address.rpartition(":")
        order = RankSetup(
            host=host or LOCALHOST,
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
        own_part = PrefixStore(order.prefix, store)
        board = Board(own_part, settings.num_stages) if has_store else RemoteBoard(order)
        return Crew(order, pickled(function, (own, *args)), board, own_part if has_store else None)

    starts = None if observer is None else Starts(here, observer, own_store, settings.lease_s, tell)
    replicas = [_Replica(part, crew_of, here.first_life, starts) for part in here.parts]
    try:
        if observer is not None:
            for one in replicas if here.first_life else ():
                observer.ended(one.life)  # and those before it
            observer.start()
        for one in replicas:
            one.begin()
        contact = None if observer is None else Contact(here, observer, settings, tell)
        return _Supervision(
            replicas, here, contact, tail, tell, has_begun, starts, settings.num_stages
        ).results()
    finally:
        for one in replicas:
            one.give_up()
        for one in replicas:
            one.join()
        if observer is not None:
            observer.close()
        here.coordinator.close()


def _only_site(settings: CoordinatorSettings, ledger: Path) -> Site:
    """This host, if it has all replicas."""
    key, address = new_key(), own_address()
    coordinator = CoordinatorProcess(CoordinatorOrder(settings, 0, 1, key, ledger, address, begins=True))
    coordinator.start()
    ranks = tuple(range(settings.num_stages))
    parts = tuple(ReplicaPart(replica, ranks, (0,)) for replica in range(settings.num_replicas))
    return Site(0, coordinator, ((address, coordinator.port),), key, parts, time.monotonic())


class _Replica:
    """The ranks of a replica on this host, in all its lives; the thread of each ends with its crew. If other
    hosts have ranks too, `starts` says when a life starts.
    """

    def __init__(
        self,
        part: ReplicaPart,
        crew_of: Callable[[ReplicaPart, Incarnation, str], Crew],
        first_life: int,
        starts: Starts | None,
    ) -> None:
        self.part, self.number = part, part.replica
        self.life = Incarnation(part.replica, first_life - 1)
        self.num_in_vain = 0
        self.was_member = self.is_told = False
        """Whether it has trained in this life, and whether the others know that this life is over."""
        self.first_round = 0
        """How many batches counted when it began to train."""
        self.died_s: float | None = None
        """When it died, until it is back."""
        self.is_over = False
        """Whether it is not started again."""
        self.alone_s: float | None = None
        """Since when another host of this life is gone."""
        self.crew: Crew | None = None
        """None while it waits for its other hosts."""
        self._crew_of, self._starts = crew_of, starts
        self._request: signal.Signals | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, least: int = 0) -> None:
        """Begin the next life, of that number at least; if other hosts have ranks too, once all are there."""
        self.life = Incarnation(self.number, max(self.life.life + 1, least))
        self.was_member = self.is_told = False
        self._request = self._request if self.crew is None else self.crew.request
        self.crew = self._thread = self.alone_s = None
        if self.part.is_whole or self._starts is None:
            self.start("")
        else:
            self._starts.propose(self.life)

    def start(self, store: str) -> None:
        """Start the processes of this life; `store` is the address of the store that other hosts have."""
        self.crew = self._crew_of(self.part, self.life, store)
        self.crew.request = self._request  # the life before was asked to stop, and could not
        name = f"bireme replica {self.number}"
        self._thread = threading.Thread(target=self._run, args=(self.crew,), name=name, daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        """Whether its processes are there."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def results(self) -> list[Any] | None:
        """What its ranks returned, if they have come to their end."""
        if self.lives or self.crew is None or self.crew.cause is not None:
            return None
        found = self.crew.results()
        return None if found is None else [pickle.loads(one) for one in found]

    @property
    def cause(self) -> Failure | None:
        """Why its life ended, if it ended so."""
        if self._error is not None:
            raise self._error
        return None if self.lives or self.crew is None else self.crew.cause

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether its processes were asked to stop."""
        return (self._request if self.crew is None else self.crew.request) is not None

    def give_up(self) -> None:
        """End its processes."""
        if self.crew is not None:
            self.crew.is_given_up = True

    def join(self) -> None:
        """Wait until there is no process of it."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, crew: Crew) -> None:
        try:
            with crew:
                crew.start()
                crew.supervise()
        except BaseException as error:
            self._error = error


class _Supervision:
    """Watches over the replicas of a run until one of them is done."""

    def __init__(
        self,
        replicas: list[_Replica],
        site: Site,
        contact: Contact | None,
        tail: LedgerTail,
        tell: Callable[[str], None],
        has_begun: Callable[[], bool],
        starts: Starts | None,
        num_stages: int,
    ) -> None:
        self._starts, self._num_stages = starts, num_stages
        self._replicas, self._site, self._tail, self._tell = replicas, site, tail, tell
        self._coordinator = site.coordinator
        self._contact, self._has_begun = contact, has_begun
        self._observer = None if contact is None else contact.observer
        self._failed: dict[str, int] = {}
        """The samples that replicas failed with, and which replica that was."""

    def results(self) -> _Launched:
        """What the replicas have come to, once one is done and the others that train have ended. It is
        nothing where none of this host trained when the run ended on the others.
        """
        while True:
            self._tend_coordinator()
            self._note_members()
            if self._done() or self._is_over_elsewhere or self._has_ended_unheard():
                self._part()
                self._tail.read()
                return _Launched(self._done(), self._tail)
            for one in self._replicas:
                self._meet_hosts(one)
                self._note_death(one)
            time.sleep(LOOK_S)

    def _tend_coordinator(self) -> None:
        """Start it again if something is wrong with it, and say who counts no more."""
        if (trouble := self._coordinator.trouble()) is None:
            return
        self._coordinator.start_again()
        for one in self._replicas:
            if one.is_told:
                self._coordinator.ended(one.life)
        self._tell(f"The coordinator {trouble}; it is started again, and the run continues.")

    @property
    def _is_over_elsewhere(self) -> bool:
        """Whether all replicas that trained have ended, except those of this host that were dropped."""
        if self._observer is None or not (word := self._observer.word).is_lost:
            return False
        dropped = {one.own_life for one in word.gone if one.why is Absence.SILENT}
        return not any(one.lives and one.was_member and one.life not in dropped for one in self._replicas)

    def _has_ended_unheard(self) -> bool:
        """Whether the run has ended while this host was cut off. Raises a `RunFailed` where this host is to
        wait no longer.
        """
        if self._contact is None:
            return False
        self._contact.note_word()
        return self._contact.has_ended(is_asked_to_stop=any(one.is_asked_to_stop for one in self._replicas))

    def _done(self) -> list[list[Any]]:
        """What the ranks of those replicas returned that have come to their end."""
        return [found for one in self._replicas if (found := one.results) is not None]

    def _meet_hosts(self, one: _Replica) -> None:
        """Do what the launchers of a replica's hosts agree on: start its ranks here, or end them, because the
        life is over on another host. A launcher that is gone has taken its ranks along.
        """
        if self._starts is None or one.part.is_whole or one.is_over:
            return
        found = self._starts.agreement(one.part)
        is_over = found.number > one.life.life
        if one.crew is None:
            if is_over:
                one.begin(found.number)
            elif found.missing:
                self._starts.tell_missing(one.part, found.missing)
            else:
                one.start(found.store)
            return
        if not found.missing:
            one.alone_s = None
        one.alone_s = one.alone_s or (time.monotonic() if found.missing else None)
        is_alone = one.alone_s is not None and time.monotonic() > one.alone_s + _ABSENT_S
        # A life that was given up stays so, even if the other hosts are there again before it has ended.
        is_over = is_over or is_alone or one.crew.is_given_up
        if not is_over or one.results is not None:
            return
        self._tell_end(one)
        if one.lives:
            one.give_up()
        elif one.cause is None:
            self._after_end_elsewhere(one, found)

    def _after_end_elsewhere(self, one: _Replica, found: StartAgreement) -> None:
        """What follows from the end of a replica's life on another host."""
        assert self._starts is not None, "the replica has other hosts"
        others = [host for host in one.part.hosts if host != self._site.number]
        what = f"Replica {one.number} ended on {self._starts.addresses(found.missing or others)}."
        if self._has_begun() and not self._others(one):
            raise RunFailed(
                f"{what} No replica is left that has the weights. Start bireme train on all hosts again: the "
                "run resumes from its newest checkpoint."
            )
        one.died_s = one.died_s or time.monotonic()
        self._tell(f"{what} It starts again once all of its hosts are there.")
        self._tail.read()  # as in `_after_death`
        one.begin(found.number)

    def _note_death(self, one: _Replica) -> None:
        """See whether a replica has died: the others learn of it at once, and it begins again once all of its
        processes are gone.
        """
        if one.is_over or one.crew is None:
            return
        if one.crew.cause is not None:
            self._tell_end(one)
        if not one.lives and one.cause is not None:
            self._after_death(one, one.cause)

    def _tell_end(self, one: _Replica) -> None:
        """Tell all coordinators, once, that the life of a replica is over."""
        if one.is_told:
            return
        one.is_told = True
        self._coordinator.ended(one.life)
        if self._observer is not None:
            self._observer.ended(one.life)

    def _note_members(self) -> None:
        """Notice who has a part in rounds, and say who is back."""
        members = self._tail.read()
        for one in self._replicas:
            if one.number in members and one.lives and not one.was_member:
                one.was_member, one.first_round = True, self._tail.num_rounds
                if one.died_s is not None:
                    away_s, one.died_s = time.monotonic() - one.died_s, None
                    self._tell(f"Replica {one.number} is back after {away_s:.1f} s.")

    def _after_death(self, one: _Replica, cause: Failure) -> None:
        """What follows from a replica's death: it begins again, or nothing goes on."""
        self._check_samples(one, cause)
        others = self._others(one)
        # What stops one that was started again, as a full disk there, need not stop the others.
        is_mistake = cause.blame is FailureKind.USER and not cause.samples
        is_of_all = cause.blame in (FailureKind.INTERRUPT, FailureKind.RUN)
        has_ended = is_of_all or (self._has_begun() and not others)
        if has_ended or (is_mistake and not one.life.life):
            raise cause.to_starter() from None
        one.died_s = one.died_s or time.monotonic()
        has_trained = one.was_member and self._tail.num_rounds >= one.first_round + _LEAST_ROUNDS
        one.num_in_vain = 0 if has_trained and not is_mistake else one.num_in_vain + 1
        rank = one.number * self._num_stages + cause.rank
        what = f"Replica {one.number} ended: rank {rank}, {cause.summary}"
        if one.num_in_vain >= _MOST_IN_VAIN:
            one.is_over = True
            if all(other.is_over for other in self._replicas):
                raise cause.to_starter() from None
            self._tell(f"{what} It has ended {_MOST_IN_VAIN} times in a row and is not started again.")
            return
        left = f"replica{'s' if len(others) > 1 else ''} {' and '.join(map(str, others))}"
        rest = f"The run continues with {left}" if others else "Nothing is lost"
        when = "" if one.part.is_whole else " once all of its hosts are there"
        self._tell(f"{what} {rest}; replica {one.number} starts again{when}.")
        self._tail.read()  # what counted before this life does not say that it trains
        one.begin()

    def _check_samples(self, one: _Replica, cause: Failure) -> None:
        """Raise if a replica here failed with one of these samples before: the data is at fault then."""
        before = next((self._failed[sample] for sample in cause.samples if sample in self._failed), None)
        if before is not None:
            raise SampleError(
                f"{cause.text} Replica {before} failed with the same samples before replica {one.number} "
                "did, so the data is at fault.",
                cause.samples,
            )
        self._failed |= dict.fromkeys(cause.samples, one.number)

    def _others(self, one: _Replica) -> list[int]:
        """The replicas that may go on without this one, here and elsewhere: those that train, or all that are
        there if nothing has been trained.
        """
        has_begun, here = self._has_begun(), {other.number for other in self._replicas}
        found = [each.number for each in self._replicas if each.lives and (each.was_member or not has_begun)]
        if self._observer is not None and not self._observer.word.is_lost:
            found += [each.replica for each in self._observer.word.members if each.replica not in here]
        return sorted(found)

    def _part(self) -> None:
        """Let those that train come to their end too. Nobody needs the others any more, and none of them if
        there can be no coordinator.
        """
        are_done = bool(self._done())
        for one in self._replicas:
            if not one.was_member or not are_done:
                one.give_up()
        ends_s = time.monotonic() + _PARTING_S
        with suppress(BiremeError):
            while self._is_needed() and time.monotonic() < ends_s:
                for one in self._replicas:
                    if not one.lives:
                        self._tell_end(one)
                self._tend_coordinator()
                time.sleep(LOOK_S)

    def _is_needed(self) -> bool:
        """Whether a replica of this host has not ended yet, or another host may need the coordinator here
        until its replicas have left.
        """
        if any(one.lives for one in self._replicas):
            return True
        if self._observer is None or not self._site.coordinates(word := self._observer.word):
            return False
        if word.is_lost:
            time.sleep(2 * BEAT_S)  # for all to hear of it
        return not word.is_lost
