"""Replicas that may die, as threads: pipelines, a coordinator that all of them talk to, deaths and new lives.

The coordinator's state machine, the agents and their sockets are the real ones. What is not: a rank is a
thread, and what it says to the coordinator is a call.
"""

import importlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from bireme.balance import ShareLimits
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.microbatches import apportioned
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.coordinator import begun, step, word_for
from bireme.sync.coordinator.host import CoordinatorCandidate, taken_up
from bireme.sync.coordinator.messages import (
    CoordinatorReply,
    Incarnation,
    Known,
    Member,
    RankId,
    Report,
    SamplePlaces,
)
from bireme.sync.coordinator.recoveries import HealTimes
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import Ended, Event, Heard, Tick
from bireme.sync.rounds.contribution import OtherWeightsError
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.patience import patience_s
from tests.support.small_models import Batch, Model
from tests.support.thread_transport import ThreadFabric

__all__ = ["Hub", "Killed", "Replicas", "Seen", "states_of"]

BEAT_S = 0.5


class Killed(BaseException):
    """A rank dies here."""


class Hub:
    """A coordinator in this process."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._lock = threading.RLock()
        self._state = begun(settings)
        self._clients: dict[RankId, _Client] = {}
        self.rounds: list[Committed] = []
        self.epochs: list[tuple[int, ...]] = []
        self.num_successions = 0
        self.ahead_s = 0.0
        """By how much its clock is ahead of the real one."""
        self._is_closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def client(self, rank: RankId) -> "_Client":
        self._clients[rank] = _Client(self, rank)
        return self._clients[rank]

    def close(self) -> None:
        self._is_closed.set()
        self._ticker.join()

    @property
    def members(self) -> tuple[Member, ...]:
        return self._state.membership.members

    @property
    def healing(self) -> set[int]:
        """The replicas that are about to be members."""
        return {heal.replica for heal in self._state.heals}

    def take(self, event: Event) -> None:
        """Let it happen, and tell everybody what follows."""
        with self._lock:
            told = step(self._state, event, self._now_s())
            self._state = told.state
            self.rounds += [line for line in told.lines if isinstance(line, Committed)]
            members = told.state.membership.replicas
            if members and (not self.epochs or self.epochs[-1] != members):
                self.epochs.append(members)
            changed = [
                self._clients[rank]
                for rank, word in told.words
                if rank in self._clients and self._clients[rank].hear(word)
            ]
        for client in changed:
            client.act()

    def succeed(self) -> None:
        """Have another coordinator take up, from what the ranks say and know, if all of them are there."""
        with self._lock:
            heard = {
                rank: Heard(said, self._now_s())
                for rank, client in self._clients.items()
                if (said := client.said) is not None
            }
            taken = taken_up(self._state.settings, CoordinatorCandidate(0, 1), heard, is_late=False)
            if taken is None:
                return
            self._state = taken.state
            for began in (line for line in taken.lines if isinstance(line, Began)):
                self.rounds = [line for line in self.rounds if not _is_open(line, began)]
            self.rounds += [line for line in taken.lines if isinstance(line, Committed)]
            self.num_successions += 1
            clients = [self._clients[rank] for rank in heard]
            for rank in heard:
                self._clients[rank].hear(word_for(self._state, rank))
        for client in clients:
            client.act()

    def _now_s(self) -> float:
        return time.monotonic() + self.ahead_s

    def _tick(self) -> None:
        while not self._is_closed.wait(BEAT_S / 4):
            for client in list(self._clients.values()):
                client.beat()
            self.take(Tick())


class _Client:
    """A rank's way to it."""

    key = "secret"

    def __init__(self, hub: Hub, rank: RankId) -> None:
        self.word = CoordinatorReply(epoch=0, number=-1)
        self._hub, self._rank = hub, rank
        self._lock = threading.RLock()
        self._report: Report | None = None
        self._said_s = 0.0
        self._act: Callable[[], None] = lambda: None
        self.is_silent = False

    def say(self, *, address: str, **fields: Any) -> None:
        with self._lock:
            self._report = Report(self._rank, 0, 0, address, **fields)
        self._send()

    def on_word(self, act: Callable[[], None]) -> None:
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        if is_leaving and self._report is not None:
            with self._lock:
                self._report = replace(self._report, is_leaving=True)
            self._send()
        self.is_silent = True

    @property
    def said(self) -> Report | None:
        """What it said last, and what it knows, as another coordinator is told it."""
        with self._lock:
            word = self.word
            known = Known(word) if word.is_installed else Known()
            return None if self._report is None else replace(self._report, known=known)

    def hear(self, word: CoordinatorReply) -> bool:
        if (word.epoch, word.number) <= (self.word.epoch, self.word.number):
            return False
        self.word = word
        return True

    def act(self) -> None:
        """Tell the rank, and confirm an epoch that it had not known."""
        self._act()
        with self._lock:
            is_known = self._report is None or self._report.epoch == self.word.epoch
        if not is_known:
            self._send()

    def beat(self) -> None:
        if time.monotonic() - self._said_s > BEAT_S:
            self._send()

    def _send(self) -> None:
        with self._lock:
            if self.is_silent or self._report is None:
                return
            self._report = replace(self._report, number=next(_numbers), epoch=self.word.epoch)
            report, self._said_s = self._report, time.monotonic()
        self._hub.take(report)


