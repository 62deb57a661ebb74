"""Starting replicas that may die: a crew of processes for each life of a replica, and a coordinator.

A rank's death ends its replica, which is started again as long as another one goes on: that one gives it what
it needs. Each crew has a store of its own, in names, so that the ranks of a replica know only each other. A
mistake of the user ends all, as does the death of the last replica.
"""

import pickle
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError
from bireme.runtime.board import Board
from bireme.runtime.coordinator_client import Address
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.failures import Failure, FailureKind
from bireme.runtime.launch import Crew, pickled, preload_own
from bireme.runtime.peer_sockets import own_address
from bireme.runtime.quorum.averaging_tail import AveragingTail
from bireme.runtime.quorum.ledger_tail import LedgerTail
from bireme.runtime.rank_process import LOCALHOST, Order
from bireme.sync.coordinator.messages import Life
from bireme.sync.coordinator.settings import Settings, SyncMode

if TYPE_CHECKING:
    from bireme.runtime.world import Backend

__all__ = ["Launched", "ReplicaOrder", "launch_replicas"]

LOOK_S = 0.1
TOKEN_BYTES = 16
MOST_IN_VAIN = 3
"""Lives of a replica in a row that end before they are members; then it is not started again."""
PARTING_S = 30.0
"""How long replicas that train may take to end after the first one has."""


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """What the processes of a replica are told: which start of it they are, and where the coordinator is. The
    run began at `began_s`, by the clock of this machine (`time.monotonic`).
    """

    life: Life
    hosts: tuple[Address, ...]
    token: str
    lease_s: float
    began_s: float


@dataclass(frozen=True, slots=True)
class Launched:
    """What the ranks of each replica returned that came to its end, and what the ledger says."""

    results: list[list[Any]]
    ledger: LedgerTail


