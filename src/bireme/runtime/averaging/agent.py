"""A rank's agent where replicas average weights: it takes part in groups and rounds of its stage.

The rank says what it brings (`arrive`, `offer`) and takes what came (`group`, `take`).
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.averaging.deals import Deals
from bireme.runtime.averaging.for_others import ForOthers
from bireme.runtime.averaging.groups import GroupJob, RankGroups
from bireme.runtime.averaging.lines import Offer, RankRounds, SettledRound
from bireme.runtime.averaging.places import PLACES
from bireme.runtime.quorum.job import Coordinator, is_in
from bireme.runtime.quorum.peer_agent import LOOK_S, PeerAgent, SupersededError
from bireme.runtime.quorum.results import RoundSum
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import Commit, CoordinatorReply, Grant, RankId, Window
from bireme.sync.quorum.line import LineBroken
from bireme.sync.quorum.ring import Contribution, Summed

__all__ = ["AveragingAgent"]


class AveragingAgent(PeerAgent):
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
        super().__init__(own, coordinator, timeout_s=timeout_s, on_error=on_error)
        self.lines: Sequence[RankRounds] = ()
        """The last one has the means over all replicas."""
        self._device = device
        self._waits, self._is_pulling = "", False
        self.deals = Deals(own, self.wait_for, self._say)
        self._for_others = ForOthers(lambda: self.lines, self._changed, timeout_s)
        self._groups = RankGroups(own, self.add_up, device, self._changed, self._say)

    # The rank's thread.

    def bind(self, likes: Sequence[Sequence[Tensor]]) -> None:
        """Learn what the sums of each line lie in."""
        with self._changed:
            before, self.lines = (
                self.lines,
                [RankRounds(n, like, self._device) for n, like in enumerate(likes)],
            )
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
        self._start()

    def enter(self, until: int) -> None:
        """The next batches are of the window after the last mean; it has the places below `until`."""
        with self._changed:
            self.deals.enter(self.lines[-1].at.committed, until)
            self._groups.is_drained = False
            for line in self.lines[:-1]:
                line.offer, line.at = None, replace(line.at, ready=None)
        self._say()

    def wait_for(self, is_so: Callable[[CoordinatorReply], bool], what: str = "") -> CoordinatorReply:
        """Wait until that is so of the last word, which it gives. If nothing happens meanwhile, the
        coordinator is told `what` this rank waits for.
        """
        found: list[CoordinatorReply] = []

        def is_known() -> bool:
            found[:] = [self._coordinator.word]
            return is_so(found[0])

        self._wait(is_known, what)
        return found[0]

    def arrive(self, batch: int, make: Callable[[], Contribution]) -> None:
        """Have the weights after a batch averaged with a group; returns at once. The samples of the next
        batch are asked for in the same report.
        """
        self.deals.want(batch + 1)
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

    def offer(self, line: RankRounds, offer: Offer) -> None:
        """Contribute to the next round of a line; returns at once."""
        with self._changed:
            line.offer = offer
            at = line.at
            line.at = replace(
                at, ready=at.committed, num_samples=offer.num_samples, trained=offer.trained, lost=()
            )
        self._say()

    def wait_settled(self, lines: Sequence[RankRounds]) -> None:
        """Wait until a round of one of these lines counts that the rank has not taken."""
        self._wait(lambda: any(line.settled for line in lines), "a mean of the replicas")

    def take(self, line: RankRounds) -> SettledRound | None:
        """The next round of a line that counts and that this rank has not used; it is taken as used."""
        with self._changed:
            if not line.settled:
                return None
            found = line.settled.popleft()
            line.offer = None
            line.at = replace(
                line.at,
                committed=line.at.committed + 1,
                ready=None,
                summed=None,
                lost=(),
                last=replace(found.commit, sources=()),
            )
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

    def wait_until_used_by_all(self) -> None:
        """Wait until no replica needs a sum from this one, or there is no telling. Who has begun to heal from
        it gets no snapshot any more, and is not waited for.
        """
        used = [line.at.committed for line in self.lines]

        def is_over(word: CoordinatorReply) -> bool:
            is_donor = any(heal.donor == self.own.replica for heal in word.heals)
            return is_donor or all(map(lambda kept, own: kept >= own, word.kept, used))

        with suppress(Exception):
            self.wait_for(is_over, "others to use the last mean")

    # The agent's own thread.

    def _answer(self, made: socket.socket, what: int, name: int) -> None:
        self._for_others.answer(made, what, name)

    def _report(self) -> Mapping[str, Any]:
        return {
            "wants": self.deals.wants,
            "rounds": tuple(line.at for line in self.lines),
            "group": self._groups.at,
            "window": self.deals.window,
            "means": self.deals.asked_to_end,
            "waits": "" if self._is_pulling else self._waits,
        }

    def _wanted(self) -> object:
        return self._groups.job

    def _note(self, word: CoordinatorReply) -> None:
        """Let go of sums that all have used."""
        for line, kept in zip(self.lines, word.kept, strict=False):
            with self._changed:
                free = [line.kept.pop(number) for number in list(line.kept) if number < kept]
            for result in free:
                line.give_back(result)

    def _step(self, word: CoordinatorReply) -> bool:
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

    def _attempt(self, line: RankRounds, grant: Grant, word: CoordinatorReply) -> None:
        self._let_go(line)
        if line.contribution is None:
            offer = line.offer
            line.was_offered = offer is not None and offer.num_samples > 0
            line.contribution = line.nothing(0) if offer is None else offer.make()
        result = line.room()

        try:
            result.summed = self.add_up(
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

    def _settle(self, line: RankRounds, commit: Commit, word: CoordinatorReply) -> bool:
        """A round counts: give its sum to the rank, and keep it for who comes late."""
        result, line.made = line.made, None
        if result is not None and result.attempt != commit.attempt:
            line.give_back(result)
            result = None
        if result is not None:
            result.parts = tuple(part.replica for part in commit.parts)
        else:
            result = self._pulled(line, commit, word)
            if result is None:
                return False
        # A coordinator that has taken up may not know whose sum it is that counts.
        is_own = line.was_offered and self.own.replica in result.parts
        result.num_users = 2
        with self._changed:
            line.kept[commit.round] = result
            line.contribution = line.failed = None
            line.next += 1
            line.settled.append(SettledRound(result, is_own, commit))
            self._changed.notify_all()
        return True

    def _pulled(self, line: RankRounds, commit: Commit, word: CoordinatorReply) -> RoundSum | None:
        """A sum that counts and that another replica has; None if it cannot be had from there."""
        source = self._source(commit)
        if source is None or source in line.at.lost:
            return None
        result = line.room()
        self._tell_pulling(is_so=True)  # which may take longer than any timeout
        try:
            words = self._pull(commit, line.number << PLACES | commit.round, word, result.flats)
        except (SupersededError, LineBroken, OSError) as error:
            line.give_back(result)
            if not isinstance(error, SupersededError):
                self._change(line, lost=(source,))
            return None
        finally:
            self._tell_pulling(is_so=False)
        result.attempt = commit.attempt
        result.summed = Summed(b"", words["weight"], (), tuple(words["numbers"]))
        result.parts = tuple(words["parts"])
        return result

    def _tell_pulling(self, *, is_so: bool) -> None:
        self._is_pulling = is_so
        self._say()

    def _let_go(self, line: RankRounds) -> None:
        if line.made is not None:
            line.give_back(line.made)
            line.made = None
            self._change(line, summed=None)

    def _change(self, line: RankRounds, **changes: Any) -> None:
        with self._changed:
            line.at = replace(line.at, **changes)
        self._say()

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

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._for_others.close()
