"""A rank's agent where replicas sum gradients: it takes part in the rounds of its stage, and gives each batch
its committed sum.

    job (batch b) ── ready ──▶ grant ── sum over members ──▶ summed ──▶ commit ──▶ result
                       ▲         │ a member is lost: its line broke     │ not of the members:
                       └─────────┘ the next attempt, same contribution  └─ the sum comes from a source
"""

import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bireme.runtime.quorum.peer_agent import (
    Buffers,
    Coordinator,
    DroppedError,
    PeerAgent,
    RoundSum,
    SumJob,
    SupersededError,
    deal_in,
    heal_in,
    is_in,
)
from bireme.runtime.quorum.peer_connections import SNAPSHOT, SUM, listed, send_named, send_tensors
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Deal,
    Grant,
    RankId,
    RoundAt,
    SamplePlaces,
)
from bireme.sync.exchange import BatchGradients, FlatViews, SentBytes, sum_in_slices
from bireme.sync.group import Group
from bireme.sync.quorum.line import LineBroken
from bireme.sync.quorum.ring import Summed
from bireme.sync.slices import SLICE_BYTES

# What a rank has for those of its stage in other replicas: committed sums, and snapshots to heal from.

KEPT_BYTES = 1 << 30
"""Committed sums that replicas which are late may still ask for take at most this, except for a few."""
LEAST_KEPT = 4
_MOST_BEHIND = 8
"""A member that lags the others by more batches starts again: to heal, it need not compute."""
MOST_FOR_MEMBERS = _MOST_BEHIND + 4
"""Sums kept for members that are late. A member that lacks an older one starts again; a few more are kept
because it may have asked a moment ago.
"""
HEAL_SHARE = 0.25
"""The share of a link's time that a snapshot for another replica may take."""
_MOST_ROUNDS = 8
"""So many rounds after the one before which a snapshot was due, it will not come any more."""
OFFER_LOOK_S = 0.5

Found = TypeVar("Found")


