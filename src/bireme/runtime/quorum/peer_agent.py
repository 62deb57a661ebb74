"""What the agents of ranks share, whether their replicas sum gradients or average weights.

An agent is a thread that takes part in what the ranks of a stage do together. It says where its rank is, does
what the coordinator grants, and gives the rank what counts. What the coordinator says is always all that
holds, so an agent looks at the last word only, and does the next step that it allows.
"""

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.failures import RunFailed
from bireme.runtime.quorum.job import Coordinator, DroppedError, heal_in, member_in
from bireme.runtime.quorum.parcels import IncomingTensors
from bireme.runtime.quorum.switchboard import SNAPSHOT, SUM, PeerConnections
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import TERM, Commit, CoordinatorReply, Heal, RankId
from bireme.sync.quorum.line import LineBroken, PeerLine, Stamp
from bireme.sync.quorum.ring import Contribution, Summed, sum_over

__all__ = ["LOOK_S", "AddUp", "PeerAgent", "SupersededError", "fetched"]

LOOK_S = 0.5

AddUp = Callable[
    [
        Contribution,
        Sequence[Tensor],
        Sequence[int],
        int,
        int,
        CoordinatorReply,
        Callable[[CoordinatorReply], bool],
    ],
    Summed,
]
"""`PeerAgent.add_up` of one rank."""


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
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._board = PeerConnections(own, self._answer, timeout_s=timeout_s)
        coordinator.on_word(self._poke)

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

        address = member_in(self.word, heal.donor).addresses[self.own.stage]
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
    ) -> Summed:
        """The sum over the ranks of this stage in some replicas, as long as it is wanted. A later sum has a
        greater `place`. Raises `SupersededError`, or `LineBroken` where a member is lost.
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
                for member in [member_in(word, replica)]
            }
            return sum_over(
                own,
                into,
                me=self.own.replica,
                members=members,
                line_to=lines.__getitem__,
                stamp=Stamp(word.epoch // TERM, place, attempt),
                timeout_s=self._timeout_s,
                check=check,
            )
        except LineBroken as error:
            self._board.drop(error.member)
            raise

    def _source(self, commit: Commit) -> int | None:
        """The replica from which this one gets a sum that counts, if it has to get it."""
        return next((one.source for one in commit.sources if one.target == self.own.replica), None)

    def _pull(
        self, commit: Commit, place: int, word: CoordinatorReply, into: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Get a sum that counts from its source; what that says of it. Raises `SupersededError` where there
        is another source by now, and `LineBroken` or an `OSError` where it cannot be had.
        """
        source = self._source(commit)
        assert source is not None, "who asks has one"

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            known = [one for one in now.commits if (one.line, one.round) == (commit.line, commit.round)]
            if source not in map(self._source, known):
                raise SupersededError

        address = member_in(word, source).addresses[self.own.stage]
        with self._board.ask(source, address, SUM, place, look) as made:
            parcel = IncomingTensors(made, look, timeout_s=self._timeout_s)
            words = parcel.words()
            parcel.fill(into)
        return words

    # Any thread.

    def _say(self) -> None:
        with self._saying:  # so that what is said last is the last
            with self._changed:
                fields = {**self._report(), "healed": self._healed}
            self._coordinator.say(address=self._board.address, **fields)

    def _poke(self) -> None:
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
