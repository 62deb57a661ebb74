"""The shares of a run: whether they follow the replicas' speed, what they begin with, what memory allows.

Preparation asks once, so that shares that cannot be are refused before any process starts; every rank asks
again and finds the same.
"""

from math import ceil, inf
from typing import Literal

from bireme.balance.policy import Policy
from bireme.balance.shares import ShareLimits, Shares, in_proportion, limits_of
from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.forecast import StageForecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.profile.profile import Profile
from bireme.profile.stages import stage_cost
from bireme.runtime.balancer import Sharing
from bireme.train.data.samples import Samples
from bireme.train.run_file import RunFile

__all__ = ["Mode", "measures_first", "mode_of", "share_limits", "sharing_of"]

Mode = Literal["off", "start", "measured"]

MOST_GROWN = 256
"""Samples of the largest micro-batch that a batch may grow to."""


def mode_of(run: RunFile, plan: Plan, cluster: Cluster) -> Mode:
    """How shares follow speeds: by measuring, if replicas are on unequal devices and the run says nothing."""
    if run.balance.mode is not None:
        return run.balance.mode
    if run.balance.batch == "grow":
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
        first=_plain_shares(plan, batch_size, limits),
        limits=limits,
        policy=policy if mode == "measured" and plan.width > 1 else None,
        lead=_lead(run, samples),
    )


def _plain_shares(plan: Plan, batch_size: int, limits: ShareLimits) -> Shares:
    """The shares that a plan has, which may not know of this size of a batch."""
    return in_proportion(batch_size, plan.micro_batch_sizes or (1,) * plan.width, limits)


def _lead(run: RunFile, samples: Samples) -> int:
    """How many batches earlier than the pipeline reads them the shares must be known.

    Samples that only have to be read are read then. Others are made ahead of time, as many batches as may be
    ready or under way.
    """
    return 0 if samples.is_quick else run.data.prefetch + run.data.num_workers


def share_limits(saved: SavedPlan, profile: Profile | None, batch_size: int, *, grows: bool) -> ShareLimits:
    """The samples of a batch that each replica can take: one in each micro-batch, and what memory holds."""
    plan, forecast = saved.plan, saved.forecast
    least = 2 if plan.source.num_sliced else 1
    most = MOST_GROWN if grows else ceil(batch_size / plan.num_microbatches)
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
        return 0.0
    cost = stage_cost(profile, stage.begin, stage.end, profile.micro_batches[0])
    return float(cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes)
