"""What a plan promises: seconds, bytes, and what limits it; and the plans a search found, best first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import MinLen

from bireme.bounds import Bytes, Count, NumBytes, Place, Positive, Seconds, Share, bytes_text, widths_text
from bireme.errors import BiremeError
from bireme.plan.plan import Plan, values_of
from bireme.plan.plan_request import Goal
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.program import Rule

# Energy of a plan: what its devices draw while they train, per sample.
#
# A device in use draws its `watts` for as long as the batch lasts, whether it computes or waits: makers
# publish the power of a board at work and seldom that of one that waits. Devices that a plan does not use
# draw nothing.


def total_watts(watts: Iterable[float]) -> float | None:
    """What some devices draw together; None where that of any is not known, which is 0."""
    each = tuple(watts)
    return sum(each) if each and all(each) else None


def joules_per_sample(watts: float | None, samples_per_s: float) -> float | None:
    """What a sample takes on devices that draw so much together; None where nobody knows that."""
    return None if watts is None else watts / samples_per_s


@dataclass(frozen=True, slots=True)
class StageForecast:
    """A stage: the units from `begin` up to but without `end`, and the device of each of its replicas.

    `busy_s` is for how long a batch keeps the slowest of them busy. `peak_bytes` and `limit_bytes` are those
    of the device that has least left; `device_peak_bytes` and `device_limit_bytes` those of each. Of the
    peak `process_bytes` are not of tensors: what a process holds besides.
    """

    begin: Place
    end: Place
    devices: tuple[str, ...]
    recompute: bool
    busy_s: Seconds
    peak_bytes: NumBytes
    limit_bytes: NumBytes
    device_peak_bytes: tuple[NumBytes, ...] = ()
    device_limit_bytes: tuple[NumBytes, ...] = ()
    process_bytes: NumBytes = 0

    def bytes_of_devices(self) -> Iterator[tuple[str, float, float]]:
        """Each device with its peak and its limit; where only the tightest is known, that for all."""
        count = len(self.devices)
        peaks = self.device_peak_bytes or (self.peak_bytes,) * count
        return zip(self.devices, peaks, self.device_limit_bytes or (self.limit_bytes,) * count, strict=True)


@dataclass(frozen=True, slots=True)
class TierForecast:
    """One tier of a rank, the same in each replica: what the rank may use of it, and what it does.

    `predicted_bytes_moved` are the bytes copied into the tier in a batch. Of the device's tier,
    `gathered_bytes` of them are weights that come from other replicas, and `waited_s` is for how long the
    rank waits for chunks and for these weights in a batch.
    """

    rank: Place
    tier: str
    budget_bytes: Bytes | None
    peak_bytes: NumBytes
    predicted_bytes_moved: NumBytes
    waited_s: Seconds = 0.0
    gathered_bytes: NumBytes = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The seconds of a batch in the middle of a run, and who is busy meanwhile.

    `penalty` is how many steps the update rule takes for one of a synchronous run, so that plans compare by
    `cost_s_per_sample`; with `delay_warmup`, the share of a run that goes under 1f1b before updates are
    delayed, it counts the bubble of these batches too. `codec_penalty` is the part of it that codecs on
    boundaries cost, `sum_penalty` that of a codec of sums over replicas, `agreement_penalty` that of replicas
    that average weights. `busy_share` is the mean over the
    devices in use. `bottleneck` names the device or link that sets the pace. `watts` is what the devices in
    use draw together, None where it is not known. `tiers` are those of the ranks that page, or share weights
    with replicas.
    """

    batch_s: Positive
    samples_per_s: Positive
    penalty: Positive
    busy_share: Share
    bottleneck: str
    stages: Annotated[tuple[StageForecast, ...], MinLen(1)]
    delay_warmup: Share = 0.0
    watts: Positive | None = None
    codec_penalty: Positive = 1.0
    sum_penalty: Positive = 1.0
    agreement_penalty: Positive = 1.0
    tiers: tuple[TierForecast, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def cost_s_per_sample(self) -> float:
        """Seconds of training for what a sample of a synchronous run is worth."""
        return self.penalty / self.samples_per_s

    def cost(self, goal: Goal) -> float:
        """What plans are compared by: these seconds, or where energy is the goal their joules."""
        power = self.watts if goal is Goal.ENERGY else None
        return self.cost_s_per_sample * (power or 1.0)

    @property
    def joules_per_sample(self) -> float | None:
        """What a sample takes of energy; None where the watts are not known."""
        return joules_per_sample(self.watts, self.samples_per_s)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return all(stage.peak_bytes <= stage.limit_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it promises."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plan comes from: what was given, as hashes of it, and how it was found."""

    graph: str
    profile: str
    cluster: str
    batch_size: Count
    how: str


@dataclass(frozen=True, slots=True)
class MemoryWay:
    """A way to live with the memory there is, and the best plan that goes it; None where none fits, for the
    reason that `refusal` gives.
    """

    words: str
    candidate: "Candidate | None"
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ConsideredWay:
    """Codecs and an agreement that the planner could choose, and the best plan with them; None for the reason
    in `refusal`. `codecs` names the codecs of boundaries. In a batch, `link_bytes` cross the slowest link.
    """

    codecs: str
    sum_codec: str
    mode: str
    candidate: "Candidate | None" = None
    refusal: str = ""
    link: str = ""
    link_bytes: NumBytes = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search found: plans that fit, the best first, with the best of every kind of schedule among
    them.
    """

    candidates: tuple[Candidate, ...]
    origin: Origin
    num_tried: int
    memory_ways: tuple[MemoryWay, ...] = ()
    """Where paging was allowed and not all fits: what each way to save memory would take."""
    shard_ways: tuple[MemoryWay, ...] = ()
    """If the planner chose what replicas share: the best plan for each choice."""
    ways: tuple[ConsideredWay, ...] = ()
    """If the planner chose codecs or how replicas agree: the best plan of each way, the chosen one first."""
    is_exhaustive: bool = False
    """Whether all plans were considered, of equal widths unless others were asked for."""

    @property
    def best(self) -> Candidate:
        """The plan to run."""
        return self.candidates[0]


class NoRoomError(BiremeError):
    """Nothing that was tried fits the devices, also with what may be paged or shared."""


@dataclass(frozen=True, slots=True)
class NothingFits:
    """That no plan fits, and why: of all plans the one whose worst device misses least.

    Its `stage` misses most, `missing_bytes` on `device`. `advice` are sentences on the changes that would
    make a plan fit, if they were asked for. `is_exhaustive` says whether all plans were considered.
    """

    schedule: str
    depth: int
    width: int
    micro_batch: int
    stages: tuple[StageForecast, ...]
    stage: int
    device: str
    missing_bytes: float
    advice: str = ""
    is_exhaustive: bool = False

    def __str__(self) -> str:
        worst = self.stages[self.stage]
        needs, has = bytes_text(worst.peak_bytes), bytes_text(worst.limit_bytes)
        return (
            f"No plan fits. The nearest one ({self.schedule}, depth {self.depth}, micro-batches of "
            f"{self.micro_batch}) needs {needs} for stage {self.stage} (units {worst.begin} to "
            f"{worst.end - 1}) on {self.device}, which has only {has}: {bytes_text(self.missing_bytes)} are "
            f"missing.{self.advice}"
        )


# A candidate in short: what kind of plan it is, its shape, and what it promises. For lists side by side.

ZERO_BUBBLE = frozenset({"zb-h1", "zbv"})
"""The schedules that split the backward in two so that nothing waits."""


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
    def of(schedule: str, num_stages: int, width: int) -> "PlanKind":
        """The kind of a plan with this schedule, stages and replicas."""
        rule = schedule_named(schedule).rule
        if rule is not Rule.SYNCHRONOUS:
            return _OF_DELAY[rule]
        if num_stages == 1:
            return PlanKind.ONE_DEVICE if width == 1 else PlanKind.DATA_PARALLEL
        return PlanKind.ZERO_BUBBLE if schedule in ZERO_BUBBLE else PlanKind.FLUSH


_OF_DELAY = {Rule.DELAYED: PlanKind.DELAYED, Rule.FRESH: PlanKind.FRESH, Rule.STASHED: PlanKind.STASHED}


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """`depth` is how many devices a replica has, on which its stages lie, or the number of stages if these
    are of unequal width; `micro_batch_sizes` has a size for each replica. The rest means what it does in plan
    and forecast.
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
    assumptions: tuple[str, ...] = ()
    stage_widths: tuple[Count, ...] = ()

    @property
    def shape(self) -> str:
        """Such as `4×2`: devices of a replica and replicas; of unequal widths `3-1`, the replicas of each
        stage.
        """
        return widths_text(self.stage_widths) or f"{self.depth}×{self.width}"


def summarize(candidate: Candidate) -> PlanSummary:
    """A candidate in short."""
    plan, forecast = candidate.plan, candidate.forecast
    batch_size = max(1, round(forecast.samples_per_s * forecast.batch_s))
    equal = -(-batch_size // (plan.width * plan.num_microbatches))
    return PlanSummary(
        kind=PlanKind.of(plan.schedule, plan.num_stages, plan.width),
        depth=plan.num_stages if plan.stage_widths else plan.num_ranks // plan.width,
        micro_batch_sizes=plan.micro_batch_sizes or (equal,) * plan.width,
        num_recomputed=len(plan.recompute),
        batch_size=batch_size,
        **values_of(plan, ("schedule", "width", "num_stages", "num_microbatches", "stage_widths")),
        **values_of(forecast, _OF_FORECASTS),
    )


_OF_FORECASTS = (
    *("batch_s", "samples_per_s", "penalty", "cost_s_per_sample", "busy_share", "bottleneck"),
    *("joules_per_sample", "assumptions"),
)


def best_of_kinds(candidates: Iterable[Candidate]) -> dict[PlanKind, PlanSummary]:
    """The first candidate of each kind; the candidates come best first."""
    found: dict[PlanKind, PlanSummary] = {}
    for candidate in candidates:
        short = summarize(candidate)
        found.setdefault(short.kind, short)
    return found


@dataclass(frozen=True, slots=True)
class TightestDevice:
    """The device of a plan with the smallest share of free memory, how much that is, and the plan's limit."""

    name: str
    left_bytes: float
    limit_bytes: float


def tightest_device(candidate: Candidate) -> TightestDevice:
    """Of all devices of a plan, at their worst moments."""
    left = headroom_bytes(candidate)
    limits = {
        device: limit_bytes
        for stage in candidate.forecast.stages
        for device, _, limit_bytes in stage.bytes_of_devices()
    }
    least = min(left, key=lambda name: left[name] / limits[name])
    return TightestDevice(least, left[least], limits[least])


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
