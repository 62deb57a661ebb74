"""What a plan promises: seconds, bytes, and what limits it; and the plans a search found, best first."""

from dataclasses import dataclass

from bireme.plan.plan import Plan

__all__ = ["Answer", "Candidate", "Forecast", "Origin", "StageForecast"]


@dataclass(frozen=True, slots=True)
class StageForecast:
    """A stage: the units from `begin` up to but without `end`, on one device of each replica.

    `busy_s` is for how long a batch keeps the slowest of them busy. `peak_bytes` and `limit_bytes` are those
    of the device that has least left.
    """

    begin: int
    end: int
    devices: tuple[str, ...]
    recompute: bool
    busy_s: float
    peak_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The seconds of a batch in the middle of a run, and who is busy meanwhile.

    `penalty` is how many steps the update rule takes for one of a synchronous run, so that plans compare by
    `cost_s_per_sample`. `busy_share` is the mean over the devices in use. `bottleneck` names the device or
    link that sets the pace.
    """

    batch_s: float
    samples_per_s: float
    penalty: float
    busy_share: float
    bottleneck: str
    stages: tuple[StageForecast, ...]

    @property
    def cost_s_per_sample(self) -> float:
        """Seconds of training for what a sample of a synchronous run is worth."""
        return self.penalty / self.samples_per_s


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
    batch_size: int
    how: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search found: plans that fit, the best first, with the best of every kind of schedule among
    them.
    """

    candidates: tuple[Candidate, ...]
    origin: Origin
    num_tried: int

    @property
    def best(self) -> Candidate:
        """The plan to run."""
        return self.candidates[0]
