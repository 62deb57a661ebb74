"""A plan made ready to be rehearsed: what its stages cost on the cluster's devices, and modules that take
it.

Each stage is one emulated module, whatever units it has: it sleeps for as long as they would take together
on its device. What it sends is small; what that weighs on the links is for the lanes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from benchmarks.engine_bench.emulated import (
    FEATURES,
    INPUT,
    EmulatedModel,
    EmulatedStage,
    StagePace,
    square_loss,
)
from benchmarks.rehearsal.shaped import rings_of
from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.model.chain import chain, chain_resolver
from bireme.plan.codec_costs import coded
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.profile.stages import stage_cost
from bireme.runtime.stepper import NamedTensors
from bireme.schedule.residency import resident
from bireme.simulate.costs import CodecCost, Costs
from bireme.simulate.links import cluster_network, ring_share
from bireme.simulate.simulator import simulate

__all__ = ["Rehearsed", "rehearsed", "simulated_s", "sleeping_sgd", "stage_model"]

SIMULATED_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A plan with its devices, and the costs of each replica's stages on them.

    `devices[r][k]` is the number of the device that rank r of replica k runs on, `sizes[k]` how many
    samples a micro-batch of replica k has. `engine_plan` is the plan whose units are whole stages.
    """

    plan: Plan
    engine_plan: Plan
    devices: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    costs: tuple[Costs, ...]

    @property
    def batch_size(self) -> int:
        """The samples of a batch."""
        return self.plan.num_microbatches * sum(self.sizes)


def rehearsed(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    micro_batch: int | None = None,
    *,
    value_bytes: int = 4,
) -> Rehearsed:
    """A plan on a cluster whose devices it names; else on its first devices.

    `micro_batch` is the size of all micro-batches where the plan does not say it, the profile's first if left
    out. Values that cross boundaries have `value_bytes`, if the plan has codecs. A plan that does not fit its
    devices is refused.
    """
    num_ranks = plan.source.num_ranks
    if num_ranks * plan.width > cluster.num_devices:
        raise BiremeError(
            f"The plan is for {num_ranks * plan.width} devices, and the cluster has {cluster.num_devices}."
        )
    if plan.devices:
        devices = tuple(tuple(cluster.number_of(name) for name in row) for row in plan.rank_devices)
        if len({device for row in devices for device in row}) < num_ranks * plan.width:
            raise BiremeError("The plan names a device for two ranks. Give each a device of its own.")
    else:
        devices = tuple(tuple(r + k * num_ranks for k in range(plan.width)) for r in range(num_ranks))
    size = profile.micro_batches[0] if micro_batch is None else micro_batch
    sizes = plan.micro_batch_sizes or (size,) * plan.width
    speeds = [[cluster.devices()[one].device.speed for one in row] for row in devices]
    costs = tuple(
        _coded(
            _costs(profile, plan, sizes[replica], [row[replica] for row in speeds]),
            plan,
            value_bytes,
            profile,
        )
        for replica in range(plan.width)
    )
    made = Rehearsed(
        plan,
        replace(plan, cuts=tuple(range(1, plan.num_stages)), recompute_units=(), devices=()),
        devices,
        sizes,
        costs,
    )
    _check_memory(made, cluster)
    return made


def simulated_s(one: Rehearsed, cluster: Cluster) -> float:
    """What the simulator says that a batch takes: that of the slowest replica, each without the others'
    messages.
    """
    program = one.plan.program(SIMULATED_BATCHES)
    rings = rings_of(one.plan, one.devices)
    found = []
    for replica, costs in enumerate(one.costs):
        row = [devices[replica] for devices in one.devices]
        network = cluster_network(cluster, program, row, replicas=rings)
        found.append(simulate(program, costs, network, agree=True).steady_batch_s)
    return max(found)


def _coded(costs: Costs, plan: Plan, value_bytes: int, profile: Profile) -> Costs:
    """With the bytes that codecs send, and the seconds that they take as a part of the passes.

    What a rehearsal really sends is too small to be encoded, so its stages sleep that long.
    """
    found = coded(costs, plan.codecs, value_bytes, profile.codecs)
    if not found.codecs:
        return costs
    before = (CodecCost(), *found.codecs[:-1])
    pairs = list(zip(before, found.codecs, strict=True))
    forward = [one.decode_forward_s + other.encode_forward_s for one, other in pairs]
    backward = [one.encode_backward_s + other.decode_backward_s for one, other in pairs]
    return replace(
        found,
        forward_s=tuple(own + more for own, more in zip(costs.forward_s, forward, strict=True)),
        backward_s=tuple(own + more for own, more in zip(costs.backward_s, backward, strict=True)),
        backward_input_s=tuple(
            own + more for own, more in zip(costs.backward_input_s, backward, strict=True)
        ),
        codecs=tuple(CodecCost(one.forward_share, one.backward_share) for one in found.codecs),
    )


