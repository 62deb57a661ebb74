"""What a user wants of a plan, and what he does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bireme.errors import BiremeError
from bireme.plan.partition.loads import Recompute
from bireme.schedule.rule import Rule

__all__ = ["PENALTIES", "Wishes"]

PENALTIES = {Rule.SYNCHRONOUS: 1.0, Rule.DELAYED: 2.15, Rule.FRESH: 1.1}
"""Steps that a rule takes for one of a synchronous run, unless the user has measured his own.

Measured with AdamW on small GPTs in 300 steps (docs/convergence.md); a fresh rule takes 1.08 where a batch
has twice as many micro-batches as the pipeline has stages, 1.14 where it has as many. Early steps suffer
most: in 1,200 steps it was 1.03. A GPT of 355M that was trained for 300,000 steps with a delay of one
reached the perplexity of a synchronous run of 20 % fewer (Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021, section 5).
"""


@dataclass(frozen=True, slots=True)
class Wishes:
    """`batch_size` samples are a step; with `largest_batch` more may be, up to so many.

    `schedule` is a name, or auto for all that the engine runs. `synchronous` forbids delayed updates.
    `memory_fraction` of each device is for the plan. `depth`, `width` and `micro_batch` fix what they name.
    `pinned` says on which device a unit must be, `together` names first and last units of ranges that must
    not be cut, `devices` those that may be used, all if empty. `recompute` is which stages run again.
    Without `lookahead` none runs further ahead than its schedule does by itself, as other frameworks cannot.
    """

    batch_size: int
    largest_batch: int | None = None
    schedule: str = "auto"
    synchronous: bool = False
    penalties: Mapping[Rule, float] = field(default_factory=lambda: dict(PENALTIES))
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
        for rule, steps in self.penalties.items():
            if not 1 <= steps < 1e6:
                raise BiremeError(f"The penalty of {rule} is {steps}; a rule takes 1 step or more for one.")
