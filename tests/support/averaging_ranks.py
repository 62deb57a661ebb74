"""Replicas that average weights on a simulated clock; agents, averages and the coordinator are real.

Ranks run their real programs instruction by instruction, in the order of a real run. What is not real is what
would take a machine: the gradients, sockets, and samples. A stage is one number. Messages to and from the
coordinator come late, twice or in another order; ranks begin late; replicas die and come back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import bireme.runtime.exchange.agent
import bireme.train.replica
from bireme.balance import ShareLimits
from bireme.memory.arena import Slots
from bireme.plan.plan import Plan
from bireme.runtime.coordinator_client import DroppedError
from bireme.runtime.exchange.agent import ExchangeAgent, SupersededError
from bireme.runtime.exchange.averages import Averages
from bireme.runtime.exchange.joining import join
from bireme.runtime.exchange.rounds import Attempt, RoundLine, RoundSum
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stage import Stage
from bireme.runtime.stores import HashStore
from bireme.runtime.updates import BatchResult
from bireme.runtime.world import World
from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.sync.coordinator.host import CoordinatorCandidate, Host, beginner, host_step, host_wake_s
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    CoordinatorReply,
    Heal,
    Incarnation,
    Known,
    RankId,
    Report,
    Window,
)
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, GroupSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Event, Tick
from bireme.sync.rounds.contribution import Contribution, Summed
from bireme.sync.rounds.round_group import LineBroken
from bireme.train.outcome import Reason, Stops
from bireme.train.replica import AveragingReplica, Meeting
from bireme.train.run_file import RunFile
from tests.support.taking_turns import Killed, Turns

__all__ = ["Case", "RankWorld", "simulated"]

LEASE_S, SUM_S, LOOK_S, TIMEOUT_S, FAREWELL_S = 10.0, 0.002, 0.5, 5.0, 30.0
CALL_S = 0.1
"""So long after a coordinator has died ranks call the next one, at most."""
PREFETCH = 1


@dataclass(frozen=True)
class Case:
    """A run of `steps` batches, from the batch `first` on, with a mean every `every` of them."""

    schedule: str
    num_stages: int
    num_replicas: int
    seed: int
    steps: int = 12
    every: int = 4
    first: int = 0
    batch_size: int = 12
    connect_every: int = 2
    late_s: float = 0.0
    """How much later than others a rank may do what takes no training."""
    spread: float = 1.0
    """How many times slower than others a replica may be."""
    is_bad: bool = False
    """Whether messages come late, twice and in another order."""
    stops_after: int | None = None
    """One of the replicas asks to stop after so many batches of its own."""
    mode: SyncMode = SyncMode.GROUPS
    diloco_every: int = 1
    fragments: int = 1
    lag: int = 0
    """With diloco, batches that a mean may come late."""
    is_tied: bool = False
    """Whether all ranks of a replica share their weights, so that groups are of replicas."""
    outlives_leaving: int | None = None
    """The coordinator dies a moment after so many ranks have begun to leave."""


@dataclass
class _Replica:
    """What the ranks of one life share: their pipeline's messages and sums."""

    life: Incarnation
    inbox: set[Message] = field(default_factory=set)
    votes: dict[int, dict[int, float]] = field(default_factory=dict)
    store: HashStore = field(default_factory=HashStore)
    changes: dict[int, float] = field(default_factory=dict)
    """How the batches change weights that all ranks share."""
    told: set[int] = field(default_factory=set)
    """Batches whose sums rank 0 has told the others."""


