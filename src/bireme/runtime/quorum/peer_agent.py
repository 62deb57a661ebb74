"""What the agents of ranks share, whether their replicas sum gradients or average weights.

An agent is a thread that takes part in what the ranks of a stage do together. It says where its rank is, does
what the coordinator grants, and gives the rank what counts. What the coordinator says is always all that
holds, so an agent looks at the last word only, and does the next step that it allows.
"""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bireme.devices import is_accelerator, pinned_like
from bireme.runtime.board import RunFailed
from bireme.runtime.coordinator_client import Address, CoordinatorClient
from bireme.runtime.quorum.peer_connections import SNAPSHOT, SUM, IncomingTensors, PeerConnections
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import TERM, Commit, CoordinatorReply, Deal, Grant, Heal, Member, RankId
from bireme.sync.coordinator.state import HealTimes, LossTimes
from bireme.sync.quorum.line import LineBroken, PeerLine, Stamp
from bireme.sync.quorum.ring import Contribution, RoundGroup, Summed, SumsFlats, sum_over

# An agent's way to the coordinator: a client that begins to talk once there is something to say.


class LazyCoordinatorClient:
    """The client of one rank, which calls these hosts. Its agent must have said first where it is reached.
    A rank that `is_empty` has no weights that the run could go on from.
    """

    def __init__(
        self, hosts: Sequence[Address], key: str, rank: RankId, *, lease_s: float, is_empty: bool = False
    ) -> None:
        self._hosts, self.key, self._rank, self._lease_s = tuple(hosts), key, rank, lease_s
        self._is_empty = is_empty
        self._client: CoordinatorClient | None = None
        self._act: Callable[[], None] = lambda: None
        self._is_closed = False

    @property
    def word(self) -> CoordinatorReply:
        """The last word."""
        if self._client is None:
            return CoordinatorReply(epoch=0, number=-1)
        word = self._client.word
        return replace(word, is_dropped=True) if self._client.is_dropped else word

    def say(self, *, address: str, **fields: Any) -> None:
        """Report these fields from now on. Does not wait."""
        if self._client is None:
            made = CoordinatorClient(self._hosts, self.key, self._rank, address, lease_s=self._lease_s)
            made.on_word(self._act)
            made.say(is_empty=self._is_empty, **fields)
            made.start()
            self._client = made
        elif not self._is_closed:
            self._client.say(**fields)

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word, from a thread that holds no lock."""
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""
        if self._client is not None and not self._is_closed:
            self._is_closed = True
            self._client.close(is_leaving=is_leaving)


# Sums of batches on the host, in memory that is used again once nobody needs what lies in it.


@dataclass(slots=True, eq=False)
class RoundSum:
    """The sum of a batch as made in one attempt, over the replicas in `parts` if that is noted. Each of
    `num_users` gives it back once. `is_own` unless another replica sent it.
    """

    flats: Sequence[Tensor]
    attempt: int = -1
    summed: Summed | None = None
    parts: tuple[int, ...] = ()
    num_users: int = 1
    is_own: bool = True


MOST_FREE = 2
"""More than a batch needs lie free only where many were kept for another replica."""


class Buffers:
    """Flats on the host like those of a rank's gradients; pinned where these are on an accelerator."""

    def __init__(self, device: torch.device | None) -> None:
        self._is_pinned = device is not None and is_accelerator(device)
        self._free: list[Sequence[Tensor]] = []
        self._lock = threading.Lock()

    def take(self, like: Sequence[Tensor]) -> RoundSum:
        """Memory for a sum of such flats. All calls are for flats alike."""
        with self._lock:
            if self._free:
                return RoundSum(self._free.pop())
        make = pinned_like if self._is_pinned else partial(torch.empty_like, device="cpu")
        return RoundSum([make(one) for one in like])

    def give_back(self, result: RoundSum) -> None:
        """One user less; after the last one the memory is used again, or given back if enough is free."""
        with self._lock:
            result.num_users -= 1
            if not result.num_users and len(self._free) < MOST_FREE:
                self._free.append(result.flats)


# What an agent works with: the coordinator it talks to, a batch whose sum is wanted, what words say.


class DroppedError(Exception):
    """This replica is no member any more: its life is over, and the launcher begins its next one."""