def _costs(profile: Profile, plan: Plan, micro_batch: int, speeds: Sequence[float]) -> Costs:
    """Of one replica."""
    num_units, again = len(profile.units), frozenset(plan.recompute_units)
    ranges = [plan.units_of(stage, num_units) for stage in range(plan.num_stages)]
    stages = [stage_cost(profile, own.start, own.stop, micro_batch) for own in ranges]
    more_s = []
    for own in ranges:
        units = [profile.units[unit].at(micro_batch) for unit in own if unit in again]
        more_s.append(sum(unit.recompute_backward_s - unit.backward_s for unit in units))
    inputs = [stage.backward_input_s for stage in stages]
    # Nothing that comes into the first stage has a gradient: all of its backward is for its weights.
    halves = [0.0, *(one for one in inputs[1:] if one is not None)]
    if None in inputs:
        halves = [0.0, *(stage.backward_s / 2 for stage in stages[1:])]
    widths = plan.stage_widths or (plan.width,) * plan.num_stages
    return Costs.per_stage(
        plan.num_stages,
        forward_s=[stage.forward_s for stage in stages],
        backward_s=[stage.backward_s + more for stage, more in zip(stages, more_s, strict=True)],
        backward_input_s=halves,
        recompute_s=[max(stage.recompute_backward_s - stage.backward_s, 0.0) for stage in stages],
        update_s=[stage.update_s for stage in stages],
        message_bytes=[*(float(stage.boundary_bytes) for stage in stages[:-1]), 0.0],
        reduce_bytes=[
            ring_share(width) * stage.gradient_bytes for width, stage in zip(widths, stages, strict=True)
        ],
        weight_bytes=[float(stage.parameter_bytes) for stage in stages],
        gradient_bytes=[float(stage.gradient_bytes) for stage in stages],
        optimizer_bytes=[
            float(stage.optimizer_bytes + stage.buffer_bytes + stage.workspace_bytes) for stage in stages
        ],
        stash_bytes=[float(stage.kept_bytes) for stage in stages],
        rank_speed=speeds,
    )


def _check_memory(one: Rehearsed, cluster: Cluster) -> None:
    """An emulated device stays within its memory: what would not fit there is not run here."""
    program = one.plan.program(2 if one.plan.num_microbatches >= one.plan.num_stages else 1)
    for replica, costs in enumerate(one.costs):
        for rank in range(program.num_ranks):
            peak_bytes = resident(program, rank, costs.sizes()).peak_bytes
            placed = cluster.devices()[one.devices[rank][replica]]
            if peak_bytes > placed.device.memory_bytes:
                raise BiremeError(
                    f"Rank {rank} of the plan takes {peak_bytes:,.0f} bytes, and {placed.name} has "
                    f"{placed.device.memory_bytes:,}. Recompute its stage, give it fewer units, or put it on "
                    "a device with more memory."
                )


class _PlannedStage(EmulatedStage):
    """A stage whose pace is that of whole micro-batches of `size` samples; of half of one it is half."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__(StagePace(0.0, 0.0), is_first=is_first)
        self.whole = StagePace(0.0, 0.0)
        self.recompute_s: float | None = None
        self.size: int | None = None

    def forward(self, given: Tensor) -> Tensor:
        """The same numbers, later. Of a stage that runs again, the second forward has gradients."""
        share = 1.0 if self.size is None else min(len(given) / self.size, 1.0)
        forward_s = self.whole.forward_s
        if self.recompute_s is not None and torch.is_grad_enabled():
            forward_s = self.recompute_s
        self.pace = StagePace(forward_s * share, self.whole.backward_s * share)
        return super().forward(given)


def stage_model(one: Rehearsed, rank: int) -> EmulatedModel:
    """The modules of all stages, those of a rank at its device's pace."""
    plan = one.plan
    replica, place = divmod(rank, len(one.devices))
    modules = tuple(_PlannedStage(is_first=stage == 0) for stage in range(plan.num_stages))
    graph = chain(modules, {INPUT: torch.ones(1, FEATURES)}, loss=square_loss, name="rehearsed")
    costs = one.costs[replica]
    speed = costs.rank_speed[place]
    slices = plan.source.num_sliced > 0
    for stage, module in enumerate(modules):
        module.whole = StagePace(costs.forward_s[stage] / speed, costs.backward_s[stage] / speed)
        module.recompute_s = costs.recompute_s[stage] / speed if stage in plan.recompute else None
        module.size = one.sizes[replica] if slices else None
    return EmulatedModel(modules, graph, chain_resolver(graph, modules, loss=square_loss))


class _SleepingSGD(SGD):
    """Steps that take their time."""

    def __init__(self, named: NamedTensors, seconds: float) -> None:
        super().__init__(named, lr=1e-3)
        self._seconds = seconds

    def step(self, closure: Any = None) -> Any:
        """Step, and be done when the device would be."""
        begin_s = time.perf_counter()
        made = super().step(closure)
        time.sleep(max(begin_s + self._seconds - time.perf_counter(), 0.0))
        return made


@dataclass(frozen=True, slots=True)
class _SleepingFactory:
    """Makes the optimizer of each stage, which it knows by the names of its parameters."""

    update_s: tuple[float, ...]

    def __call__(self, named: NamedTensors) -> Optimizer:
        stage = int(named[0][0].partition(".")[0])
        return _SleepingSGD(named, self.update_s[stage])


def sleeping_sgd(one: Rehearsed, rank: int) -> _SleepingFactory:
    """The optimizers of a rank's stages."""
    replica, place = divmod(rank, len(one.devices))
    costs = one.costs[replica]
    return _SleepingFactory(tuple(seconds / costs.rank_speed[place] for seconds in costs.update_s))