class RankWorld(Turns):
    """All of it; `lines` is the ledger, `meetings` who met with what."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.seed)
        self.case = case
        micro_batches = max(case.num_stages, 2)
        self.settings = CoordinatorSettings(
            case.mode,
            case.num_replicas,
            case.num_stages,
            case.batch_size,
            ShareLimits((micro_batches,) * case.num_replicas, (case.batch_size,) * case.num_replicas),
            lease_s=LEASE_S,
            timeout_s=TIMEOUT_S,
            first=case.first,
            fresh=case.first * case.batch_size,
            num_lines=case.fragments,
            groups=GroupSettings(case.connect_every, of_replicas=case.is_tied),
        )
        plan = Plan(tuple(range(1, case.num_stages)), micro_batches, case.schedule)
        self.source = plan.averaging(case.lag).source
        sync: dict[str, Any] = {"mode": "groups", "connect_every": case.connect_every}
        if case.mode is SyncMode.DILOCO:
            sync = {
                "mode": "diloco",
                "diloco_every": case.diloco_every,
                "diloco_fragments": case.fragments,
                "diloco_overlap": case.lag,
            }
        training = {"batch_size": case.batch_size, "steps": case.steps}
        self.run_file = RunFile.model_validate({"format": 1, "sync": sync, "training": training})
        self.lines: list[Began | Committed] = []
        self.meetings: dict[int, dict[RankId, tuple[Meeting, float]]] = {}
        self.ended: dict[RankId, int] = {}
        self.left: set[RankId] = set()
        """Ranks whose processes have come to their end."""
        self.num_deaths = 0
        self.offers: dict[object, dict[int, Contribution]] = {}
        self.agents: dict[RankId, SimulatedAgent] = {}
        self.replicas: dict[int, _Replica] = {}
        self.slowness = [self.random.uniform(1.0, case.spread) for _ in range(case.num_replicas)]
        self._host, self._due_s = beginner(self.settings, 1), 0.0
        self._term = self.link = self._num_leaving = 0
        """The connections to the coordinator are of that number."""
        self._tick_later()
        for number in range(case.num_replicas):
            self.begin(Incarnation(number, 0))

    def spawn(self, name: str, owner: Any, act: Callable[[], None]) -> None:
        """Begin a thread of a replica's life, which ends with it if it is dropped."""

        def go() -> None:
            try:
                act()
            except DroppedError:
                self.lose(owner)

        super().spawn(name, owner, go)

    def begin(self, life: Incarnation) -> None:
        """Start a replica."""
        self.replicas[life.replica] = own = _Replica(life)
        for stage in range(self.case.num_stages):
            rank = RankId(life.replica, life.life, stage)
            self.spawn(f"{rank}", life, SimulatedRank(self, own, rank).live)

    def end(self, replica: int) -> None:
        """Kill a replica, if others go on; it is started again."""
        others = self.members & self.replicas.keys() - {replica}
        if self.ended or replica not in self.replicas or not others:
            return
        self.lose(self.replicas[replica].life)

    def lose(self, life: Incarnation) -> None:
        """A replica's life ends, and its next one begins."""
        if not self.lives(life):
            return
        self.num_deaths += 1
        self.kill(life)
        self.replicas.pop(life.replica)
        self.after(0.01, partial(self.hear, Ended(life)))
        again = Incarnation(life.replica, life.life + 1)
        self.after(self.random.uniform(0.02, 0.3), lambda: None if self.ended else self.begin(again))

    def part(self) -> None:
        """A replica is done: nobody needs those any more that did not train then."""
        for number in self.replicas.keys() - self.members - {rank.replica for rank in self.ended}:
            self.kill(self.replicas.pop(number).life)

    def note_leaving(self) -> None:
        """One more rank begins to leave."""
        self._num_leaving += 1
        if self._num_leaving == self.case.outlives_leaving:
            self.after(self.random.uniform(0.0, 0.003), self.end_coordinator)

    @property
    def members(self) -> set[int]:
        state = self._host.state
        lives = [] if state is None else [one.own_life for one in state.membership.members]
        return {one.replica for one in lives if self.lives(one)}

    def lives(self, life: Incarnation) -> bool:
        found = self.replicas.get(life.replica)
        return found is not None and found.life == life

    def hear(self, event: Event) -> None:
        """Something comes to the coordinator."""
        done = host_step(self._host, event, self.now_s)
        assert not done.resigns
        self._host = done.host
        self.lines += done.lines
        if done.host.state is not None:
            self._term = done.host.state.membership.epoch // TERM
        for rank, word in done.words:
            if rank in self.agents:
                self.send(partial(self.agents[rank].client.hear, word, self.link))
        self._tick_later()

    def hear_over(self, link: int, report: Report) -> None:
        """A report comes over a connection, if that is still there."""
        if link == self.link:
            self.hear(report)

    def end_coordinator(self) -> None:
        """Its process dies. The one that is started in its place knows nothing but its term, and which of the
        replicas that there were last have come to their end.
        """
        self.link += 1
        self._host = Host(self.settings, CoordinatorCandidate(0, 1, used=self._term))
        for own in self.replicas.values():
            if sum(rank.own_life == own.life for rank in self.left) == self.case.num_stages:
                self.after(0.01, partial(self.hear, Ended(own.life)))
        self._tick_later()
        for agent in self.agents.values():
            self.after(self.random.uniform(0.0, CALL_S), agent.client.call)

    def send(self, come: Callable[[], object]) -> None:
        """Have a message come."""
        is_bad = self.case.is_bad
        for _ in range(1 + (is_bad and self.random.random() < 0.1)):
            self.after(self.random.uniform(0.0001, 0.02 if is_bad else 0.001), come)

    def linger(self) -> None:
        """A rank does something else, such as to save or to evaluate."""
        self.sleep(self.random.uniform(0.0, self.case.late_s) * self.random.choice([0.01, 1.0]))

    def _tick_later(self) -> None:
        at_s = max(host_wake_s(self._host, self.now_s), self.now_s + 1e-4)
        if self.now_s < self._due_s <= at_s:
            return
        self._due_s = at_s
        self.after(at_s - self.now_s, partial(self.hear, Tick()))


