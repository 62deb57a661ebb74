"""What a plan promises: seconds, bytes, and what limits it; and the plans a search found, best first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen

from bireme.bounds import Bytes, Count, NumBytes, Place, Positive, Seconds, Share, bytes_text
from bireme.errors import BiremeError
from bireme.plan.energy import joules_per_sample
from bireme.plan.plan import Plan
from bireme.plan.plan_request import Goal

__all__ = [
    "Answer",
    "Candidate",
    "Forecast",
    "MemoryWay",
    "NoRoomError",
    "NothingFits",
    "Origin",
    "StageForecast",
    "TierForecast",
]


@dataclass(frozen=True, slots=True)
class StageForecast:
    """A stage: the units from `begin` up to but without `end`, on one device of each replica.

    `busy_s` is for how long a batch keeps the slowest of them busy. `peak_bytes` and `limit_bytes` are those
    of the device that has least left; `device_peak_bytes` and `device_limit_bytes` those of each.
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

    def bytes_of_devices(self) -> Iterator[tuple[str, float, float]]:
        """Each device with its peak and its limit; where only the tightest is known, that for all."""
        count = len(self.devices)
        peaks = self.device_peak_bytes or (self.peak_bytes,) * count
        return zip(self.devices, peaks, self.device_limit_bytes or (self.limit_bytes,) * count, strict=True)


@dataclass(frozen=True, slots=True)
class TierForecast:
    """One tier of a rank, the same in each replica: what the rank may use of it, and what it does.

    `predicted_bytes_moved` are the bytes copied into the tier in a batch. `waited_s`, of the device's tier,
    is for how long the rank waits for chunks in a batch.
    """

    rank: Place
    tier: str
    budget_bytes: Bytes | None
    peak_bytes: NumBytes
    predicted_bytes_moved: NumBytes
    waited_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The seconds of a batch in the middle of a run, and who is busy meanwhile.

    `penalty` is how many steps the update rule takes for one of a synchronous run, so that plans compare by
    `cost_s_per_sample`; with `delay_warmup`, the share of a run that goes under 1f1b before updates are
    delayed, it counts the bubble of these batches too. `codec_penalty` is the part of it that codecs on
    borders cost, `sum_penalty` that of a codec of sums over replicas. `busy_share` is the mean over the
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
    tiers: tuple[TierForecast, ...] = ()

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it promises; `fits` where every device has the memory for it."""

    plan: Plan
    forecast: Forecast

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return all(stage.peak_bytes <= stage.limit_bytes for stage in self.forecast.stages)


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
class Answer:
    """What a search found: plans that fit, the best first, with the best of every kind of schedule among
    them.
    """

    candidates: tuple[Candidate, ...]
    origin: Origin
    num_tried: int
    memory_ways: tuple[MemoryWay, ...] = ()
    """Where paging was allowed and not all fits: what each way to save memory would take."""
    is_exhaustive: bool = False
    """Whether all plans were considered."""

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
