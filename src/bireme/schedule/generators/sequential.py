"""No pipelining: one micro-batch is in the machine at a time, one stage works while the others wait.

The yardstick of every other schedule, and the way to run a model that is merely too large.
"""

from bireme.schedule.generators.shape import Schedule, Shape, backward, forward
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["SEQUENTIAL"]

SEQUENTIAL_PICTURE = """
rank 0: F0 . . . . . . . . . B0=F1 . . . . . . . . . B1=F2 . . . . . . . . . B2=F3 . . . . . . . . . B3=|
rank 1:  .F0 . . . . . . B0= . . .F1 . . . . . . B1= . . .F2 . . . . . . B2= . . .F3 . . . . . . B3=|. .
rank 2:  . .F0 . . . B0= . . . . . .F1 . . . B1= . . . . . .F2 . . . B2= . . . . . .F3 . . . B3=|. . . .
rank 3:  . . .F0 B0= . . . . . . . . .F1 B1= . . . . . . . . .F2 B2= . . . . . . . . .F3 B3=|. . . . . .
F forward   B backward   . idle   | update
"""
"""4 stages, 4 micro-batches, 1 batch."""


def _sequential_orders(shape: Shape) -> Orders:
    one_batch = [
        [step for k in range(shape.num_microbatches) for step in (forward(stage, k), backward(stage, k))]
        for stage in range(shape.num_stages)
    ]
    return every_batch(one_batch, shape.num_batches)


SEQUENTIAL = Schedule(
    name="sequential",
    summary="no pipelining: one micro-batch at a time",
    rule=Rule.SYNCHRONOUS,
    picture=SEQUENTIAL_PICTURE,
    orders=_sequential_orders,
)