class Coordinator(Protocol):
    """A rank's way to the coordinator. It reports by itself as often as its lease wants it. Processes of the
    run know its `key`.
    """

    key: str

    @property
    def word(self) -> CoordinatorReply:
        """The last word."""

    def say(self, *, address: str, **fields: Any) -> None:
        """Report these fields from now on. Does not wait."""

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word, from any thread that holds no lock."""

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""


@dataclass(slots=True, eq=False)
class SumJob:
    """A batch that this rank wants the committed sum of, in flats `like` these.

    `prepare`, which is called in the agent's thread, fills in the contribution and the seconds that it kept
    the rank busy; without it this replica has no part in the batch. It is called once `may_prepare` is set.
    If it `always_prepares`, that is also called where the batch counts already: other ranks take part.
    `how` adds contributions up, other than as they are. `after` is called there with the result.
    """

    batch: int
    like: Sequence[Tensor]
    prepare: Callable[["SumJob"], None] | None = None
    may_prepare: threading.Event | None = None
    always_prepares: bool = False
    how: SumsFlats | None = None
    after: Callable[[RoundSum], None] | None = None
    busy_s: float = 0.0
    contribution: Contribution | None = None
    result: RoundSum | None = None
    parts: tuple[int, ...] = ()
    """The replicas whose samples the committed sum is of."""
    error: BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)


def deal_in(word: CoordinatorReply, own: RankId, batch: int) -> Deal | None:
    """What a rank's replica trains in a batch, if that is dealt."""
    return next((one for one in word.deals if (one.replica, one.batch) == (own.replica, batch)), None)


def heal_in(word: CoordinatorReply, own: RankId) -> Heal | None:
    """Where a rank's replica gets its state from, if it is no member yet."""
    return next((one for one in word.heals if one.replica == own.replica), None)


def is_in(own: RankId, grant: Grant) -> bool:
    """Whether a rank's replica has a part in a round."""
    return any(part.replica == own.replica for part in grant.parts)


def _member_in(word: CoordinatorReply, replica: int) -> Member:
    """A replica that lives. Raises `LineBroken` if it does not."""
    found = next((one for one in word.members if one.replica == replica), None)
    if found is None or not all(found.addresses):
        raise LineBroken(replica, "it is no member any more")
    return found


LOOK_S = 0.5


class SupersededError(Exception):
    """The attempt is not wanted any more."""


