"""The engine and torch on a GPU: one rank and a plain loop, two ranks and torch's pipeline runtime.

Both train the same model in the same process on the same weights; they take turns, and a batch's end is when
the device has done it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.models import Gpt, Weights
from bireme.devices import Backend, synchronize
from bireme.model.graph import Graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World

__all__ = ["loop", "peer"]

LR = 1e-3
WARM, ROUNDS, BATCHES = 3, 5, 4
TIMEOUT_S = 100.0

Trainer = Callable[[int], None]
"""Trains so many batches."""


@dataclass(frozen=True, slots=True)
class _Ours:
    """The engine as a trainer."""

    pipeline: Pipeline
    gpt: Gpt

    def __call__(self, num_batches: int) -> None:
        for _ in self.pipeline.train(self.gpt.batches(num_batches)):
            pass


def loop(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """One rank of the engine and torch without a pipeline: what the engine costs where it gains nothing."""
    (rows,) = launch(_and_loop, 1, quick, timeout_s=TIMEOUT_S, device=kind)
    return rows


def peer(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """Two ranks, and those of `torch.distributed.pipelining`, each with a device of its own."""
    backend: Backend = "gloo" if kind == "cpu" else "nccl"
    return launch(_and_torch, 2, quick, timeout_s=TIMEOUT_S, backend=backend, device=kind)[0]


def _gpt(num_microbatches: int, *, quick: bool) -> Gpt:
    if quick:
        return Gpt(4, 64, 2, vocab=256, context=64, num_microbatches=num_microbatches)
    return Gpt(8, 768, 12, vocab=4096, context=256, samples=4, num_microbatches=num_microbatches)


def _and_loop(world: World, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for m in (4,) if quick else (4, 8, 16):
        gpt = _gpt(m, quick=quick)
        graph = gpt.graph()
        ours = _ours(graph, gpt, Plan((), m, "1f1b"), world)
        theirs = _loop(_Stage(graph, 0, len(units_of(graph)), world.device), gpt, world.device)
        ours_s, theirs_s = _in_turns(world, ours, theirs)
        ours.pipeline.close()
        rows.append(
            {
                "microbatches": m,
                "ours_ms": median(ours_s) * 1e3,
                "torch_ms": median(theirs_s) * 1e3,
                **_spread("over_loop", ours_s, theirs_s),
            }
        )
    return rows


def _and_torch(world: World, quick: bool) -> list[dict[str, Any]]:
    world.join_torch()
    rows = []
    for m in (4,) if quick else (4, 8, 16):
        gpt = _gpt(m, quick=quick)
        graph = gpt.graph()
        cut = len(units_of(graph)) // 2
        theirs = _schedule(graph, gpt, cut, world)
        for schedule in ("1f1b", "2bw"):
            ours = _ours(graph, gpt, Plan((cut,), m, schedule), world)
            ours_s, theirs_s = _in_turns(world, ours, theirs)
            ours.pipeline.close()
            rows.append(
                {
                    "schedule": schedule,
                    "microbatches": m,
                    "ours_ms": median(ours_s) * 1e3,
                    "torch_ms": median(theirs_s) * 1e3,
                    **_spread("torch_over_ours", theirs_s, ours_s),
                }
            )
    return rows


def _ours(graph: Graph, gpt: Gpt, plan: Plan, world: World) -> _Ours:
    weights = Weights(graph, world.device)
    return _Ours(
        Pipeline(
            graph, plan, DistFabric(world), weights=weights, settings=PipelineSettings(device=world.device)
        ),
        gpt,
    )


class _Stage(nn.Module):
    """Some units as a module: what comes in by position, the model's inputs by name."""

    def __init__(self, graph: Graph, first: int, end: int, device: torch.device) -> None:
        super().__init__()
        self.function: StageFunction = StageFunction(graph, units_of(graph)[first:end], outputs=("loss",))
        weights, self.device = Weights(graph, device), device
        self.held = nn.ParameterList(weights(self.function.parameters).values())
        self.tables = weights(self.function.buffers)

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor:
        """The loss, or what goes to the next stage."""
        names = (*self.function.receives, *self.function.inputs)
        given = dict(zip(names, received, strict=False)) | inputs
        parameters = dict(zip(self.function.parameters, self.held, strict=True))
        (made,) = self.function(parameters, self.tables, given, device=self.device).values()
        return made


def _loop(stage: _Stage, gpt: Gpt, device: torch.device) -> Trainer:
    optimizer = torch.optim.AdamW(stage.parameters(), lr=LR, fused=True)

    def run(num_batches: int) -> None:
        for batch in gpt.batches(num_batches):
            for place in range(gpt.num_microbatches):
                rows = slice(place * gpt.samples, (place + 1) * gpt.samples)
                loss = stage(**{name: value[rows].to(device) for name, value in batch.items()})
                (loss / gpt.num_microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _schedule(graph: Graph, gpt: Gpt, cut: int, world: World) -> Trainer:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    is_last = world.rank == 1
    units, device = units_of(graph), world.device
    module = _Stage(graph, cut, len(units), device) if is_last else _Stage(graph, 0, cut, device)
    ids = torch.empty(gpt.samples, gpt.context, device="meta", dtype=torch.int64)
    crossing = torch.empty(gpt.samples, gpt.context, gpt.width, device="meta", requires_grad=True)
    stage = PipelineStage(
        module,
        world.rank,
        2,
        device,
        input_args=(crossing if is_last else ids,),
        output_args=(torch.empty((), device="meta", requires_grad=True) if is_last else crossing,),
    )
    schedule = Schedule1F1B(stage, gpt.num_microbatches, loss_fn=lambda loss, _target: loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def run(num_batches: int) -> None:
        for batch in gpt.batches(num_batches):
            given = {name: value.to(device) for name, value in batch.items()}
            if is_last:
                keywords: dict[str, Any] = {name: given[name] for name in module.function.inputs}
                schedule.step(target=given["labels"], return_outputs=False, **keywords)
            else:
                schedule.step(given["input_ids"], return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()

    return run


def _in_turns(world: World, ours: Trainer, theirs: Trainer) -> tuple[list[float], list[float]]:
    """Seconds a batch of both, round by round."""
    for trainer in (ours, theirs):
        trainer(WARM)
    took: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(ROUNDS):
        for place, trainer in enumerate((ours, theirs)):
            synchronize(world.device)
            begin = perf_counter()
            trainer(BATCHES)
            synchronize(world.device)
            took[place].append((perf_counter() - begin) / BATCHES)
    return took[0], took[1]


def _spread(name: str, one: list[float], other: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return {name: median(ratios), f"{name}_least": min(ratios), f"{name}_most": max(ratios)}
