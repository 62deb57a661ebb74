"""Lines of rounds as one rank sees them: what it brings to a round, and the sums of rounds.

Sums lie on the host, in memory that is used again once nobody needs what lies in it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bireme.devices import is_accelerator, pinned_like
from bireme.sync.coordinator.groups import FIRST_WAIT_S, next_wait_s
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Grant,
    GroupAt,
    GroupMember,
    GroupReply,
    RankId,
    RoundAt,
)
from bireme.sync.rounds.contribution import CodedFlats, Contribution, Summed

PLACES = 40
"""Bits of a number within a line or a window: rounds of all lines, windows and groups share one order."""

HowOfRound = Callable[[int], CodedFlats]
"""How the contributions to the round or group of that number are added up."""


@dataclass(slots=True, eq=False)
class RoundSum:
    """The sum of a round as made in one attempt, over the replicas in `parts` if that is noted. Each of
    `num_users` gives it back once. It `is_made_here` unless another replica sent it. Once it counts it has a
    `commit`, and is known to have this rank's own offer in it (`has_own`).
    """

    flats: Sequence[Tensor]
    buffers: "Buffers"
    attempt: int = -1
    parts: tuple[int, ...] = ()
    num_users: int = 1
    is_made_here: bool = True
    has_own: bool = False
    summed: Summed = field(init=False)
    """The numbers and tensors that belong to it."""
    commit: Commit = field(init=False)

    @property
    def num_bytes(self) -> int:
        """The bytes of its flats."""
        return sum(one.nbytes for one in self.flats)

    def give_back(self) -> None:
        """One user less; after the last one the memory is used again, or freed if enough is free."""
        with self.buffers.lock:
            self.num_users -= 1
            if not self.num_users and len(self.buffers.free) < MOST_FREE:
                self.buffers.free.append(self.flats)


MOST_FREE = 2
"""More than a round needs lie free only where many were kept for another replica."""


class Buffers:
    """Flats on the host like those of a rank; pinned where these are on an accelerator."""

    def __init__(self, device: torch.device | None) -> None:
        self._is_pinned = device is not None and is_accelerator(device)
        self.free: list[Sequence[Tensor]] = []
        self.lock = threading.Lock()

    def take(self, like: Sequence[Tensor]) -> RoundSum:
        """Memory for a sum of such flats. All calls are for flats alike."""
        with self.lock:
            if self.free:
                return RoundSum(self.free.pop(), self)
        make = pinned_like if self._is_pinned else partial(torch.empty_like, device="cpu")
        return RoundSum([make(one) for one in like], self)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a round over the ranks of this stage in some replicas. A later round has a greater
    `place`. It goes on as long as it `is_wanted`.
    """

    members: Sequence[int]
    place: int
    number: int
    word: CoordinatorReply
    is_wanted: Callable[[CoordinatorReply], bool]
    how: CodedFlats | None = None


MakesSum = Callable[[Contribution, "Buffers", Attempt, Callable[[int], None]], RoundSum | None]
"""Gives the sum of an attempt, or None; see `ExchangeAgent.made`."""


@dataclass(slots=True, eq=False)
class Offer:
    """What a rank brings to a round: `make` is called in the agent's thread, once. It is of that many
    samples, and the first `trained` batches of the replica are in it or in earlier ones. A round that
    `is_due` is made even if no replica has samples in it.
    """

    make: Callable[[], Contribution] | None
    num_samples: int = 0
    trained: int = 0
    is_due: bool = False


@dataclass(slots=True, eq=False)
class BatchOffer(Offer):
    """What a rank brings to the round of a batch, whose sum it wants in any case. It is made before the rank
    reports that it is ready, once `may_make` is set; `busy_s` gives the seconds that it kept the device busy.
    Without `make` the replica has no part in the batch. One that `is_joint` is made even if the batch counts
    already: other ranks take part. `how` adds contributions up, other than as they are. `after` is called in
    the agent's thread with the sum, which is `settled` then. It `is_done` then, or if the agent ends.
    """

    busy_s: Callable[[], float] = lambda: 0.0
    may_make: threading.Event | None = None
    is_joint: bool = False
    how: CodedFlats | None = None
    after: Callable[[RoundSum], None] = lambda _settled: None
    settled: RoundSum | None = None
    is_done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class RoundLine:
    """A line of rounds; a sum lies in flats `like` these, and `firsts` are those of their `Contribution`.
    `how` is how contributions to a round are added up, other than as they are.

    `at` is what it reports: there the rounds that it has used are committed. `next` is the first one whose
    sum the agent does not have, or has not heard to count.
    """

    number: int
    like: Sequence[Tensor] = ()
    firsts: Sequence[int | None] = ()
    device: torch.device | None = None
    how: HowOfRound | None = None
    at: RoundAt = field(default_factory=RoundAt, init=False)
    next: int = field(default=0, init=False)
    offers: dict[int, Offer] = field(default_factory=dict, init=False)
    """By round, what the rank brings to it."""
    contribution: Contribution | None = field(default=None, init=False)
    """To the next round, as it was made."""
    made: RoundSum | None = field(default=None, init=False)
    """The sum that was made and is not yet committed, in the attempt that the report says."""
    was_offered: bool = field(default=False, init=False)
    """Whether the contribution has samples of this rank in it. A later offer may be waiting."""
    failed: Grant | None = field(default=None, init=False)
    """The attempt in which a member was lost."""
    kept: dict[int, RoundSum] = field(default_factory=dict, init=False)
    """Sums that other replicas may still ask for."""
    settled: deque[RoundSum] = field(default_factory=deque, init=False)
    """Rounds that count and that the rank has not taken."""

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.device)

    def begin(self, committed: int) -> None:
        """The rank has used that many rounds."""
        self.at, self.next = RoundAt(committed=committed), committed

    def use(self, commit: Commit) -> None:
        """The rank uses the sum of one more round."""
        self.at = replace(
            self.at,
            committed=self.at.committed + 1,
            ready=None,
            summed=None,
            lost=(),
            last=replace(commit, sources=()),
        )

    def nothing(self, num_numbers: int) -> Contribution:
        """What a rank contributes that has nothing to add, and yet holds what others do."""
        flats = [torch.zeros(one.shape, dtype=one.dtype) for one in self.like]
        return Contribution(flats, b"", 0.0, 0.0, (), (0.0,) * num_numbers, firsts=self.firsts)


# The groups of one rank: it arrives with its weights after a batch, and gets the mean of its group.


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