def _is_open(line: Committed, began: Began) -> bool:
    """Whether a coordinator that takes up does not know that a round counts."""
    samples = [one for own in line.samples for one in own]
    return any(one.begin <= own.begin < one.end for own in samples for one in began.open)


_numbers = itertools.count()


@dataclass(slots=True)
class Seen:
    """What a rank saw in a life: the state after each batch, and what became of it."""

    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[int, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    healed: list[tuple[int, int, HealTimes]] = field(default_factory=list)
    """Batches, with the replicas that came back in them and how long that took."""
    detect_s: dict[int, float] = field(default_factory=dict)
    first: int = 0
    error: BaseException | None = None
    has_joined: bool = False
    is_done: bool = False


Act = Callable[[RankId, Instruction], None]


class Replicas:
    """Replicas of a pipeline, or sites with plans of more width, that train `num_batches` of `data`.

    `on_instruction` may raise `Killed`; with `revives` a replica that died begins its next life. Each
    micro-batch has `least` samples or more.
    """

    def __init__(
        self,
        model: Model,
        setting: Setting,
        num_replicas: int,
        data: Batch,
        num_batches: int,
        batch_size: int,
        *,
        on_instruction: Act = lambda _rank, _step: None,
        revives: bool = False,
        balances: bool = False,
        grace_s: float = 30.0,
        lease_s: float = 60.0,
        timeout_s: float = 20.0,
        pace: Callable[[RankId, int], None] = lambda _rank, _batch: None,
        compare_every: int = 0,
        least: int = 1,
    ) -> None:
        self.model, self.setting, self.data = model, setting, data
        self.num_replicas, self.num_batches, self.batch_size = num_replicas, num_batches, batch_size
        self.depth = setting.plan.num_ranks
        least = self._spare = setting.plan.width * setting.plan.source.num_microbatches * least
        self.hub = Hub(
            CoordinatorSettings(
                SyncMode.QUORUM,
                num_replicas,
                self.depth,
                batch_size,
                ShareLimits((least,) * num_replicas, (batch_size,) * num_replicas),
                lease_s=lease_s,
                grace_s=grace_s,
            ),
        )
        self.seen: dict[RankId, Seen] = {}
        self.lives = dict.fromkeys(range(num_replicas), 0)
        self._on_instruction, self._revives, self._pace = on_instruction, revives, pace
        self._timeout_s, self._balances, self._compare_every = timeout_s, balances, compare_every
        self.pipelines: dict[RankId, Pipeline] = {}
        self.differed: list[str] = []
        """What the ranks said whose weights were others than those of their peers."""
        self._agents: dict[Incarnation, list[ExchangeAgent]] = {}
        self._fabrics: dict[Incarnation, ThreadFabric] = {}
        self._threads: list[threading.Thread] = []
        self._killed: set[Incarnation] = set()
        self._missing: set[int] = set()
        """Replicas that died, and whose next life is no member yet, nor about to be one."""
        self._lock = threading.Lock()

    @property
    def are_whole(self) -> bool:
        """Whether every replica is a member in its present life, and each of its ranks has the weights.

        A member whose ranks still wait for sums has not what the run needs to go on without the others.
        """
        members = {one.replica: one.life for one in self.hub.members}
        lives = [Incarnation(*one) for one in members.items()]
        joined = Counter(rank.own_life for rank, seen in list(self.seen.items()) if seen.has_joined)
        return members == self.lives and all(
            joined[life] == self.depth and life not in self._killed for life in lives
        )

    def wait_until_present(self) -> None:
        """Wait until every replica that died is about to be a member: the others shall not end before."""
        end_s = time.monotonic() + patience_s()
        while self._missing and time.monotonic() < end_s:
            with self._lock:
                self._missing = {replica for replica in self._missing if not self._is_present(replica)}
            time.sleep(0.005)
        if not self.are_whole:
            time.sleep(0.02)

    def _is_present(self, replica: int) -> bool:
        """Whether its present life is a member or about to be one."""
        life = Incarnation(replica, self.lives[replica])
        if life in self._killed:
            return False
        return replica in self.hub.healing or life in [
            Incarnation(one.replica, one.life) for one in self.hub.members
        ]

    def run(self) -> None:
        """Train to the end. Raises what no test has asked for."""
        # Optimizers import it at their first use, and threads that do so at once may see it half made.
        importlib.import_module("torch._dynamo")
        torch.set_num_threads(1)
        try:
            for replica in range(self.num_replicas):
                self._begin(Incarnation(replica, 0))
            end_s = time.monotonic() + patience_s()
            while True:
                self._end_joiners()
                with self._lock:
                    living = [one for one in self._threads if one.is_alive()]
                if not living:
                    break
                living[0].join(0.1)
                told = [repr(one.error) for one in list(self.seen.values()) if one.error is not None]
                assert time.monotonic() < end_s, f"a rank does not end. Errors: {told}"
        finally:
            self.hub.close()
        errors = [one.error for one in self.seen.values() if one.error is not None]
        for error in errors:
            raise error

    def _end_joiners(self) -> None:
        """End replicas that are no members yet, once another one has come to the end."""
        done = {rank.replica for rank, seen in list(self.seen.items()) if seen.is_done}
        if not done:
            return
        for life in list(self._agents):
            ranks = [seen for rank, seen in list(self.seen.items()) if rank.own_life == life]
            if not any(seen.has_joined for seen in ranks):
                self._revives = False
                self.kill(life)

    def condemn(self, life: Incarnation) -> None:
        """A rank of it is about to raise `Killed`: from now on the replicas are not whole."""
        self._killed.add(life)

    def kill(self, life: Incarnation) -> None:
        """As if a process of that replica had died: the launcher sees it, and the others learn of it."""
        self.condemn(life)
        with self._lock:
            agents = self._agents.pop(life, None)
        if agents is None:
            return
        for stage in range(self.depth):
            self._fabrics[life].lose(stage)
        for agent in agents:
            agent.abort()
        revives = self._revives
        with self._lock:  # before the others hear of it, or they may be done before it is back
            others = self._missing - {life.replica}
            self._missing = {*others, life.replica} if revives else others
        self.hub.take(Ended(life))
        if revives:
            self._begin(Incarnation(life.replica, life.life + 1))

    def committed(self) -> list[Batch]:
        """The samples of each committed round, in the order of its members."""
        return [self._rows([one for own in line.samples for one in own]) for line in self.hub.rounds]

    def sizes(self) -> list[list[int]]:
        """The samples of each micro-batch of each committed round."""
        num = self.setting.plan.width * self.setting.plan.source.num_microbatches
        found = []
        for line in self.hub.rounds:
            counts = [sum(one.count for one in own) for own in line.samples]
            found.append([size for count in counts for size in apportioned(count, [1] * num)])
        return found

    def _begin(self, life: Incarnation) -> None:
        self.lives[life.replica] = life.life
        fabric = self._fabrics[life] = ThreadFabric(self.depth)
        self._agents[life] = []
        ranks = [RankId(life.replica, life.life, stage) for stage in range(self.depth)]
        threads = [
            threading.Thread(target=self._live, args=(rank, fabric), daemon=True, name=f"rank {rank}")
            for rank in ranks
        ]
        with self._lock:
            self._threads += threads
        for thread in threads:
            thread.start()

    def _live(self, rank: RankId, fabric: ThreadFabric) -> None:
        seen = self.seen[rank] = Seen()
        life = rank.own_life
        try:
            self._train(rank, fabric, seen)
            seen.is_done = True
        except Killed:
            self.kill(life)
        except OtherWeightsError as error:
            self.differed.append(str(error))
            self.kill(life)
        except BaseException as error:
            if life in self._agents:  # nobody killed it
                seen.error = error
                self._revives = False
                self.kill(life)

    def _train(self, rank: RankId, fabric: ThreadFabric, seen: Seen) -> None:
        agent = ExchangeAgent(
            rank,
            cast(Any, self.hub.client(rank)),
            timeout_s=self._timeout_s,
            of_batches=True,
            spare=self._spare,
        )
        with self._lock:
            self._agents[rank.own_life].append(agent)
        pipeline = pipeline_of(
            self.model,
            self.setting,
            fabric.of(rank.stage),
            lambda step: self._on_instruction(rank, step),
            agreement=QuorumAgreement(
                agent, self.num_replicas, self.batch_size, self._balances, self._compare_every
            ),
        )
        self.pipelines[rank] = pipeline
        try:
            pipeline.join()
            seen.first, seen.has_joined = pipeline.num_trained, True
            for result in pipeline.train(self._batches(agent, pipeline)):
                seen.losses[result.batch] = result.loss
                seen.norms[result.batch] = result.grad_norm
                seen.healed += [(result.batch, *one) for one in result.healed.items()]
                seen.weights[result.batch] = pipeline.state_dict()
                seen.states[result.batch] = states_of(pipeline)
                self._pace(rank, result.batch)
            agent.wait_until_used_by_all()
            seen.detect_s |= agent.losses.detect_s
        finally:
            with suppress(ConnectionAbortedError):
                pipeline.close()
        with self._lock:
            if rank.own_life in self._agents:
                self._agents[rank.own_life].remove(agent)
        agent.close(is_leaving=True)

    def _batches(self, agent: ExchangeAgent, pipeline: Pipeline) -> Iterator[Batch]:
        number = pipeline.num_trained
        while number < self.num_batches:  # a test may have them end sooner
            deal = agent.deals.dealt(number)
            assert deal is not None, "batches of all replicas have no windows"
            yield self._rows(deal.samples)
            number += 1

    def _rows(self, samples: Sequence[SamplePlaces]) -> Batch:
        return {
            name: torch.cat([rows[one.begin : one.end] for one in samples])
            for name, rows in self.data.items()
        }


def states_of(pipeline: Pipeline) -> dict[str, dict[str, Tensor]]:
    """Copies of what the optimizer of a rank remembers."""
    return {
        name: {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        for stage in pipeline.stages.values()
        for name, state in stage.banks.optimizer_state().items()
    }
