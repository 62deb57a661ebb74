"""Contenders: the engine, and torch's pipeline runtime, each going through batches that take turns.

A contender gives the moments at which batches were over. What a batch takes is read off those in the middle,
so that filling and draining the pipeline counts where it happens in every batch, and not where once in a run.
"""

import importlib
import inspect
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

from bireme.errors import BiremeError
from bireme.profile.timing import core_time
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.schedule.program import Program, Rule
from bireme.schedule.torch_csv import to_csv

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


# Run a program in torch's own pipeline runtime.
#
# A peer, to compare ours with. Torch keeps this runtime private, so its names are used here and nowhere else,
# and looked up only when needed.

MODULE = "torch.distributed.pipelining.schedules"
_USED = {
    "PipelineScheduleMulti.__init__": ("stages", "n_microbatches", "loss_fn", "scale_grads"),
    "_PipelineScheduleRuntime._prepare_schedule_with_comms": ("actions", "format"),
    "_Action.from_str": ("action_string",),
    "_add_send_recv": ("compute_actions", "stage_to_rank", "num_stages"),
    "_simulate_comms_compute": ("pipeline_order", "stage_to_rank", "num_stages"),
}
"""What is used of that module: the callables and their parameters."""


def torch_schedule(
    program: Program,
    stages: "Sequence[PipelineStage]",
    loss_fn: Callable[..., torch.Tensor],
    *,
    scale_grads: bool = True,
    comms: bool = False,
) -> "_PipelineScheduleRuntime":
    """Torch's runtime, loaded with one batch of the program, for the stages of this rank.

    Its `step()` runs a batch and leaves the gradients in the modules; step the optimizer after it. With
    `scale_grads` they are divided by the number of micro-batches, as for a loss that is a mean. Torch
    communicates its own way unless `comms` asks for the program's. Give the stages the shapes of their
    inputs and outputs: otherwise torch runs each once to learn them, which touches buffers and needs NumPy.
    """
    private = _private_torch()
    _check_stages(program, stages)
    runtime: _PipelineScheduleRuntime = private._PipelineScheduleRuntime(
        stages=sorted(stages, key=lambda stage: stage.stage_index),
        n_microbatches=program.num_microbatches,
        loss_fn=loss_fn,
        scale_grads=scale_grads,
    )
    runtime._prepare_schedule_with_comms(
        _actions(private, program, comms=comms),
        format="compute_comms" if comms else "compute_only",
    )
    return runtime


def torch_dry_run(program: Program) -> Callable[[], int]:
    """Torch's own dry run of one batch, ready to go: it puts in communication and counts unit steps."""
    private = _private_torch()
    ranks, num_stages = program.rank_of_stage, program.num_stages
    actions = _actions(private, program)

    def run() -> int:
        copies = {rank: list(row) for rank, row in actions.items()}
        lowered = private._add_send_recv(
            copies, stage_to_rank=lambda stage: ranks[stage], num_stages=num_stages
        )
        steps = private._simulate_comms_compute(
            lowered, stage_to_rank=lambda stage: ranks[stage], num_stages=num_stages
        )
        return max(len(row) for row in steps.values())

    return run


def _actions(private: Any, program: Program, *, comms: bool = False) -> dict[int, list[Any]]:
    rows = to_csv(program, comms=comms).splitlines()
    return {
        rank: [private._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)
    }


def _private_torch() -> Any:
    """Torch's module of schedules, if all that is used of it is still there."""
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError:
        module = None
    for path, parameters in _USED.items():
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
        known = inspect.signature(found).parameters if callable(found) else None
        lost = parameters if known is None else [name for name in parameters if name not in known]
        if lost:
            what = "is gone" if known is None else f"no longer takes {', '.join(lost)}"
            raise BiremeError(
                f"Torch {torch.__version__} cannot run programs in its pipeline runtime: {MODULE}.{path} "
                f"{what}. It is private to torch and may move with any release. Use Bireme's own engine, or "
                "torch 2.13, for which this was written."
            )
    return module


def _check_stages(program: Program, stages: "Sequence[PipelineStage]") -> None:
    if not stages:
        raise BiremeError("Torch's runtime needs at least one stage on every rank; this rank brings none.")
    num_ranks, rank = stages[0].group_size, stages[0].group_rank
    if num_ranks != program.num_ranks:
        raise BiremeError(
            f"{program.name} is made for {program.num_ranks} ranks, but the stages' process group has "
            f"{num_ranks}. Start as many processes, or make the schedule for {num_ranks}."
        )
    for stage in stages:
        if stage.num_stages != program.num_stages:
            raise BiremeError(
                f"{program.name} has {program.num_stages} stages, but PipelineStage {stage.stage_index} says "
                f"it is one of {stage.num_stages}. Cut the model into {program.num_stages}."
            )
    brought = sorted(stage.stage_index for stage in stages)
    if brought != list(program.stages_of(rank)):
        raise BiremeError(
            f"{program.name} has stages {_listed(program.stages_of(rank))} on rank {rank}, which brings "
            f"{_listed(brought)}. Build the stages that program.stages_of(rank) names."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


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
    """Torch's runtime with its own optimizer step after every batch."""

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
class _Turns:
    """For each contender what a batch took on this rank, round by round, and the share of this machine's
    cores that other programs, or other guests of its host, had meanwhile; None if the system does not say.
    """

    seconds: list[list[float]]
    others_share: float | None


def take_turns(contenders: Sequence[Contender], *, counted: int, rounds: int) -> _Turns:
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
        return _Turns(found, None)
    busy_s = now.busy_s + now.stolen_s - before.busy_s - before.stolen_s
    return _Turns(found, max(0.0, busy_s - own_s.item()) / (passed_s * (os.cpu_count() or 1)))


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
