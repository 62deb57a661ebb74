"""`quorum` and two published baselines on the simulator's clock.

The rounds and the samples of `quorum` are those of the real coordinator (`bireme.sync.coordinator`), as event
handlers. A replica is one here, not a rank for each stage. A death is known after `noticed_s`, when the
launcher reports it or the lease ends. Before that the replica may be silent.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from random import Random

from benchmarks.replica_speeds.mortal import SurvivingAgreement
from bireme.balance import ShareLimits
from bireme.simulate.together import Agreement, Together, Trained
from bireme.sync.coordinator.messages import Grant
from bireme.sync.coordinator.samples import Dealing, Pool
from bireme.sync.coordinator.state import RoundSequence, next_grant

_READ_AHEAD = 2
"""After so many batches new shares hold, for nobody has read further."""


class QuorumRounds(SurvivingAgreement):
    """Gradients of the living are summed in every batch; whoever comes too late gets the sum of the others.

    A round goes on without some once more than half of the members are ready and no other has come for
    `grace_s`, and waits for nobody who was silent for `silent_s`. One that returns after a death has the
    weights of a donor after `heal_s`.
    """

    def __init__(
        self, *, grace_s: float, noticed_s: float, heal_s: float = 0.0, silent_s: float | None = None
    ) -> None:
        self.grace_s = grace_s
        self.noticed_s = noticed_s
        self.silent_s = noticed_s if silent_s is None else silent_s
        self.heal_s = heal_s

    def begin(self, run: Together) -> None:
        """Everybody is a member, with an equal share."""
        self.line = RoundSequence(0)
        self.pool = Pool()
        self.members = set(range(run.num_replicas))
        self.silent: frozenset[int] = frozenset()
        self.dealt: dict[int, dict[int, int]] = {}
        """By batch and replica, as long as the batch is not committed."""
        self.taken: dict[tuple[int, int], int] = {}
        """What replicas train of the batches that they have begun with."""
        self.there: dict[int, set[int]] = {}
        """By batch, whose contributions have come."""
        most = (run.batch_size,) * run.num_replicas
        self.dealing = Dealing(run.batch_size, ShareLimits((1,) * run.num_replicas, most))
        self.redone = 0
        super().begin(run)

    def share(self, replica: int, batch: int) -> int:
        """What was dealt; nothing of a batch that was committed before it could begin with it."""
        taken = self.taken.get((replica, batch))
        if taken is None:
            if batch >= self.line.committed and batch not in self.dealt:
                self._deal(batch)
            taken = self.taken[replica, batch] = self.dealt.get(batch, {}).get(replica, 0)
        return taken

    def contributed(self, replica: int, batch: int, now_s: float) -> None:
        """One more is ready, or one is late."""
        if batch < self.line.committed:
            self.run.update(replica, batch, now_s + self.run.exchange.seconds(2))
            return
        self.there.setdefault(batch, set()).add(replica)
        self._grant(now_s)

    def woke(self, now_s: float) -> None:
        """The grace window may be over."""
        self._grant(now_s)

    def died(self, replica: int, now_s: float) -> None:
        """The coordinator hears of it, or its lease ends."""
        if self.silent_s < self.noticed_s:
            self.run.at(now_s + self.silent_s, partial(self._note_silence, replica))
        self.run.at(now_s + self.noticed_s, partial(self._drop_dead, replica))

    def returned(self, replica: int, now_s: float) -> None:
        """Its earlier life is over; it takes the weights of a donor."""
        self._drop(replica, now_s)
        self.run.at(now_s + self.heal_s, partial(self._join, replica))

    def _join(self, replica: int, now_s: float) -> None:
        self.taken = {place: own for place, own in self.taken.items() if place[0] != replica}
        self.members.add(replica)
        self.run.start(replica, self.line.committed, now_s)

    def _drop_dead(self, replica: int, now_s: float) -> None:
        if not self.run.is_alive(replica):
            self._drop(replica, now_s)

    def _note_silence(self, replica: int, now_s: float) -> None:
        if not self.run.is_alive(replica) and replica in self.members:
            self.silent |= {replica}
            self._grant(now_s)

    def _drop(self, replica: int, now_s: float) -> None:
        """What it had goes back, and a round that it was in is made again without it."""
        if replica not in self.members:
            return
        self.members.discard(replica)
        self.silent -= {replica}
        self._return(replica, self.dealt)
        for batch in self.there.values():
            batch.discard(replica)
        if self.line.grant is not None and any(one.replica == replica for one in self.line.grant.parts):
            self.line = replace(self.line, grant=None)
        self._grant(now_s)

    def _return(self, replica: int, batches: Iterable[int]) -> None:
        for batch in batches:
            self.redone += self.dealt[batch].pop(replica, 0)
        self.pool = self.pool.with_returned(replica)

    def _deal(self, batch: int) -> None:
        """Shares of a batch by the speeds that are known; each member has at least one sample."""
        self.dealing = self.dealing.among(tuple(sorted(self.members)), batch, self.silent)
        self.dealt[batch] = self.dealing.counts(batch)
        self.pool = self.pool.with_deal(batch, self.dealt[batch])

    def _grant(self, now_s: float) -> None:
        batch = self.line.committed
        there = self.there.get(batch, set())
        dealt = self.dealt.get(batch, {})
        ready = {one: dealt[one] for one in there if dealt.get(one)}
        contributors = [one for one in self.members if dealt.get(one)]
        if self.line.grant is not None or not ready:
            return
        quorum = len(self.members) // 2 + 1
        line = next_grant(
            self.line,
            ready,
            contributors,
            quorum=quorum,
            grace_s=self.grace_s,
            now_s=now_s,
            silent=self.silent,
        )
        has_quorum = len(ready) >= quorum and line.ready != self.line.ready
        self.line = line
        if line.grant is not None:
            grant = line.grant
            sum_s = self.run.exchange.control_s + self.run.exchange.seconds(len(grant.parts))
            self.run.at(now_s + sum_s, partial(self._summed, grant))
        elif has_quorum:
            self.run.wake_at(line.since_s + self.grace_s)

    def _summed(self, grant: Grant, now_s: float) -> None:
        """The sum is there, unless a part of it has died: then it waits for the next attempt."""
        if self.line.grant is not grant or not all(self.run.is_alive(one.replica) for one in grant.parts):
            return
        batch = grant.round
        parts = tuple(one.replica for one in grant.parts)
        self.run.count(Trained(batch, parts, sum(one.num_samples for one in grant.parts), now_s))
        for replica in parts:
            self.dealt[batch].pop(replica)
        self.pool = self.pool.without_deals(parts, batch)
        late = self.dealt.pop(batch)
        for replica, samples in late.items():
            self.redone += samples
            self.pool = self.pool.with_returned(replica, below=batch + 1)
        counts = {one.replica: one.num_samples for one in grant.parts}
        seconds = {replica: self.run.busy_s(replica, batch) for replica in parts}
        after = batch + _READ_AHEAD + 1
        dealing = self.dealing.with_batch(batch, counts, seconds, takes_effect=after)
        self.dealing = dealing.with_late(batch, late, takes_effect=after)
        self.line = self.line.after_commit()
        for replica in self.there.pop(batch, ()):
            self.run.update(replica, batch, now_s)
        self._grant(now_s)


class AsynchronousPairs(Agreement):
    """AD-PSGD as published: after each batch a replica averages with a random other, which does not wait.

    The weights of the other are averaged while it computes; each replica has one exchange at a time.
    """

    average_lag = 0

    def begin(self, run: Together) -> None:
        """Nobody exchanges anything."""
        super().begin(run)
        self.free_s: dict[tuple[int, int], float] = {}
        self.latest: dict[tuple[int, int], int] = {}
        self.random = Random(run.seed)

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """It averages with another one as soon as both can."""
        self.latest[replica, stage] = batch
        others = [one for one in range(self.run.num_replicas) if one != replica and self.run.is_alive(one)]
        if not others:
            super().offered(replica, stage, batch, now_s)
            return
        other = self.random.choice(others)
        ends = (replica, stage), (other, stage)
        at_s = max(now_s, *(self.free_s.get(end, 0.0) for end in ends)) + self.run.exchange.seconds(2)
        self.free_s |= dict.fromkeys(ends, at_s)
        self.run.complete(stage, {replica: batch}, at_s)


class BoundedStaleness(Agreement):
    """HetPipe-like: each replica sends what a batch changed to a server and takes the newest weights.

    Nobody begins a batch more than `most` batches before the slowest. The server of a stage has one link.
    """

    average_lag = 0

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self, run: Together) -> None:
        """Nobody has sent anything."""
        super().begin(run)
        self.free_s: dict[int, float] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.held: dict[int, list[tuple[int, int]]] = {}

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """What it sends and takes goes through the server's link, after what others do."""
        exchange = self.run.exchange
        begin_s = max(now_s, self.free_s.get(stage, 0.0))
        self.free_s[stage] = begin_s + 2 * exchange.num_bytes / exchange.bytes_per_s
        at_s = self.free_s[stage] + 2 * exchange.latency_s
        self.run.at(at_s, partial(self._sent, replica, stage, batch))

    def _sent(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        done = self.done.setdefault(stage, dict.fromkeys(range(self.run.num_replicas), -1))
        done[replica] = batch
        waiting = [*self.held.get(stage, ()), (replica, batch)]
        slowest = min(done.values())
        self.held[stage] = [one for one in waiting if one[1] - slowest > self.most]
        for other, reached in waiting:
            if reached - slowest <= self.most:
                self.run.complete(stage, {other: reached}, now_s)
