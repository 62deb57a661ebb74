"""Machines that come and go by a trace, on a clock: the real coordinator decides, replicas take given times.

Each machine has a replica of one stage. What it does and what it reports are those of `quorum`: it trains the
samples that it is assigned, sums with the members of a round, takes sums that it missed from a source, and
heals from a donor when it comes back. What takes time is in `Costs`. The coordinator's state machine is the
one of `bireme.sync.coordinator`; its processor time, its replies and their bytes are counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from time import thread_time

from benchmarks.churning.trace import Kind, Trace
from bireme.balance import ShareLimits
from bireme.sync.coordinator.coordinator import begun, step, wake_s
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Grant,
    Incarnation,
    RankId,
    Report,
    RoundAt,
    encode,
)
from bireme.sync.coordinator.samples import Committed, CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Event, Tick

_BEATS = 5
"""Reports of a rank in a lease, if there is nothing else to say."""
_SHORTEST_S = 0.001
"""Between two times at which the coordinator looks at its clock, as in its process."""
_SIZED = 101
"""One in so many replies is encoded to know its bytes: all of them would take most of the time."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of what replicas do: train a sample, make a sum, start their processes, get a donor's state,
    and apply one sum that they missed. A launcher reports an end that it sees after `told_s`; a message to
    the coordinator takes `control_s`.
    """

    sample_s: float = 0.05
    sum_s: float = 0.05
    start_s: float = 5.0
    transfer_s: float = 1.0
    replay_s: float = 0.05
    told_s: float = 0.05
    control_s: float = 0.0005


@dataclass(frozen=True, slots=True)
class Recovery:
    """A machine that trains again: seconds until its loss was noticed (None: never a member before), from its
    arrival until its processes have started, until it has a donor's state, and until it trains.
    """

    machine: str
    detect_s: float | None
    start_s: float
    transfer_s: float
    catch_up_s: float


@dataclass(slots=True)
class Ran:
    """What came of a simulated run."""

    committed: list[tuple[float, Committed]] = field(default_factory=list)
    """Rounds with the time at which they counted."""
    recoveries: list[Recovery] = field(default_factory=list)
    num_reports: int = 0
    num_replies: int = 0
    reply_bytes: float = 0.0
    """Of all replies, from a sample."""
    busy_s: float = 0.0
    """Processor seconds of the state machine."""

    def samples_from(self, begin_s: float) -> int:
        """Samples that count from that time on."""
        return sum(one.num_samples for at_s, one in self.committed if at_s >= begin_s)

    @property
    def samples_redone(self) -> int:
        """Samples that came back from machines that were lost, or were too late, and were assigned again."""
        return self.committed[-1][1].returned if self.committed else 0


def simulated(
    trace: Trace, costs: Costs, *, samples: int, lease_s: float = 10.0, grace_s: float = 1.0
) -> Ran:
    """A run over a trace that begins with all machines; `samples` of each batch for each of them."""
    names = trace.machines
    batch = samples * len(names)
    settings = CoordinatorSettings(
        SyncMode.QUORUM,
        len(names),
        1,
        batch,
        ShareLimits((1,) * len(names), (batch,) * len(names)),
        lease_s,
        grace_s,
        timeout_s=30.0,
    )
    world = _World(settings, costs, names)
    for event in trace.events:
        world.at(event.time_s, partial(world.happens, names.index(event.machine), event.kind))
    world.run(trace.end_s)
    return world.ran


class _World:
    """The clock, the coordinator and the machines."""

    def __init__(self, settings: CoordinatorSettings, costs: Costs, names: tuple[str, ...]) -> None:
        self.settings, self.costs, self.names = settings, costs, names
        self.now_s, self.ran, self.index = 0.0, Ran(), _Index()
        self.machines: dict[int, _Machine] = {}
        self.lost_s: dict[int, float] = {}
        """When a replica that was a member was lost, until the coordinator drops it."""
        self.detect_s: dict[int, float] = {}
        self._lives = dict.fromkeys(range(len(names)), -1)
        self._state = begun(settings)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._tick_s = -1.0

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._count += 1
        heappush(self._agenda, (when_s, self._count, act))

    def run(self, end_s: float) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, act = heappop(self._agenda)
            act()

    def happens(self, replica: int, kind: Kind) -> None:
        """An event of the trace. Who leaves has its end reported by its launcher."""
        if kind is Kind.ARRIVES:
            self._lives[replica] += 1
            rank, first = RankId(replica, self._lives[replica], 0), not self.now_s
            machine = self.machines[replica] = _Machine(self, rank, self.now_s)
            self.at(self.now_s + (0.0 if first else self.costs.start_s), machine.start)
            return
        machine = self.machines.pop(replica)
        machine.is_there = False
        if machine.is_member:
            self.lost_s[replica] = self.now_s
        if kind is Kind.LEAVES:
            self.at(self.now_s + self.costs.told_s, partial(self.take, Ended(machine.rank.own_life)))

    def is_there(self, replica: int) -> bool:
        """Whether a machine is there."""
        return replica in self.machines

    @property
    def has_counted(self) -> bool:
        """Whether any batch counts."""
        return bool(self.ran.committed)

    def tell(self, report: Report) -> None:
        """Send a report to the coordinator."""
        self.ran.num_reports += 1
        self.at(self.now_s + self.costs.control_s, partial(self.take, report))

    def take(self, event: Event) -> None:
        """Let the coordinator act on an event, and send its replies."""
        begin_s = thread_time()
        done = step(self._state, event, self.now_s)
        next_s = max(wake_s(done.state, self.now_s), self.now_s + _SHORTEST_S)
        self.ran.busy_s += thread_time() - begin_s
        members, self._state = self._state.membership.members, done.state
        self.ran.committed += ((self.now_s, one) for one in done.lines if isinstance(one, Committed))
        if done.state.membership.members != members:
            self._note_dropped({one.own_life for one in done.state.membership.members})
        for rank, word in done.words:
            self.ran.num_replies += 1
            if self.ran.num_replies % _SIZED == 0:
                self.ran.reply_bytes += len(encode(word)) * _SIZED
            machine = self.machines.get(rank.replica)
            if machine is not None and machine.rank == rank:
                self.at(self.now_s + self.costs.control_s, partial(machine.hear, word))
        if next_s < self._tick_s or self._tick_s <= self.now_s:
            self._tick_s = next_s
            self.at(next_s, partial(self._tick, next_s))

    def _tick(self, due_s: float) -> None:
        if due_s == self._tick_s:
            self.take(Tick())

    def _note_dropped(self, there: set[Incarnation]) -> None:
        for replica in list(self.lost_s):
            if Incarnation(replica, self._lives[replica]) not in there:
                self.detect_s[replica] = self.now_s - self.lost_s.pop(replica)


class _Index:
    """What replies list, by replica. All machines get the same lists, so each list is read once."""

    def __init__(self) -> None:
        self._deals: tuple[object, dict[tuple[int, int], int]] = (None, {})
        self._lives: tuple[object, dict[int, int]] = (None, {})
        self._parts: dict[tuple[int, int], frozenset[int]] = {}

    def deals(self, word: CoordinatorReply) -> dict[tuple[int, int], int]:
        """The samples of each replica in each batch."""
        if self._deals[0] is not word.deals:
            self._deals = word.deals, {(one.replica, one.batch): one.num_samples for one in word.deals}
        return self._deals[1]

    def lives(self, word: CoordinatorReply) -> dict[int, int]:
        """The incarnation of each member."""
        if self._lives[0] is not word.members:
            self._lives = word.members, {one.replica: one.life for one in word.members}
        return self._lives[1]

    def parts(self, round_: Grant | Commit) -> frozenset[int]:
        """The replicas in an attempt at a round."""
        key = round_.round, round_.attempt
        if key not in self._parts:
            self._parts[key] = frozenset(one.replica for one in round_.parts)
        return self._parts[key]


class _Machine:
    """A machine with one replica of one stage."""

    def __init__(self, world: _World, rank: RankId, arrived_s: float) -> None:
        self.rank, self.is_there, self.is_member = rank, True, False
        self._world, self._arrived_s = world, arrived_s
        self._address = f"10.0.{rank.replica // 250}.{rank.replica % 250 + 1} {40000 + rank.life}"
        self._at, self._wants = RoundAt(), 0
        self._healed: int | None = None
        self._word: CoordinatorReply | None = None
        self._number, self._said_s, self._said_epoch = 0, 0.0, 0
        self._is_empty = world.has_counted
        self._started_s = self._healed_s = 0.0
        self._begun: set[object] = set()

    def start(self) -> None:
        """Its processes have started."""
        if self.is_there:
            self._started_s = self._healed_s = self._world.now_s
            self._say()
            self._beat()

    def _beat(self) -> None:
        """Report often enough for the lease."""
        if self.is_there:
            beat_s = self._world.settings.lease_s / _BEATS
            if self._world.now_s >= self._said_s + beat_s * (1 - 1e-9):
                self._say()
            self._world.at(self._said_s + beat_s, self._beat)

    def _say(self) -> None:
        self._number, self._said_s = self._number + 1, self._world.now_s
        epoch = self._said_epoch = 0 if self._word is None else self._word.epoch
        self._world.tell(
            Report(
                self.rank,
                self._number,
                epoch,
                self._address,
                wants=self._wants,
                rounds=(self._at,),
                healed=self._healed,
                is_empty=self._is_empty,
            )
        )

    def hear(self, word: CoordinatorReply) -> None:
        """Take a reply, and do what it asks for."""
        if not self.is_there or (self._word is not None and word.place <= self._word.place):
            return
        is_new_epoch = self._said_epoch != word.epoch and word.is_confirmed_at_once((self._at,))
        self._word, before = word, (self._at, self._wants, self._healed)
        self._follow(word)
        if is_new_epoch or before != (self._at, self._wants, self._healed):
            self._say()

    def _follow(self, word: CoordinatorReply) -> None:
        replica, number = self.rank.replica, self._at.committed
        was_member = self.is_member
        self.is_member = self._world.index.lives(word).get(replica) == self.rank.life
        heal = next((one for one in word.heals if one.replica == replica), None)
        if heal is not None and self._healed != heal.batch and word.committed[0] >= heal.batch:
            key = ("heal", heal.donor, heal.batch)
            self._later(key, self._costs.transfer_s, partial(self._heal, heal.batch))
        if self.is_member and not was_member and self._healed is not None:
            self._note_recovery()
        for commit in word.commits:
            self._take_commit(commit)
        if self.is_member or (heal is not None and heal.first is not None):
            self._wants = max(self._wants, self._at.committed + 2)
        number = self._at.committed
        samples = self._world.index.deals(word).get((replica, number), 0)
        if samples and self._at.ready != number:
            busy_s = samples * self._costs.sample_s
            self._later(("train", number), busy_s, partial(self._trained, number, busy_s))
        for grant in word.grants:
            if grant.round == number == self._at.ready and self._is_in(grant):
                key = ("sum", grant.round, grant.attempt)
                self._later(key, self._costs.sum_s, partial(self._sum, grant))

    @property
    def _costs(self) -> Costs:
        return self._world.costs

    def _later(self, key: object, delay_s: float, act: Callable[[], None]) -> None:
        """Do that once, after its time."""
        if key in self._begun:
            return
        self._begun.add(key)

        def do() -> None:
            if self.is_there:
                before = (self._at, self._wants, self._healed)
                act()
                if self._word is not None:
                    self._follow(self._word)
                if before != (self._at, self._wants, self._healed):
                    self._say()

        self._world.at(self._world.now_s + delay_s, do)

    def _is_in(self, round_: Grant | Commit) -> bool:
        return self.rank.replica in self._world.index.parts(round_)

    def _trained(self, batch: int, busy_s: float) -> None:
        if self._at.committed == batch:
            self._at = replace(self._at, ready=batch, busy_s=busy_s)

    def _sum(self, grant: Grant) -> None:
        if self._at.committed != grant.round or self._at.attempt > grant.attempt:
            return
        lost = tuple(sorted(self._world.index.parts(grant) - self._world.machines.keys()))
        summed = None if lost else grant.round
        self._at = replace(self._at, summed=summed, attempt=grant.attempt, lost=lost)

    def _take_commit(self, commit: Commit) -> None:
        at = self._at
        if commit.round != at.committed:
            return
        if self._is_in(commit) and (at.summed, at.attempt) == (commit.round, commit.attempt):
            self._apply(commit.round)
            return
        source = next((one.source for one in commit.sources if one.target == self.rank.replica), None)
        if source is None:
            return
        if self._world.is_there(source):
            key = ("replay", commit.round)
            self._later(key, self._costs.replay_s, partial(self._apply, commit.round))
        elif source not in at.lost:
            self._at = replace(at, lost=(*at.lost, source))

    def _apply(self, number: int) -> None:
        if self._at.committed == number:
            self._at = RoundAt(committed=number + 1)
            self._begun = {key for key in self._begun if isinstance(key, tuple) and key[0] == "heal"}

    def _heal(self, batch: int) -> None:
        """It has the state after so many batches, if its donor is the same and lives."""
        word = self._word
        heal = next((one for one in word.heals if one.replica == self.rank.replica), None) if word else None
        if heal is None or heal.batch != batch:
            return
        if not self._world.is_there(heal.donor):
            self._at = replace(self._at, lost=(heal.donor,))
            return
        self._healed, self._at, self._healed_s = batch, RoundAt(committed=batch), self._world.now_s

    def _note_recovery(self) -> None:
        world = self._world
        world.ran.recoveries.append(
            Recovery(
                world.names[self.rank.replica],
                world.detect_s.pop(self.rank.replica, None),
                self._started_s - self._arrived_s,
                self._healed_s - self._started_s,
                world.now_s - self._healed_s,
            )
        )
