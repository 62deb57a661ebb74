"""Replicas, coordinators and a network on a simulated clock: messages are late, doubled, reordered and lost,
and anything may die.

A rank here does what an engine does, with sets of sample numbers for gradients: it contributes its samples,
sums what the members of a grant kept, and applies a sum once it is committed. What a rank has applied is its
weights. Sums go from rank to rank at once or not at all, as a socket would.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from random import Random

from bireme.balance import ShareLimits
from bireme.sync.coordinator.host import CoordinatorCandidate, beginner, host_step, host_wake_s
from bireme.sync.coordinator.host import Host as CoordinatorHost
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    CoordinatorReply,
    Grant,
    Incarnation,
    Known,
    RankId,
    Report,
    RoundAt,
    SamplePlaces,
    decode,
    encode,
)
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Tick

Sum = tuple[tuple[int, tuple[SamplePlaces, ...]], ...]
"""What a round adds up to: the samples of each replica."""

WRITTEN = 0.05
"""One in so many messages goes through JSON; all of them would take most of the time."""

LEASE_S, GRACE_S, BEAT_S = 1.0, 0.1, 0.2


def settings_for(num_replicas: int, num_stages: int, batch_size: int = 12) -> CoordinatorSettings:
    limits = ShareLimits((1,) * num_replicas, (batch_size,) * num_replicas)
    return CoordinatorSettings(
        SyncMode.QUORUM, num_replicas, num_stages, batch_size, limits, LEASE_S, GRACE_S
    )


@dataclass
class Faults:
    """How bad the network is, until it gets well at `end_s`."""

    lost: float = 0.0
    doubled: float = 0.0
    longest_s: float = 0.01
    end_s: float = 0.0


class World:
    """All of it, and the clock."""

    def __init__(
        self, settings: CoordinatorSettings, seed: int, faults: Faults, *, num_hosts: int = 1
    ) -> None:
        self.settings, self.random, self.faults = settings, Random(seed), faults
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.ranks: dict[RankId, SimulatedRank] = {}
        self.lives = dict.fromkeys(range(settings.num_replicas), -1)
        self.speed = {replica: self.random.uniform(0.02, 0.06) for replica in range(settings.num_replicas)}
        self.applied: dict[tuple[int, int], Sum] = {}
        self.ledger: list[Began | Committed] = []
        self.deals: dict[tuple[int, int, int], tuple[SamplePlaces, ...]] = {}
        self.cut: set[tuple[object, object]] = set()
        self.hosts = [Host(self, number, num_hosts) for number in range(num_hosts)]
        for replica in range(settings.num_replicas):
            self.start(replica)

    def start(self, replica: int) -> None:
        """Start a replica, or start it again."""
        self.lives[replica] += 1
        is_empty = any(isinstance(one, Committed) for one in self.ledger)
        for stage in range(self.settings.num_stages):
            rank = RankId(replica, self.lives[replica], stage)
            self.ranks[rank] = SimulatedRank(self, rank, is_empty=is_empty)

    def kill(self, replica: int, *, is_told: bool, again_s: float | None = 0.5) -> None:
        """Kill the processes of a replica; whoever started them says so, and starts them again."""
        life = Incarnation(replica, self.lives[replica])
        for rank in [one for one in self.ranks if one.replica == replica]:
            self.ranks.pop(rank).is_dead = True
        if is_told:
            self.after(0.05, partial(self._tell_end, life))
        if again_s is not None:
            self.after(again_s, lambda: self.start(replica) if self.lives[replica] == life.life else None)

    def _tell_end(self, life: Incarnation) -> None:
        for host in self.hosts:
            host.hear(Ended(life))

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))  # type: ignore[misc]

    def send(self, come: Callable[[], object], *ends: object) -> None:
        """Have a message come, as the network has it."""
        faults, random = self.faults, self.random
        is_bad = self.now_s < faults.end_s
        if any((one, other) in self.cut for one in ends for other in ends):
            return
        if is_bad and random.random() < faults.lost:
            return
        for _ in range(2 if is_bad and random.random() < faults.doubled else 1):
            self.after(random.uniform(0.0005, faults.longest_s if is_bad else 0.002), come)

    def can_reach(self, one: "SimulatedRank", other: "SimulatedRank") -> bool:
        ends = (one.rank.replica, other.rank.replica)
        return ends not in self.cut and ends[::-1] not in self.cut

    def run(self, until: Callable[[], bool], most_s: float) -> bool:
        """Let time pass until that is so; whether it was so in time."""
        while self._queue and self._queue[0][0] < most_s:
            self.now_s, _, act = heappop(self._queue)
            act()
            if until():
                return True
        return False

    def note_applied(self, stage: int, number: int, found: Sum) -> None:
        """All ranks of a stage apply the same sum in each round."""
        assert self.applied.setdefault((stage, number), found) == found, (stage, number)

    def is_whole(self, replica: int) -> bool:
        """Whether all ranks of a replica are there and know that it is a member."""
        own = [one for one in self.ranks.values() if one.rank.replica == replica]
        known = [(one.word is not None and one.word.members) or () for one in own]
        are_members = all(
            any(each.own_life == one.rank.own_life for each in members)
            for one, members in zip(own, known, strict=True)
        )
        return len(own) == self.settings.num_stages and are_members

    @property
    def num_common(self) -> int:
        """The rounds that all ranks have applied, if all replicas are there."""
        if {rank.replica for rank in self.ranks} != set(range(self.settings.num_replicas)):
            return 0
        return min(len(one.weights) for one in self.ranks.values())


class Host:
    """A machine on which a coordinator may run."""

    def __init__(self, world: World, number: int, num_hosts: int) -> None:
        self.world, self.number, self.num_hosts = world, number, num_hosts
        self.is_up = True
        self.link = 0
        """Which connections to it there are: others are closed."""
        self.host = (
            beginner(world.settings, num_hosts)
            if number == 0
            else CoordinatorHost(world.settings, CoordinatorCandidate(number, num_hosts))
        )
        self._due_s = 0.0
        self._tick_later()

    def die(self, *, again_s: float | None) -> None:
        """Kill its coordinator; one that is started again has its ledger."""
        self.is_up = False
        self.link += 1
        if again_s is not None:
            self.world.after(again_s, self.rise)

    def rise(self) -> None:
        self.is_up = True
        own = [one for one in self.world.ledger if one.epoch // TERM % self.num_hosts == self.number]
        is_last = bool(own) and own[-1] is self.world.ledger[-1]
        recorded = max((one.batch + 1 for one in own if isinstance(one, Committed)), default=0)
        used = max((one.epoch // TERM for one in own), default=-1)
        candidate = CoordinatorCandidate(self.number, self.num_hosts, recorded if is_last else None, used)
        self.host = CoordinatorHost(self.world.settings, candidate)

    def hear(self, event: Report | Ended | Tick) -> None:
        if not self.is_up:
            return
        done = host_step(self.host, event, self.world.now_s)
        self.host = done.host
        self.link += done.resigns
        self.world.ledger.extend(done.lines)
        for rank, word in done.words:
            self._send(rank, word)
        self._tick_later()

    def _send(self, rank: RankId, word: CoordinatorReply) -> None:
        word = decode(CoordinatorReply, encode(word)) if self.world.random.random() < WRITTEN else word
        link = self.link

        def come() -> None:
            if rank in self.world.ranks:
                self.world.ranks[rank].hear(self.number, link, word)

        self.world.send(come, f"host{self.number}", rank.replica)

    def _tick_later(self) -> None:
        at_s = max(host_wake_s(self.host, self.world.now_s), self.world.now_s + 1e-4)
        if self.world.now_s < self._due_s <= at_s:
            return
        self._due_s, link = at_s, self.link

        def tick() -> None:
            if self.link == link:
                self.hear(Tick())
            self._tick_later()

        self.world.after(at_s - self.world.now_s, tick)


@dataclass
class Kept:
    """What a rank keeps of a round: its own contribution, and the sum of an attempt."""

    contributions: dict[int, Sum] = field(default_factory=dict)
    sums: dict[int, Sum] = field(default_factory=dict)


class SimulatedRank:
    """A rank of a replica."""

    def __init__(self, world: World, rank: RankId, *, is_empty: bool) -> None:
        self.world, self.rank, self.is_empty = world, rank, is_empty
        self.is_dead = False
        self.weights: list[Sum] = []
        self.known = Known()
        self.at = RoundAt()
        self.healed: int | None = None
        self.wants = 0
        self.kept = Kept()
        self._number = self._epoch = 0
        self._host = self._link = 0
        self._heard_s = world.now_s
        self._has_word = True
        self._busy: set[object] = set()
        self._heals: tuple[int, int] | None = None
        world.after(world.random.uniform(0, BEAT_S), self._beat)

    @property
    def word(self) -> CoordinatorReply | None:
        return self.known.last

    def _beat(self) -> None:
        if self.is_dead:
            return
        is_closed = self.world.hosts[self._host].link != self._link
        if is_closed or self.world.now_s > self._heard_s + (LEASE_S / 2 if self._has_word else 1.5 * LEASE_S):
            self._call(0 if is_closed else self._host + 1)
        self._say()
        self.world.after(BEAT_S, self._beat)

    def _call(self, first: int) -> None:
        """Connect to the first host from that one on that takes connections."""
        hosts = self.world.hosts
        for number in (one % len(hosts) for one in range(first, first + len(hosts))):
            if hosts[number].is_up and (f"host{number}", self.rank.replica) not in self.world.cut:
                self._host, self._link = number, hosts[number].link
                break
        self._heard_s, self._has_word = self.world.now_s, False

    def _say(self) -> None:
        self._number += 1
        epoch = self._epoch = 0 if self.word is None else self.word.epoch
        report = Report(
            self.rank,
            self._number,
            epoch,
            f"at {self.rank.stage}",
            wants=self.wants,
            rounds=(self.at,),
            healed=self.healed,
            is_empty=self.is_empty,
            known=None if self._has_word else self.known,
        )
        host = self.world.hosts[self._host]
        report = decode(Report, encode(report)) if self.world.random.random() < WRITTEN else report
        link = self._link
        self.world.send(
            lambda: host.hear(report) if host.link == link else None,
            f"host{self._host}",
            self.rank.replica,
        )

    def hear(self, host: int, link: int, word: CoordinatorReply) -> None:
        """Take a word, if it comes over the connection that this rank has now."""
        if self.is_dead or (host, link) != (self._host, self._link):
            return
        if word.is_dropped:
            if self.word is None or word.place >= self.word.place:
                self.world.kill(self.rank.replica, is_told=True)
            return
        is_new = self._epoch != word.epoch and word.is_confirmed_at_once((self.at,))
        if word == self.word:
            self._heard_s = self.world.now_s
        known = self.known.with_word(word)
        if known is None:
            return
        self._heard_s, self._has_word, self.known = self.world.now_s, True, known
        self._check_deals(word)
        if self._follow(word) or is_new:
            self._say()

    def _check_deals(self, word: CoordinatorReply) -> None:
        """No life of a replica is dealt other samples for a batch than before."""
        for deal in word.deals:
            if deal.replica == self.rank.replica:
                key = (deal.replica, self.rank.life, deal.batch)
                assert self.world.deals.setdefault(key, deal.samples) == deal.samples, deal

    def _follow(self, word: CoordinatorReply) -> bool:
        before = (self.at, self.healed, self.wants)
        mine = next((one for one in word.heals if one.replica == self.rank.replica), None)
        if mine is not None and self.healed != mine.batch:
            self._heal(mine.donor, mine.batch)
        for commit in word.commits:
            self._take_commit(commit)
        is_member = any(one.own_life == self.rank.own_life for one in word.members)
        if is_member or (mine is not None and mine.first is not None):
            self.wants = max(self.wants, self.at.committed + 1 + self.rank.replica % 2)
        number = self.at.committed
        for deal in word.deals:
            if (deal.replica, deal.batch) == (self.rank.replica, number) and self.at.ready != number:
                compute = partial(self._computed, deal.batch, deal.samples)
                self._later(("compute", number), self._speed, compute)
        for grant in word.grants:
            if grant.round == number and self.at.ready == number and self._is_in(grant):
                key = ("sum", grant.round, grant.attempt)
                self._later(key, 0.003, partial(self._sum, grant))
        return before != (self.at, self.healed, self.wants)

    @property
    def _speed(self) -> float:
        return self.world.speed[self.rank.replica] * self.world.random.uniform(0.8, 1.2)

    def _later(self, key: object, delay_s: float, act: Callable[[], None]) -> None:
        """Do that once, after some time."""
        if key in self._busy:
            return
        self._busy.add(key)

        def do() -> None:
            if not self.is_dead:
                act()
                self._say()
                if self.word is not None:
                    self._follow(self.word)

        self.world.after(delay_s * self.world.random.uniform(0.5, 1.5), do)

    def _computed(self, batch: int, samples: tuple[SamplePlaces, ...]) -> None:
        if self.at.committed == batch:
            self.kept.contributions[batch] = ((self.rank.replica, samples),)
            self.at = replace(self.at, ready=batch, busy_s=self.world.speed[self.rank.replica])

    def _is_in(self, grant: Grant | Commit) -> bool:
        return any(one.replica == self.rank.replica for one in grant.parts)

    def _peer(self, replica: int) -> "SimulatedRank | None":
        word = self.word
        assert word is not None
        lives = [one.life for one in word.members if one.replica == replica]
        found = self.world.ranks.get(RankId(replica, lives[0], self.rank.stage)) if lives else None
        return found if found is not None and self.world.can_reach(self, found) else None

    def _sum(self, grant: Grant) -> None:
        """Add up what the members kept, if all can be reached."""
        if self.at.committed != grant.round:
            return
        found, lost = list[tuple[int, tuple[SamplePlaces, ...]]](), list[int]()
        for part in grant.parts:
            peer = self._peer(part.replica)
            if peer is None or grant.round not in peer.kept.contributions:
                lost.append(part.replica)
            else:
                found += peer.kept.contributions[grant.round]
                assert sum(one.count for one in found[-1][1]) == part.num_samples
        if lost:
            self.at = replace(self.at, attempt=grant.attempt, lost=tuple(lost), summed=None)
        else:
            self.kept.sums[grant.round] = tuple(found)
            self.at = replace(self.at, summed=grant.round, attempt=grant.attempt, lost=())

    def _take_commit(self, commit: Commit) -> None:
        if commit.round != self.at.committed:
            return
        at = self.at
        if self._is_in(commit) and (at.summed, at.attempt) == (commit.round, commit.attempt):
            self._apply(self.kept.sums[commit.round], commit)
            return
        source = next((one.source for one in commit.sources if one.target == self.rank.replica), None)
        if source is None:
            return
        peer = self._peer(source)
        if peer is None:
            self.at = replace(at, lost=(*({*at.lost} - {source}), source))
        elif len(peer.weights) > commit.round:
            self._apply(peer.weights[commit.round], commit)
        elif (peer.at.summed, peer.at.attempt) == (commit.round, commit.attempt):
            self._apply(peer.kept.sums[commit.round], commit)

    def _apply(self, found: Sum, commit: Commit) -> None:
        self.world.note_applied(self.rank.stage, len(self.weights), found)
        self.weights.append(found)
        self.at = RoundAt(committed=len(self.weights), last=replace(commit, sources=()))

    def _heal(self, donor: int, batch: int) -> None:
        """Take the donor's weights after so many batches, once it is there."""
        peer = self._peer(donor)
        if peer is None:
            self.at = replace(self.at, lost=(donor,))
        elif len(peer.weights) >= batch:
            self.weights = peer.weights[:batch]
            self.healed, self.at = batch, RoundAt(committed=batch)
