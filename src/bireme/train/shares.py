"""The shares of a run: whether they follow the replicas' speed, what they begin with, what memory allows.

Preparation asks once, so that shares that cannot be are refused before any process starts; every rank asks
again and finds the same.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from bireme.balance import Policy, ShareLimits, Shares, SlowStage, StageWatch, in_proportion, limits_of
from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.machines.orders import phase_of
from bireme.plan.forecast import StageForecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.profile.profile import Profile
from bireme.profile.stages import stage_cost
from bireme.runtime.balancer import Sharing
from bireme.runtime.updates import BatchResult
from bireme.schedule.source import ProgramSource
from bireme.train.data.samples import Samples
from bireme.train.run_file import RunFile

# What a run notes of its replicas while it trains: changes of shares, and stages that have become slow.


def sample_seconds(plan: Plan, profile: Profile | None) -> list[float] | None:
    """How long the passes of a sample should keep each stage busy on a device of speed 1; None where nothing
    was profiled, as for a plan from a file.
    """
    if profile is None:
        return None
    size = max(profile.micro_batches)
    bounds = (0, *plan.cuts, len(profile.units))
    found = []
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        cost = stage_cost(profile, begin, end, size)
        again_s = cost.forward_s if stage in plan.source.recomputed else 0.0
        found.append((cost.forward_s + cost.backward_s + again_s) / size)
    return found


def stage_watch_of(plan: Plan, cluster: Cluster, sample_s: Sequence[float] | None) -> StageWatch | None:
    """What watches the ranks of a plan whose stages should take so long for a sample, if that is known.

    What ends a batch is no part of it, for it does not depend on shares.
    """
    if sample_s is None or not plan.devices:
        return None
    speeds = {placed.name: placed.device.speed for placed in cluster.devices()}
    ranks = range(len(plan.rank_devices))
    of_rank = [sum(sample_s[stage] for stage in plan.source.stages_of(rank)) for rank in ranks]
    expected_s = [
        of_rank[rank] / speeds.get(row[replica], 1.0)
        for replica in range(plan.width)
        for rank, row in enumerate(plan.rank_devices)
    ]
    return StageWatch(expected_s, len(ranks), plan.process_devices) if min(expected_s) > 0 else None


class ReplicaNotes:
    """Notes what every batch says of the replicas. Only rank 0 tells anything; what is decided is the same on
    all ranks.
    """

    def __init__(
        self, watch: StageWatch | None, tell: Callable[..., None], *, may_replan: bool, is_weighed: bool
    ) -> None:
        """If the run `may_replan`, it ends for the sake of a slow stage. If `is_weighed`, the coordinator
        decides whether it does.
        """
        self._watch = watch
        self._tell = tell
        self._may_replan, self._is_weighed = may_replan, is_weighed
        self._num_slow = 0
        self._shares: Shares = ()
        self.slow: SlowStage | None = None
        """The stage for whose sake a new plan is to be made."""

    def note(self, result: BatchResult, source: ProgramSource) -> str | None:
        """Take notice of a batch; gives a warning if there is one."""
        if result.shares != self._shares and len(result.shares) > 1:
            self._tell("shares", result.batch, shares=list(result.shares))
        self._shares = result.shares
        if self._watch is None or not result.busy_s:
            return None
        slow = self._watch.note(result.shares, result.busy_s)
        if slow is not None or len(self._watch.slow) != self._num_slow:
            self._num_slow = len(self._watch.slow)
            self._tell("slow", result.batch, stages=[asdict(one) for one in self._watch.slow.values()])
        if slow is None:
            return None
        self.slow = slow if self._may_replan else None
        how = "is made with balance.replan = true"
        if self._may_replan:
            how = "is made at the next checkpoint"
        elif self._is_weighed:
            how = "is weighed once that has lasted for elastic.patience_s"
        return _text(slow, source, how)


def _text(slow: SlowStage, source: ProgramSource, how: str) -> str:
    """Which stage is slow, where and by how much, what a new plan would give, and how to have one."""
    stages = " and ".join(map(str, source.stages_of(slow.pipeline_rank)))
    where = f"on {slow.device} (replica {slow.replica}, rank {slow.rank})"
    what = f"Stage {stages} {where} takes {slow.times:.1f} times as long"
    gain = f"a new plan could save up to {slow.saves:.0%} of a step's time"
    return f"{what} as planned, compared with the other stages: {gain}. It {how}."


def as_slow_as_found(cluster: Cluster, before: Cluster, plan: Plan, log: Path) -> Cluster:
    """The cluster with the speeds that a phase before has found: those that it was planned with, of the
    devices `before`, and those of the stages that its log has as slow.
    """
    speeds = {placed.name: placed.device.speed for placed in before.devices()}
    for slow in _slow_stages(log):
        name = plan.devices[slow.pipeline_rank][slow.replica]
        speeds[name] = speeds.get(name, 1.0) / slow.times
    return _with_speeds(cluster, speeds)


def _with_speeds(cluster: Cluster, speeds: Mapping[str, float]) -> Cluster:
    """The cluster with other speeds of these devices."""
    names, servers = iter(placed.name for placed in cluster.devices()), []
    for server in cluster.servers:
        devices = (replace(one, speed=speeds.get(next(names), one.speed)) for one in server.devices)
        servers.append(replace(server, devices=tuple(devices)))
    return replace(cluster, servers=tuple(servers))


def _slow_stages(log: Path) -> list[SlowStage]:
    """The slow stages by the last line of a log, since the run was started for the last time."""
    found: list[SlowStage] = []
    with suppress(OSError), log.open(encoding="utf-8") as lines:
        for line in lines:
            if '"kind": "start"' in line:
                found = []
            elif '"kind": "slow"' in line:
                found = _SLOW_STAGES.validate_python(json.loads(line)["stages"])
    return found


_SLOW_STAGES = TypeAdapter(list[SlowStage])


def slowed(cluster: Cluster, plan: Plan, found: SlowStage) -> Cluster:
    """The cluster with the device of a slow stage as slow as it was found to be."""
    name = plan.devices[found.pipeline_rank][found.replica]
    speed = cluster.devices()[cluster.number_of(name)].device.speed
    return _with_speeds(cluster, {name: speed / found.times})


_Mode = Literal["off", "start", "measured"]

_MOST_GROWN = 256
"""Samples of the largest micro-batch that a batch may grow to."""


def mode_of(run: RunFile, plan: Plan, cluster: Cluster) -> _Mode:
    """How shares follow speeds: by measuring, if replicas are on unequal devices and the run says nothing. So
    are the stages of one replica on machines that have joined, which may be slower than was planned.
    """
    if run.balance.mode is not None:
        return run.balance.mode
    if run.balance.batch == "grow":
        return "measured"
    has_joined = bool(phase_of(os.environ)) and run.sync.mode == "allreduce"
    if has_joined and plan.width == 1 < len(plan.process_devices):
        return "measured"
    speeds = {placed.name: placed.device.speed for placed in cluster.devices()}
    is_unequal = any(len({speeds.get(name) for name in row}) > 1 for row in plan.devices)
    return "measured" if is_unequal and plan.width > 1 else "off"


def measures_first(run: RunFile, plan: Plan, cluster: Cluster) -> bool:
    """Whether every replica is measured before the first step."""
    return mode_of(run, plan, cluster) == "start" or run.balance.batch == "grow"


def sharing_of(
    run: RunFile, saved: SavedPlan, cluster: Cluster, profile: Profile | None, samples: Samples
) -> Sharing | None:
    """How a run's batches are shared out; None where they are as the plan has it, and nothing is measured.

    With one replica there is nothing to share out, but it can be seen whether one of its stages is slow.
    """
    plan, mode = saved.plan, mode_of(run, saved.plan, cluster)
    if mode == "off":
        return None
    if plan.width == 1 and (mode == "start" or run.balance.batch == "grow"):
        key = 'mode = "start"' if mode == "start" else 'batch = "grow"'
        raise BiremeError(
            f"balance.{key} has no effect: the plan has one replica, so there are no shares. Leave it out, "
            "or set plan.width."
        )
    batch_size = run.training.batch_size
    limits = share_limits(saved, profile, batch_size, grows=run.balance.batch == "grow")
    limits.check(batch_size)
    policy = Policy(run.balance.margin, run.balance.every_steps)
    return Sharing(
        # The shares that the plan has, which may not know of this size of a batch.
        first=in_proportion(batch_size, plan.micro_batch_sizes or (1,) * plan.width, limits),
        limits=limits,
        policy=policy if mode == "measured" and plan.width > 1 else None,
        # Samples that only have to be read are read by the pipeline. Others are made ahead of time, as many
        # batches as may be ready or under way.
        lead=0 if samples.is_quick else run.data.prefetch + run.data.num_workers,
    )


def share_limits(saved: SavedPlan, profile: Profile | None, batch_size: int, *, grows: bool) -> ShareLimits:
    """The samples of a batch that each replica can take: one in each micro-batch, and what memory holds."""
    plan, forecast = saved.plan, saved.forecast
    least = 2 if plan.source.num_sliced else 1
    most = _MOST_GROWN if grows else ceil(batch_size / plan.num_microbatches)
    planned = batch_size if forecast is None else round(forecast.samples_per_s * forecast.batch_s)
    sizes = plan.micro_batch_sizes or (ceil(planned / (plan.width * plan.num_microbatches)),) * plan.width
    held = [_most_held(saved, profile, replica, size) for replica, size in enumerate(sizes)]
    return limits_of(
        plan.num_microbatches,
        [int(max(least, min(most, one))) for one in held],
        least_per_microbatch=least,
    )


def _most_held(saved: SavedPlan, profile: Profile | None, replica: int, size: int) -> float:
    """The samples of a micro-batch that the memory of a replica's devices holds; no limit is known of a plan
    without a forecast.

    A forecast is for micro-batches of one size. What a stage holds whatever the size is known only in part,
    so all else is taken to grow with it, which is more than it does.
    """
    stages = () if saved.forecast is None else saved.forecast.stages
    return min((_most_of_stage(stage, profile, replica, size) for stage in stages), default=inf)


def _most_of_stage(stage: StageForecast, profile: Profile | None, replica: int, size: int) -> float:
    _, peak_bytes, limit_bytes = list(stage.bytes_of_devices())[replica]
    fixed_bytes = min(_fixed_bytes(stage, profile), peak_bytes)
    if peak_bytes <= fixed_bytes or not limit_bytes:
        return inf
    return max(size * (limit_bytes - fixed_bytes) // (peak_bytes - fixed_bytes), size)


def _fixed_bytes(stage: StageForecast, profile: Profile | None) -> float:
    """What a stage holds at the least, however large its micro-batches are."""
    if profile is None:
        return stage.process_bytes
    cost = stage_cost(profile, stage.begin, stage.end, profile.micro_batches[0])
    return stage.process_bytes + cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes
