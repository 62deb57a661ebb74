"""A rank's agent where replicas average weights: a thread that takes part in groups and rounds of its stage.

It says where the rank is, does what the coordinator grants, and gives the rank each mean and each sum that
counts. What the coordinator says is always all that holds, so it looks at the last word only, and does the
next step that it allows. The rank says what it brings (`arrive`, `offer`) and takes what came (`group`,
`take`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.averaging.deals import Deals
from bireme.runtime.averaging.for_others import ForOthers
from bireme.runtime.averaging.groups import GroupJob, Groups
from bireme.runtime.averaging.lines import Coordinator, Line, Offer, Settled
from bireme.runtime.averaging.sums import PLACES, PeerSums, SupersededError
from bireme.runtime.quorum.job import DroppedError, is_in, member_in
from bireme.runtime.quorum.parcels import Parcel
from bireme.runtime.quorum.switchboard import SNAPSHOT, Switchboard
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import Commit, Grant, Heal, RankId, Window, Word
from bireme.sync.quorum.line import LineBroken
from bireme.sync.quorum.ring import Contribution

__all__ = ["AveragingAgent"]

LOOK_S = 0.5


class AveragingAgent:
    """The agent of one rank. `on_error` is told, from its thread, why it ends before it is closed."""

    def __init__(
        self,
        own: RankId,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        on_error: Callable[[BaseException], object] = lambda _error: None,
    ) -> None:
        self.own = own
        self.lines: Sequence[Line] = ()
        """The last one has the means over all replicas."""
        self._coordinator, self._timeout_s, self._on_error = coordinator, timeout_s, on_error
        self._device = device
        self._changed, self._saying = threading.Condition(), threading.Lock()
        self._healed: int | None = None
        self._waits = ""
        self.deals = Deals(own, self.wait_for, self._say)
        self._for_others = ForOthers(lambda: self.lines, self._changed, timeout_s)
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._board = Switchboard(own, self._for_others.answer, timeout_s=timeout_s)
        self._sums = PeerSums(own, self._board, lambda: coordinator.word, self._check_usable, timeout_s)
        self._groups = Groups(own, self._sums, device, self._changed, self._say)
        coordinator.on_word(self._poke)

    # The rank's thread.

    def bind(self, likes: Sequence[Sequence[Tensor]]) -> None:
        """Learn what the sums of each line lie in."""
        with self._changed:
            before, self.lines = self.lines, [Line(n, like, self._device) for n, like in enumerate(likes)]
            for old, new in zip(before, self.lines, strict=False):
                new.begin(old.at.committed)

    def begin(self, window: Window, *, used: Sequence[int] = (), healed: int | None = None) -> None:
        """Report to the coordinator from now on, from a window; this rank has used so many rounds of each
        line.
        """
        with self._changed:
            self.deals.window, self._healed = window, healed
            for line, committed in zip(self.lines, used, strict=False):
                line.begin(committed)
        self._say()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="bireme agent", daemon=True)
            self._thread.start()

    def enter(self, until: int) -> None:
        """The next batches are of the window after the last mean; it has the places below `until`."""
        with self._changed:
            self.deals.enter(self.lines[-1].at.committed, until)
            self._groups.is_drained = False
            for line in self.lines[:-1]:
                line.offer, line.at = None, replace(line.at, ready=None)
        self._say()

    def wait_for(self, is_so: Callable[[Word], bool], what: str = "") -> Word:
        """Wait until that is so of the last word, which it gives. `what` it is, all may wait for in vain."""
        found: list[Word] = []

        def is_known() -> bool:
            found[:] = [self._coordinator.word]
            return is_so(found[0])

        self._wait(is_known, what)
        return found[0]

    @property
    def word(self) -> Word:
        """The last word of the coordinator."""
        return self._coordinator.word

    def arrive(self, batch: int, make: Callable[[], Contribution]) -> None:
        """Have the weights after a batch averaged with a group; returns at once."""
        self._groups.arrive(batch, make)

    def group(self, batch: int) -> GroupJob:
        """The group after a batch, once its mean counts."""
        job = self._groups.job
        assert job is not None, "it has arrived"
        assert job.batch == batch, "groups are taken in the order of arrivals"
        self._wait(job.is_done.is_set, f"a group after its batch {batch}")
        return job

    def give_back(self, job: GroupJob) -> None:
        """The mean of a group is used."""
        self._groups.give_back(job)

    def offer(self, line: Line, offer: Offer) -> None:
        """Contribute to the next round of a line; returns at once."""
        with self._changed:
            line.offer = offer
            at = line.at
            line.at = replace(
                at, ready=at.committed, num_samples=offer.num_samples, trained=offer.trained, lost=()
            )
        self._say()

    def wait_settled(self, lines: Sequence[Line]) -> None:
        """Wait until a round of one of these lines counts that the rank has not taken."""
        self._wait(lambda: any(line.settled for line in lines), "a mean of the replicas")

    def take(self, line: Line) -> Settled | None:
        """The next round of a line that counts and that this rank has not used; it is taken as used."""
        with self._changed:
            if not line.settled:
                return None
            found = line.settled.popleft()
            line.offer = None
            line.at = replace(line.at, committed=line.at.committed + 1, ready=None, summed=None, lost=())
        self._say()
        return found

    def drain(self) -> None:
        """This rank has no batch left in its window."""
        with self._changed:
            self._groups.is_drained = True
        self._say()

    def due(self, batch: int) -> int | None:
        """The name of a snapshot that another replica waits for, if one is due before a batch's update."""
        return self._for_others.due(self.word, self.own.replica, batch)

    def provide(self, name: int, snapshot: Snapshot) -> None:
        """Here is one that was due."""
        self._for_others.provide(name, snapshot, self.deals.window)

    def tell_lost(self, donor: int) -> None:
        """A donor could not be reached."""
        with self._changed:
            self.lines[-1].at = replace(self.lines[-1].at, lost=(donor,))
        self._say()

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[Parcel]:
        """The parcel in which the donor of this replica sends what `heal` says, as named tensors. It comes
        once the donor is there, however long that takes. Raises `LineBroken` if there is another donor.
        """

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            if heal not in now.heals:
                raise LineBroken(heal.donor, "it is the donor no more")

        address = member_in(self.word, heal.donor).addresses[self.own.stage]
        with self._board.ask(heal.donor, address, SNAPSHOT, heal.batch, look) as made:
            yield Parcel(made, look, timeout_s=self._timeout_s)

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

    def wait_until_used_by_all(self) -> None:
        """Wait until no replica needs a sum from this one, or there is no telling. Who has begun to heal from
        it gets no snapshot any more, and is not waited for.
        """
        used = [line.at.committed for line in self.lines]

        def is_over(word: Word) -> bool:
            is_donor = any(heal.donor == self.own.replica for heal in word.heals)
            return is_donor or all(map(lambda kept, own: kept >= own, word.kept, used))

        with suppress(Exception):
            self.wait_for(is_over, "others to use the last mean")

    def wait_until_gone(self, replica: int) -> None:
        """Wait until another replica is no member any more, or there is no telling."""
        with suppress(Exception):
            self.wait_for(
                lambda word: all(one.replica != replica for one in word.members),
                f"replica {replica} to leave",
            )

    # The agent's own thread.

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while not self._is_closed:
                    word, job = self._coordinator.word, self._groups.job
                    self._check_usable(word)
                    self._forget(word)
                    if not self._step(word):
                        self._wait_for_news(word, job)
        except BaseException as error:
            is_first = not self._is_closed
            self._end(error)
            if is_first:
                self._on_error(error)

    def _wait_for_news(self, seen: Word, job: GroupJob | None) -> None:
        """Wait until there is another word than the one that was seen, or another job."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._coordinator.word is not seen or self._groups.job is not job,
                LOOK_S,
            )

    def _forget(self, word: Word) -> None:
        """Let go of sums that all have used."""
        for line, kept in zip(self.lines, word.kept, strict=False):
            with self._changed:
                free = [line.kept.pop(number) for number in list(line.kept) if number < kept]
            for result in free:
                line.give_back(result)

    def _step(self, word: Word) -> bool:
        """Do the next thing that a word allows; False if there is none."""
        if all(one.own_life != self.own.own_life for one in word.members):
            return False  # a snapshot is to say first which rounds are in it
        for line in self.lines:
            commit = next((o for o in word.commits if (o.line, o.round) == (line.number, line.next)), None)
            if commit is not None and self._settle(line, commit, word):
                return True
        for line in self.lines:
            grant = next((o for o in word.grants if (o.line, o.round) == (line.number, line.next)), None)
            if grant is None or grant == line.failed or not is_in(self.own, grant):
                continue
            if line.at.summed != grant.round or line.at.attempt != grant.attempt:
                self._attempt(line, grant, word)
                return True
        return self._groups.step(word, self.lines[-1].at.committed if self.lines else 0)

    def _attempt(self, line: Line, grant: Grant, word: Word) -> None:
        self._let_go(line)
        if line.contribution is None:
            offer = line.offer
            line.was_offered = offer is not None and offer.num_samples > 0
            line.contribution = line.nothing(0) if offer is None else offer.make()
        result = line.room()

        try:
            result.summed = self._sums.add_up(
                line.contribution,
                result.flats,
                [part.replica for part in grant.parts],
                (sum(word.committed) + 1) << PLACES,
                grant.attempt,
                word,
                lambda word: grant in word.grants,
            )
        except (SupersededError, LineBroken) as error:
            line.give_back(result)
            if isinstance(error, LineBroken):
                line.failed = grant
                self._change(line, summed=None, lost=(error.member,), attempt=grant.attempt)
            return
        result.attempt = grant.attempt
        line.made = result
        self._change(line, summed=grant.round, attempt=grant.attempt, lost=())

    def _settle(self, line: Line, commit: Commit, word: Word) -> bool:
        """A round counts: give its sum to the rank, and keep it for who comes late."""
        result, line.made = line.made, None
        if result is not None and result.attempt != commit.attempt:
            line.give_back(result)
            result = None
        is_own = result is not None and line.was_offered
        if result is None:
            source = next((one.source for one in commit.sources if one.target == self.own.replica), None)
            if source is None or source in line.at.lost:
                return False
            result = self._sums.pulled(line, commit, source, word)
            if result is None:
                self._change(line, lost=(source,))
                return False
        result.num_users = 2
        parts = tuple(part.replica for part in commit.parts)
        with self._changed:
            line.kept[commit.round] = result
            line.contribution = line.failed = None
            line.next += 1
            line.settled.append(Settled(result, is_own, parts))
            self._changed.notify_all()
        return True

    def _let_go(self, line: Line) -> None:
        if line.made is not None:
            line.give_back(line.made)
            line.made = None
            self._change(line, summed=None)

    def _change(self, line: Line, **changes: Any) -> None:
        with self._changed:
            line.at = replace(line.at, **changes)
        self._say()

    def _say(self) -> None:
        with self._saying:  # so that what is said last is the last
            with self._changed:
                fields = {
                    "wants": self.deals.wants,
                    "rounds": tuple(line.at for line in self.lines),
                    "group": self._groups.at,
                    "healed": self._healed,
                    "window": self.deals.window,
                    "means": self.deals.asked_to_end,
                    "waits": self._waits,
                }
            self._coordinator.say(address=self._board.address, **fields)

    # Other threads.

    def _wait(self, is_so: Callable[[], bool], what: str = "") -> None:
        """Wait until that is so, and let the coordinator know for what if nothing happens."""
        while not (found := self._looked(is_so)):
            if found is None and what and not self._waits:
                self._tell_waits(what)
        if what and self._waits == what:
            self._tell_waits("")

    def _looked(self, is_so: Callable[[], bool]) -> bool | None:
        """Whether that is so: False if it may be by now, None if nothing has happened for a while."""
        with self._changed:
            self._check_usable(self._coordinator.word)
            return is_so() or (False if self._changed.wait(LOOK_S) else None)

    def _tell_waits(self, what: str) -> None:
        self._waits = what
        self._say()

    def _poke(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_usable(self, word: Word) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ConnectionAbortedError("This rank's agent is closed.")
        if word.standstill:
            raise BiremeError(word.standstill)
        if word.is_dropped:
            raise DroppedError(f"a rank of replica {self.own.replica} was silent for longer than its lease.")

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._is_closed = True
            self._changed.notify_all()
        self._for_others.close()
