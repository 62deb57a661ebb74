"""A rank's agent where replicas average weights: it takes part in groups and rounds of its stage.

The rank says what it brings (`arrive`, `offer`) and takes what came (`group`, `take`).
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bireme.runtime.averaging.groups import PLACES, GroupJob, HowOfRound, RankGroups
from bireme.runtime.quorum.agent import HEAL_SHARE, OFFER_LOOK_S, has_hung_up
from bireme.runtime.quorum.peer_agent import (
    LOOK_S,
    Buffers,
    Coordinator,
    PeerAgent,
    RoundSum,
    SupersededError,
    deal_in,
    is_in,
)
from bireme.runtime.quorum.peer_connections import SNAPSHOT, SUM, listed, send_named, send_tensors
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Deal,
    End,
    Grant,
    RankId,
    RoundAt,
    Window,
)
from bireme.sync.quorum.line import LineBroken
from bireme.sync.quorum.ring import Contribution, Summed

# The batches of a replica as one of its ranks learns of them: what was dealt, and where its window ends.

_LEAST_KEPT = 64
"""Deals that are known of batches before the newest."""

_WaitFor = Callable[[Callable[[CoordinatorReply], bool], str], CoordinatorReply]


class _Deals:
    """`wait_for` waits for a word of which something is so, which it is told in words; `say` reports what is
    here.
    """

    def __init__(self, own: RankId, wait_for: _WaitFor, say: Callable[[], None]) -> None:
        self.window = Window(0, 0)
        self.wants = self.asked_to_end = self.ended_at = 0
        """The first batch that is not wanted yet, how many windows were asked to end, and the place at which
        the present one ends, as far as that is known."""
        self._own, self._wait_for, self._say = own, wait_for, say
        self._known: dict[int, Deal] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, until: int) -> None:
        """The next batches are of that window, which has the places below `until`."""
        self.window = replace(self.window, number=number, until=until)
        self.ended_at = until

    def ask_end(self) -> None:
        """Ask for the present window to end."""
        if self.asked_to_end <= self.window.number:
            self.asked_to_end = self.window.number + 1
            self._say()

    def want(self, batch: int) -> bool:
        """Want a batch from the next report on; False if it was wanted before."""
        with self._lock:  # whoever reads batches and whoever trains them want some
            is_new = batch >= self.wants
            self.wants = max(self.wants, batch + 1)
        return is_new

    def dealt(self, batch: int) -> Deal | None:
        """The samples of a batch; None if its window has none. Waits until that is known."""
        if self.want(batch):
            self._say()

        def end_in(word: CoordinatorReply) -> End | None:
            own = self._own.replica, self.window.number
            ends = (one for one in word.ends if (one.replica, one.window) == own and batch >= one.batch)
            return next(ends, None)

        word = self._wait_for(
            lambda word: end_in(word) is not None or deal_in(word, self._own, batch) is not None,
            "samples",
        )
        if (end := end_in(word)) is not None:
            self.ended_at = end.until
            return None
        deal = deal_in(word, self._own, batch)
        assert deal is not None, "it was waited for"
        self._known[batch] = deal
        self._known.pop(batch - _LEAST_KEPT, None)
        return deal

    def of(self, batch: int) -> Deal:
        """What was dealt for a batch that is under way."""
        return self._known[batch]


# The rounds that an averaging agent has under way, line by line.


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a rank brings to a round: `make` is called in the agent's thread, once. It is of so many samples,
    and the first `trained` batches of the replica are in it or in earlier ones. A round that `is_due` is made
    even if no replica has samples in it.
    """

    make: Callable[[], Contribution]
    num_samples: int = 0
    trained: int = 0
    is_due: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SettledRound:
    """A round that counts, and whether this rank's own offer is in it. Whoever takes it gives it back."""

    result: RoundSum
    is_own: bool
    commit: Commit

    @property
    def parts(self) -> tuple[int, ...]:
        """The replicas that had a part in it."""
        return self.result.parts


class RankRounds:
    """A line of rounds as one rank sees it; a sum lies in flats `like` these, and `firsts` are those of their
    `Contribution`. `how` is how contributions to a round are added up, other than as they are.

    `at` is what it reports: there the rounds that it has used are committed. `next` is the first one whose
    sum the agent does not have, or has not heard to count.
    """

    def __init__(
        self,
        number: int,
        like: Sequence[Tensor],
        firsts: Sequence[int | None],
        device: torch.device | None,
        how: HowOfRound | None,
    ) -> None:
        self.number = number
        self.like = like
        self.firsts = firsts
        self.how = how
        self.at = RoundAt()
        self.next = 0
        self.offer: Offer | None = None
        self.contribution: Contribution | None = None
        self.made: RoundSum | None = None
        """The sum that was made and is not yet committed, in the attempt that the report says."""
        self.was_offered = False
        """Whether the sum that was made has samples of this rank in it. A later offer may be waiting."""
        self.failed: Grant | None = None
        self.kept: dict[int, RoundSum] = {}
        self.settled: deque[SettledRound] = deque()
        self._buffers = Buffers(device)

    def begin(self, committed: int) -> None:
        """The rank has used so many rounds."""
        self.at, self.next = RoundAt(committed=committed), committed

    def room(self) -> RoundSum:
        """Memory for a sum."""
        return self._buffers.take(self.like)

    def give_back(self, result: RoundSum) -> None:
        """A sum is used."""
        self._buffers.give_back(result)

    def nothing(self, num_numbers: int) -> Contribution:
        """What a rank contributes that has nothing to add, and yet holds what others do."""
        flats = [torch.zeros(one.shape, dtype=one.dtype) for one in self.like]
        return Contribution(flats, b"", 0.0, 0.0, (), (0.0,) * num_numbers, firsts=self.firsts)


