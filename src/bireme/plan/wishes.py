"""What a user wants of a plan, and what he does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bireme.errors import BiremeError
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import START, steps_for_one, unseen_share
from bireme.schedule.rule import Rule

__all__ = ["Goal", "Wishes"]


class Goal(StrEnum):
    """What makes a plan the best."""

    TIME_TO_LOSS = "time-to-loss"
    """Seconds per sample, times the steps that its update rule takes for one of a synchronous run."""
    THROUGHPUT = "throughput"
    """Seconds per sample."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """`batch_size` samples are a step; with `largest_batch` more may be, up to so many.

    `schedule` is a name, or auto for all that the engine runs. `synchronous` forbids delayed updates.
    `penalties` are what the user has measured, in the place of ours. `start` is the share of the run that
    goes under 1f1b before updates are delayed; without, it is `START` where the planner has the choice of
    the schedule, and none where the user has made it.
    `memory_fraction` of each device is for the plan. `depth`, `width` and `micro_batch` fix what they name.
    `pinned` says on which device a unit must be, `together` names first and last units of ranges that must
    not be cut, `devices` those that may be used, all if empty. `recompute` is which stages run again.
    Without `lookahead` none runs further ahead than its schedule does by itself, as other frameworks cannot.
    """

    batch_size: int
    largest_batch: int | None = None
    schedule: str = "auto"
    synchronous: bool = False
    goal: Goal = Goal.TIME_TO_LOSS
    penalties: Mapping[Rule, float] = field(default_factory=dict)
    start: float | None = None
    memory_fraction: float = 1.0
    depth: int | None = None
    width: int | None = None
    micro_batch: int | None = None
    pinned: Mapping[int, str] = field(default_factory=dict)
    together: tuple[tuple[int, int], ...] = ()
    devices: tuple[str, ...] = ()
    recompute: Recompute = Recompute.WHERE_NEEDED
    lookahead: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "largest_batch", "depth", "width", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BiremeError(f"{name} is {value}; it must be 1 or more.")
        if not 0 < self.memory_fraction <= 1:
            raise BiremeError(
                f"The memory fraction is {self.memory_fraction}; it must be more than 0 and at most 1."
            )
        if self.start is not None and not 0 <= self.start <= 1:
            raise BiremeError(f"The start without delay is {self.start:g} of the run; it must be 0 to 1.")
        for rule, steps in self.penalties.items():
            if not 1 <= steps < 1e6:
                raise BiremeError(f"The penalty of {rule} is {steps}; a rule takes 1 step or more for one.")

    @property
    def start_share(self) -> float:
        """The share of a run that goes without delayed updates before they begin."""
        if self.start is not None:
            return self.start
        return START if self.schedule == "auto" else 0.0

    def penalty(
        self, rule: Rule, optimizer: str, num_stages: int, num_microbatches: int, *, lookahead: int = 0
    ) -> float:
        """How many batches of a plan make up for one of a synchronous run; 1 if the goal is throughput.

        Those of a start without delay take longer, by the bubble of equal stages, and count as so many more.
        """
        if rule is Rule.SYNCHRONOUS or self.goal is Goal.THROUGHPUT:
            return 1.0
        steps = self.penalties.get(rule)
        if steps is None:
            unseen = unseen_share(num_stages, num_microbatches, lookahead)
            steps = steps_for_one(rule, optimizer, start=self.start_share, unseen=unseen)
        return steps * (1 + self.start_share * (num_stages - 1) / num_microbatches)