class _Client:
    """A rank's way to the coordinator, in the place of `CoordinatorClient`."""

    key = "secret"

    def __init__(self, hosts: Any, _token: str, rank: RankId, *, lease_s: float, is_empty: bool) -> None:
        del is_empty
        self.world: RankWorld = hosts[0]
        self.rank, self._lease_s = rank, lease_s
        self._known = Known()
        self._report: Report | None = None
        self._is_due = self._is_dropped = self._is_closed = self._has_word = False
        self._act: Callable[[], None] = lambda: None

    @property
    def word(self) -> CoordinatorReply:
        word = self._known.last or CoordinatorReply(epoch=0, number=-1)
        return replace(word, is_dropped=True) if self._is_dropped else word

    def on_word(self, act: Callable[[], None]) -> None:
        self._act = act

    def say(self, *, address: str, **fields: Any) -> None:
        if self._is_closed:
            return
        if self._report is None:
            self._report = Report(self.rank, 0, 0, address)
            self.world.after(self._lease_s / 5, self._beat)
        self._report = replace(self._report, **fields)
        self._send_soon()

    def close(self, *, is_leaving: bool) -> None:
        if self._report is not None and not self._is_closed and is_leaving:
            self._report = replace(self._report, is_leaving=True)
            self.world.note_leaving()
            self._send()
            ends_s = self.world.now_s + FAREWELL_S
            self.world.after(FAREWELL_S, lambda: None)
            self.world.wait(lambda: self._is_dropped or self.world.now_s >= ends_s)
        self._is_closed = True

    def call(self) -> None:
        """Talk to another coordinator, which is told what is known."""
        self._has_word = False
        self._send_soon()

    def hear(self, word: CoordinatorReply, link: int) -> None:
        if self._is_closed or link != self.world.link or not self.world.lives(self.rank.own_life):
            return
        before = self.word
        self._is_dropped = self._is_dropped or (word.is_dropped and word.place >= before.place)
        known = self._known.with_word(word)
        if known is not None:
            self._known, self._has_word = known, True
            if before.epoch != word.epoch:
                self._send_soon()
        self._act()

    def _beat(self) -> None:
        if not self._is_closed and self.world.lives(self.rank.own_life):
            self._send()
            self.world.after(self._lease_s / 5, self._beat)

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.world.after(self.world.random.uniform(0.0, 0.0005), self._send)

    def _send(self) -> None:
        self._is_due = False
        if self._is_closed or self._report is None or not self.world.lives(self.rank.own_life):
            return
        self._report = replace(
            self._report,
            number=self._report.number + 1,
            epoch=self.word.epoch,
            known=None if self._has_word else self._known,
        )
        self.world.send(partial(self.world.hear_over, self.world.link, self._report))


