"""The groups of one rank: it arrives with its weights after a batch, and gets the mean of its group."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bireme.runtime.exchange.rounds import PLACES, Attempt, Buffers, HowOfRound, MakesSum, RoundSum
from bireme.sync.coordinator.groups import FIRST_WAIT_S, next_wait_s
from bireme.sync.coordinator.messages import CoordinatorReply, GroupAt, GroupMember, GroupReply, RankId
from bireme.sync.rounds.contribution import Contribution


@dataclass(slots=True, eq=False)
class GroupJob:
    """The group that a rank waits for after a batch. `result` is the mean; None where it was alone."""

    batch: int
    make: Callable[[], Contribution]
    contribution: Contribution | None = None
    result: RoundSum | None = None
    attempt: tuple[int, int] = (-1, -1)
    """Number and attempt of the group that the result is of."""
    failed: tuple[int, int] = (-1, -1)
    size: int = 0
    is_done: threading.Event = field(default_factory=threading.Event)


class RankGroups:
    """`step` is for the thread of the rank's agent, the rest for the rank's. `made` gives sums, `say` reports
    what is here.
    """

    def __init__(
        self,
        own: RankId,
        made: MakesSum,
        device: torch.device | None,
        changed: threading.Condition,
        say: Callable[[], None],
    ) -> None:
        self.job: GroupJob | None = None
        self.how: HowOfRound | None = None
        """How the contributions to a group are added up, other than as they are."""
        self.is_drained = False
        self._own, self._made, self._changed, self._say = own, made, changed, say
        self._at: GroupAt | None = None
        self._last: GroupReply | None = None
        """The group that the rank took last."""
        self._wait_s = FIRST_WAIT_S
        self._buffers = Buffers(device)

    @property
    def at(self) -> GroupAt | None:
        """What the rank reports."""
        if self._at is None and not self.is_drained:
            return None
        return replace(self._at or GroupAt(), is_drained=self.is_drained)

    def arrive(self, batch: int, make: Callable[[], Contribution]) -> None:
        """The weights after a batch may be averaged; returns at once."""
        with self._changed:
            self.job = GroupJob(batch, make)
        self._tell(batch)

    def step(self, word: CoordinatorReply, window: int) -> bool:
        """Do the next thing that a word allows, in a window; False if there is none."""
        job = self.job
        if job is None or job.is_done.is_set():
            return False
        group = word.group
        if group is None or GroupMember(self._own.replica, job.batch) not in group.members:
            return False
        key = group.number, group.attempt
        if group.is_settled and (len(group.members) == 1 or job.attempt == key):
            self._finish(job, group)
            return True
        if key in (job.attempt, job.failed) or len(group.members) == 1:
            return False
        self._attempt(job, group, word, window)
        return True

    def _finish(self, job: GroupJob, group: GroupReply) -> None:
        size = len(group.members)
        self._wait_s, self._last = next_wait_s(self._wait_s, size), group
        job.size = size
        if size == 1 and job.result is not None:  # the others have died
            job.result.give_back()
            job.result = None
        with self._changed:
            job.is_done.set()
            self._changed.notify_all()

    def _attempt(self, job: GroupJob, group: GroupReply, word: CoordinatorReply, window: int) -> None:
        key = group.number, group.attempt
        if job.contribution is None:
            job.contribution = job.make()
        if job.result is not None:
            job.result.give_back()
            job.result = None

        def is_wanted(word: CoordinatorReply) -> bool:
            return word.group is not None and (word.group.number, word.group.attempt) == key

        def is_lost(_member: int) -> None:
            job.failed = key
            self._tell(job.batch, attempt=group.attempt, is_broken=True)

        attempt = Attempt(
            [one.replica for one in group.members],
            (window << PLACES) + group.number + 1,
            group.attempt,
            word,
            is_wanted,
            None if self.how is None else self.how(group.number),
        )
        job.result = self._made(job.contribution, self._buffers, attempt, is_lost)
        if job.result is not None:
            job.attempt = key
            self._tell(job.batch, summed=group.number, attempt=group.attempt)

    def _tell(self, batch: int, **more: Any) -> None:
        with self._changed:
            self._at = GroupAt(batch, self._wait_s, last=self._last, **more)
        self._say()
