"""A rank's agent: a thread that takes part in the rounds of its stage with the ranks of other replicas.

It says where the rank is, does what the coordinator grants, and gives each batch its committed sum. What the
coordinator says is always all that holds, so the agent looks at the last word only, and does the next step
that it allows.

    job (batch b) ── ready ──▶ grant ── sum over members ──▶ summed ──▶ commit ──▶ result
                       ▲         │ a member is lost: its line broke     │ not of the members:
                       └─────────┘ the next attempt, same contribution  └─ the sum comes from a source
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from bireme.runtime.quorum.job import Coordinator, DroppedError, Job, deal_in, heal_in, is_in, member_in
from bireme.runtime.quorum.offers import Offers, summed_in
from bireme.runtime.quorum.parcels import Parcel
from bireme.runtime.quorum.results import Buffers, Result
from bireme.runtime.quorum.switchboard import SNAPSHOT, SUM, Switchboard
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    Deal,
    Grant,
    Heal,
    RankId,
    RoundAt,
    Samples,
    Word,
)
from bireme.sync.quorum.line import LineBroken, Stamp
from bireme.sync.quorum.ring import sum_over

__all__ = ["Agent"]

MOST_BEHIND = 8
"""A replica that has fallen further behind the others starts again: to heal, it need not compute."""
LOOK_S = 0.5


class _SupersededError(Exception):
    """The attempt is not wanted any more."""


class Agent:
    """The agent of one rank. `on_error` is told, from its thread, why it ends before it is closed. The fewest
    samples that a replica can train are `spare`.
    """

    def __init__(
        self,
        own: RankId,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        on_error: Callable[[BaseException], object] = lambda _error: None,
        spare: int = 1,
    ) -> None:
        self.own = own
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._buffers = Buffers(device)
        self._changed, self._saying = threading.Condition(), threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._at = RoundAt()
        self._wants = 0
        self._spare = Deal(own.replica, 0, (Samples(0, spare),))
        self._healed: int | None = None
        self._result: Result | None = None
        """The sum that was made and is not yet committed."""
        self._failed: Grant | None = None
        """The attempt in which a member was lost."""
        self.offers = Offers(own.replica, self._buffers)
        """What others may ask of this rank."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._board = Switchboard(own, self.offers.answer, timeout_s=timeout_s)
        coordinator.on_word(self._poke)

    def begin(self, first: int, *, is_healed: bool = False) -> None:
        """Report that this rank has all rounds below `first`, and take part from there on; `is_healed` says
        that they are from a snapshot.
        """
        with self._changed:
            self._at = RoundAt(committed=first)
            self._healed = first if is_healed else None
        self.offers.begin(first)
        self._say()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="bireme agent", daemon=True)
            self._thread.start()

    def add(self, job: Job) -> None:
        """Have the committed sum of a batch got; returns at once."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._jobs[job.batch] = job
            self._changed.notify_all()

    def give_back(self, result: Result) -> None:
        """A committed sum is used."""
        self._buffers.give_back(result)

    def dealt(self, batch: int) -> Deal:
        """The samples of a batch that this replica trains; waits until they are dealt.

        If the batch has been committed without it they are any samples: what it makes of them counts nowhere.
        """
        with self._changed:
            is_new = batch >= self._wants
            self._wants = max(self._wants, batch + 1)
        if is_new:
            self._say()

        def is_known(word: Word) -> bool:
            return deal_in(word, self.own, batch) is not None or _is_over(word, batch)

        word = self.wait_for(is_known)
        deal = deal_in(word, self.own, batch) or replace(self._spare, batch=batch)
        self._spare = deal
        return deal

    def wait_for(self, is_so: Callable[[Word], bool]) -> Word:
        """Wait until that is so of the last word, which it gives."""
        with self._changed:
            while True:
                word = self._coordinator.word
                self._check_usable(word)
                if is_so(word):
                    return word
                self._changed.wait(LOOK_S)

    @property
    def word(self) -> Word:
        """The last word of the coordinator."""
        return self._coordinator.word

    def tell_lost(self, donor: int) -> None:
        """A donor could not be reached."""
        self._change(lost=(donor,))

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[Parcel]:
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

    def wait_until_kept_by_all(self, batch: int) -> None:
        """Wait until no replica needs a sum below that batch from this one, or there is no telling."""
        with suppress(Exception):
            self.wait_for(lambda word: not word.kept or word.kept[0] >= batch)

    def wait_until_gone(self, replica: int) -> None:
        """Wait until another replica is no member any more, or there is no telling."""
        with suppress(Exception):
            self.wait_for(lambda word: all(one.replica != replica for one in word.members))

    # The agent's own thread.

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while not self._is_closed:
                    word = self._coordinator.word
                    self._check_usable(word)
                    self.offers.note(word)
                    if not self._step(word):
                        self._wait_for_news(word)
        except BaseException as error:
            is_first = not self._is_closed
            self._end(error)
            if is_first:
                self._on_error(error)

    def _wait_for_news(self, seen: Word) -> None:
        with self._changed:
            known = self._jobs.get(self._at.committed)
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or self._coordinator.word is not seen
                    or self._jobs.get(self._at.committed) is not known
                ),
                LOOK_S,
            )

    def _step(self, word: Word) -> bool:
        """Do the next thing that a word allows; False if there is none."""
        batch = self._at.committed
        with self._changed:
            job = self._jobs.get(batch)
        if job is None:
            return False
        heal = heal_in(word, self.own)
        if job.prepare is None and heal is not None and heal.batch > batch:
            # The sum will not come: it was to be had from a donor that is gone.
            raise DroppedError(f"replica {self.own.replica} has lost its donor.")
        commit = next((one for one in word.commits if (one.line, one.round) == (0, batch)), None)
        if commit is not None:
            num_behind = word.committed[0] - batch
            if job.prepare is not None and num_behind > MOST_BEHIND:
                raise DroppedError(f"replica {self.own.replica} is {num_behind} batches behind the others.")
            return self._settle(job, commit, word)
        if job.prepare is not None and job.contribution is None:
            job.prepare(job)
        if job.contribution is None:
            return False
        if self._at.ready != batch:
            if self.offers.is_full:
                return False
            self._change(ready=batch, busy_s=job.busy_s)
            return True
        grant = next((one for one in word.grants if (one.line, one.round) == (0, batch)), None)
        if grant is None or grant == self._failed or not is_in(self.own, grant):
            return False
        if self._at.summed == batch and self._at.attempt == grant.attempt:
            return False
        self._attempt(job, grant, word)
        return True

    def _attempt(self, job: Job, grant: Grant, word: Word) -> None:
        assert job.contribution is not None, "it is ready"
        self._let_go()
        result = self._buffers.take(job.like)
        members = [part.replica for part in grant.parts]

        def check() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            if grant not in now.grants:
                raise _SupersededError

        try:
            lines = {
                replica: self._board.line(replica, member.life, member.addresses[self.own.stage], check)
                for replica in members
                if replica != self.own.replica
                for member in [member_in(word, replica)]
            }
            result.summed = sum_over(
                job.contribution,
                result.flats,
                me=self.own.replica,
                members=members,
                line_to=lines.__getitem__,
                stamp=Stamp(word.epoch // TERM, job.batch, grant.attempt),
                timeout_s=self._timeout_s,
                check=check,
            )
        except (_SupersededError, LineBroken) as error:
            self._buffers.give_back(result)
            if isinstance(error, LineBroken):
                self._board.drop(error.member)
                self._failed = grant
                self._change(summed=None, lost=(error.member,), attempt=grant.attempt)
            return
        result.attempt = grant.attempt
        self._result = result
        self._change(summed=job.batch, attempt=grant.attempt, lost=())

    def _settle(self, job: Job, commit: Commit, word: Word) -> bool:
        """A batch's sum is committed: give it to who waits for it, and keep it for who comes late."""
        result, self._result = self._result, None
        if result is not None and result.attempt != commit.attempt:
            self._buffers.give_back(result)
            result = None
        if result is None:
            result = self._pulled(job, commit, word)
            if result is None:
                return False
        result.num_users = 2
        job.parts = tuple(part.replica for part in commit.parts)
        self.offers.keep(job.batch, result)
        with self._changed:
            self._failed = None
            del self._jobs[job.batch]
        job.contribution = job.prepare = None
        job.result = result
        self._at = RoundAt(committed=job.batch + 1, last=replace(commit, sources=()))
        self._say()
        try:
            if job.after is not None:
                job.after(result)
        except BaseException as error:
            job.error = error
            raise
        finally:
            job.is_done.set()
        return True

    def _pulled(self, job: Job, commit: Commit, word: Word) -> Result | None:
        """A committed sum that another replica has; None if it cannot be had from there."""
        source = self._source(commit)
        if source is None or source in self._at.lost:
            return None

        def look() -> None:
            now = self._coordinator.word
            self._check_usable(now)
            known = [one for one in now.commits if (one.line, one.round) == (commit.line, commit.round)]
            if source not in map(self._source, known):
                raise _SupersededError

        result = self._buffers.take(job.like)
        try:
            address = member_in(word, source).addresses[self.own.stage]
            with self._board.ask(source, address, SUM, job.batch, look) as made:
                parcel = Parcel(made, look, timeout_s=self._timeout_s)
                result.summed = summed_in(parcel.words())
                parcel.fill(result.flats)
        except (_SupersededError, LineBroken, OSError) as error:
            self._buffers.give_back(result)
            if not isinstance(error, _SupersededError):
                self._change(lost=(source,))
            return None
        result.attempt = commit.attempt
        return result

    def _source(self, commit: Commit) -> int | None:
        """The replica from which this one gets a committed sum."""
        return next((one.source for one in commit.sources if one.target == self.own.replica), None)

    def _let_go(self) -> None:
        if self._result is not None:
            self._buffers.give_back(self._result)
            self._result = None
            self._change(summed=None)

    def _change(self, **changes: object) -> None:
        self._at = replace(self._at, **changes)  # type: ignore[arg-type]
        self._say()

    def _say(self) -> None:
        with self._saying:  # so that what is said last is the last
            self._coordinator.say(
                address=self._board.address, wants=self._wants, rounds=(self._at,), healed=self._healed
            )

    # Other threads.

    def _poke(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_usable(self, word: Word) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ConnectionAbortedError("This rank's agent is closed.")
        if word.is_dropped:
            raise DroppedError(f"a rank of replica {self.own.replica} was silent for longer than its lease.")

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._is_closed = True
            for job in self._jobs.values():
                job.error = self._error
                job.is_done.set()
            self._changed.notify_all()
        self.offers.close()


def _is_over(word: Word, batch: int) -> bool:
    """Whether a batch counts already."""
    return bool(word.committed) and word.committed[0] > batch
