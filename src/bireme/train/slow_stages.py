"""What a run notes of its replicas while it trains: changes of shares, and stages that have become slow."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from bireme.balance.shares import Shares
from bireme.balance.slow_stage import SlowStage, StageWatch
from bireme.cluster.cluster import Cluster
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.profile.stages import stage_cost
from bireme.runtime.result import BatchResult
from bireme.schedule.source import ProgramSource

__all__ = ["ReplicaNotes", "sample_seconds", "slowed", "stage_watch_of"]


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
    ranks = range(len(plan.devices))
    of_rank = [sum(sample_s[stage] for stage in plan.source.stages_of(rank)) for rank in ranks]
    expected_s = [
        of_rank[rank] / speeds.get(row[replica], 1.0)
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

    def note(self, result: BatchResult, source: ProgramSource) -> str | None:
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
    return f"{what} as planned, compared with the other stages: {gain}. It {how}."


def slowed(cluster: Cluster, plan: Plan, found: SlowStage) -> Cluster:
    """The cluster with the device of a slow stage as slow as it was found to be."""
    slow = cluster.devices()[cluster.number_of(plan.devices[found.pipeline_rank][found.replica])]
    servers = list(cluster.servers)
    server = servers[slow.server]
    devices = list(server.devices)
    devices[slow.place] = replace(slow.device, speed=slow.device.speed / found.times)
    servers[slow.server] = replace(server, devices=tuple(devices))
    return replace(cluster, servers=tuple(servers))
