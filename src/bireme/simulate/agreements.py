"""Who agrees with whom, as the simulator's replicas ask: the modes of Bireme and two published baselines.

Groups and rounds are made by the rules of the real coordinator, `bireme.sync.coordinator`, as event handlers.
"""

from functools import partial
from random import Random

from bireme.simulate.together import Agreement, Together, Trained
from bireme.sync.coordinator.groups import (
    FIRST_WAIT_S,
    AveragingGroup,
    GroupEvent,
    GroupMembers,
    GroupState,
    GroupSummed,
    Paces,
    groups_begun,
    groups_step,
    next_deadline_s,
    next_wait_s,
)
from bireme.sync.coordinator.samples import GroupSettings
from bireme.sync.coordinator.state import RoundSequence, next_grant


class Everyone(Agreement):
    """`allreduce`: gradients of all replicas are summed in every batch; one that is missing holds up the
    others.
    """

    def begin(self, run: Together) -> None:
        """Nobody has contributed."""
        super().begin(run)
        self.contributions: dict[int, set[int]] = {}

    def contributed(self, replica: int, batch: int, now_s: float) -> None:
        """The last one lets the sum begin."""
        there = self.contributions.setdefault(batch, set())
        there.add(replica)
        if len(there) == self.run.num_replicas:
            del self.contributions[batch]
            at_s = now_s + self.run.exchange.seconds(len(there))
            self.run.count(Trained(batch, tuple(sorted(there)), self.run.batch_size, at_s))
            for one in there:
                self.run.update(one, batch, at_s)


class GroupsAgreement(Agreement):
    """`groups`: weights are averaged within the group that is ready, by the coordinator's own rules.

    A dead replica is dropped after `noticed_s`. One that returns takes the weights of the others, which
    takes `heal_s`, and goes on at the batch of the furthest.
    """

    average_lag = 0

    def __init__(
        self,
        settings: GroupSettings,
        num_stages: int,
        *,
        noticed_s: float = 10.0,
        heal_s: float = 0.0,
    ) -> None:
        self.settings = settings
        self.num_stages = num_stages
        self.noticed_s = noticed_s
        self.heal_s = heal_s

    def begin(self, run: Together) -> None:
        """Everybody is a member."""
        super().begin(run)
        self.state: GroupState = groups_begun(self.settings, self.num_stages, range(run.num_replicas))
        self.waits_s: dict[tuple[int, int], float] = {}
        self.paces = Paces()
        self.deadline_s: float | None = None
        self.furthest = 0

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """A rank asks the coordinator for its group."""
        self.furthest = max(self.furthest, batch)
        wait_s = self.waits_s.setdefault((replica, stage), FIRST_WAIT_S)
        self.paces = self.paces.with_arrival(stage, replica, now_s)
        arrived = self.paces.arrived(stage, replica, batch, wait_s)
        self.run.at(now_s + self.run.exchange.control_s, partial(self._happened, arrived))

    def woke(self, now_s: float) -> None:
        """The wait of an opener may be over."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.deadline_s = None
            self._happened(None, now_s)

    def died(self, replica: int, now_s: float) -> None:
        """The coordinator hears of it, or its lease ends."""
        self.paces = self.paces.without([replica])
        self.run.at(now_s + self.noticed_s, partial(self._drop, replica))

    def returned(self, replica: int, now_s: float) -> None:
        """It takes the weights of the others, and is a member from then on."""
        self._remove(replica, now_s)
        self.run.at(now_s + self.heal_s, partial(self._join, replica))

    def _drop(self, replica: int, now_s: float) -> None:
        if not self.run.is_alive(replica):
            self._remove(replica, now_s)

    def _remove(self, replica: int, now_s: float) -> None:
        self._happened(GroupMembers(self.state.members - {replica}), now_s)

    def _join(self, replica: int, now_s: float) -> None:
        self._happened(GroupMembers(self.state.members | {replica}), now_s)
        self.run.start(replica, self.furthest + 1, now_s)

    def _happened(self, event: GroupEvent, now_s: float) -> None:
        self.state, groups = groups_step(self.state, event, now_s)
        for group in groups:
            if group.is_settled:
                self._settled(group, now_s)
            else:
                self._exchange(group, now_s)
        deadline_s = next_deadline_s(self.state)
        if deadline_s is not None and (self.deadline_s is None or deadline_s < self.deadline_s):
            self.deadline_s = deadline_s
            self.run.wake_at(max(deadline_s, now_s))

    def _exchange(self, group: AveragingGroup, now_s: float) -> None:
        """All members hold the mean after the time that it takes, but for those who die meanwhile."""
        if len(group.members) > 1:
            at_s = now_s + self.run.exchange.seconds(len(group.members))
            for replica in group.replicas:
                summed = GroupSummed(group.stage, replica, group.number, group.attempt)
                self.run.at(at_s, partial(self._happened_to, summed))

    def _happened_to(self, summed: GroupSummed, now_s: float) -> None:
        if self.run.is_alive(summed.replica):
            self._happened(summed, now_s)

    def _settled(self, group: AveragingGroup, now_s: float) -> None:
        for replica in group.replicas:
            place = replica, group.stage
            self.waits_s[place] = next_wait_s(self.waits_s[place], len(group.members))
        self.run.complete(group.stage, {one.replica: one.batch for one in group.members}, now_s)


class DilocoRounds(Agreement):
    """`diloco`: after every `every` batches of its own a replica offers its drift, a batch before it needs
    the mean.

    A round begins when all have come, or more than half of them and nobody else within `grace_s`.
    """

    average_lag = 1

    def __init__(self, every: int, grace_s: float) -> None:
        self.every = every
        self.grace_s = grace_s

    def begin(self, run: Together) -> None:
        """No round is open."""
        super().begin(run)
        self.lines: dict[int, RoundSequence] = {}
        self.offers: dict[int, dict[int, int]] = {}
        """By stage and replica, after which batch of its own it waits for the round."""

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """One more for the round that is open, if this batch is due."""
        if (batch + 1) % self.every:
            super().offered(replica, stage, batch, now_s)
            return
        self.offers.setdefault(stage, {})[replica] = batch
        self._grant(stage, now_s)
        if stage in self.offers:
            self.run.at(now_s + self.grace_s, partial(self._grant, stage))

    def _grant(self, stage: int, now_s: float) -> None:
        offers, everyone = self.offers.get(stage, {}), range(self.run.num_replicas)
        line = next_grant(
            self.lines.get(stage, RoundSequence(stage)),
            dict.fromkeys(offers, 1),
            everyone,
            quorum=len(everyone) // 2 + 1,
            grace_s=self.grace_s,
            now_s=now_s,
        )
        if line.grant is not None:
            at_s = now_s + self.run.exchange.control_s + self.run.exchange.seconds(len(offers))
            self.run.complete(stage, self.offers.pop(stage), at_s)
            line = line.after_commit()
        self.lines[stage] = line


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
