"""Replicas in the engine, on emulated devices, one of them slower: gradients of all summed, or groups.

Each replica is one process with one stage that sleeps where it would compute, so many run on few cores. What
is measured are samples a second over all replicas, compared with the sum of the replicas' own speeds: the
ideal. What sleeps, threads and processes on shared cores take of it is measured too, by replicas that train
beside each other and agree on nothing.
"""

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from benchmarks.engine_bench.emulated import EmulatedModel, StagePace, emulated_model
from bireme.balance import ShareLimits
from bireme.plan.plan import Plan
from bireme.runtime.coordinator_client import CoordinatorClient
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averages import Averaging
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder, launch_replicas
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import RankId
from bireme.sync.coordinator.samples import CoordinatorSettings, GroupSettings, SyncMode

__all__ = ["ALONE", "EngineRow", "measure_agreement"]

PACE = StagePace(0.02, 0.04)
"""Of a micro-batch."""
MICROBATCHES = 4
"""Of one sample each, in a batch of one replica."""
ALONE = "alone"
"""The mode of replicas that agree on nothing."""
WARM_BATCHES = 3
LEAST_BATCHES = 6


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Samples a second over all replicas, and the most that there could be. `processor_s` is what a batch of
    a replica took of the processors, without the coordinator.
    """

    mode: str
    samples_per_s: float
    ideal_per_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class _Took:
    """What some batches of one rank took, by the clock and of the processors."""

    num_batches: int
    seconds: float
    processor_s: float


def measure_agreement(
    num_replicas: int, slower: float, seconds: float, connect_every: int
) -> list[EngineRow]:
    """Each mode for about so many seconds, the first replica so many times slower than the others."""
    own_s = MICROBATCHES * PACE.whole_s
    batch_size = MICROBATCHES * num_replicas
    paces = tuple(
        StagePace(PACE.forward_s * each, PACE.backward_s * each)
        for each in (slower, *[1.0] * (num_replicas - 1))
    )
    ideal_per_s = (num_replicas - 1 + 1 / slower) * MICROBATCHES / own_s

    found = launch(_train_alone, num_replicas, paces, seconds, threads_per_process=1)
    alone_per_s = sum(one.num_batches * MICROBATCHES / one.seconds for one in found)
    alone = EngineRow(ALONE, alone_per_s, ideal_per_s, _processor_s(found))

    num = max(round(seconds / (own_s * slower)), LEAST_BATCHES)
    found = launch(_sum_gradients, num_replicas, paces, num, threads_per_process=1)
    everyone = _row("allreduce", num * batch_size, ideal_per_s, found)

    num = max(round(seconds * ideal_per_s / batch_size), LEAST_BATCHES)
    settings = CoordinatorSettings(
        SyncMode.GROUPS,
        num_replicas,
        1,
        batch_size,
        ShareLimits((MICROBATCHES,) * num_replicas, (batch_size,) * num_replicas),
        num_lines=0,
        groups=GroupSettings(connect_every),
    )
    with TemporaryDirectory() as folder:
        launched = launch_replicas(
            _average_in_groups,
            settings,
            paces,
            (WARM_BATCHES * batch_size, (WARM_BATCHES + num) * batch_size),
            ledger=Path(folder) / "ledger.jsonl",
            tell=lambda _sentence: None,
            threads_per_process=1,
        )
    found = [one for replica in launched.results for one in replica]
    return [alone, everyone, _row("groups", num * batch_size, ideal_per_s, found)]


def _row(mode: str, num_samples: int, ideal_per_s: float, found: Sequence[_Took]) -> EngineRow:
    rate = num_samples / max(one.seconds for one in found)
    return EngineRow(mode, rate, ideal_per_s, _processor_s(found))


def _processor_s(found: Sequence[_Took]) -> float:
    return sum(one.processor_s for one in found) / sum(one.num_batches for one in found)


class _Stopwatch:
    """The clock and the processors from now on, of this process."""

    def __init__(self) -> None:
        self._begin_s, self._used_s = perf_counter(), _used_s()

    def took(self, num_batches: int) -> _Took:
        """What so many batches took."""
        return _Took(num_batches, perf_counter() - self._begin_s, _used_s() - self._used_s)


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _train_alone(world: World, paces: Sequence[StagePace], seconds: float) -> _Took:
    """On every rank: what the batches take that it trains by itself in about so many seconds."""
    world.join_torch()
    model = emulated_model(1, paces[world.rank])
    pipeline = _pipeline(model, Plan(model.cuts, MICROBATCHES, "1f1b"), None)
    batch = model.batch(MICROBATCHES)
    dist.barrier()
    watch, end_s = _Stopwatch(), perf_counter() + seconds
    num = sum(1 for _ in pipeline.train(takewhile(lambda _: perf_counter() < end_s, repeat(batch))))
    took = watch.took(num)
    dist.barrier()  # so that the last batches of one have the others beside them too
    pipeline.close()
    return took


def _sum_gradients(world: World, paces: Sequence[StagePace], num_batches: int) -> _Took:
    """On every rank: what so many batches take, without the first ones."""
    model = emulated_model(1, paces[world.rank])
    plan = Plan(model.cuts, MICROBATCHES, "1f1b", width=world.size)
    pipeline = _pipeline(model, plan, DistFabric(world))
    batch = model.batch(MICROBATCHES * world.size)
    for _ in pipeline.train(repeat(batch, WARM_BATCHES)):
        pass
    watch = _Stopwatch()
    for _ in pipeline.train(repeat(batch, num_batches)):
        pass
    took = watch.took(num_batches)
    pipeline.close()
    return took


def _average_in_groups(
    world: World, order: ReplicaOrder, paces: Sequence[StagePace], marks: tuple[int, int]
) -> _Took:
    """On every rank: what the window between two places takes, with the mean at its end."""
    replica = order.life.replica
    rank = RankId(replica, order.life.life, world.rank)
    talk = CoordinatorClient(order.hosts, order.token, rank, lease_s=order.lease_s)
    agent = ExchangeAgent(rank, talk, timeout_s=world.timeout_s, on_error=world.watch.failed)
    model = emulated_model(1, paces[replica])
    averaging = Averaging(agent, MICROBATCHES * len(paces))
    pipeline = _pipeline(model, Plan(model.cuts, MICROBATCHES, "1f1b"), None, averaging)
    pipeline.join()
    took = _Took(0, 0.0, 0.0)
    for until in marks:
        watch, first = _Stopwatch(), pipeline.num_trained
        agent.enter(until)
        for _ in pipeline.train(_dealt(agent, model, first)):
            pass
        pipeline.meet()
        took = watch.took(pipeline.num_trained - first)
    agent.wait_until_used_by_all()
    pipeline.close()
    agent.close(is_leaving=True)
    return took


def _dealt(agent: ExchangeAgent, model: EmulatedModel, first: int) -> Iterator[dict[str, Tensor]]:
    number = first
    while (deal := agent.deals.dealt(number)) is not None:
        yield model.batch(deal.num_samples)
        number += 1


def _pipeline(
    model: EmulatedModel, plan: Plan, fabric: DistFabric | None, averaging: Averaging | None = None
) -> Pipeline:
    return Pipeline(
        model.graph,
        plan,
        fabric,
        weights=model.weights,
        optimizer="sgd",
        settings=PipelineSettings(resolve=model.resolve, averaging=averaging),
    )
