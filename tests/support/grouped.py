"""Replicas that average their weights in groups, on a simulated clock.

A replica goes through its batches: the last stage is ready first, the others after it. It waits for its group
and then for the group's mean, and goes on once that counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

from bireme.sync.coordinator.groups import (
    FIRST_WAIT_S,
    Arrived,
    AveragingGroup,
    Drained,
    GroupEvent,
    GroupMembers,
    GroupSummed,
    groups_begun,
    groups_step,
    next_deadline_s,
    next_wait_s,
)
from bireme.sync.coordinator.samples import GroupSettings

SUM_S = 0.002


@dataclass
class Replica:
    number: int
    batch_s: float
    batch: int = 0
    waits: dict[int, float] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    """The last batch that counts, of each stage."""
    drains_after: int | None = None
    """It drains after this batch, alone, and then goes on with the others."""
    life: int = 0


class GroupWorld:
    """All replicas, and what happened."""

    def __init__(self, num_replicas: int, num_stages: int, settings: GroupSettings, seed: int) -> None:
        self.random, self.num_stages = Random(seed), num_stages
        self.now_s, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.state = groups_begun(settings, num_stages, range(num_replicas))
        self.formed: list[tuple[float, AveragingGroup]] = []
        self.settled: list[AveragingGroup] = []
        self.drained: list[tuple[int, int, int]] = []
        """Which replica has drained at which stage after which batch."""
        self.opened: dict[int, tuple[float, float]] = {}
        """When the group of a stage that gathers now was opened, and how long its opener would wait."""
        self.replicas = {
            one: Replica(
                one,
                self.random.choice([0.01, 0.02, 0.1]),
                waits=dict.fromkeys(range(num_stages), FIRST_WAIT_S),
            )
            for one in range(num_replicas)
        }
        for one in self.replicas.values():
            self._train(one)
        self.watch: Callable[[], None] = lambda: None

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def run(self, most_s: float) -> None:
        while self._queue and self._queue[0][0] < most_s:
            self.now_s, _, act = heappop(self._queue)
            act()

    def tell(self, event: GroupEvent) -> None:
        """Have it happen, perhaps twice."""
        for _ in range(self.random.choice([1, 1, 2])):
            self.state, groups = groups_step(self.state, event, self.now_s)
            self.watch()
            for group in groups:
                self._act(group)
        deadline_s = next_deadline_s(self.state)
        if deadline_s is not None:
            self.after(max(deadline_s - self.now_s, 0.0), self._tick)

    def kill(self, number: int) -> None:
        one = self.replicas.pop(number)
        one.life += 1
        self.tell(GroupMembers(self.state.members - {number}))

    def come(self, number: int) -> None:
        self.tell(GroupMembers(self.state.members | {number}))
        one = Replica(number, 0.02, waits=dict.fromkeys(range(self.num_stages), FIRST_WAIT_S))
        self.replicas[number] = one
        self._train(one)

    def drain(self) -> None:
        """Have all replicas drain after the batch that follows the one that they are at."""
        for one in self.replicas.values():
            one.drains_after = one.batch + 1

    def _tick(self) -> None:
        deadline_s = next_deadline_s(self.state)
        if deadline_s is not None and deadline_s <= self.now_s:
            self.tell(None)

    def _train(self, one: Replica) -> None:
        """The stages are ready one after the other, the last one first; messages may overtake each other."""
        if one.life:
            return
        for place, stage in enumerate(reversed(range(self.num_stages))):
            delay_s = one.batch_s * self.random.uniform(0.8, 1.2) + 0.001 * place * self.random.random()
            self.after(delay_s, partial(self._arrive, one, stage, one.batch))

    def _tell_of(self, one: Replica, event: GroupEvent) -> None:
        if one.life == 0:
            self.tell(event)

    def _arrive(self, one: Replica, stage: int, batch: int) -> None:
        if one.life == 0:
            self.tell(Arrived(stage, one.number, batch, one.waits[stage]))

    def _act(self, group: AveragingGroup) -> None:
        if not group.is_settled:
            self.formed.append((self.now_s, group))
            for member in group.replicas:
                one = self.replicas.get(member)
                if one is not None and len(group.members) > 1:
                    event = GroupSummed(group.stage, member, group.number, group.attempt)
                    self.after(
                        SUM_S * self.random.uniform(0.5, 2.0),
                        partial(self._tell_of, one, event),
                    )
            return
        self.settled.append(group)
        for entry in group.members:
            one = self.replicas.get(entry.replica)
            if one is None or one.done.get(group.stage, -1) >= entry.batch:
                continue
            one.done[group.stage] = entry.batch
            one.waits[group.stage] = next_wait_s(one.waits[group.stage], len(group.members))
            is_draining = one.drains_after == entry.batch
            if is_draining:
                self.drained.append((one.number, group.stage, entry.batch))
                self.tell(Drained(group.stage, one.number))
            if len(one.done) == self.num_stages and min(one.done.values()) == one.batch:
                one.batch += 1
                self.after(2 * one.batch_s if is_draining else 0.0, partial(self._train, one))
