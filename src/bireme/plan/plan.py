"""The noun of this room: a `Plan`, how a model is cut and which schedule trains it.

It says nothing about times; who made it, by hand or by search, does not show.
"""

from dataclasses import dataclass
from functools import lru_cache
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
    so within theirs. `micro_batch_sizes` are the samples of a micro-batch in each replica, to which batches
    are cut in proportion; left out, replicas get equal shares. `devices[rank][replica]` names the device of
    each process, for who starts them.
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
    micro_batch_sizes: tuple[int, ...] = ()
    devices: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 for cut in self.cuts):
            raise BiremeError(
                f"The cuts {list(self.cuts)} are no way to cut a chain of units: they must rise, from 1 on."
            )
        if self.width < 1:
            raise BiremeError(f"A pipeline has at least one replica, not {self.width}.")
        sizes = self.micro_batch_sizes
        if sizes and (len(sizes) != self.width or min(sizes) < 1):
            raise BiremeError(
                f"Micro-batches of {', '.join(map(str, sizes))} samples are no shares for {self.width} "
                "replicas: give a size of 1 or more for each replica."
            )
        num_ranks = self.program(1).num_ranks
        if self.devices and [len(names) for names in self.devices] != [self.width] * num_ranks:
            raise BiremeError(
                f"The plan names devices for {len(self.devices)} ranks; it needs one for each of "
                f"{self.width} replicas of each of {num_ranks} ranks."
            )

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
        return _program(self, num_batches, first_batch)

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage, of so many in all."""
        bounds = [0, *self.cuts, num_units]
        if self.cuts and self.cuts[-1] >= num_units:
            raise BiremeError(
                f"The plan cuts at unit {self.cuts[-1]}, and the model has {num_units} units. It was made "
                "for another model."
            )
        begin, end = list(pairwise(bounds))[stage]
        return range(begin, end)


@lru_cache(maxsize=64)
def _program(plan: Plan, num_batches: int, first_batch: int) -> Program:
    return generate(
        plan.schedule,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        num_batches=num_batches,
        stages_per_rank=plan.stages_per_rank,
        num_sliced=plan.num_sliced,
        lookahead=plan.lookahead,
        recompute=plan.recompute,
        first_batch=first_batch,
    )
