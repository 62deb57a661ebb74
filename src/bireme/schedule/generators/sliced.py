"""Sliced 1F1B (AutoPipe): the first micro-batches go forward in halves, so the last stage starts sooner.

Of the first k micro-batches, stage s of d runs the forward of micro-batch j in two halves where j ≤ d−1−s;
after that the input has arrived whole anyway. It sends the halves one by one, except where the next stage
would not be ready for the first (j = d−1−s): there it sends the whole. Backwards stay whole, so memory and
gradients are those of 1F1B, and the start-up takes half the time.

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and Micro-batch
Slicing", CLUSTER 2022; which messages to aggregate is our derivation.
"""

from bireme.errors import BiremeError
from bireme.schedule.generators.one_f_one_b import alternate
from bireme.schedule.generators.shape import Schedule, Shape, forward
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["SLICED"]

SLICED_PICTURE = """
rank 0: 0a0b1a1b F2= F3= . . . . . . . . . B0===== . . B1===== . . B2===== . . B3=====|
rank 1:  .0a0b1a1b . F2= . . . . . B0===== F3= B1===== . . B2===== . . B3=====|. . . .
rank 2:  . .0a0b1a1b . . . B0===== F2= B1===== F3= B2===== . . B3=====|. . . . . . . .
rank 3:  . . .0a0b B0===== F1= B1===== F2= B2===== F3= B3=====|. . . . . . . . . . . .
F forward   B backward   0a 0b halves of a forward   . idle   | update
"""
"""4 stages, 4 micro-batches, two of them sliced, 1 batch."""


def _sliced_order(shape: Shape, stage: int) -> list[Instruction]:
    num_sliced = min(shape.num_sliced, shape.num_stages - stage)
    order: list[Instruction] = []
    for step in alternate(shape, stage, shape.num_microbatches):
        k = step.microbatch
        if step.kind is Kind.FORWARD and k is not None and k < num_sliced:
            order.extend(forward(stage, k, half=half) for half in (0, 1))
        else:
            order.append(step)
    return order


def _sliced_orders(shape: Shape) -> Orders:
    return every_batch([_sliced_order(shape, stage) for stage in range(shape.num_stages)], shape.num_batches)


def _check(shape: Shape) -> None:
    most = min(shape.num_stages, shape.num_microbatches)
    if not 0 <= shape.num_sliced <= most:
        raise BiremeError(
            f"{shape.num_sliced} micro-batches cannot be sliced: with {shape.num_stages} stages and "
            f"{shape.num_microbatches} micro-batches it can be 0 to {most}."
        )


SLICED = Schedule(
    name="1f1b-sliced",
    summary="AutoPipe's 1F1B: slices the first micro-batches, which halves the start-up",
    rule=Rule.SYNCHRONOUS,
    picture=SLICED_PICTURE,
    orders=_sliced_orders,
    check=_check,
    slices=True,
)
