"""Bytes: what is kept for receives, what weight versions take, and how large processes grow.

The first two are counted. The peak resident set is the kernel's word, quoted as what training adds to what
the process was before, compared with the sum of what the profile and the schedule say.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bireme.bench.contenders import TorchFeed, say, torch_run
from bireme.bench.document import resident_bytes
from bireme.bench.effort import BenchEffort
from bireme.bench.emulated import FEATURES, INPUT, EmulatedModel, StagePace, emulated_model, square_loss
from bireme.bench.small_gpt import GPT_RANKS, GPT_SAMPLES, load_small_gpt
from bireme.cluster.device import device_named
from bireme.plan.plan import Plan
from bireme.profile.profiler import profile
from bireme.profile.stages import stage_cost
from bireme.runtime.bank_memory import BankMemory
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.schedule.residency import resident

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "FOOTPRINT_SCHEDULES",
    "Footprint",
    "MemoryCounts",
    "counts_of",
    "measure_counts",
    "measure_footprint",
]

FOOTPRINT_SCHEDULES = ("1f1b", "2bw")
FOOTPRINT_MICROBATCHES = 4
BALLAST = 65_536
"""Parameters of a stage, besides, whose versions are counted."""


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """Bytes over all ranks: receive buffers by the number of micro-batches, and weights."""

    receive_bytes: dict[int, int]
    torch_receive_bytes: dict[int, int]
    flush_weight_bytes: int
    delayed_weight_bytes: int
    parameter_bytes: int

    @property
    def extra_copies(self) -> float:
        """How many copies of the parameters 2bw keeps more than 1f1b."""
        return (self.delayed_weight_bytes - self.flush_weight_bytes) / self.parameter_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What training the small GPT added to a rank's peak resident set, and what was predicted."""

    schedule: str
    rank: int
    measured_bytes: int
    predicted_bytes: int


def measure_counts(world: World, effort: BenchEffort) -> MemoryCounts:
    """On two ranks, of one rank's own."""
    say(world, f"bytes with {', '.join(map(str, effort.buffers))} micro-batches")
    fabric = DistFabric(world)
    model = emulated_model(world.size, StagePace(0.0, 0.0), num_ballast=BALLAST)
    ours, theirs = {}, {}
    for m in effort.buffers:
        pipeline = _trained(model, Plan(model.cuts, m, "1f1b"), fabric)
        ours[m] = pipeline.most_receive_bytes
        pipeline.close()
        theirs[m] = _torch_receive_bytes(world, model, m)
    weights = {}
    for schedule in ("1f1b", "2bw"):
        pipeline = _trained(model, Plan(model.cuts, world.size, schedule), fabric)
        weights[schedule] = sum(_kept_bytes(stage.banks.memory()) for stage in pipeline.stages.values())
        parameter_bytes = sum(tensor.nbytes for tensor in pipeline.parameters().values())
        pipeline.close()
    return MemoryCounts(ours, theirs, weights["1f1b"], weights["2bw"], parameter_bytes)


def _kept_bytes(memory: BankMemory) -> int:
    """What a stage keeps from batch to batch: all but gradients and workspace."""
    return memory.total_bytes - memory.gradient_bytes - memory.workspace_bytes


def counts_of(one: MemoryCounts, other: MemoryCounts) -> MemoryCounts:
    """Both ranks' together."""
    return MemoryCounts(
        {m: num_bytes + other.receive_bytes[m] for m, num_bytes in one.receive_bytes.items()},
        {m: num_bytes + other.torch_receive_bytes[m] for m, num_bytes in one.torch_receive_bytes.items()},
        one.flush_weight_bytes + other.flush_weight_bytes,
        one.delayed_weight_bytes + other.delayed_weight_bytes,
        one.parameter_bytes + other.parameter_bytes,
    )


def measure_footprint() -> list[Footprint]:
    """Each schedule in processes of its own, as a peak never goes down again."""
    gpt = load_small_gpt()
    known = profile(gpt.graph, device_named("laptop"), [GPT_SAMPLES])
    found = []
    for schedule in FOOTPRINT_SCHEDULES:
        plan = Plan(gpt.cuts, FOOTPRINT_MICROBATCHES, schedule)
        program = plan.program(3)
        for rank, num_bytes in enumerate(launch(_footprint, GPT_RANKS, schedule, threads_per_process=1)):
            units = plan.units_of(rank, len(gpt.units))
            predicted = stage_cost(known, units.start, units.stop, GPT_SAMPLES).peak_bytes(
                num_versions=program.banks[rank],
                num_stashed=resident(program, rank).peak_stashed_microbatches,
            )
            found.append(Footprint(schedule, rank, num_bytes, predicted))
    return found


def _trained(model: EmulatedModel, plan: Plan, fabric: DistFabric) -> Pipeline:
    pipeline = Pipeline(
        model.graph, plan, fabric, weights=model.weights, optimizer="adamw", resolve=model.resolve
    )
    for _ in pipeline.train([model.batch(plan.num_microbatches)] * 3):
        pass
    return pipeline


def _torch_receive_bytes(world: World, model: EmulatedModel, num_microbatches: int) -> int:
    """The bytes of all buffers that torch's stage of this rank receives into."""
    from torch.distributed.pipelining import PipelineStage

    given, made = (
        torch.empty(1, FEATURES, device="meta", requires_grad=learns) for learns in (world.rank > 0, True)
    )
    stage = PipelineStage(
        model.modules[world.rank],
        world.rank,
        world.size,
        torch.device("cpu"),
        input_args=(given,),
        output_args=(made,),
    )
    batch = model.batch(num_microbatches)[INPUT]
    torch_run("Schedule1F1B", [stage], num_microbatches, square_loss, TorchFeed((batch,), batch)).ends_s(1)
    return _buffer_bytes(stage)


def _buffer_bytes(stage: "PipelineStage") -> int:
    infos = [
        info
        for by_microbatch in (stage.args_recv_info, stage.grad_recv_info)
        for several in by_microbatch.values()
        for info in several
    ]
    buffers = [buffer for info in infos if (buffer := getattr(info, "buffer", None)) is not None]
    return sum(buffer.nbytes for buffer in buffers)


def _footprint(world: World, schedule: str) -> int:
    """By how much training raises the peak of this process."""
    say(world, f"peak resident set of {schedule}")
    gpt = load_small_gpt()
    # What torch takes for itself when it first computes is no part of the model's memory.
    warm = torch.zeros(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    before = resident_bytes("VmRSS")
    pipeline = Pipeline(
        gpt.graph, Plan(gpt.cuts, FOOTPRINT_MICROBATCHES, schedule), world, weights=gpt.weights
    )
    for _ in pipeline.train([gpt.batch(FOOTPRINT_MICROBATCHES)] * 3):
        pass
    pipeline.close()
    return resident_bytes("VmHWM") - before
