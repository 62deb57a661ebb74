"""All that a coordinator knows, and what happens to it."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any

from bireme.sync.coordinator import messages
from bireme.sync.coordinator.groups import GroupState, Paces
from bireme.sync.coordinator.messages import (
    Absence,
    Commit,
    CoordinatorReply,
    End,
    Gone,
    Grant,
    GroupReply,
    Heal,
    Incarnation,
    Member,
    RankId,
    Report,
    RoundAt,
    RoundPart,
    replace,
)
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, Dealing, Pool

# Who is a member: leases, epochs, and how many must know an epoch before anything counts in it.
#
# A replica lives as long as all of its ranks are heard of within the lease. It is one start of a replica, an
# *incarnation*: a report of a later incarnation means that the earlier one is over.
#
# **Nobody agrees twice.** While it lives, the coordinator alone decides. If a part of the members is out of
# its reach, they may have found another coordinator, which needs more than half of them. So this one goes on
# only with at least half of them: an epoch's members are at least half of its *voters*, the members of the
# last epoch that was installed, and it is installed once at least half of the voters have confirmed it. A
# coordinator that has taken up after another needs more than half, until its own epoch is installed. A
# replica that is known to have ended does not vote, and so is no voter any more.


@lru_cache(65536)
def _ranks_of(replica: int, life: int, num_stages: int) -> tuple[RankId, ...]:
    """The ranks of an incarnation. Making them anew would be most of what an event costs."""
    return tuple(RankId(replica, life, stage) for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class Heard:
    """The last report of a rank, and when it came."""

    report: Report
    at_s: float


class HeardRanks(Mapping[RankId, Heard]):
    """The last report of each rank. It never changes: `with_one` gives the next mapping and copies only the
    group that the rank is in. A copy of all would be most of what an event costs with many ranks.
    """

    __slots__ = ("_groups",)
    _NUM_GROUPS = 64

    def __init__(self, heard: Mapping[RankId, Heard] = {}) -> None:
        groups: list[dict[RankId, Heard]] = [{} for _ in range(self._NUM_GROUPS)]
        for rank, each in heard.items():
            groups[rank.replica % self._NUM_GROUPS][rank] = each
        self._groups = groups

    def with_one(self, rank: RankId, each: Heard) -> "HeardRanks":
        """With another last report of one rank."""
        made, number = HeardRanks.__new__(HeardRanks), rank.replica % self._NUM_GROUPS
        made._groups = self._groups.copy()
        made._groups[number] = made._groups[number] | {rank: each}
        return made

    # The next three are slow in `Mapping`, which calls `__getitem__` for each rank, and explained there.

    def get(self, rank: RankId, default: Any = None) -> Any:  # noqa: D102 as in Mapping
        return self._groups[rank.replica % self._NUM_GROUPS].get(rank, default)

    def items(self) -> Any:  # noqa: D102 as in Mapping
        return [one for group in self._groups for one in group.items()]

    def values(self) -> Any:  # noqa: D102 as in Mapping
        return [each for group in self._groups for each in group.values()]

    def __getitem__(self, rank: RankId) -> Heard:
        return self._groups[rank.replica % self._NUM_GROUPS][rank]

    def __iter__(self) -> Iterator[RankId]:
        return chain.from_iterable(self._groups)

    def __len__(self) -> int:
        return sum(map(len, self._groups))


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of an epoch. `voters` are sets of incarnations, of each of which enough must confirm it: at
    least half, and more than half if it `is_strict`.
    """

    num_stages: int
    epoch: int
    members: tuple[Member, ...] = ()
    voters: tuple[frozenset[Incarnation], ...] = ()
    is_strict: bool = False
    is_installed: bool = False
    """Whether enough of the voters have confirmed the epoch, so that things may count in it."""
    heard: HeardRanks = field(default_factory=HeardRanks)
    over: dict[int, int] = field(default_factory=dict)
    """Of each replica the incarnations below this have ended."""
    dropped: frozenset[Incarnation] = frozenset()
    """Incarnations that may go on somewhere, but are members no more."""

    def with_report(self, report: Report, now_s: float) -> "Membership":
        """After a report, unless it is late or of an incarnation that is over."""
        rank = report.rank
        last = self.heard.get(rank)
        if self.is_over(rank) or (last is not None and last.report.number >= report.number):
            return self
        found = self if last is not None else self.with_over(Incarnation(rank.replica, rank.life - 1))
        # Looking up an equal key that is another object takes several times as long.
        rank = _ranks_of(rank.replica, rank.life, self.num_stages)[rank.stage]
        return replace(found, heard=found.heard.with_one(rank, Heard(report, now_s)))

    def without(self, life: Incarnation) -> "Membership":
        """After a silent incarnation was dropped: nothing that it says counts again."""
        heard = {rank: each for rank, each in self.heard.items() if rank.own_life != life}
        return replace(self, heard=HeardRanks(heard), dropped=self.dropped | {life})

    def with_over(self, life: Incarnation) -> "Membership":
        """After an incarnation is known to have ended: it, and those before it, do not vote."""
        if life.life < self.over.get(life.replica, 0):
            return self

        def ends(one: Incarnation | RankId) -> bool:
            return one.replica == life.replica and one.life <= life.life

        return replace(
            self,
            over=self.over | {life.replica: life.life + 1},
            voters=tuple(own.difference([one for one in own if ends(one)]) for own in self.voters),
            heard=HeardRanks({rank: each for rank, each in self.heard.items() if not ends(rank)}),
        )

    def is_over(self, one: Incarnation | RankId | Member) -> bool:
        """Whether that incarnation has ended, or was dropped."""
        if one.life < self.over.get(one.replica, 0):
            return True
        return bool(self.dropped) and Incarnation(one.replica, one.life) in self.dropped

    def member(self, life: Incarnation | RankId) -> Member | None:
        """The member that is this incarnation."""
        place = bisect_left(self.members, life.replica, key=attrgetter("replica"))
        found = self.members[place] if place < len(self.members) else None
        is_it = found is not None and (found.replica, found.life) == (life.replica, life.life)
        return found if is_it else None

    @property
    def have_ended(self) -> bool:
        """Whether there are members, and all of them are known to have ended."""
        ended = (one.life < self.over.get(one.replica, 0) for one in self.members)
        return bool(self.members) and all(ended)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The members' numbers."""
        return tuple(one.replica for one in self.members)

    def reports(self, life: Incarnation | RankId | Member) -> list[Report]:
        """The last reports of all ranks of an incarnation, stage by stage; none unless all were heard."""
        found = []
        for rank in _ranks_of(life.replica, life.life, self.num_stages):
            heard = self.heard.get(rank)
            if heard is None:
                return []
            found.append(heard.report)
        return found

    def is_heard(self, life: Incarnation | RankId | Member, since_s: float) -> bool:
        """Whether all of its ranks have been heard since then, or have said that they will say no more."""
        for rank in _ranks_of(life.replica, life.life, self.num_stages):
            heard = self.heard.get(rank)
            if heard is None or not (heard.at_s >= since_s or heard.report.is_leaving):
                return False
        return True

    def goes_on(self, life: Incarnation | Member, since_s: float) -> bool:
        """Whether all of its ranks were heard since then or have left, and not all of them have left."""
        have_left = True
        for rank in _ranks_of(life.replica, life.life, self.num_stages):
            heard = self.heard.get(rank)
            if heard is None:
                return False
            if not heard.report.is_leaving:
                if heard.at_s < since_s:
                    return False
                have_left = False
        return not have_left

    def is_empty(self, life: Incarnation) -> bool:
        """Whether it has no weights to begin with."""
        return any(one.is_empty for one in self.reports(life))

    def confirms(self, life: Incarnation | RankId | Member) -> bool:
        """Whether all ranks of an incarnation know this epoch."""
        return self.are_of_epoch(self.reports(life))

    def are_of_epoch(self, reports: Collection[Report]) -> bool:
        """Whether these ranks, if there are any, know this epoch."""
        epoch = self.epoch
        for one in reports:
            if one.epoch != epoch:
                return False
        return bool(reports)

    def installed(self) -> "Membership":
        """With its members as the voters, once it is installed."""
        if self.is_installed or not self.members:
            return self
        if not self._are_enough({one for own in self.voters for one in own if self.confirms(one)}):
            return self
        present = frozenset(one.own_life for one in self.members)
        return replace(self, voters=(present,), is_strict=False, is_installed=True)

    @property
    def num_to_confirm(self) -> int:
        """How many more of its voters must confirm the epoch at least before it is installed."""
        if self.is_installed:
            return 0
        missing = [
            len(own) // 2 + 1 - (len(own) % 2 == 0 and not self.is_strict) - sum(map(self.confirms, own))
            for own in self.voters
        ]
        return max(missing, default=0)

    def can_be(self, members: Iterable[Member]) -> bool:
        """Whether an epoch of these members could ever be installed."""
        return self._are_enough({one.own_life for one in members})

    def begun(self, members: Collection[Member]) -> "Membership":
        """The next epoch."""
        ordered = tuple(sorted(members, key=attrgetter("replica")))
        return replace(self, epoch=self.epoch + 1, members=ordered, is_installed=False)

    def _are_enough(self, there: set[Incarnation]) -> bool:
        for own in self.voters:
            num, needed = len(own & there), len(own)
            if 2 * num < needed or (self.is_strict and 2 * num == needed > 0):
                return False
        return True