class PeerAgent(ABC):
    """The agent of one rank. `on_error` is told, from its thread, why it ends before it is closed."""

    def __init__(
        self,
        own: RankId,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        on_error: Callable[[BaseException], object],
    ) -> None:
        self.own = own
        self._coordinator, self._timeout_s, self._on_error = coordinator, timeout_s, on_error
        self._changed, self._saying = threading.Condition(), threading.Lock()
        self._healed: int | None = None
        """The batch of the snapshot that was loaded, for the coordinator to know."""
        self.heal_times: HealTimes | None = None
        """How long this rank took to heal, until the other replicas have it."""
        self.losses = LossTimes()
        """How late this rank noticed that other replicas were lost."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._board = PeerConnections(own, self._answer, key=coordinator.key, timeout_s=timeout_s)
        coordinator.on_word(self.poke)

    # What each kind of agent does in its own way.

    @abstractmethod
    def tell_lost(self, donor: int) -> None:
        """A donor could not be reached."""

    @abstractmethod
    def _answer(self, made: socket.socket, what: int, name: int) -> None:
        """Give another rank what it asks for; called in a thread of the request's own."""

    @abstractmethod
    def _report(self) -> Mapping[str, Any]:
        """What the coordinator is told of this rank."""

    @abstractmethod
    def _note(self, word: CoordinatorReply) -> None:
        """Take notice of what others need, before anything else follows from a word."""

    @abstractmethod
    def _step(self, word: CoordinatorReply) -> bool:
        """Do the next thing that a word allows; False if there is none."""

    @abstractmethod
    def _wanted(self) -> object:
        """What the rank waits for now: where that is another one, there may be a next thing to do."""

    # The rank's thread.

    @property
    def word(self) -> CoordinatorReply:
        """The last word of the coordinator."""
        return self._coordinator.word

    def wait_for(self, is_so: Callable[[CoordinatorReply], bool], what: str = "") -> CoordinatorReply:
        """Wait until that is so of the last word, which it gives. `what` says it in words, for agents that
        tell the coordinator.
        """
        del what
        with self._changed:
            while True:
                word = self._coordinator.word
                self._check_usable(word)
                if is_so(word):
                    return word
                self._changed.wait(LOOK_S)

    def wait_until_gone(self, replica: int) -> None:
        """Wait until another replica is no member any more, or there is no telling."""
        with suppress(Exception):
            self.wait_for(
                lambda word: all(one.replica != replica for one in word.members),
                f"replica {replica} to leave",
            )

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[IncomingTensors]:
        """The parcel in which the donor of this replica sends what `heal` says, as named tensors. It comes
        once the donor is there, however long that takes. Raises `LineBroken` if there is another donor.
        """

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            known = heal_in(now, self.own)
            if known is None or (known.donor, known.batch) != (heal.donor, heal.batch):
                raise LineBroken(heal.donor, "it is the donor no more")

        address = _member_in(self.word, heal.donor).addresses[self.own.stage]
        with self._board.ask(heal.donor, address, SNAPSHOT, heal.batch, look) as made:
            yield IncomingTensors(made, look, timeout_s=self._timeout_s)

    def abort(self) -> None:
        """Give up, from any thread: whoever waits here is told at once."""
        self._end(ConnectionAbortedError("This rank has given its agent up."))
        self._board.close()

    def close(self, *, is_leaving: bool) -> None:
        """End. One that is leaving has done all its rounds."""
        self._end(None)
        self._coordinator.close(is_leaving=is_leaving)
        self._board.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    # The agent's own thread.

    def _start(self) -> None:
        """Begin to take part, if it has not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="bireme agent", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while not self._is_closed:
                    # What is wanted is looked at first: it may become another while a step is looked for.
                    wanted, word = self._wanted(), self._coordinator.word
                    self._check_usable(word)
                    self.losses.note(word, time.monotonic())
                    self._note(word)
                    if not self._step(word):
                        self._wait_for_news(word, wanted)
        except BaseException as error:
            is_first = not self._is_closed
            self._end(error)
            if is_first:
                self._on_error(error)

    def _wait_for_news(self, seen: CoordinatorReply, wanted: object) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._coordinator.word is not seen or self._wanted() is not wanted,
                LOOK_S,
            )

    def add_up(
        self,
        own: Contribution,
        into: Sequence[Tensor],
        members: Sequence[int],
        place: int,
        attempt: int,
        word: CoordinatorReply,
        is_wanted: Callable[[CoordinatorReply], bool],
        how: SumsFlats | None = None,
    ) -> Summed:
        """The sum over the ranks of this stage in some replicas, as long as it is wanted. A later sum has a
        greater `place`. Raises `SupersededError`, or `LineBroken` if a member is lost.
        """

        def check() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            if not is_wanted(now):
                raise SupersededError

        try:
            lines: Mapping[int, PeerLine] = {
                replica: self._board.line(replica, member.life, member.addresses[self.own.stage], check)
                for replica in members
                if replica != self.own.replica
                for member in [_member_in(word, replica)]
            }
            group = RoundGroup(
                self.own.replica,
                members,
                lines.__getitem__,
                Stamp(word.epoch // TERM, place, attempt),
                timeout_s=self._timeout_s,
                check=check,
            )
            return sum_over(own, into, group, how)
        except LineBroken as error:
            self._board.drop(error.member)
            raise

    def _source(self, commit: Commit) -> int | None:
        """The replica from which this one gets a sum that counts, if it has to get it."""
        return next((one.source for one in commit.sources if one.target == self.own.replica), None)

    def _pull(
        self, commit: Commit, place: int, word: CoordinatorReply, into: Sequence[Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Get a sum that counts from its source: its numbers, and the tensors that belong to it. Raises
        `SupersededError` if there is another source by now, and `LineBroken` or an `OSError` if the source
        cannot send it.
        """
        source = self._source(commit)
        assert source is not None, "who asks has one"

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            known = [one for one in now.commits if (one.line, one.round) == (commit.line, commit.round)]
            if source not in map(self._source, known):
                raise SupersededError

        address = _member_in(word, source).addresses[self.own.stage]
        with self._board.ask(source, address, SUM, place, look) as made:
            parcel = IncomingTensors(made, look, timeout_s=self._timeout_s)
            words = parcel.words()
            parcel.fill(into)
            return words, parcel.named(words)

    # Any thread.

    def _say(self) -> None:
        with self._saying:  # so that what is said last is the last
            with self._changed:
                fields = {**self._report(), "healed": self._healed}
            self._coordinator.say(address=self._board.address, **fields)

    def poke(self) -> None:
        """Have the agent's thread look for its next step."""
        with self._changed:
            self._changed.notify_all()

    def _check_usable(self, word: CoordinatorReply) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ConnectionAbortedError("This rank's agent is closed.")
        if word.standstill:
            raise RunFailed(word.standstill)
        if word.is_dropped:
            raise DroppedError(f"a rank of replica {self.own.replica} was silent for longer than its lease.")

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._is_closed = True
            self._changed.notify_all()


def fetched(agent: PeerAgent, heal: Heal) -> tuple[Snapshot, dict[str, Any]] | None:
    """What a donor sends, and what it says along with it; None if it could not be had, and the coordinator is
    to name a donor again.
    """
    try:
        with agent.fetch(heal) as parcel:
            words = parcel.words()
            tensors = parcel.named(words)
    except (LineBroken, OSError):
        if heal in agent.word.heals:
            agent.tell_lost(heal.donor)
        return None
    return Snapshot(words["num_trained"], words["clip_scale"], tensors), words