# What a rank has for those of its stage in other replicas: sums that count, and snapshots to heal from.

_Found = TypeVar("_Found")


class _ForOthers:
    """What one rank has; sums are those that its `lines` keep. All share the agent's `changed`."""

    def __init__(
        self, lines: Callable[[], Sequence[RankRounds]], changed: threading.Condition, timeout_s: float
    ) -> None:
        self._lines, self._changed, self._timeout_s = lines, changed, timeout_s
        self._snapshots: dict[int, tuple[Snapshot, dict[str, Any]]] = {}
        """With where the run was then: the rounds of each line that are in it, and the window."""
        self._is_closed = False

    def due(self, word: CoordinatorReply, replica: int, batch: int) -> int | None:
        """The name of a snapshot that is wanted of this replica, if one is due before a batch's update."""
        asked = {heal.batch for heal in word.heals if heal.donor == replica}
        with self._changed:
            self._snapshots = {name: one for name, one in self._snapshots.items() if name in asked}
            found = [name for name in asked - self._snapshots.keys() if name <= batch]
        return min(found, default=None)

    def provide(self, name: int, snapshot: Snapshot, window: Window) -> None:
        """Here is one that was due, from within a window."""
        with self._changed:
            used = tuple(line.at.committed for line in self._lines())
            where = {"used": used, "window": window.number, "until": window.until}
            self._snapshots[name] = snapshot, where
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, name: int) -> None:
        """Give another replica what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            kept, ends_s = self._lines()[name >> PLACES].kept, time.monotonic() + self._timeout_s
            result = self._found(
                lambda: kept.get(name & ((1 << PLACES) - 1)), lambda: time.monotonic() > ends_s
            )
            if result is not None and result.summed is not None:
                summed = result.summed
                words = {"weight": summed.weight, "numbers": summed.numbers, "parts": result.parts}
                words |= {"tensors": listed(summed.more)}
                send_tensors(made, words, [*result.flats, *summed.more.values()])
        elif what == SNAPSHOT:
            # An evaluation may take longer than any timeout, and the next update follows it.
            found = self._found(lambda: self._snapshots.get(name), lambda: has_hung_up(made))
            if found is not None:
                snapshot, where = found
                said = {"num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale}
                send_named(made, {**said, **where}, snapshot.tensors, share=HEAL_SHARE)

    def close(self) -> None:
        """There is nothing more to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _found(self, find: Callable[[], _Found | None], is_over: Callable[[], bool]) -> _Found | None:
        with self._changed:
            while (found := find()) is None and not self._is_closed and not is_over():
                self._changed.wait(OFFER_LOOK_S)
            return found


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
        self.deals = _Deals(own, self.wait_for, self._say)
        self._for_others = _ForOthers(lambda: self.lines, self._changed, timeout_s)
        self._groups = RankGroups(self, device, self._changed, self._say)

    # The rank's thread.

    def bind(
        self,
        likes: Sequence[Sequence[Tensor]],
        firsts: Sequence[int | None] = (),
        hows: Sequence[HowOfRound | None] = (),
        group_how: HowOfRound | None = None,
    ) -> None:
        """Learn what the sums of each line lie in. `firsts` are those of each line's contributions, and
        `hows` how these are added up: as they are for lines without. `group_how` is that of groups.
        """
        with self._changed:
            before, self._groups.how = self.lines, group_how
            self.lines = [
                RankRounds(number, like, firsts, self._device, hows[number] if number < len(hows) else None)
                for number, like in enumerate(likes)
            ]
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
                at,
                ready=at.committed,
                num_samples=offer.num_samples,
                trained=offer.trained,
                is_due=offer.is_due,
                lost=(),
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
                None if line.how is None else line.how(grant.round),
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
            words, more = self._pull(commit, line.number << PLACES | commit.round, word, result.flats)
        except (SupersededError, LineBroken, OSError) as error:
            line.give_back(result)
            if not isinstance(error, SupersededError):
                self._change(line, lost=(source,))
            return None
        finally:
            self._tell_pulling(is_so=False)
        result.attempt, result.is_own = commit.attempt, False
        result.summed = Summed(b"", words["weight"], (), tuple(words["numbers"]), more)
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
