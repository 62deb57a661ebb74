"""A candidate in short: what kind of plan it is, its shape, and what it promises. For lists side by side."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bireme.bounds import Count, Place, Positive, Share
from bireme.plan.forecast import Candidate
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.rule import Rule

__all__ = ["ZERO_BUBBLE", "PlanKind", "PlanSummary", "best_of_kinds", "headroom_bytes", "summarize"]

ZERO_BUBBLE = frozenset({"zb-h1", "zbv"})
"""The schedules that split the backward in two so that nothing waits."""


class PlanShape(Protocol):
    """What the kind of a plan depends on."""

    @property
    def schedule(self) -> str:
        """Its schedule."""

    @property
    def num_stages(self) -> int:
        """How many stages it has."""

    @property
    def width(self) -> int:
        """How many replicas."""


class PlanKind(StrEnum):
    """What a plan is, as people compare plans."""

    DELAYED = "2bw"
    FRESH = "2bw-fresh"
    FLUSH = "flush"
    ZERO_BUBBLE = "zero-bubble"
    ONE_DEVICE = "one device"
    DATA_PARALLEL = "data parallel"
    STASHED = "pipedream"

    @staticmethod
    def of(plan: PlanShape) -> "PlanKind":
        """The kind of a plan, or of all plans of a shape."""
        rule = schedule_named(plan.schedule).rule
        if rule is not Rule.SYNCHRONOUS:
            return OF_DELAY[rule]
        if plan.num_stages == 1:
            return PlanKind.ONE_DEVICE if plan.width == 1 else PlanKind.DATA_PARALLEL
        return PlanKind.ZERO_BUBBLE if plan.schedule in ZERO_BUBBLE else PlanKind.FLUSH


OF_DELAY = {Rule.DELAYED: PlanKind.DELAYED, Rule.FRESH: PlanKind.FRESH, Rule.STASHED: PlanKind.STASHED}


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """`depth` is how many devices a replica has, on which its stages lie; `micro_batch_sizes` has a size for
    each replica. The rest means what it does in plan and forecast.
    """

    kind: PlanKind
    schedule: str
    depth: Count
    width: Count
    num_stages: Count
    micro_batch_sizes: tuple[Count, ...]
    num_microbatches: Count
    num_recomputed: Place
    batch_size: Count
    batch_s: Positive
    samples_per_s: Positive
    penalty: Positive
    cost_s_per_sample: Positive
    busy_share: Share
    bottleneck: str
    joules_per_sample: Positive | None = None


def summarize(candidate: Candidate) -> PlanSummary:
    """A candidate in short."""
    plan, forecast = candidate.plan, candidate.forecast
    batch_size = max(1, round(forecast.samples_per_s * forecast.batch_s))
    equal = -(-batch_size // (plan.width * plan.num_microbatches))
    return PlanSummary(
        kind=PlanKind.of(plan),
        schedule=plan.schedule,
        depth=plan.num_ranks // plan.width,
        width=plan.width,
        num_stages=plan.num_stages,
        micro_batch_sizes=plan.micro_batch_sizes or (equal,) * plan.width,
        num_microbatches=plan.num_microbatches,
        num_recomputed=len(plan.recompute),
        batch_size=batch_size,
        batch_s=forecast.batch_s,
        samples_per_s=forecast.samples_per_s,
        penalty=forecast.penalty,
        cost_s_per_sample=forecast.cost_s_per_sample,
        busy_share=forecast.busy_share,
        bottleneck=forecast.bottleneck,
        joules_per_sample=forecast.joules_per_sample,
    )


def best_of_kinds(candidates: Iterable[Candidate]) -> dict[PlanKind, PlanSummary]:
    """The first candidate of each kind; the candidates come best first."""
    found: dict[PlanKind, PlanSummary] = {}
    for candidate in candidates:
        short = summarize(candidate)
        found.setdefault(short.kind, short)
    return found


def headroom_bytes(candidate: Candidate) -> dict[str, float]:
    """What is left on each device of a plan at its worst moment.

    Several stages of one device each show what is left on it when all are counted.
    """
    found: dict[str, float] = {}
    for stage in candidate.forecast.stages:
        for device, peak_bytes, limit_bytes in stage.bytes_of_devices():
            left = limit_bytes - peak_bytes
            found[device] = min(found.get(device, left), left)
    return found
