"""Rehearse plans: run them with the real engine on emulated devices and links, on this one machine.

Every device is a process that sleeps for as long as its stage would compute. Its weights, schedule,
messages and sums over replicas are the engine's own, and come through the cluster's lanes when they would
there. What is measured is what a planner predicts: order, overlap and waiting. Tied weights are not
rehearsed: stages share none here.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.verdicts import Spread
from benchmarks.engine_bench.contenders import Contender, Ours, closing, say, take_turns
from benchmarks.rehearsal.lanes import SharedLanes
from benchmarks.rehearsal.rehearsed import Rehearsed, rehearsed, simulated_s, sleeping_sgd, stage_model
from benchmarks.rehearsal.shaped import ShapedFabric, Wiring, wiring_of
from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from bireme.schedule.program import Rule

__all__ = ["Effort", "Rehearsal", "rehearse"]


@dataclass(frozen=True, slots=True)
class Effort:
    """`counted` batches in the steady state make one figure, of which there are `rounds`."""

    counted: int = 4
    rounds: int = 3

    def __post_init__(self) -> None:
        if min(self.counted, self.rounds) < 1:
            raise BiremeError("A rehearsal counts one batch and one round at least.")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What became of a plan: measured seconds of a batch, round by round, and what the simulator says."""

    plan: Plan
    batch_size: int
    rounds_s: tuple[float, ...]
    simulated_s: float

    @property
    def measured_s(self) -> Spread:
        """Seconds of a batch."""
        return Spread.of(self.rounds_s)

    @property
    def error(self) -> float:
        """By which part of the measured time the simulator misses it."""
        return self.simulated_s / self.measured_s.median - 1


def rehearse(
    profile: Profile,
    cluster: Cluster,
    plans: Sequence[Plan],
    *,
    micro_batches: Sequence[int] = (),
    effort: Effort | None = None,
    timeout_s: float = 120.0,
    value_bytes: int = 4,
) -> list[Rehearsal]:
    """Run plans on an emulated cluster, in turns, round by round.

    A plan names its devices, or runs on the first ones. `micro_batches` are the sizes for plans that do not
    say theirs. Plans of as many processes take turns in one run, so that their times can be compared.
    """
    effort = effort or Effort()
    _check(cluster, plans)
    if micro_batches and len(micro_batches) != len(plans):
        raise BiremeError(f"{len(micro_batches)} sizes of micro-batches are given for {len(plans)} plans.")
    sizes = list(micro_batches) or [profile.micro_batches[0]] * len(plans)
    ready = [
        rehearsed(profile, cluster, plan, size, value_bytes=value_bytes)
        for plan, size in zip(plans, sizes, strict=True)
    ]
    rounds_s: dict[int, tuple[float, ...]] = {}
    for num_ranks in sorted({one.plan.num_ranks for one in ready}):
        places = [place for place, one in enumerate(ready) if one.plan.num_ranks == num_ranks]
        chosen = [ready[place] for place in places]
        wirings = [wiring_of(cluster, one.plan, one.devices) for one in chosen]
        with tempfile.TemporaryDirectory(prefix="bireme-lanes-") as folder:
            paths = [Path(folder) / str(place) for place in places]
            for path in paths:
                SharedLanes.make(path)
            by_rank = launch(
                _run, num_ranks, chosen, wirings, paths, effort, threads_per_process=1, timeout_s=timeout_s
            )
        for index, place in enumerate(places):
            # The slowest rank's batch is the pipeline's.
            of_plan = zip(*(seconds[index] for seconds in by_rank), strict=True)
            rounds_s[place] = tuple(max(same) for same in of_plan)
    return [
        Rehearsal(one.plan, one.batch_size, rounds_s[place], simulated_s(one, cluster))
        for place, one in enumerate(ready)
    ]


def _check(cluster: Cluster, plans: Sequence[Plan]) -> None:
    if not plans:
        raise BiremeError("There is no plan to rehearse; give at least one.")
    real = [placed for placed in cluster.devices() if placed.device.kind != "emulated"]
    if real:
        raise BiremeError(
            f"{real[0].name} is a device of kind {real[0].device.kind}; only emulated ones are rehearsed. "
            'Give every device of the cluster the kind "emulated", and its speed relative to the one that '
            "was profiled."
        )
    for plan in plans:
        if plan.source.rule is Rule.STASHED:
            raise BiremeError(f"The engine does not run {plan.schedule}, so it cannot be rehearsed.")


def _run(
    world: World,
    ready: Sequence[Rehearsed],
    wirings: Sequence[Wiring],
    paths: Sequence[Path],
    effort: Effort,
) -> list[list[float]]:
    """On every rank: what a batch of each plan took, round by round."""
    say(world, f"rehearsing {len(ready)} plans on {world.size} emulated devices")
    world.join_torch()
    joined = DistFabric(world)
    contenders: list[Contender] = []
    all_lanes = []
    for one, wiring, path in zip(ready, wirings, paths, strict=True):
        lanes = SharedLanes(path, wiring.bytes_per_s, wiring.channels)
        all_lanes.append(lanes)
        model = stage_model(one, world.rank)
        replica = world.rank // len(one.devices)
        num_elements = [sum(p.numel() for p in module.parameters()) for module in model.modules]
        fabric = ShapedFabric(joined, one.plan, wiring, one.costs[replica], lanes, num_elements)
        pipeline = Pipeline(
            model.graph,
            one.engine_plan,
            fabric,
            weights=model.weights,
            optimizer=sleeping_sgd(one, world.rank),
            settings=PipelineSettings(resolve=model.resolve),
        )
        contenders.append(Ours(one.plan.schedule, pipeline, model.batch(one.batch_size)))
    with closing(contenders):
        seconds = take_turns(contenders, counted=effort.counted, rounds=effort.rounds).seconds
    for lanes in all_lanes:
        lanes.close()
    return seconds
