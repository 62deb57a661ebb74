"""A rank's agent: a thread that takes part in the rounds and groups of its stage.

The rank says what it brings (`offer`, `arrive`) and takes what came (`take`, `group`). What the coordinator
says is always all that holds, so the agent looks at the last word only, and does the next step that it
allows.

    offer ── ready ──▶ grant ── sum over members ──▶ summed ──▶ commit ──▶ taken
               ▲         │ a member is lost: its line broke     │ not of the members:
               └─────────┘ the next attempt, same contribution  └─ the sum comes from a source
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.board import RunFailed
from bireme.runtime.coordinator_client import CoordinatorClient, DroppedError
from bireme.runtime.exchange.deals import Deals, heal_in, member_in
from bireme.runtime.exchange.for_others import KEPT_BYTES, MOST_BEHIND, ForOthers, take_sum
from bireme.runtime.exchange.peer_connections import SNAPSHOT, SUM, PeerConnections, TensorConnection
from bireme.runtime.exchange.rounds import (
    PLACES,
    Attempt,
    BatchOffer,
    Buffers,
    GroupJob,
    HowOfRound,
    Offer,
    RankGroups,
    RoundLine,
    RoundSum,
)
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    CoordinatorReply,
    Grant,
    Heal,
    RankId,
    Window,
)
from bireme.sync.coordinator.recoveries import HealTimes, LossTimes
from bireme.sync.rounds.contribution import Contribution, Summed, sum_over
from bireme.sync.rounds.round_group import LineBroken, PeerLine, RoundGroup, Stamp

LOOK_S = 0.5


class SupersededError(Exception):
    """The attempt is not wanted any more."""


class ExchangeAgent:
    """The agent of one rank. `on_error` is told, from its thread, why it ends before it is closed.

    There is one line of rounds if these are `of_batches`: then a round is the sum of a batch, in which a
    replica can train `spare` samples at the fewest, and sums for replicas that heal take at most
    `kept_bytes`. Else `bind` gives the lines, the last of which has the means over all replicas.
    """

    def __init__(
        self,
        own: RankId,
        coordinator: CoordinatorClient,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        on_error: Callable[[BaseException], object] = lambda _error: None,
        of_batches: bool = False,
        spare: int = 1,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.own = own
        self._coordinator, self._timeout_s, self._on_error = coordinator, timeout_s, on_error
        self._changed, self._saying = threading.Condition(), threading.Lock()
        self._of_batches = of_batches
        self._healed: int | None = None
        """The batch of the snapshot that was loaded, for the coordinator to know."""
        self.heal_times: HealTimes | None = None
        """How long this rank took to heal, until the other replicas have it."""
        self.losses = LossTimes()
        """How late this rank noticed that other replicas were lost."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._num_pokes = 0
        """With another number there may be a next step."""
        self._waits, self._is_pulling = "", False
        self.lines: Sequence[RoundLine] = [RoundLine(0, device=device)] if of_batches else []
        self.deals = Deals(own, self.wait_for, self._say, spare if of_batches else None)
        self.for_others = ForOthers(
            own.replica, lambda: self.lines, self._changed, of_batches=of_batches, kept_bytes=kept_bytes
        )
        self.groups = RankGroups(own, self.made, device, self._changed, self._say)
        self._board = PeerConnections(own, self.for_others.answer, key=coordinator.key, timeout_s=timeout_s)
        coordinator.on_word(self.poke)

    # The rank's thread.

    @property
    def word(self) -> CoordinatorReply:
        """The last word of the coordinator."""
        return self._coordinator.word

    def bind(self, lines: Sequence[RoundLine], group_how: HowOfRound | None = None) -> None:
        """Learn the lines of rounds, and how contributions to groups are added up, other than as they are."""
        with self._changed:
            for old, new in zip(self.lines, lines, strict=False):
                new.begin(old.at.committed)
            self.lines, self.groups.how = lines, group_how

    def begin(
        self, window: Window | None = None, *, used: Sequence[int] = (), healed: int | None = None
    ) -> None:
        """Report to the coordinator from now on, from a window, if there are any; this rank has used so many
        rounds of each line. It has `healed` by the snapshot of that name.
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
            self.groups.is_drained = False
            for line in self.lines[:-1]:
                line.offers.clear()
                line.at = replace(line.at, ready=None)
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

    def wait_until_gone(self, replica: int) -> None:
        """Wait until another replica is no member any more, or there is no telling."""

        def is_gone(word: CoordinatorReply) -> bool:
            return all(one.replica != replica for one in word.members)

        with suppress(Exception):
            self.wait_for(is_gone, f"replica {replica} to leave")

    def wait_until_used_by_all(self) -> None:
        """Wait until no replica needs a sum from this one, or there is no telling. Who has begun to heal from
        it within a window gets no snapshot any more, and is not waited for.
        """
        used = [line.at.committed for line in self.lines]

        def is_over(word: CoordinatorReply) -> bool:
            is_donor = any(heal.donor == self.own.replica for heal in word.heals) and not self._of_batches
            return is_donor or all(map(lambda kept, own: kept >= own, word.kept, used))

        with suppress(Exception):
            self.wait_for(is_over, "others to use the last mean")

    def offer(self, line: RoundLine, offer: Offer) -> None:
        """Contribute to the next round of a line; returns at once."""
        with self._changed:
            at = line.at
            line.offers[at.committed] = offer
            line.at = replace(
                at,
                ready=at.committed,
                num_samples=offer.num_samples,
                trained=offer.trained,
                is_due=offer.is_due,
                lost=(),
            )
        self._say()

    def offer_batch(self, batch: int, offer: BatchOffer, like: Sequence[Tensor]) -> None:
        """Have the sum of a batch got, in flats like these; returns at once."""
        with self._changed:
            self._check_usable(self.word)
            self.lines[0].like, self.lines[0].offers[batch] = like, offer
        self.poke()

    def wait_for_batch(self, offer: BatchOffer) -> RoundSum:
        """The sum of a batch, once it counts and all that follows from it in the agent's thread is done."""
        offer.is_done.wait()  # woken once and not by every word, which would take a processor's time
        if offer.settled is None:
            self._check_usable(self.word)
        assert offer.settled is not None, "it was waited for"
        return offer.settled

    def wait_settled(self, lines: Sequence[RoundLine]) -> None:
        """Wait until a round of one of these lines counts that the rank has not taken."""
        self._wait(lambda: any(line.settled for line in lines), "a mean of the replicas")

    def take(self, line: RoundLine) -> RoundSum | None:
        """The next round of a line that counts and that this rank has not used; it is taken as used."""
        with self._changed:
            if not line.settled:
                return None
            found = line.settled.popleft()
            line.offers.pop(line.at.committed, None)
            line.use(found.commit)
        self._say()
        return found

    def arrive(self, batch: int, make: Callable[[], Contribution]) -> None:
        """Have the weights after a batch averaged with a group; returns at once. The samples of the next
        batch are asked for in the same report.
        """
        self.deals.want(batch + 1)
        self.groups.arrive(batch, make)
        self.poke()

    def group(self, batch: int) -> GroupJob:
        """The group after a batch, once its mean counts."""
        job = self.groups.job
        assert job is not None, "it has arrived"
        assert job.batch == batch, "groups are taken in the order of arrivals"
        self._wait(job.is_done.is_set, f"a group after its batch {batch}")
        return job

    def drain(self) -> None:
        """This rank has no batch left in its window."""
        with self._changed:
            self.groups.is_drained = True
        self._say()

    def due(self, batch: int) -> int | None:
        """The name of a snapshot that another replica waits for, if one is due before a batch's update."""
        return self.for_others.due(self.word, batch)

    def provide(self, name: int, snapshot: Snapshot) -> None:
        """Here is one that was due."""
        self.for_others.provide(name, snapshot, self.deals.window)

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[TensorConnection]:
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
            yield TensorConnection(made, self._timeout_s, look)

    def tell_lost(self, donor: int) -> None:
        """A donor could not be reached."""
        self._change(self.lines[-1], lost=(donor,))

    def abort(self) -> None:
        """Give up, from any thread: each wait here ends with an error at once."""
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

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while not self._is_closed:
                    # This is looked at first: something may be offered while a step is looked for.
                    num_pokes, word = self._num_pokes, self._coordinator.word
                    self._check_usable(word)
                    self.losses.note(word, time.monotonic())
                    self.for_others.note(word)
                    if not self._step(word):
                        self._wait_for_news(num_pokes)
        except BaseException as error:
            is_first = not self._is_closed
            self._end(error)
            if is_first:
                self._on_error(error)

    def _wait_for_news(self, num_pokes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_pokes != num_pokes, LOOK_S)

    def _step(self, word: CoordinatorReply) -> bool:
        """Do the next thing that a word allows; False if there is none."""
        # A snapshot is to say first which rounds are in it. Who heals takes the sums of batches after that.
        is_member = any(one.own_life == self.own.own_life for one in word.members)
        lines = [line for line in self.lines if (line.next in line.offers if self._of_batches else is_member)]
        return (
            any(self._settle_next(line, word) for line in lines)
            or any(self._make_next(line, word) for line in lines)
            or (is_member and self.groups.step(word, self.lines[-1].at.committed if self.lines else 0))
        )

    def _settle_next(self, line: RoundLine, word: CoordinatorReply) -> bool:
        """Take the sum of the next round of a line, if it counts and is there."""
        offer = line.offers.get(line.next)
        if isinstance(offer, BatchOffer):
            heal = heal_in(word, self.own)
            if offer.make is None and heal is not None and heal.batch > line.next:
                # The sum will not come: it was to be had from a donor that is gone.
                raise DroppedError(f"replica {self.own.replica} has lost its donor.")
            if offer.is_joint and not self._is_prepared(line, offer):
                return False
        commit = next((o for o in word.commits if (o.line, o.round) == (line.number, line.next)), None)
        if commit is None:
            return False
        num_behind = word.committed[line.number] - line.next
        if isinstance(offer, BatchOffer) and offer.make is not None and num_behind > MOST_BEHIND:
            raise DroppedError(f"replica {self.own.replica} is {num_behind} batches behind the others.")
        return self._settle(line, commit, word)

    def _make_next(self, line: RoundLine, word: CoordinatorReply) -> bool:
        """Make the sum of the next round of a line, if it is granted, or report that it may be."""
        offer = line.offers.get(line.next)
        if isinstance(offer, BatchOffer):
            if not self._is_prepared(line, offer) or line.contribution is None:
                return False
            if line.at.ready != line.next:
                if self.for_others.is_full(line):
                    return False
                self._change(line, ready=line.next)
                return True
        grant = next((o for o in word.grants if (o.line, o.round) == (line.number, line.next)), None)
        if grant is None or grant == line.failed:
            return False
        if all(part.replica != self.own.replica for part in grant.parts):
            return False
        if line.at.summed == grant.round and line.at.attempt == grant.attempt:
            return False
        self._attempt(line, grant, word)
        return True

    def _is_prepared(self, line: RoundLine, offer: BatchOffer) -> bool:
        """Have the contribution to a batch made, if there is to be one; False if it is too early for that."""
        if offer.make is None or line.contribution is not None:
            return True
        if offer.may_make is not None and not offer.may_make.is_set():
            return False
        line.at = replace(line.at, busy_s=offer.busy_s())
        line.contribution, line.was_offered = offer.make(), True
        return True

    def _attempt(self, line: RoundLine, grant: Grant, word: CoordinatorReply) -> None:
        if line.made is not None:
            line.made.give_back()
            line.made = None
            self._change(line, summed=None)
        offer = line.offers.get(line.next)
        if line.contribution is None:
            make = None if offer is None else offer.make
            line.was_offered = offer is not None and offer.num_samples > 0
            line.contribution = line.nothing(0) if make is None else make()
        how = offer.how if isinstance(offer, BatchOffer) else line.how and line.how(grant.round)
        attempt = Attempt(
            [part.replica for part in grant.parts],
            (sum(word.committed) + 1) << PLACES,
            grant.attempt,
            word,
            lambda word: grant in word.grants,
            how,
        )

        def is_lost(member: int) -> None:
            line.failed = grant
            self._change(line, summed=None, lost=(member,), attempt=grant.attempt)

        line.made = self.made(line.contribution, line.buffers, attempt, is_lost)
        if line.made is not None:
            self._change(line, summed=grant.round, attempt=grant.attempt, lost=())

    def _settle(self, line: RoundLine, commit: Commit, word: CoordinatorReply) -> bool:
        """A round counts: give its sum to the rank, and keep it for who comes late."""
        result, line.made = line.made, None
        if result is not None and result.attempt != commit.attempt:
            result.give_back()
            result = None
        if result is not None:
            result.parts = tuple(part.replica for part in commit.parts)
        else:
            result = self._pulled(line, commit, word)
            if result is None:
                return False
        # A coordinator that has taken up may not know whose sum it is that counts.
        result.has_own, result.commit = line.was_offered and self.own.replica in result.parts, commit
        result.num_users = 2
        offer = line.offers.get(commit.round)
        with self._changed:
            line.kept[commit.round] = result
            line.contribution = line.failed = None
            line.was_offered = False
            line.next += 1
            if isinstance(offer, BatchOffer):
                offer.make = None
                line.use(commit)
            else:
                line.settled.append(result)
            self.for_others.note_bytes()
            self._changed.notify_all()
        if isinstance(offer, BatchOffer):
            self._say()
            offer.after(result)
            offer.settled = result
            del line.offers[commit.round]
            offer.is_done.set()
        return True

    def made(
        self, own: Contribution, buffers: Buffers, attempt: Attempt, is_lost: Callable[[int], None]
    ) -> RoundSum | None:
        """The sum of an attempt; None if that is over without one. `is_lost` is told of a member that is."""
        result = buffers.take(own.flats)
        try:
            result.summed = self.add_up(own, result.flats, attempt)
        except (SupersededError, LineBroken) as error:
            result.give_back()
            if isinstance(error, LineBroken):
                is_lost(error.member)
            return None
        result.attempt = attempt.number
        return result

    def add_up(self, own: Contribution, into: Sequence[Tensor], attempt: Attempt) -> Summed:
        """Write the sum of an attempt, as long as it is wanted. Raises `SupersededError`, or `LineBroken` if
        a member is lost.
        """

        def check() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            if not attempt.is_wanted(now):
                raise SupersededError

        try:
            lines: Mapping[int, PeerLine] = {
                replica: self._board.line(replica, member.life, member.addresses[self.own.stage], check)
                for replica in attempt.members
                if replica != self.own.replica
                for member in [member_in(attempt.word, replica)]
            }
            group = RoundGroup(
                self.own.replica,
                attempt.members,
                lines.__getitem__,
                Stamp(attempt.word.epoch // TERM, attempt.place, attempt.number),
                timeout_s=self._timeout_s,
                check=check,
            )
            return sum_over(own, into, group, attempt.how)
        except LineBroken as error:
            self._board.drop(error.member)
            raise

    def _source(self, commit: Commit) -> int | None:
        """The replica from which this one gets a sum that counts, if it has to get it."""
        return next((one.source for one in commit.sources if one.target == self.own.replica), None)

    def _pulled(self, line: RoundLine, commit: Commit, word: CoordinatorReply) -> RoundSum | None:
        """A sum that counts and that another replica has; None if it cannot be had from there."""
        source = self._source(commit)
        if source is None or source in line.at.lost:
            return None

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            known = [one for one in now.commits if (one.line, one.round) == (commit.line, commit.round)]
            if source not in map(self._source, known):
                raise SupersededError

        result = line.buffers.take(line.like)
        self._is_pulling = True  # which may take longer than any timeout
        self._say_waits()
        try:
            address = member_in(word, source).addresses[self.own.stage]
            name = line.number << PLACES | commit.round
            with self._board.ask(source, address, SUM, name, look) as made:
                parcel = TensorConnection(made, self._timeout_s, look)
                words = parcel.hear()
                parcel.fill(result.flats)
                take_sum(result, words, parcel.named(words))
        except (SupersededError, LineBroken, OSError) as error:
            result.give_back()
            if not isinstance(error, SupersededError):
                self._change(line, lost=(source,))
            return None
        finally:
            self._is_pulling = False
            self._say_waits()
        result.attempt = commit.attempt
        return result

    # Any thread.

    def poke(self) -> None:
        """Have the agent's thread look for its next step: there is a new word, or something has changed."""
        with self._changed:
            self._num_pokes += 1
            self._changed.notify_all()

    def _say(self) -> None:
        with self._saying:  # so that what is said last is the last
            with self._changed:
                deals, window = self.deals, self.deals.window
                fields: dict[str, Any] = {
                    "wants": deals.wants,
                    "rounds": tuple(line.at for line in self.lines),
                    "healed": self._healed,
                }
                if window is not None:
                    fields |= {"group": self.groups.at, "window": window, "means": deals.asked_to_end}
                    fields |= {"waits": "" if self._is_pulling else self._waits}
            self._coordinator.say(address=self._board.address, **fields)

    def _change(self, line: RoundLine, **changes: Any) -> None:
        with self._changed:
            line.at = replace(line.at, **changes)
        self._say()

    def _wait(self, is_so: Callable[[], bool], what: str = "") -> None:
        """Wait until that is so, and let the coordinator know for what if nothing happens."""
        while not (found := self._looked(is_so)):
            if found is None and what and not self._waits:
                self._waits = what
                self._say_waits()
        if what and self._waits == what:
            self._waits = ""
            self._say_waits()

    def _looked(self, is_so: Callable[[], bool]) -> bool | None:
        """Whether that is so: False if it may be by now, None if nothing has happened for a while."""
        with self._changed:
            self._check_usable(self._coordinator.word)
            return is_so() or (False if self._changed.wait(LOOK_S) else None)

    def _say_waits(self) -> None:
        """Report what this rank waits for, if the coordinator looks at that."""
        if not self._of_batches:
            self._say()

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
            for offer in [one for line in self.lines for one in [*line.offers.values()]]:
                if isinstance(offer, BatchOffer):
                    offer.is_done.set()
            self._changed.notify_all()
        self.for_others.close()
