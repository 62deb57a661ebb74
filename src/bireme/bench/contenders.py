"""Contenders: the engine, and torch's pipeline runtime, each going through batches that take turns.

A contender gives the moments at which batches were over. What a batch takes is read off those in the middle,
so that filling and draining the pipeline counts where it happens in every batch, and not where once in a run.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.bench.torch_pipelining import torch_schedule
from bireme.profile.waits import core_time
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "LR",
    "Contender",
    "CountedWindow",
    "Ours",
    "TorchFeed",
    "TorchRun",
    "Turns",
    "closing",
    "say",
    "take_turns",
    "torch_run",
]

LR = 1e-3


@dataclass(frozen=True, slots=True)
class CountedWindow:
    """Batches that count; those before and after them do not."""

    before: int
    counted: int
    after: int = 0

    @property
    def num_batches(self) -> int:
        """All batches that are run."""
        return self.before + self.counted + self.after

    def batch_s(self, ends_s: Sequence[float]) -> float:
        """Seconds that a batch that counts takes."""
        last = self.before + self.counted - 1
        return (ends_s[last] - ends_s[self.before - 1]) / self.counted


class Contender(Protocol):
    """Something that trains."""

    @property
    def name(self) -> str:
        """What it is called."""

    def window(self, counted: int) -> CountedWindow:
        """The window in which so many batches are in the steady state."""

    def ends_s(self, num_batches: int) -> list[float]:
        """Train on so many batches; when each was over, on a clock of this process."""


@dataclass(frozen=True, slots=True)
class Ours:
    """The engine. A stream of batches needs some to fill, and drains over the last ones."""

    name: str
    pipeline: Pipeline
    batch: Mapping[str, Tensor]

    def window(self, counted: int) -> CountedWindow:
        """Flush schedules are steady from the second batch on."""
        flushes = self.pipeline.plan.source.rule is Rule.SYNCHRONOUS
        return CountedWindow(1, counted) if flushes else CountedWindow(3, counted, 2)

    def ends_s(self, num_batches: int) -> list[float]:
        """Train on one stream."""
        return [perf_counter() for _ in self.pipeline.train(repeat(self.batch, num_batches))]


@dataclass(frozen=True, slots=True)
class TorchFeed:
    """What torch's runtime is given: the first stage's arguments, all stages' keywords, the target."""

    arguments: tuple[Tensor, ...]
    target: Tensor
    keywords: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchRun:
    """Torch's runtime with its own optimiser step after every batch."""

    name: str
    schedule: Any
    stages: "Sequence[PipelineStage]"
    optimizer: torch.optim.Optimizer
    feed: TorchFeed

    def window(self, counted: int) -> CountedWindow:
        """The second batch is like any later one."""
        return CountedWindow(1, counted)

    def ends_s(self, num_batches: int) -> list[float]:
        """Train on batch after batch."""
        arguments = self.feed.arguments if any(stage.is_first for stage in self.stages) else ()
        target = self.feed.target if any(stage.is_last for stage in self.stages) else None
        ends = []
        for _ in range(num_batches):
            self.schedule.step(*arguments, target=target, return_outputs=False, **self.feed.keywords)
            self.optimizer.step()
            self.optimizer.zero_grad()
            ends.append(perf_counter())
        return ends


def torch_run(
    kind: str | Program,
    stages: "Sequence[PipelineStage]",
    num_microbatches: int,
    loss: Callable[..., Tensor],
    feed: TorchFeed,
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> TorchRun:
    """One of torch's schedules, by the name of its class, or a program of ours in torch's runtime."""
    import torch.distributed.pipelining as peer

    schedule: Any
    if isinstance(kind, Program):
        name, schedule = f"runtime with {kind.name}", torch_schedule(kind, stages, loss)
    else:
        is_single = kind in ("Schedule1F1B", "ScheduleGPipe")
        name = kind
        schedule = getattr(peer, kind)(stages[0] if is_single else list(stages), num_microbatches, loss)
    parameters: Iterable[Tensor] = [p for stage in stages for p in stage.submod.parameters()]
    make: Any = optimizer
    return TorchRun(name, schedule, tuple(stages), make(parameters, lr=LR), feed)


@dataclass(frozen=True, slots=True)
class Turns:
    """For each contender what a batch took on this rank, round by round, and the share of this machine's
    cores that other programs, or other guests of its host, had meanwhile; None if the system does not say.
    """

    seconds: list[list[float]]
    others_share: float | None


def take_turns(contenders: Sequence[Contender], *, counted: int, rounds: int) -> Turns:
    """Time the contenders in turns. Each warms up before."""
    found: list[list[float]] = [[] for _ in contenders]
    for contender in contenders:
        contender.ends_s(2)
    dist.barrier()
    began_s, own_began_s, before = perf_counter(), process_time(), core_time()
    for _ in range(rounds):
        for contender, seconds in zip(contenders, found, strict=True):
            window = contender.window(counted)
            dist.barrier()
            seconds.append(window.batch_s(contender.ends_s(window.num_batches)))
    own_s = torch.tensor([process_time() - own_began_s], dtype=torch.float64)
    dist.all_reduce(own_s)
    now, passed_s = core_time(), perf_counter() - began_s
    if before is None or now is None:
        return Turns(found, None)
    busy_s = now.busy_s + now.stolen_s - before.busy_s - before.stolen_s
    return Turns(found, max(0.0, busy_s - own_s.item()) / (passed_s * (os.cpu_count() or 1)))


@contextmanager
def closing(contenders: Sequence[Contender]) -> Iterator[None]:
    """End what the engine runs in the background when the work is over."""
    yield
    for contender in contenders:
        if isinstance(contender, Ours):
            contender.pipeline.close()


def say(world: World, text: str) -> None:
    """Tell whoever waits what is being done; once, not from every rank."""
    if world.rank == 0:
        sys.stderr.write(f"bireme bench: {text}\n")
        sys.stderr.flush()