class _Board:
    """The place of the peer connections of a rank."""

    def __init__(self, own: RankId, *_: object, **__: object) -> None:
        self.address = f"at {own}"

    def close(self) -> None:
        """There is nothing to close."""


class SimulatedAgent(ExchangeAgent):
    """The agent of a rank, whose waits let others run."""

    def __init__(self, own: RankId, client: _Client, **more: Any) -> None:
        super().__init__(own, cast(Any, client), **more)
        self.client, self.world = client, client.world
        self.world.agents[own] = self
        self._has_begun = False
        self._thread = cast(Any, SimpleNamespace(join=lambda _timeout_s: None))
        self._last = (-1, -1)

    def begin(self, *words: Any, **more: Any) -> None:
        super().begin(*words, **more)
        if not self._has_begun:
            self._has_begun = True
            self.world.spawn(f"agent of {self.own}", self.own.own_life, self._work)

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[Any]:
        found: dict[int, Any] = {}

        def donor() -> SimulatedAgent | None:
            lives = [one.own_life for one in self.word.members if one.replica == heal.donor]
            is_there = bool(lives) and self.world.lives(lives[0])
            return self.world.agents[RankId(heal.donor, lives[0].life, self.own.stage)] if is_there else None

        def is_over() -> bool:
            known = None if (own := donor()) is None else own.snapshots
            found.update(known or {})
            return heal.batch in found or known is None or heal not in self.word.heals

        self.world.wait(is_over)
        if heal.batch not in found:
            self.world.sleep(SUM_S)
            raise LineBroken(heal.donor, "it is the donor no more")
        snapshot, words = found[heal.batch]
        said = {**words, "num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale}
        yield SimpleNamespace(hear=lambda: said, named=lambda _words: dict(snapshot.tensors))

    @property
    def snapshots(self) -> dict[int, Any]:
        """What it has for others."""
        return self.for_others._snapshots

    def _looked(self, is_so: Callable[[], bool]) -> bool | None:
        ends_s = self.world.now_s + LOOK_S
        self.world.after(LOOK_S, lambda: None)

        def is_over() -> bool:
            word = self.word
            has_failed = self._error is not None or self._is_closed or word.is_dropped or word.standstill
            return bool(has_failed) or is_so() or self.world.now_s >= ends_s

        self.world.wait(is_over)
        self._check_usable(self.word)
        return is_so() or None

    def _wait_for_news(self, num_pokes: int) -> None:
        client, is_known = self.client, self.client._known
        self.world.wait(
            lambda: (
                self._is_closed
                or client._known is not is_known
                or client._is_dropped
                or self._num_pokes != num_pokes
            )
        )

    def add_up(self, own: Contribution, into: Any, attempt: Attempt) -> Summed:
        assert attempt.how is None, "these ranks send their weights as they are"
        members, is_wanted = attempt.members, attempt.is_wanted
        place = attempt.place, attempt.number
        assert place > self._last, "a line drops what is older than what it had"
        self._last = place
        lives = {one.replica: one.own_life for one in attempt.word.members}
        come = self.world.offers.setdefault((self.own.stage, tuple(members), place), {})
        come[self.own.replica] = own

        def lost() -> list[int]:
            return [one for one in members if one not in lives or not self.world.lives(lives[one])]

        def is_over() -> bool:
            now = self.word
            return set(members) <= come.keys() or bool(lost()) or now.is_dropped or not is_wanted(now)

        self.world.wait(is_over)
        self.world.sleep(SUM_S * self.world.random.random())
        self._check_usable(self.word)
        if not set(members) <= come.keys():
            if not is_wanted(self.word):
                raise SupersededError
            raise LineBroken((lost() or [members[0]])[0], "it is gone")
        parts = [come[one] for one in members]
        weight = sum(one.weight for one in parts)
        for place_of, flat in enumerate(into):
            flat.copy_(sum(one.flats[place_of] * one.nominal for one in parts) / (weight or 1.0))
        numbers = tuple(map(sum, zip(*(one.numbers for one in parts), strict=True)))
        return Summed(b"", weight, (), numbers)

    def _pulled(self, line: RoundLine, commit: Commit, word: CoordinatorReply) -> RoundSum | None:
        source = self._source(commit)
        if source is None or source in line.at.lost:
            return None
        life = next((one.own_life for one in word.members if one.replica == source), None)

        def kept() -> RoundSum | None:
            if life is None or not self.world.lives(life):
                return None
            agent = self.world.agents[RankId(source, life.life, self.own.stage)]
            return agent.lines[line.number].kept.get(commit.round)

        self.world.wait(
            lambda: kept() is not None or life is None or not self.world.lives(life) or self.word.is_dropped
        )
        self._check_usable(self.word)
        found = kept()
        if found is None:
            self.world.sleep(SUM_S)
            self._change(line, lost=(source,))
            return None
        result = line.buffers.take(line.like)
        for flat, its in zip(result.flats, found.flats, strict=True):
            flat.copy_(its)
        result.attempt, result.summed, result.parts = commit.attempt, found.summed, found.parts
        return result


class SimulatedRank:
    """A rank of a replica: what `bireme.train.worker`, the loop and the interpreter do."""

    def __init__(self, world: RankWorld, own: _Replica, rank: RankId) -> None:
        self.world, self.own, self.rank = world, own, rank
        self.case = world.case
        self.num_trained = self.case.first
        self.flat = torch.zeros(1, dtype=torch.float64)
        self._ready: list[int] = []
        self._is_read = False
        self._slowness = world.slowness[rank.replica]

    def live(self) -> None:
        world, case, rank = self.world, self.case, self.rank
        watch = SimpleNamespace(failed=self._failed, abort_on_failure=lambda _agent: None)
        of_rank = SimpleNamespace(
            rank=rank.stage,
            timeout_s=60.0,
            device=torch.device("cpu"),
            watch=watch,
            store=self.own.store,
        )
        order = ReplicaOrder(rank.own_life, cast(Any, (world,)), "", LEASE_S, 0.0, first=case.first)
        world.linger()
        replica = self.replica = AveragingReplica(
            cast(World, of_rank), order, world.run_file, case.num_replicas
        )
        replica.begin(case.first)
        banks = SimpleNamespace(
            averaged=[(Slots({"weights": (1,)}), self.flat)],
            newest_version=0,
            average=lambda _version, write, *, is_drained=False: write([self.flat]),
        )
        stage = cast(Stage, SimpleNamespace(banks=banks))
        self.agent = world.agents[rank]
        self.averages = Averages(
            replica.averaging,
            {rank.stage: stage},
            cast(Any, SimpleNamespace(tied={}, repeated=frozenset())),
            torch.device("cpu"),
        )
        replica.join(cast(Pipeline, self))
        steps, is_over = case.steps, False
        while not is_over and replica.step < steps:
            world.linger()
            end = min(steps, (replica.step // case.every + 1) * case.every)
            for result in self._train(end):
                replica.note(result)
            before = replica.step
            meeting = replica.meet(cast(Pipeline, self))
            assert meeting.step >= before, "no meeting is at an earlier step than the one before"
            assert self.agent.deals.window is not None
            number = self.agent.deals.window.number
            world.meetings.setdefault(number, {})[rank] = meeting, self.flat.item()
            is_over = meeting.reason > Reason.SAVE
        world.linger()
        world.ended[rank] = replica.step
        replica.leave()
        world.left.add(rank)
        world.part()

    def join(self) -> None:
        self.num_trained = join(self.agent, self.num_trained, self._restore, window=Window(0, 0))

    def meet(self, *numbers: float) -> Any:
        return self.averages.meet(self.num_trained, numbers)

    def _restore(self, snapshot: Snapshot) -> None:
        self.flat.copy_(snapshot.tensors["weights"])
        self.averages.load(snapshot.tensors)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Killed | DroppedError):
            raise error

    def _read(self, first: int) -> None:
        """Read ahead, as a loader's thread does."""
        number = first
        while True:
            self.world.wait(lambda: len(self._ready) < max(PREFETCH, 1))
            if self.replica.deal(number) is None:
                break
            self._ready.append(number)
            number += 1
        self._is_read = True

    def _train(self, end: int) -> Iterator[BatchResult]:
        world, first = self.world, self.num_trained
        num_read = 0

        def has(number: int) -> bool:
            nonlocal num_read
            while num_read < number:
                world.wait(lambda: bool(self._ready) or self._is_read)
                if not self._ready:
                    return False
                self._ready.pop(0)
                num_read += 1
            return True

        self.agent.enter(end * self.case.batch_size)
        self._ready, self._is_read = [], False
        world.spawn(f"loader of {self.rank}", self.rank.own_life, partial(self._read, first))
        stops = SimpleNamespace(vote=self._vote)
        votes = self.replica.votes(cast(Stops, stops))
        for block in world.source.blocks(self.rank.stage, has, first_batch=first):
            for written in block.instructions:
                step = written.shifted(block.batches, block.versions)
                yield from self._do(step, votes)

    def _vote(self) -> float:
        after, number = self.case.stops_after, self.rank.replica
        is_asked = after is not None and self.num_trained >= self.case.first + after
        return float(Reason.SIGNAL if is_asked and number == self.case.seed % self.case.num_replicas else 0)

    def _do(self, step: Instruction, votes: Callable[[], float]) -> Iterator[BatchResult]:
        world, own = self.world, self.own
        if step.kind in COMPUTE:
            needed = step.needs(self.case.num_stages)
            if needed is not None:
                self._wait_for_ranks(lambda: needed in own.inbox)
                own.inbox.remove(needed)
            world.sleep(0.001 * self._slowness * world.random.uniform(0.5, 1.5))
        elif step.kind in SENDS:
            world.after(world.random.uniform(0.0, 0.001), partial(own.inbox.add, step.carries()))
        elif step.kind is Kind.REDUCE:
            own.votes.setdefault(step.batch, {})[self.rank.stage] = votes()
        elif step.kind is Kind.UPDATE:
            self._wait_for_ranks(lambda: step.batch in own.told)
            name = self.agent.due(step.batch)
            if name is not None:
                tensors = {"weights": self.flat.clone()} | self.averages.donated()
                self.agent.provide(name, Snapshot(step.batch, 1.0, tensors))
            change = world.random.random()
            self.flat += own.changes.setdefault(step.batch, change) if self.case.is_tied else change
            self.num_trained += 1
            yield cast(
                BatchResult, SimpleNamespace(batch=step.batch, votes=sum(own.votes[step.batch].values()))
            )
        elif step.kind is Kind.AVERAGE_START:
            self.averages.start(step)
        elif step.kind is Kind.AVERAGE_END:
            self.averages.end(step)
        else:
            assert step.kind in RECEIVES | {Kind.TRIAL}

    def _wait_for_ranks(self, is_so: Callable[[], bool]) -> None:
        """Rank 0 adds up for the others while it waits for a message or a sum, and at no other time."""
        own, is_first = self.own, self.rank.stage == 0

        def look() -> bool:
            if is_first:
                own.told.update(batch for batch, of in own.votes.items() if len(of) == self.case.num_stages)
            return is_so()

        self.world.wait(look)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replicas made of these parts."""
    monkeypatch.setattr(bireme.train.replica, "ExchangeAgent", SimulatedAgent)
    monkeypatch.setattr(bireme.train.replica, "CoordinatorClient", _Client)
    monkeypatch.setattr(bireme.runtime.exchange.agent, "PeerConnections", _Board)
