"""A rank's agent where replicas sum gradients: it takes part in the rounds of its stage, and gives each batch
its committed sum.

    job (batch b) ── ready ──▶ grant ── sum over members ──▶ summed ──▶ commit ──▶ result
                       ▲         │ a member is lost: its line broke     │ not of the members:
                       └─────────┘ the next attempt, same contribution  └─ the sum comes from a source
"""

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from bireme.runtime.quorum.job import Coordinator, DroppedError, SumJob, deal_in, heal_in, is_in
from bireme.runtime.quorum.offers import KEPT_BYTES, MOST_BEHIND, Offers, summed_in
from bireme.runtime.quorum.peer_agent import PeerAgent, SupersededError
from bireme.runtime.quorum.results import Buffers, RoundSum
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Deal,
    Grant,
    RankId,
    RoundAt,
    SamplePlaces,
)
from bireme.sync.quorum.line import LineBroken

__all__ = ["Agent"]


class Agent(PeerAgent):
    """The agent of one rank. `on_error` is told, from its thread, why it ends before it is closed. The fewest
    samples that a replica can train are `spare`. Sums for replicas that heal take at most `kept_bytes`.
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
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        super().__init__(own, coordinator, timeout_s=timeout_s, on_error=on_error)
        self._buffers = Buffers(device)
        self._jobs: dict[int, SumJob] = {}
        self._at = RoundAt()
        self._wants = 0
        self._spare = Deal(own.replica, 0, (SamplePlaces(0, spare),))
        self._result: RoundSum | None = None
        """The sum that was made and is not yet committed."""
        self._failed: Grant | None = None
        """The attempt in which a member was lost."""
        self.offers = Offers(own.replica, self._buffers, kept_bytes)
        """What others may ask of this rank."""

    def begin(self, first: int, *, is_healed: bool = False) -> None:
        """Report that this rank has all rounds below `first`, and take part from there on; `is_healed` says
        that they are from a snapshot.
        """
        with self._changed:
            self._at = RoundAt(committed=first)
            self._healed = first if is_healed else None
        self.offers.begin(first)
        self._say()
        self._start()

    def add(self, job: SumJob) -> None:
        """Have the committed sum of a batch got; returns at once."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._jobs[job.batch] = job
            self._changed.notify_all()

    def give_back(self, result: RoundSum) -> None:
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

        def is_known(word: CoordinatorReply) -> bool:
            return deal_in(word, self.own, batch) is not None or _is_over(word, batch)

        word = self.wait_for(is_known)
        deal = deal_in(word, self.own, batch) or replace(self._spare, batch=batch)
        self._spare = deal
        return deal

    def tell_lost(self, donor: int) -> None:
        """A donor could not be reached."""
        self._change(lost=(donor,))

    def wait_until_kept_by_all(self, batch: int) -> None:
        """Wait until no replica needs a sum below that batch from this one, or there is no telling."""
        with suppress(Exception):
            self.wait_for(lambda word: not word.kept or word.kept[0] >= batch)

    # The agent's own thread.

    def _answer(self, made: socket.socket, what: int, name: int) -> None:
        self.offers.answer(made, what, name)

    def _report(self) -> Mapping[str, Any]:
        return {"wants": self._wants, "rounds": (self._at,)}

    def _note(self, word: CoordinatorReply) -> None:
        self.offers.note(word)

    def _wanted(self) -> object:
        return self._jobs.get(self._at.committed)

    def _step(self, word: CoordinatorReply) -> bool:
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

    def _attempt(self, job: SumJob, grant: Grant, word: CoordinatorReply) -> None:
        assert job.contribution is not None, "it is ready"
        self._let_go()
        result = self._buffers.take(job.like)

        try:
            result.summed = self.add_up(
                job.contribution,
                result.flats,
                [part.replica for part in grant.parts],
                job.batch,
                grant.attempt,
                word,
                lambda word: grant in word.grants,
            )
        except (SupersededError, LineBroken) as error:
            self._buffers.give_back(result)
            if isinstance(error, LineBroken):
                self._failed = grant
                self._change(summed=None, lost=(error.member,), attempt=grant.attempt)
            return
        result.attempt = grant.attempt
        self._result = result
        self._change(summed=job.batch, attempt=grant.attempt, lost=())

    def _settle(self, job: SumJob, commit: Commit, word: CoordinatorReply) -> bool:
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

    def _pulled(self, job: SumJob, commit: Commit, word: CoordinatorReply) -> RoundSum | None:
        """A committed sum that another replica has; None if it cannot be had from there."""
        source = self._source(commit)
        if source is None or source in self._at.lost:
            return None

        result = self._buffers.take(job.like)
        try:
            result.summed = summed_in(self._pull(commit, job.batch, word, result.flats))
        except (SupersededError, LineBroken, OSError) as error:
            self._buffers.give_back(result)
            if not isinstance(error, SupersededError):
                self._change(lost=(source,))
            return None
        result.attempt = commit.attempt
        return result

    def _let_go(self) -> None:
        if self._result is not None:
            self._buffers.give_back(self._result)
            self._result = None
            self._change(summed=None)

    def _change(self, **changes: object) -> None:
        self._at = replace(self._at, **changes)  # type: ignore[arg-type]
        self._say()

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        with self._changed:
            for job in self._jobs.values():
                job.error = self._error
                job.is_done.set()
        self.offers.close()


def _is_over(word: CoordinatorReply, batch: int) -> bool:
    """Whether a batch counts already."""
    return bool(word.committed) and word.committed[0] > batch
