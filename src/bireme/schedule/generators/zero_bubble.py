"""ZB-H1: 1F1B with the backward in two parts, the second of which fills the bubble.

Only the gradient of the input (I) is waited for by the stage before; the gradient of the weights (W) can
wait. Stage s keeps s weight parts back and runs them while the pipeline drains. With f = i = w the bubble
is a third of 1F1B's, and no stage keeps more than d micro-batches.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from bireme.schedule.generators.shape import Schedule, Shape, backward, forward
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["ZERO_BUBBLE_H1"]

ZB_H1_PICTURE = """
rank 0: F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3|
rank 1: .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3|
rank 2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3|
rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3|
F forward   I backward for the inputs   W backward for the weights   . idle   | update
"""
"""4 stages, 4 micro-batches, 1 batch."""


def _zb_h1_order(shape: Shape, stage: int) -> list[Instruction]:
    m = shape.num_microbatches
    ahead = min(shape.num_stages - 1 - stage, m)
    order = [forward(stage, k) for k in range(ahead)]
    for k in range(m + stage):
        if k + ahead < m:
            order.append(forward(stage, k + ahead))
        if k < m:
            order.append(backward(stage, k, kind=Kind.BACKWARD_INPUT))
        if 0 <= k - stage < m:
            order.append(backward(stage, k - stage, kind=Kind.BACKWARD_WEIGHT))
    return order


def _zb_h1_orders(shape: Shape) -> Orders:
    return every_batch([_zb_h1_order(shape, stage) for stage in range(shape.num_stages)], shape.num_batches)


ZERO_BUBBLE_H1 = Schedule(
    name="zb-h1",
    summary="zero-bubble H1: split backward fills two thirds of 1F1B's bubble",
    rule=Rule.SYNCHRONOUS,
    picture=ZB_H1_PICTURE,
    orders=_zb_h1_orders,
    splits_backward=True,
)
