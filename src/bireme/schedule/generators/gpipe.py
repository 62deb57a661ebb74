"""GPipe: all forwards of a batch, then all its backwards.

Simple, and hungry: every stage keeps the activations of all m micro-batches.
"""

from bireme.schedule.generators.shape import Schedule, Shape, backward, forward
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["GPIPE"]

GPIPE_PICTURE = """
rank 0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0=== B1=== B2=== B3===|
rank 1: .  F0 F1 F2 F3 .  .  .  .  .  .  B0=== B1=== B2=== B3===|.  .
rank 2: .  .  F0 F1 F2 F3 .  .  .  B0=== B1=== B2=== B3===|.  .  .  .
rank 3: .  .  .  F0 F1 F2 F3 B0=== B1=== B2=== B3===|.  .  .  .  .  .
F forward   B backward   . idle   | update
"""
"""4 stages, 4 micro-batches, 1 batch."""


def _gpipe_orders(shape: Shape) -> Orders:
    microbatches = range(shape.num_microbatches)
    one_batch = [
        [forward(stage, k) for k in microbatches] + [backward(stage, k) for k in microbatches]
        for stage in range(shape.num_stages)
    ]
    return every_batch(one_batch, shape.num_batches)


GPIPE = Schedule(
    name="gpipe",
    summary="all forwards, then all backwards; stashes every micro-batch",
    rule=Rule.SYNCHRONOUS,
    picture=GPIPE_PICTURE,
    orders=_gpipe_orders,
)
