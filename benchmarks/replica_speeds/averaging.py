"""Replicas in the engine, on emulated devices, one of them slower: gradients of all summed, or groups.

Each replica is one process with one stage that sleeps where it would compute, so many run on few cores. What
is measured are samples a second over all replicas, compared with the sum of the replicas' own speeds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from torch import Tensor

from bireme.balance.shares import Limits
from bireme.bench.emulated import EmulatedModel, Pace, emulated_model
from bireme.plan.plan import Plan
from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.averaging import Averaging
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.quorum.launch import ReplicaOrder, launch_replicas
from bireme.runtime.quorum.talk import Talk
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import RankId
from bireme.sync.coordinator.settings import GroupSettings, Settings, SyncMode

__all__ = ["EngineRow", "measure_agreement"]

PACE = Pace(0.02, 0.04)
MICROBATCHES = 4
"""Of one sample each, in a batch of one replica."""
WARM_BATCHES = 3
LEAST_BATCHES = 6


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Samples a second with the first replica so many times slower, and the most that there could be."""

    mode: str
    slower: float
    samples_per_s: float
    ideal_per_s: float


def measure_agreement(
    num_replicas: int, slower: Sequence[float], seconds: float, connect_every: int
) -> Iterator[EngineRow]:
    """Each mode for about so many seconds at each speed of the first replica."""
    own_s = MICROBATCHES * PACE.whole_s
    batch_size = MICROBATCHES * num_replicas
    for times in slower:
        paces = tuple(
            Pace(PACE.forward_s * each, PACE.backward_s * each)
            for each in (times, *[1.0] * (num_replicas - 1))
        )
        ideal_per_s = (num_replicas - 1 + 1 / times) * MICROBATCHES / own_s
        num = max(round(seconds / (own_s * times)), LEAST_BATCHES)
        took_s = launch(_sum_gradients, num_replicas, paces, num, threads_per_process=1)
        yield EngineRow("all", times, num * batch_size / max(took_s), ideal_per_s)
        num = max(round(seconds * ideal_per_s / batch_size), LEAST_BATCHES)
        settings = Settings(
            SyncMode.GROUPS,
            num_replicas,
            1,
            batch_size,
            Limits((MICROBATCHES,) * num_replicas, (batch_size,) * num_replicas),
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
        took_s = [one for replica in launched.results for one in replica]
        yield EngineRow("groups", times, num * batch_size / max(took_s), ideal_per_s)


def _sum_gradients(world: World, paces: Sequence[Pace], num_batches: int) -> float:
    """On every rank: what so many batches take, without the first ones."""
    model = emulated_model(1, paces[world.rank])
    plan = Plan(model.cuts, MICROBATCHES, "1f1b", width=world.size)
    pipeline = _pipeline(model, plan, DistFabric(world))
    batch = model.batch(MICROBATCHES * world.size)
    for _ in pipeline.train(repeat(batch, WARM_BATCHES)):
        pass
    begin_s = perf_counter()
    for _ in pipeline.train(repeat(batch, num_batches)):
        pass
    took_s = perf_counter() - begin_s
    pipeline.close()
    return took_s


def _average_in_groups(
    world: World, order: ReplicaOrder, paces: Sequence[Pace], marks: tuple[int, int]
) -> float:
    """On every rank: what the window between two places takes, with the mean at its end."""
    replica = order.life.replica
    rank = RankId(replica, order.life.life, world.rank)
    talk = Talk(order.hosts, order.token, rank, lease_s=order.lease_s)
    agent = AveragingAgent(rank, talk, timeout_s=world.timeout_s, on_error=world.watch.failed)
    model = emulated_model(1, paces[replica])
    averaging = Averaging(agent, MICROBATCHES * len(paces))
    pipeline = _pipeline(model, Plan(model.cuts, MICROBATCHES, "1f1b"), None, averaging)
    pipeline.join_averaging(0)
    took_s = 0.0
    for until in marks:
        begin_s = perf_counter()
        agent.enter(until)
        for _ in pipeline.train(_dealt(agent, model, pipeline.num_trained)):
            pass
        pipeline.meet()
        took_s = perf_counter() - begin_s
    agent.wait_until_used_by_all()
    pipeline.close()
    agent.close(is_leaving=True)
    return took_s


def _dealt(agent: AveragingAgent, model: EmulatedModel, first: int) -> Iterator[dict[str, Tensor]]:
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
        resolve=model.resolve,
        averaging=averaging,
    )
