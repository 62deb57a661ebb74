"""What a run that waits for its chunks says: which wire between tiers limits it, and how fast that was."""

from collections.abc import Sequence

from bireme.cluster.cluster import Cluster
from bireme.cluster.tiers import tier_share
from bireme.plan.plan import Plan
from bireme.report.units import rate_text
from bireme.runtime.paging.rank_paging import TierMoves
from bireme.train.outcome import Outcome

__all__ = ["slow_tiers"]

LONG = 0.1
"""The share of the time for which ranks may wait for chunks without a word."""

REMEDY = {
    "disk": "A faster disk, a larger memory.host or a larger memory.device would help",
    "host": "A larger memory.device would help",
}


def slow_tiers(plan: Plan, cluster: Cluster, outcomes: Sequence[Outcome]) -> list[str]:
    """One sentence about the rank that waits the longest, if any waits for long."""
    waiting = max(outcomes, key=lambda one: _waited_share(one.own.tiers), default=None)
    if waiting is None or _waited_share(waiting.own.tiers) < LONG:
        return []
    rank, (device, *lower) = waiting.own.rank, waiting.own.tiers
    slowest = max(lower, key=lambda tier: tier.copied_s)
    if not slowest.copied_s:
        return []
    planned = rate_text(_planned(plan, cluster, rank, slowest.tier))
    measured = rate_text(slowest.copied_bytes / slowest.copied_s)
    return [
        f"Rank {rank} waited for chunks for {device.waited_s / device.window_s:.0%} of its "
        f"{device.window_s:.3g} s of training, and the {slowest.tier} is what limits: copies to and from it "
        f"ran at {measured}, where the plan counts on {planned}. {REMEDY[slowest.tier]}."
    ]


def _waited_share(tiers: Sequence[TierMoves]) -> float:
    return tiers[0].waited_s / tiers[0].window_s if tiers and tiers[0].window_s else 0.0


def _planned(plan: Plan, cluster: Cluster, rank: int, tier: str) -> float:
    """The bytes per second that a plan counts on between a tier and the one above."""
    replica, of_pipeline = divmod(rank, plan.source.num_ranks)
    places = {device.name: index for index, device in enumerate(cluster.devices())}
    used = [places[name] for row in plan.devices for name in row if name in places] or list(places.values())
    name = plan.devices[of_pipeline][replica] if plan.devices else ""
    share = tier_share(cluster, places.get(name, rank), used)
    return share.disk_bytes_per_s if tier == "disk" else share.host_bytes_per_s
