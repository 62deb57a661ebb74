"""Who is a member: leases, epochs, and how many must know an epoch before anything counts in it.

A replica lives as long as all of its ranks are heard of within the lease. It is one start of a replica, a
*life*: whoever sees a later life of it knows that the earlier one is over.

**Nobody agrees twice.** While it lives, the coordinator alone decides. If a part of the members is out of its
reach, they may have found another coordinator, which needs more than half of them. So this one goes on only
with at least half of them: an epoch's members are at least half of its *voters*, the members of the last
epoch that was installed, and it is installed once at least half of the voters have confirmed it. A
coordinator that has taken up after another needs more than half, until its own epoch is installed. A replica
that is known to have ended elects nobody, and so is no voter any more.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from bireme.sync.coordinator.messages import Absence, CoordinatorReply, Incarnation, Member, RankId, Report

__all__ = ["Changes", "Heard", "Membership", "MembershipChange", "heard_replicas"]


@dataclass(frozen=True, slots=True)
class Heard:
    """The last report of a rank, and when it came."""

    report: Report
    at_s: float


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of an epoch. `voters` are sets of lives, of each of which enough must confirm it: at least
    half, and more than half if it `is_strict`.
    """

    num_stages: int
    epoch: int
    members: tuple[Member, ...] = ()
    voters: tuple[frozenset[Incarnation], ...] = ()
    is_strict: bool = False
    is_installed: bool = False
    """Whether enough of the voters have confirmed the epoch, so that things may count in it."""
    heard: dict[RankId, Heard] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)
    """Of each replica the lives below this have ended."""
    dropped: frozenset[Incarnation] = frozenset()
    """Lives that may go on somewhere, but are members no more."""

    def with_report(self, report: Report, now_s: float) -> "Membership":
        """After a report, unless it is late or of a life that is over."""
        rank = report.rank
        last = self.heard.get(rank)
        if self.is_over(rank.own_life) or (last is not None and last.report.number >= report.number):
            return self
        found = self.with_over(Incarnation(rank.replica, rank.life - 1))
        return replace(found, heard=found.heard | {rank: Heard(report, now_s)})

    def without(self, life: Incarnation) -> "Membership":
        """After a life that is not heard of any more was dropped: nothing that it says counts again."""
        heard = {rank: each for rank, each in self.heard.items() if rank.own_life != life}
        return replace(self, heard=heard, dropped=self.dropped | {life})

    def with_over(self, life: Incarnation) -> "Membership":
        """After a life is known to have ended: it, and those before it, elect nobody."""
        if life.life < self.over.get(life.replica, 0):
            return self
        over = self.over | {life.replica: life.life + 1}

        def goes_on(one: Incarnation) -> bool:
            return one.life >= over.get(one.replica, 0)

        return replace(
            self,
            over=over,
            voters=tuple(frozenset(filter(goes_on, own)) for own in self.voters),
            heard={rank: each for rank, each in self.heard.items() if goes_on(rank.own_life)},
        )

    def is_over(self, life: Incarnation) -> bool:
        """Whether that life has ended, or was dropped."""
        return life in self.dropped or life.life < self.over.get(life.replica, 0)

    def member(self, life: Incarnation) -> Member | None:
        """The member that is this life."""
        return next((one for one in self.members if one.own_life == life), None)

    @property
    def have_ended(self) -> bool:
        """Whether there are members, and all of them are known to have ended."""
        ended = (one.life < self.over.get(one.replica, 0) for one in self.members)
        return bool(self.members) and all(ended)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The members' numbers."""
        return tuple(one.replica for one in self.members)

    def reports(self, life: Incarnation) -> list[Report]:
        """The last reports of all ranks of a life, stage by stage; none unless all have been heard."""
        found = [self.heard.get(RankId(life.replica, life.life, stage)) for stage in range(self.num_stages)]
        return [] if None in found else [one.report for one in found if one is not None]

    def is_heard(self, life: Incarnation, since_s: float) -> bool:
        """Whether all of its ranks have been heard since then, or have said that they will say no more."""
        ranks = [RankId(life.replica, life.life, stage) for stage in range(self.num_stages)]
        heard = [self.heard.get(rank) for rank in ranks]
        return all(one is not None and (one.at_s >= since_s or one.report.is_leaving) for one in heard)

    def is_empty(self, life: Incarnation) -> bool:
        """Whether it has no weights to begin with."""
        return any(one.is_empty for one in self.reports(life))

    def confirms(self, life: Incarnation) -> bool:
        """Whether all ranks of a life know this epoch."""
        reports = self.reports(life)
        return bool(reports) and all(one.epoch == self.epoch for one in reports)

    def installed(self) -> "Membership":
        """With its members as the voters, once it is installed."""
        present = frozenset(one.own_life for one in self.members)
        if self.is_installed or not present:
            return self
        if not self._are_enough({one for own in self.voters for one in own if self.confirms(one)}):
            return self
        return replace(self, voters=(present,), is_strict=False, is_installed=True)

    def can_be(self, members: Iterable[Member]) -> bool:
        """Whether an epoch of these members could ever be installed."""
        return self._are_enough({one.own_life for one in members})

    def begun(self, members: Collection[Member]) -> "Membership":
        """The next epoch."""
        ordered = tuple(sorted(members, key=lambda one: one.replica))
        return replace(self, epoch=self.epoch + 1, members=ordered, is_installed=False)

    def _are_enough(self, there: Collection[Incarnation]) -> bool:
        for own in self.voters:
            num, needed = len(own & set(there)), len(own)
            if 2 * num < needed or (self.is_strict and 2 * num == needed > 0):
                return False
        return True


def heard_replicas(membership: Membership, since_s: float) -> list[Incarnation]:
    """All lives, members or not, of which every rank has been heard since then."""
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
        """Of each replica the life that was a member last."""
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
