"""Unequal replicas on emulated devices: stages that sleep for every sample, at a speed that changes.

What a device takes for a batch is the same as in the simulator, from the same figures and the same chance: so
what was possible is known, to the batch. A batch says its number to the devices in its own samples.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine_bench.contenders import say
from benchmarks.engine_bench.emulated import sharpen_sleeps, square_loss
from benchmarks.replica_speeds.balanced_run import Informed, ReplicaCost
from bireme.balance import Policy, ShareLimits, Shares, limits_of
from bireme.model.chain import chain, chain_resolver
from bireme.plan.plan import Plan
from bireme.runtime.balancer import Sharing
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World

__all__ = ["Trained", "Trial", "chances", "possible_s", "train_unequal"]

NUMBER, NUM_FEATURES = "number", 4
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Trial:
    """A run over replicas with these costs, which are those of a stage of `depth` equal ones.

    `policy` is None where shares stay equal.
    """

    name: str
    replicas: tuple[ReplicaCost, ...]
    batch_size: int
    num_batches: int
    depth: int = 1
    num_microbatches: int = 4
    schedule: str = "1f1b"
    policy: Policy | None = None
    seed: int = 0

    @property
    def limits(self) -> ShareLimits:
        """A sample for each micro-batch, and as many as there are: sleeping takes no memory."""
        return limits_of(self.num_microbatches, [self.batch_size] * len(self.replicas))

    @property
    def equal(self) -> Shares:
        """Equal shares."""
        return (self.batch_size // len(self.replicas),) * len(self.replicas)


@dataclass(frozen=True, slots=True)
class Trained:
    """When each batch was done, and its shares."""

    end_s: tuple[float, ...]
    shares: tuple[Shares, ...]

    @property
    def changes(self) -> tuple[int, ...]:
        """The batches with other shares than the one before."""
        return tuple(b for b, (one, other) in enumerate(pairwise(self.shares), 1) if one != other)

    def seconds(self, begin: int, end: int) -> float:
        """Of the batches `begin` up to but without `end`; a batch must come before."""
        return self.end_s[end - 1] - self.end_s[begin - 1]

    def samples_per_s(self, begin: int, end: int) -> float:
        """In these batches."""
        return sum(map(sum, self.shares[begin:end])) / self.seconds(begin, end)


def chances(trial: Trial) -> list[list[float]]:
    """The chance of every replica in every batch."""
    random = Random(trial.seed)
    return [[random.uniform(-1, 1) for _ in trial.replicas] for _ in range(trial.num_batches)]


def possible_s(trial: Trial, begin: int, end: int) -> float:
    """What these batches take at the least, for one who knows every speed beforehand but not chance."""
    informed = Informed(trial.replicas, trial.batch_size, trial.limits)
    drawn = chances(trial)
    return sum(
        max(
            one.seconds(share, batch, chance)
            for one, share, chance in zip(trial.replicas, informed.shares(batch), drawn[batch], strict=True)
        )
        for batch in range(begin, end)
    )


def train_unequal(trial: Trial) -> Trained:
    """Train it in as many processes as it has devices."""
    num_ranks = len(trial.replicas) * trial.depth
    return launch(_train, num_ranks, trial, threads_per_process=1)[0]


def _train(world: World, trial: Trial) -> Trained:
    """On every rank."""
    say(world, trial.name)
    sharpen_sleeps()
    replica = world.rank // trial.depth
    device = _Device(trial.replicas[replica], [row[replica] for row in chances(trial)])
    modules = tuple(_PacedStage(device) for _ in range(trial.depth))
    graph = chain(modules, {NUMBER: torch.zeros(1, NUM_FEATURES)}, loss=square_loss, name="unequal")
    held = dict(nn.Sequential(*modules).named_parameters())
    pipeline = Pipeline(
        graph,
        Plan(
            tuple(range(1, trial.depth)),
            trial.num_microbatches,
            trial.schedule,
            width=len(trial.replicas),
        ),
        DistFabric(world),
        weights=lambda names: {name: held[name].detach().clone() for name in names},
        optimizer="sgd",
        settings=PipelineSettings(
            resolve=chain_resolver(graph, modules, loss=square_loss),
            sharing=Sharing(trial.equal, trial.limits, trial.policy),
        ),
    )
    end_s, shares = [], []
    for result in pipeline.train(_batches(trial)):
        end_s.append(time.perf_counter())
        shares.append(result.shares)
    pipeline.close()
    return Trained(tuple(end_s), tuple(shares))


def _batches(trial: Trial) -> Iterator[dict[str, Tensor]]:
    for number in range(trial.num_batches):
        yield {NUMBER: torch.full((trial.batch_size, NUM_FEATURES), float(number))}


@dataclass(frozen=True, slots=True)
class _Device:
    """A device that sleeps. Fixed seconds are those of a micro-batch's place in a batch, so it has none."""

    cost: ReplicaCost
    chances: Sequence[float]

    def work(self, given: Tensor, part: float) -> None:
        """Take the time of a part of the work on these samples."""
        begin_s = time.perf_counter()
        batch = int(given[0, 0])
        one = replace(self.cost, fixed_s=0.0)
        rest_s = part * one.seconds(len(given), batch, self.chances[batch])
        time.sleep(max(0.0, begin_s + rest_s - time.perf_counter()))


class _Paced(torch.autograd.Function):
    """Gives its input on, and takes its time in both passes."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, device: _Device) -> Tensor:
        ctx.device = device
        ctx.save_for_backward(given)
        device.work(given, FORWARD_SHARE)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (given,) = ctx.saved_tensors
        ctx.device.work(given, 1 - FORWARD_SHARE)
        return gradients[0].clone(), torch.zeros(1), None


class _PacedStage(nn.Module):
    """A stage that learns nothing: what comes in goes out, so that every stage knows the batch."""

    def __init__(self, device: _Device) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, number: Tensor) -> Tensor:
        paced: Tensor = _Paced.apply(number, self.weight, self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return paced
