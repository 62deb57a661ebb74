"""What a run notes of its replicas while it trains: changes of shares, and stages that have become slow."""

from collections.abc import Callable
from dataclasses import replace

from bireme.balance.shares import Shares
from bireme.balance.slow_stage import SlowStage, StageWatch
from bireme.cluster.cluster import Cluster
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.runtime.result import Result
from bireme.schedule.source import ProgramSource

__all__ = ["ReplicaNotes", "slowed", "stage_watch_of"]


def stage_watch_of(saved: SavedPlan, cluster: Cluster) -> StageWatch | None:
    """What watches the ranks of a plan; None without a forecast, as of a plan made by hand."""
    plan, forecast = saved.plan, saved.forecast
    if forecast is None or not plan.devices:
        return None
    speeds = {placed.name: placed.device.speed for placed in cluster.devices()}
    ranks = plan.source.rank_of_stage
    sizes = plan.micro_batch_sizes or (1,) * plan.width
    work = []
    for rank, row in enumerate(plan.devices):
        own = [stage.busy_s for stage, of in zip(forecast.stages, ranks, strict=True) if of == rank]
        # The forecast is of the slowest device; this is for one of speed 1.
        slowest = max(size / speeds.get(name, 1.0) for size, name in zip(sizes, row, strict=True))
        work.append(sum(own) / slowest)
    expected_s = [
        work[rank] / speeds.get(row[replica], 1.0)
        for replica in range(plan.width)
        for rank, row in enumerate(plan.devices)
    ]
    return StageWatch(expected_s, len(plan.devices)) if min(expected_s) > 0 else None


class ReplicaNotes:
    """Notes what every batch says of the replicas. Only rank 0 tells anything; what is decided is the same on
    all ranks.
    """

    def __init__(self, watch: StageWatch | None, tell: Callable[..., None], *, may_replan: bool) -> None:
        self._watch = watch
        self._tell = tell
        self._may_replan = may_replan
        self._shares: Shares = ()
        self.slow: SlowStage | None = None
        """The stage for whose sake a new plan is to be made."""

    def note(self, result: Result, source: ProgramSource) -> str | None:
        """Take notice of a batch; gives a warning if there is one."""
        if result.shares != self._shares and len(result.shares) > 1:
            self._tell("shares", result.batch, shares=list(result.shares))
        self._shares = result.shares
        if self._watch is None or not result.busy_s:
            return None
        slow = self._watch.note(result.shares, result.busy_s)
        if slow is None:
            return None
        self.slow = slow if self._may_replan else None
        return _text(slow, source, replans=self._may_replan)


def _text(slow: SlowStage, source: ProgramSource, *, replans: bool) -> str:
    """Which stage is slow and by how much, what a new plan would give, and how to have one."""
    stages = " and ".join(map(str, source.stages_of(slow.pipeline_rank)))
    what = f"Stage {stages} of replica {slow.replica} (rank {slow.rank}) takes {slow.times:.1f} times as long"
    gain = f"a new plan could save up to {slow.saves:.0%} of a step's time"
    how = "is made at the next checkpoint" if replans else "is made with balance.replan = true"
    return f"{what} as planned, beside the other stages: {gain}. It {how}."


def slowed(cluster: Cluster, plan: Plan, found: SlowStage) -> Cluster:
    """The cluster with the device of a slow stage as slow as it was found to be."""
    slow = cluster.devices()[cluster.number_of(plan.devices[found.pipeline_rank][found.replica])]
    servers = list(cluster.servers)
    server = servers[slow.server]
    devices = list(server.devices)
    devices[slow.place] = replace(slow.device, speed=slow.device.speed / found.times)
    servers[slow.server] = replace(server, devices=tuple(devices))
    return replace(cluster, servers=tuple(servers))
