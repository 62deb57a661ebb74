"""Replicas that average their weights, as threads: pipelines, agents and their sockets are the real ones.

The coordinator's state machine is too; what a rank says to it is a call (`mortal_replicas.Hub`).
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from bireme.balance import ShareLimits
from bireme.codec.sum_description import parse_sum_codec
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averages import Averaging, DilocoSettings
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.messages import Deal, GroupMember, RankId, SamplePlaces
from bireme.sync.coordinator.samples import CoordinatorSettings, GroupSettings, SyncMode
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.mortal_replicas import Hub, Killed, states_of
from tests.support.patience import patience_s
from tests.support.small_models import Batch, Model
from tests.support.thread_transport import ThreadFabric

__all__ = ["AveragingReplicas", "Told"]


@dataclass(slots=True)
class Told:
    """What a rank saw: the loss of each of its batches, their samples, its weights and its optimizer's state
    after each window.
    """

    losses: dict[int, float] = field(default_factory=dict)
    dealt: dict[int, tuple[SamplePlaces, ...]] = field(default_factory=dict)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    groups: dict[int, tuple[GroupMember, ...]] = field(default_factory=dict)
    sent_bytes: int = 0
    averaged_bytes: int = 0
    error: BaseException | None = None
    first: int = 0


class AveragingReplicas:
    """Replicas of a pipeline that train windows of the batches up to `marks`. Each has a plan of width 1, or
    is a site of several that sum their gradients.

    With `in_step` no replica asks for a batch before all others have got the one before.
    """

    def __init__(
        self,
        model: Model,
        setting: Setting,
        num_replicas: int,
        data: Batch,
        marks: Sequence[int],
        batch_size: int,
        *,
        diloco: DilocoSettings | None = None,
        lag: int = 0,
        connect_every: int = 1,
        grace_s: float = 30.0,
        averages_optimizer: bool = False,
        codec: str = "none",
        in_step: bool = False,
        of_replicas: bool = False,
        on_instruction: Callable[[RankId, Instruction], None] = lambda _rank, _step: None,
        pace: Callable[[RankId, int], None] = lambda _rank, _batch: None,
    ) -> None:
        self.model, self.setting, self.data, self.marks = model, setting, data, marks
        self.num_replicas, self.batch_size = num_replicas, batch_size
        self.depth = setting.plan.num_ranks
        self.diloco, self.lag, self.averages_optimizer = diloco, lag, averages_optimizer
        self.codec = codec
        least = setting.plan.width * setting.plan.source.num_microbatches
        self.hub = Hub(
            CoordinatorSettings(
                SyncMode.GROUPS if diloco is None else SyncMode.DILOCO,
                num_replicas,
                self.depth,
                batch_size,
                ShareLimits((least,) * num_replicas, (batch_size,) * num_replicas),
                lease_s=60.0,
                grace_s=grace_s,
                num_lines=0 if diloco is None else diloco.fragments,
                groups=GroupSettings(connect_every, of_replicas=of_replicas),
            )
        )
        self.told: dict[RankId, Told] = {}
        self._on_instruction, self._pace = on_instruction, pace
        self._is_in_step, self._got = in_step, dict.fromkeys(range(num_replicas), -1)
        self._changed = threading.Condition()
        self._agents: dict[RankId, ExchangeAgent] = {}
        self._fabrics: list[ThreadFabric] = []
        self._killed: set[int] = set()

    def run(self) -> None:
        """Train to the end. Raises what no test has asked for."""
        # Optimizers import it at their first use, and threads that do so at once may see it half made.
        importlib.import_module("torch._dynamo")
        torch.set_num_threads(1)
        threads = []
        for replica in range(self.num_replicas):
            self._fabrics.append(ThreadFabric(self.depth, timeout_s=60.0))
            for stage in range(self.depth):
                rank = RankId(replica, 0, stage)
                self.told[rank] = Told()
                threads.append(threading.Thread(target=self._live, args=(rank,), daemon=True))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(patience_s())
                assert not thread.is_alive(), "a rank does not end"
        finally:
            self.hub.close()
        for one in self.told.values():
            if one.error is not None:
                raise one.error

    def batch(self, _replica: int, _number: int, samples: Sequence[SamplePlaces]) -> Batch:
        """What a replica reads of the samples of its batch."""
        return self.rows(samples)

    def rows(self, samples: Sequence[SamplePlaces]) -> Batch:
        """The data at some places."""
        return {
            name: torch.cat([rows[one.begin : one.end] for one in samples])
            for name, rows in self.data.items()
        }

    def _live(self, rank: RankId) -> None:
        try:
            self._train(rank)
        except Killed:
            self._kill(rank.replica)
        except BaseException as error:
            if rank.replica not in self._killed:
                self.told[rank].error = error
                for replica in range(self.num_replicas):
                    self._kill(replica)

    def _kill(self, replica: int) -> None:
        self._killed.add(replica)
        for stage in range(self.depth):
            self._fabrics[replica].lose(stage)
        for rank, agent in list(self._agents.items()):
            if rank.replica == replica:
                agent.abort()

    def _train(self, rank: RankId) -> None:
        told = self.told[rank]
        agent = self._agents[rank] = ExchangeAgent(rank, cast(Any, self.hub.client(rank)), timeout_s=20.0)
        pipeline = pipeline_of(
            self.model,
            self.setting,
            self._fabrics[rank.replica].of(rank.stage),
            lambda step: self._note(rank, agent, step),
            averaging=Averaging(
                agent,
                self.batch_size,
                self.diloco,
                self.lag,
                averages_optimizer=self.averages_optimizer,
                codec=parse_sum_codec(self.codec),
            ),
        )
        marks = [mark * self.batch_size for mark in self.marks]
        try:
            pipeline.join(until=marks[0])
            told.first = pipeline.num_trained
            for _mark, after in pairwise([*marks, None]):
                for result in pipeline.train(self._batches(rank, agent, pipeline)):
                    told.losses[result.batch] = result.loss
                    self._pace(rank, result.batch)
                self._note_group(rank, agent)
                pipeline.meet()
                told.ends.append(pipeline.num_trained)
                told.weights.append(pipeline.state_dict())
                told.states.append(states_of(pipeline))
                if after is not None:
                    agent.enter(after)
            told.sent_bytes = pipeline.sum_bytes.sent
            told.averaged_bytes = 0 if pipeline._averages is None else pipeline._averages.sent.sent
            agent.wait_until_used_by_all()
        finally:
            with suppress(ConnectionAbortedError):
                pipeline.close()
        agent.close(is_leaving=True)

    def _note(self, rank: RankId, agent: ExchangeAgent, step: Instruction) -> None:
        self._on_instruction(rank, step)
        self._note_group(rank, agent)

    def _note_group(self, rank: RankId, agent: ExchangeAgent) -> None:
        group = agent.word.group
        for member in () if group is None else group.members:
            if member.replica == rank.replica and group is not None and group.is_settled:
                self.told[rank].groups[member.batch] = group.members

    def _dealt(self, rank: RankId, agent: ExchangeAgent, number: int) -> Deal | None:
        if self._is_in_step:
            with self._changed:
                assert self._changed.wait_for(lambda: min(self._got.values()) >= number - 1, patience_s())
        deal = agent.deals.dealt(number)
        with self._changed:
            self._got[rank.replica] = max(self._got[rank.replica], number - (deal is None))
            self._changed.notify_all()
        return deal

    def _batches(self, rank: RankId, agent: ExchangeAgent, pipeline: Pipeline) -> Iterator[Batch]:
        number = pipeline.num_trained
        while (deal := self._dealt(rank, agent, number)) is not None:
            self.told[rank].dealt[number] = deal.samples
            yield self.rows(deal.samples)
            number += 1