def heard_replicas(membership: Membership, since_s: float) -> list[Incarnation]:
    """All incarnations, members or not, of which every rank has been heard since then."""
    lives = sorted({rank.own_life for rank in membership.heard})
    return [one for one in lives if membership.is_heard(one, since_s)]


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A replica that is gone, for the reason `why`, or that is back (None). The run had done `step` steps."""

    replica: int
    host: str
    step: int
    why: Absence | None = None

    @property
    def text(self) -> str:
        """The sentence for people, without the reason of an absence."""
        name = f"Replica {self.replica} ({self.host})" if self.host else f"Replica {self.replica}"
        if self.why is None:
            return f"{name} is back at step {self.step + 1}"
        return f"{name} is gone after step {self.step}"


class Changes:
    """Which replicas have gone and come back, from one word of the coordinator to the next."""

    def __init__(self, batch_size: int, *, is_quorum: bool) -> None:
        self._batch_size, self._is_quorum = batch_size, is_quorum
        self._lives: dict[int, int] = {}
        """Of each replica the incarnation that was a member last."""
        self._gone: set[Incarnation] = set()

    def in_word(self, word: CoordinatorReply) -> list[MembershipChange]:
        """The changes since the word before. A replica that has done all its batches is none, and nothing of
        an epoch that is not installed: a coordinator that is cut off begins such epochs.
        """
        found = list[MembershipChange]()
        if not word.is_installed:
            return found
        for one in word.gone:
            is_new = self._lives.get(one.replica) == one.life and one.own_life not in self._gone
            self._gone.add(one.own_life)
            if is_new and one.why is not Absence.LEFT:
                found.append(MembershipChange(one.replica, _host(one.address), one.step, one.why))
        for member in word.members:
            before = self._lives.get(member.replica)
            self._lives[member.replica] = member.life
            if before is not None and before != member.life:
                step = member.first if self._is_quorum else word.fresh // self._batch_size
                found.append(MembershipChange(member.replica, _host(member.addresses[0]), step))
        return found


def _host(address: str) -> str:
    return address.partition(" ")[0]


# A line of rounds: who is ready, who is granted a round, when it is made again, and when it counts.
#
#     contributions ready ──▶ granted (attempt 0) ──▶ all hold the sum ──▶ committed
#                                │        ▲
#                                ▼        │ the next attempt, without who is gone
#                             a member is lost
#
# A round is granted once all who contribute are ready, or once the quorum is ready and no other has come for
# the grace window, or is expected: who says nothing is not waited for. It counts once every rank of it holds
# the sum of the same attempt.


@dataclass(frozen=True, slots=True)
class RoundSequence:
    """A line of rounds: that many are `committed`, and the next one is granted or gathers contributions.

    `ready` are the replicas whose contributions have come, the last of them at `since_s`. Who was not heard
    of since `broken_s`, when an attempt broke, is not ready.
    """

    number: int
    committed: int = 0
    first_attempt: int = 0
    """Of a round: that of another term is another one, even with the same members."""
    attempts: int = 0
    """The number of the next attempt at the present round, within its term."""
    grant: Grant | None = None
    ready: frozenset[int] = frozenset()
    since_s: float = 0.0
    broken_s: float = 0.0

    def after_commit(self) -> "RoundSequence":
        """Ready for the next round."""
        return replace(self, committed=self.committed + 1, attempts=0, grant=None, ready=frozenset())


def is_ready(line: RoundSequence, reports: Collection[Report]) -> bool:
    """Whether all ranks of a replica have kept their contribution to the present round."""
    number, committed = line.number, line.committed
    for report in reports:  # it is asked of all members
        one = report.at(number)
        if one.ready != committed or one.committed != committed:
            return False
    return bool(reports)


def is_summed(grant: Grant, reports: Collection[Report]) -> bool:
    """Whether all ranks of a replica hold the sum of the attempt that is granted."""
    number, wanted, attempt = grant.line, grant.round, grant.attempt
    for report in reports:
        one = report.at(number)
        if one.summed != wanted or one.attempt != attempt:
            return False
    return bool(reports)


def is_broken(grant: Grant, reports: Collection[Report]) -> bool:
    """Whether a rank could not reach another in the attempt that is granted."""
    places = [one.at(grant.line) for one in reports]
    return any(one.lost and one.ready == grant.round and one.attempt == grant.attempt for one in places)


def next_grant(
    line: RoundSequence,
    ready: Mapping[int, int],
    contributors: Collection[int],
    *,
    quorum: int,
    grace_s: float,
    now_s: float,
    silent: Collection[int] = (),
    attempts: int = 0,
) -> RoundSequence:
    """The line with its present round granted, if that is due, to those `ready` with that many samples. No
    replica waits for those that are `silent`, once the quorum is ready. `attempts` is greater than the number
    of any attempt at the present round of another line: ranks ignore what is older than the last attempt.
    """
    if line.ready != ready.keys():
        line = replace(line, ready=frozenset(ready), since_s=now_s)
    if not ready:
        return line
    missing = set(contributors) - ready.keys()
    is_over = missing <= set(silent) or now_s >= line.since_s + grace_s
    if missing and not (len(ready) >= quorum and is_over):
        return line
    number = max(line.attempts, attempts)
    parts = tuple(RoundPart(replica, num) for replica, num in sorted(ready.items()))
    grant = Grant(line.number, line.committed, line.first_attempt + number, parts)
    return replace(line, grant=grant, attempts=number + 1)


@dataclass(frozen=True, slots=True)
class Ended:
    """A start of a replica is over for certain: who started its processes has seen one of them end, and will
    end the others.
    """

    life: Incarnation


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Report | Ended | Tick


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """A coordinator. `number` is that of its last word, `heals` are of replicas that are no members yet.

    `dealt` is the first batch that has not been assigned, of all replicas in `quorum`, else of each.
    `trained` says of each replica and stage, or line, up to which batch its samples are in weights that
    others have.
    """

    settings: CoordinatorSettings
    membership: Membership
    lines: tuple[RoundSequence, ...]
    pool: Pool
    dealing: Dealing
    number: int = 0
    heals: tuple[Heal, ...] = ()
    gone: tuple[Gone, ...] = ()
    """The last incarnation of each replica that ceased to be a member."""
    commits: tuple[Commit, ...] = ()
    dealt: int = 0
    dealt_to: dict[int, int] = field(default_factory=dict)
    trained: dict[tuple[int, int], int] = field(default_factory=dict)
    ends: tuple[End, ...] = ()
    groups: GroupState | None = None
    group_words: dict[tuple[int, int], GroupReply] = field(default_factory=dict)
    paces: Paces = field(default_factory=Paces)
    first_heard_s: float | None = None
    after: tuple[int, int] = (0, 0)
    """The word from which it took up."""
    settled_s: float = 0.0
    """When it was last seen to what follows from what is known."""
    silence_s: float = -inf
    """Before that time nothing follows from the silence of anybody who was heard when it was settled."""
    has_broken: bool = False
    """Whether it was settled while a rank reported that it cannot reach another, or lacked a source."""
    num_to_confirm: int = 0
    """How many more replicas must confirm the epoch at least before it is installed."""
    awaited: tuple[int, int, int] = (0, 0, 0)
    """Where to look first for a replica that is not ready, for one that has no sum, and for one that lacks a
    committed round. Any place is right: these only save a search.
    """
    word: CoordinatorReply | None = None
    """The last reply, without what is of one rank."""
    still_s: float | None = None
    """Since when all ranks wait for each other, and nothing has happened."""
    standstill: str = ""
    """Why the run ends, once that has been so for too long."""

    ledger: tuple[Began | Committed, ...] = ()
    """Lines for the ledger that the last event has led to."""

    @property
    def is_quorum(self) -> bool:
        """Whether all replicas train the same batches."""
        return not self.settings.averages

    @property
    def has_many(self) -> bool:
        """Whether news that no rank waits for goes with the next answer to each rank."""
        return self.is_quorum and len(self.membership.members) > messages.MANY

    @property
    def contributors(self) -> tuple[int, ...]:
        """The replicas that train the next batch that is assigned."""
        entering = [one.replica for one in self.heals if one.first is not None and one.first <= self.dealt]
        return tuple(sorted([*self.membership.replicas, *entering]))

    def reports(self, replica: int) -> list[Report]:
        """The last reports of all ranks of a replica that were heard. They are of one incarnation: a report
        of a later one ends those before it.
        """
        membership = self.membership
        ranks = _ranks_of(replica, membership.over.get(replica, 0), membership.num_stages)
        found = map(membership.heard.get, ranks)
        return [each.report for each in found if each is not None]

    def places(self, replica: int, line: int) -> list[RoundAt]:
        """Where the ranks of a replica are in a line of rounds."""
        return [one.at(line) for one in self.reports(replica)]

    def is_of_means(self, line: RoundSequence) -> bool:
        """Whether the rounds of a line are the means over all replicas, which need every member."""
        return not self.is_quorum and line.number == len(self.lines) - 1

    def with_line(self, line: RoundSequence) -> "CoordinatorState":
        """With another state of a line of rounds."""
        return replace(self, lines=tuple(line if one.number == line.number else one for one in self.lines))

    def in_epoch(self, membership: Membership, members: Collection[Member]) -> "CoordinatorState":
        """In the next epoch, with these members: what was granted in the one before is off."""
        return replace(self.without_grants(), membership=membership.begun(members))

    def without_grants(self) -> "CoordinatorState":
        """With nothing granted."""
        return replace(self, lines=tuple(replace(one, grant=None) for one in self.lines))

    def first_undealt(self, replica: int) -> int:
        """The first of its own batches that was not assigned to a replica."""
        return self.dealt_to.get(replica, self.settings.first)

    def last_end(self, replica: int) -> End | None:
        """The end of the last window in which a replica has no batch left."""
        return next((one for one in self.ends if one.replica == replica), None)

    def has_ended(self, replica: int, window: int) -> bool:
        """Whether a replica has no batch left in a window."""
        last = self.last_end(replica)
        return last is not None and last.window == window

    def with_counted(self, batch: int, attempt: int, replicas: tuple[int, ...]) -> "CoordinatorState":
        """After the samples of these replicas in a batch were committed."""
        pool = self.pool
        samples = tuple(pool.deals.get((one, batch), ()) for one in replicas)
        pool = pool.without_deals(replicas, batch)
        line = Committed(
            self.membership.epoch, batch, attempt, replicas, samples, pool.fresh, pool.open, pool.returned
        )
        return replace(self, pool=pool, ledger=(*self.ledger, line))

    def with_dropped(
        self, membership: Membership, lost: Iterable[Member], leaving: Collection[Member] = ()
    ) -> "CoordinatorState":
        """With members among those that are gone, and this membership. Incarnations that may go on somewhere
        are dropped: they may have samples that nobody here knows of.
        """
        gone = {one.replica: one for one in self.gone}
        step = self.lines[0].committed if self.is_quorum else self.pool.fresh // self.settings.batch_size
        for one in lost:
            why = Absence.LEFT if one in leaving else Absence.ENDED
            if not membership.is_over(one):
                membership, why = membership.without(one.own_life), Absence.SILENT
            gone.pop(one.replica, None)
            gone[one.replica] = Gone(one.replica, one.life, step, why, next(iter(one.addresses), ""))
        return replace(self, membership=membership, gone=tuple(gone.values()))

    def with_returned(self, replicas: Iterable[int]) -> "CoordinatorState":
        """After all that was assigned to replicas has come back."""
        pool = self.pool
        for one in replicas:
            pool = pool.with_returned(one)
        return replace(self, pool=pool)


@dataclass(frozen=True, slots=True)
class CoordinatorStep:
    """What an event leads to: words for ranks, and lines for the ledger, which come before the words. Lines
    that are `is_lasting` must be on the disk by then, with all before them, and not only written.
    """

    state: CoordinatorState
    words: tuple[tuple[RankId, CoordinatorReply], ...] = ()
    is_lasting: bool = True

    @property
    def lines(self) -> tuple[Began | Committed, ...]:
        """The lines for the ledger."""
        return self.state.ledger