class Offers:
    """The offers of one rank of a replica. Sums lie in `buffers`, and go back there. Those for replicas that
    heal take at most `kept_bytes`, except for a few: then the others wait.
    """

    def __init__(self, replica: int, buffers: Buffers, kept_bytes: int = KEPT_BYTES) -> None:
        self._replica, self._buffers, self._kept_bytes = replica, buffers, kept_bytes
        self.peak_bytes = 0
        """The most that sums and snapshots for other replicas took at a time."""
        self._changed = threading.Condition()
        self._kept: dict[int, RoundSum] = {}
        self._next = 0
        """The first batch whose sum has not been had."""
        self._snapshots: dict[int, Snapshot] = {}
        self._due: set[int] = set()
        self._is_closed = False

    def begin(self, first: int) -> None:
        """Of the rounds below `first` this rank will have no sums."""
        with self._changed:
            self._next = first

    def note(self, word: CoordinatorReply) -> None:
        """Take notice of what others need, before any sum is given away that an update is made from."""
        asked = {heal.batch for heal in word.heals if heal.donor == self._replica}
        with self._changed:
            self._due |= asked - self._snapshots.keys()
            self._due &= asked
            self._snapshots = {batch: one for batch, one in self._snapshots.items() if batch in asked}
            kept = max(word.kept[0] if word.kept else 0, min([self._next - MOST_FOR_MEMBERS, *asked]))
            free = [self._kept.pop(batch) for batch in list(self._kept) if batch < kept]
        for result in free:
            self._buffers.give_back(result)

    def keep(self, batch: int, result: RoundSum) -> None:
        """A committed sum, for whoever comes late."""
        with self._changed:
            self._kept[batch], self._next = result, batch + 1
            self._note_bytes()
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether others have to catch up first, as this rank keeps all that it can for them."""
        num = len(self._kept)
        if num < LEAST_KEPT:
            return False
        return num * _num_bytes(next(iter(self._kept.values())).flats) >= self._kept_bytes

    def is_due(self, batch: int) -> bool:
        """Whether a snapshot after so many updates is wanted for another replica."""
        return batch in self._due

    def provide(self, snapshot: Snapshot) -> None:
        """Here is one that was due."""
        with self._changed:
            self._due.discard(snapshot.num_trained)
            self._snapshots[snapshot.num_trained] = snapshot
            self._note_bytes()
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, batch: int) -> None:
        """Give another rank what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            result = self._found(made, lambda: self._kept.get(batch), last=batch)
            if result is None or result.summed is None:
                return
            one = result.summed
            words = {"holds": one.holds.hex(), "weight": one.weight, "means": one.means}
            words |= {"numbers": one.numbers, "tensors": listed(one.more)}
            send_tensors(made, words, [*result.flats, *one.more.values()])
        elif what == SNAPSHOT:
            snapshot = self._found(made, lambda: self._snapshots.get(batch), last=batch + _MOST_ROUNDS)
            if snapshot is not None:
                words = {"num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale}
                send_named(made, words, snapshot.tensors, share=HEAL_SHARE)

    def close(self) -> None:
        """There is nothing more to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _note_bytes(self) -> None:
        sums = len(self._kept) * _num_bytes(next(iter(self._kept.values())).flats) if self._kept else 0
        snapshots = sum(_num_bytes(one.tensors.values()) for one in self._snapshots.values())
        self.peak_bytes = max(self.peak_bytes, sums + snapshots)

    def _found(self, made: socket.socket, find: Callable[[], Found | None], *, last: int) -> Found | None:
        """What was asked for, once it is there. None where all rounds up to the last one have been without
        it, and where who asks has hung up.
        """
        with self._changed:
            while (found := find()) is None:
                if self._is_closed or self._next > last or has_hung_up(made):
                    return None
                self._changed.wait(OFFER_LOOK_S)
            return found


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _summed_in(words: Mapping[str, Any], more: Mapping[str, Tensor]) -> Summed:
    """A committed sum as the text that announces it and its tensors describe it."""
    means, numbers = tuple(words["means"]), tuple(words["numbers"])
    return Summed(bytes.fromhex(words["holds"]), words["weight"], means, numbers, more)


def has_hung_up(made: socket.socket) -> bool:
    """Whether the other end is gone, which says nothing once it has asked."""
    poller = select.poll()
    poller.register(made, select.POLLIN)
    try:
        return bool(poller.poll(0)) and not made.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


# Parameters that stages of several ranks of a replica share: their gradients are added up within it.
#
# That follows the sum over replicas, on copies, in the agent's thread. All ranks of a replica get the
# committed sums in the same order, so they meet here in the same order too.


class TiedSums:
    """The tied parameters of one rank, each with the group of all ranks of the replica that hold it."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = {name: groups[name] for name in sorted(groups)}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def names(self) -> Set[str]:
        """The tied parameters."""
        return self._groups.keys()

    def sum(self, gradients: BatchGradients, flats: Sequence[Tensor], held: set[str]) -> BatchGradients:
        """The whole gradients of these parameters, from those in `flats`, which lie as `gradients` do."""
        own = {name: gradients.views[name] for name in self._groups}
        views = FlatViews.of(own, gradients.flats).in_(flats)
        copies = {name: view.clone() for name, view in views.items()}
        found = BatchGradients(copies, held & copies.keys())
        for name, group in self._groups.items():
            sum_in_slices(group, [name], found, [copies[name]], SLICE_BYTES, SentBytes())
        return found


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
        if job.always_prepares and not _prepared(job):
            return False
        commit = next((one for one in word.commits if (one.line, one.round) == (0, batch)), None)
        if commit is not None:
            num_behind = word.committed[0] - batch
            if job.prepare is not None and num_behind > _MOST_BEHIND:
                raise DroppedError(f"replica {self.own.replica} is {num_behind} batches behind the others.")
            return self._settle(job, commit, word)
        if not _prepared(job) or job.contribution is None:
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
                job.how,
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
            result.summed = _summed_in(*self._pull(commit, job.batch, word, result.flats))
        except (SupersededError, LineBroken, OSError) as error:
            self._buffers.give_back(result)
            if not isinstance(error, SupersededError):
                self._change(lost=(source,))
            return None
        result.attempt, result.is_own = commit.attempt, False
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


def _prepared(job: SumJob) -> bool:
    """Have the contribution made, if there is to be one; False if it is too early for that."""
    if job.prepare is None or job.contribution is not None:
        return True
    if job.may_prepare is not None and not job.may_prepare.is_set():
        return False
    job.prepare(job)
    return True


def _is_over(word: CoordinatorReply, batch: int) -> bool:
    """Whether a batch counts already."""
    return bool(word.committed) and word.committed[0] > batch
