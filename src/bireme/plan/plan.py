"""The noun of this room: a `Plan`, how a model is cut and which schedule trains it.

It says nothing about times; who made it, by hand or by search, does not show.
"""

from dataclasses import dataclass
from itertools import pairwise

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.schedule.program import Program

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages, replicas and schedule.

    `cuts` are the units at which a new stage begins, without the first stage's 0. `width` is how many
    replicas of the pipeline there are; a batch is `width` · `num_microbatches` micro-batches. `recompute`
    names the stages that run their forward again before the backward, `recompute_units` single units that do
    so within theirs.
    """

    cuts: tuple[int, ...]
    num_microbatches: int
    schedule: str = "2bw"
    width: int = 1
    stages_per_rank: int | None = None
    num_sliced: int | None = None
    lookahead: int = 0
    recompute: tuple[int, ...] = ()
    recompute_units: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 for cut in self.cuts):
            raise BiremeError(
                f"The cuts {list(self.cuts)} are no way to cut a chain of units: they must rise, from 1 on."
            )
        if self.width < 1:
            raise BiremeError(f"A pipeline has at least one replica, not {self.width}.")
        self.program(1)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    @property
    def num_ranks(self) -> int:
        """How many processes it takes, replicas counted."""
        return self.width * self.program(1).num_ranks

    def program(self, num_batches: int, first_batch: int = 0) -> Program:
        """What each rank of one replica does in a window of batches."""
        return generate(
            self.schedule,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_batches=num_batches,
            stages_per_rank=self.stages_per_rank,
            num_sliced=self.num_sliced,
            lookahead=self.lookahead,
            recompute=self.recompute,
            first_batch=first_batch,
        )

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage, of so many in all."""
        bounds = [0, *self.cuts, num_units]
        if self.cuts and self.cuts[-1] >= num_units:
            raise BiremeError(
                f"The plan cuts at unit {self.cuts[-1]}, and the model has {num_units} units. It was made "
                "for "
                "another model."
            )
        begin, end = list(pairwise(bounds))[stage]
        return range(begin, end)