def launch_replicas(
    function: Callable[..., object],
    settings: Settings,
    *args: object,
    ledger: Path,
    tell: Callable[[str], None],
    timeout_s: float = 60.0,
    threads_per_process: int | None = None,
    backend: "Backend" = "gloo",
    device: str | None = None,
) -> Launched:
    """Run `function(world, order, *args)` in new processes for each replica, until one replica is done.

    `world` is of the replica's own ranks. `tell` is given a sentence for each death and each return. Raises
    what `launch` does where no replica is left to go on.
    """
    from bireme.runtime.stores import PrefixStore, open_store

    preload_own(function)
    store = open_store(LOCALHOST, 0, serve=True, timeout_s=timeout_s)
    token = secrets.token_hex(TOKEN_BYTES)
    coordinator = CoordinatorProcess(CoordinatorOrder(settings, 0, 1, token, ledger, begins=True))
    is_quorum = settings.mode is SyncMode.QUORUM
    tail = LedgerTail(ledger, settings.batch_size) if is_quorum else AveragingTail(ledger)
    num_ranks = settings.num_replicas * settings.num_stages
    began_s = time.monotonic()

    def crew_of(life: Life) -> Crew:
        own = ReplicaOrder(life, ((own_address(), coordinator.port),), token, settings.lease_s, began_s)
        order = Order(
            port=store.port,
            num_processes=settings.num_stages,
            timeout_s=timeout_s,
            num_threads=threads_per_process or max(1, num_cores() // num_ranks),
            backend=backend,
            device=device,
            prefix=f"replica {life.replica} life {life.life}",
            first_local=life.replica * settings.num_stages,
        )
        board = Board(PrefixStore(order.prefix, store), settings.num_stages)
        return Crew(order, pickled(function, (own, *args)), board)

    replicas = [_Replica(number, crew_of) for number in range(settings.num_replicas)]
    try:
        coordinator.start()
        for one in replicas:
            one.begin()
        return _Supervision(replicas, coordinator, tail, tell, may_lose_coordinator=is_quorum).results()
    finally:
        for one in replicas:
            one.give_up()
        for one in replicas:
            one.join()
        coordinator.close()


class _Replica:
    """A replica in all its lives; the thread of each ends with its crew."""

    def __init__(self, number: int, crew_of: Callable[[Life], Crew]) -> None:
        self.number = number
        self.life = Life(number, -1)
        self.num_in_vain = 0
        self.was_member = self.is_told = False
        """Whether it has trained in this life, and whether the others know that this life is over."""
        self.died_s: float | None = None
        """When it died, until it is back."""
        self.is_over = False
        """Whether it is not started again."""
        self.crew: Crew | None = None
        self._crew_of = crew_of
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return 0 if self.crew is None else len(self.crew.ranks)

    def begin(self) -> None:
        """Begin the next life."""
        self.life = Life(self.number, self.life.life + 1)
        self.was_member = self.is_told = False
        self.crew = self._crew_of(self.life)
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
        found = [rank.result for rank in self.crew.ranks]
        return None if None in found else [pickle.loads(one) for one in found if one is not None]

    @property
    def cause(self) -> Failure | None:
        """Why its life ended, if it ended so."""
        if self._error is not None:
            raise self._error
        return None if self.lives or self.crew is None else self.crew.cause

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
        coordinator: CoordinatorProcess,
        tail: LedgerTail,
        tell: Callable[[str], None],
        *,
        may_lose_coordinator: bool,
    ) -> None:
        self._may_lose_coordinator = may_lose_coordinator
        self._replicas, self._coordinator, self._tail, self._tell = replicas, coordinator, tail, tell

    def results(self) -> Launched:
        """What the replicas have come to, once one is done and the others that train have ended."""
        while True:
            if not self._may_lose_coordinator and self._coordinator.has_ended:
                raise BiremeError(
                    "The coordinator's process has ended, and what it knew of batches under way is lost with "
                    "it. Resume the run from its last checkpoint."
                )
            if self._coordinator.keep():
                self._tell("The coordinator had ended; it was started again, and the run goes on.")
            self._note_members()
            if self._done():
                self._part()
                self._tail.read()
                return Launched(self._done(), self._tail)
            for one in self._replicas:
                self._note_death(one)
            time.sleep(LOOK_S)

    def _done(self) -> list[list[Any]]:
        """What the ranks of those replicas returned that have come to their end."""
        return [found for one in self._replicas if (found := one.results) is not None]

    def _note_death(self, one: _Replica) -> None:
        """See whether a replica has died: the others learn of it at once, and it begins again once all of its
        processes are gone.
        """
        if one.is_over or one.crew is None:
            return
        if one.crew.cause is not None and not one.is_told:
            one.is_told = True
            self._coordinator.ended(one.life)
        if not one.lives and one.cause is not None:
            self._after_death(one, one.cause)

    def _note_members(self) -> None:
        """Notice who has a part in rounds, and say who is back."""
        members = self._tail.read()
        for one in self._replicas:
            if one.number in members and one.lives and not one.was_member:
                one.was_member, one.num_in_vain = True, 0
                if one.died_s is not None:
                    away_s, one.died_s = time.monotonic() - one.died_s, None
                    self._tell(f"Replica {one.number} is back after {away_s:.1f} s.")

    def _after_death(self, one: _Replica, cause: Failure) -> None:
        """What follows from a replica's death: it begins again, or nothing goes on."""
        others = [other for other in self._replicas if other.lives and other.was_member]
        if cause.blame is not FailureKind.PROGRAM or not others:
            raise cause.to_starter() from None
        one.died_s = one.died_s or time.monotonic()
        one.num_in_vain = 0 if one.was_member else one.num_in_vain + 1
        rank = one.number * one.num_ranks + cause.rank
        what = f"Replica {one.number} ended: rank {rank}, {cause.summary}"
        left = ", ".join(str(other.number) for other in others)
        if one.num_in_vain >= MOST_IN_VAIN:
            one.is_over = True
            self._tell(f"{what} It has ended {MOST_IN_VAIN} times in a row and is not started again.")
            return
        self._tell(f"{what} The run goes on with replica {left}; replica {one.number} starts again.")
        self._tail.read()  # what counted before this life does not say that it trains
        one.begin()

    def _part(self) -> None:
        """Let those that train come to their end too. Nobody needs the others any more."""
        for one in self._replicas:
            if not one.was_member:
                one.give_up()
        ends_s = time.monotonic() + PARTING_S
        while any(one.lives for one in self._replicas) and time.monotonic() < ends_s:
            time.sleep(LOOK_S)
