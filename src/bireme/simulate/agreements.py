"""Who agrees with whom, as the simulator's replicas ask: modes of Bireme.

Groups and rounds are made by the rules of the real coordinator, `bireme.sync.coordinator`, as event handlers.
"""

from dataclasses import dataclass
from functools import partial

from bireme.simulate.together import Agreement, Together, Trained
from bireme.sync.coordinator.groups import (
    FIRST_WAIT_S,
    AveragingGroup,
    GroupEvent,
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


@dataclass(eq=False)
class GroupsAgreement(Agreement):
    """`groups`: weights are averaged within the group that is ready, by the coordinator's own rules."""

    settings: GroupSettings
    num_stages: int
    average_lag = 0

    def begin(self, run: Together) -> None:
        """Everybody is a member."""
        super().begin(run)
        self.state: GroupState = groups_begun(self.settings, self.num_stages, range(run.num_replicas))
        self.waits_s: dict[tuple[int, int], float] = {}
        self.paces = Paces()
        self.deadline_s: float | None = None

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """A rank asks the coordinator for its group."""
        wait_s = self.waits_s.setdefault((replica, stage), FIRST_WAIT_S)
        self.paces = self.paces.with_arrival(stage, replica, now_s)
        arrived = self.paces.arrived(stage, replica, batch, wait_s)
        self.run.at(now_s + self.run.exchange.control_s, partial(self.happened, arrived))

    def woke(self, now_s: float) -> None:
        """The wait of an opener may be over."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.deadline_s = None
            self.happened(None, now_s)

    def happened(self, event: GroupEvent, now_s: float) -> None:
        """Take an event in, by the rules of the coordinator."""
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
        """All members hold the mean after the time that it takes."""
        if len(group.members) > 1:
            at_s = now_s + self.run.exchange.seconds(len(group.members))
            for replica in group.replicas:
                summed = GroupSummed(group.stage, replica, group.number, group.attempt)
                self.run.at(at_s, partial(self.happened, summed))

    def _settled(self, group: AveragingGroup, now_s: float) -> None:
        for replica in group.replicas:
            place = replica, group.stage
            self.waits_s[place] = next_wait_s(self.waits_s[place], len(group.members))
        self.run.complete(group.stage, {one.replica: one.batch for one in group.members}, now_s)


@dataclass(eq=False)
class DilocoRounds(Agreement):
    """`diloco`: after every `every` batches of its own a replica offers its drift, a batch before it needs
    the mean.

    A round begins when all have come, or more than half of them and nobody else within `grace_s`.
    """

    every: int
    grace_s: float
    average_lag = 1

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
