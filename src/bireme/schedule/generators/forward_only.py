"""Forward only: what an evaluation runs. It makes no version, so it is no schedule to train by."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from bireme.schedule.generators.shape import forward
from bireme.schedule.instruction import Instruction
from bireme.schedule.lowering import lower
from bireme.schedule.program import Program, Track
from bireme.schedule.rule import Rule

__all__ = ["forward_only"]


@lru_cache(maxsize=64)
def forward_only(rank_of_stage: tuple[int, ...], num_microbatches: int) -> Program:
    """One batch forward through all stages, each rank's stages one after the other."""
    return lower(
        Program(
            name="evaluation",
            rule=Rule.SYNCHRONOUS,
            rank_of_stage=rank_of_stage,
            num_microbatches=num_microbatches,
            num_batches=1,
            banks=(1,) * len(rank_of_stage),
            tracks=tuple(
                Track(_order(rank_of_stage, rank, num_microbatches)) for rank in range(max(rank_of_stage) + 1)
            ),
        )
    )


def _order(rank_of_stage: Sequence[int], rank: int, num_microbatches: int) -> tuple[Instruction, ...]:
    own = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
    return tuple(replace(forward(stage, k), version=0) for stage in own for k in range(num_microbatches))
