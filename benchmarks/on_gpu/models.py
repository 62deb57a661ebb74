"""The models that are trained on GPUs, their batches, and one rank's part of a measured training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.plan import Plan
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan
from bireme.profile.control import torch_device
from bireme.profile.profile import Profile
from bireme.profile.profiler import profile
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from bireme.timeline.timeline import Timeline
from bireme.train.outcome import MemoryUsed

__all__ = ["Gpt", "Measured", "Weights", "plan_on", "profiled", "train"]

WARM, COUNTED, RECORDED = 3, 6, 4
DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Gpt:
    """A GPT by its sizes, and how it is trained: samples of a micro-batch, and micro-batches of a batch."""

    layers: int
    width: int
    heads: int
    vocab: int = 8192
    context: int = 512
    samples: int = 2
    num_microbatches: int = 8

    @property
    def source(self) -> str:
        """As Bireme names it."""
        sizes = f"layers={self.layers},width={self.width},heads={self.heads}"
        return f"gpt:{sizes},vocab={self.vocab},context={self.context},tied=false"

    @property
    def num_parameters(self) -> int:
        """About how many it has."""
        return 12 * self.layers * self.width**2 + (2 * self.vocab + self.context) * self.width

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return self.samples * self.num_microbatches

    def graph(self) -> Graph:
        """Captured, without weights."""
        source = load_source(self.source, batch=self.samples)
        return capture(source.model, source.example_inputs, name=self.source)

    def batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Tokens drawn at random, the same on every rank."""
        draw = torch.Generator().manual_seed(0)
        for _ in range(count):
            ids = torch.randint(self.vocab, (self.batch_size, self.context), generator=draw)
            yield {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights drawn on the device itself, so that nothing large is made on the host."""

    graph: Graph
    device: torch.device

    def __call__(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Those of these names, the same wherever they are drawn."""
        states = {state.name: state for state in (*self.graph.parameters, *self.graph.buffers)}
        return {name: self._made(name, states[name].shape, states[name].dtype) for name in names}

    def _made(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if len(shape) < 2 or not kind.is_floating_point:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            return fill(shape, dtype=kind, device=self.device)
        draw = torch.Generator(self.device).manual_seed(sum(map(ord, name)))
        return torch.randn(shape, dtype=kind, device=self.device, generator=draw).mul_(DEVIATION)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank saw: the median step, its own peak, first and last loss, and on rank 0 the timeline."""

    step_s: float
    peak_bytes: int | None
    first_loss: float
    last_loss: float
    timeline: Timeline | None


def train(world: World, gpt: Gpt, plan: Plan) -> Measured:
    """One rank's part of a training of some batches."""
    graph = gpt.graph()
    memory = MemoryUsed(world.device)
    pipeline = Pipeline(
        graph,
        plan,
        world,
        weights=Weights(graph, world.device),
        settings=PipelineSettings(device=world.device),
    )
    results = list(pipeline.train(gpt.batches(WARM + COUNTED)))
    peak = memory.peak_bytes()
    list(pipeline.train(gpt.batches(RECORDED), record=True))
    timeline = pipeline.timeline()
    pipeline.close()
    return Measured(
        step_s=median(result.seconds for result in results[WARM:-1]),
        peak_bytes=peak,
        first_loss=results[0].loss,
        last_loss=results[-1].loss,
        timeline=timeline if world.rank == 0 else None,
    )


def profiled(_world: World, gpt: Gpt, kind: str) -> Profile:
    """What its units take on a device, measured in a process that ends, and gives its memory back."""
    return profile(gpt.graph(), torch_device(kind), [gpt.samples])


def plan_on(gpt: Gpt, measured: Profile, cluster: Cluster, schedule: str, fraction: float) -> Candidate:
    """The planner's choice for that schedule with a stage on each device, within a part of the memory."""
    request = PlanRequest(
        batch_size=gpt.batch_size,
        schedule=schedule,
        goal=Goal.THROUGHPUT,
        memory_fraction=fraction,
        depth=cluster.num_devices,
        width=1,
        micro_batch=gpt.samples,
    )
    found = find_plan(measured, cluster, request)
    if not isinstance(found, Answer):
        raise BiremeError(str(found))
    return found.best
