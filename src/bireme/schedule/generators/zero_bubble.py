"""ZB-H1: 1F1B with the backward in two parts, the second of which fills the bubble.

Only the gradient of the input (I) is waited for by the stage before; the gradient of the weights (W) can
wait. Stage s keeps s weight parts back and runs them while the pipeline drains. With f = i = w the bubble
is a third of 1F1B's, and no stage keeps more than d micro-batches.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from functools import partial

from bireme.errors import BiremeError
from bireme.schedule.generators.shape import Schedule, Shape, backward, draining, forward
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Rule

# ZB-V: two stages per rank laid out as a V, backwards in two parts, and no bubble at f = i = w.
#
# Rank r of p runs stage r on the way down and stage 2p−1−r on the way up, so the first and the last stage
# share rank 0 and a micro-batch's backward can start where its forward ended. Weight parts wait only for the
# drain. No rank keeps more than 2p half-depth stashes, the memory of 1F1B.
#
# Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.

# rank 0: F0 F1 F2 F3 .  .  .  f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3|.  .
# rank 1: .  F0 F1 F2 F3 .  f0 .  f1 i0 w0 f2 i1 w1 f3 i2 w2 I0 i3 I1 W0 I2 W1 I3 W2 w3 W3|.  .
# rank 2: .  .  F0 F1 F2 f0 F3 f1 .  f2 i0 w0 f3 i1 w1 I0 i2 I1 .  i3 I2 W0 I3 W1 w2 W2 w3 W3|.
# rank 3: .  .  .  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 I0 i1 I1 .  i2 I2 .  i3 I3 W0 w1 W1 w2 W2 w3 W3|
# F forward   I backward for the inputs   W backward for the weights   small letters: second stage of the rank
# . idle   | update
#
# 8 stages on 4 ranks, 4 micro-batches, 1 batch.

_FORWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


class _Rank:
    """The order of one rank while it is written: each part of each stage in micro-batch order."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.stages = {"down": rank, "up": shape.num_stages - 1 - rank}
        self.num_microbatches = shape.num_microbatches
        self.done = {(way, kind): 0 for way in self.stages for kind in (_FORWARD, _INPUT, _WEIGHT)}
        self.order: list[Instruction] = []

    def run(self, way: str, *kinds: Kind) -> None:
        """The next micro-batch of each kind, where there is one left whose earlier parts are done."""
        for kind in kinds:
            k = self.done[way, kind]
            earlier = {
                _FORWARD: self.num_microbatches,
                _INPUT: self.done[way, _FORWARD],
                _WEIGHT: self.done[way, _INPUT],
            }
            if k < earlier[kind]:
                self.order.append(Instruction(kind, self.stages[way], 0, k))
                self.done[way, kind] += 1

    def left(self, kind: Kind) -> bool:
        return any(self.done[way, kind] < self.num_microbatches for way in self.stages)


def _zbv_order(shape: Shape, rank: int) -> list[Instruction]:
    p = shape.num_ranks
    me = _Rank(shape, rank)
    for _ in range(2 * (p - rank) - 1):
        me.run("down", _FORWARD)
    for _ in range(rank):
        me.run("up", _FORWARD)
        me.run("down", _FORWARD)
    for _ in range(p - rank):
        me.run("up", _FORWARD, _INPUT, _WEIGHT)
    while me.left(_FORWARD):
        me.run("down", _FORWARD, _INPUT, _WEIGHT)
        me.run("up", _FORWARD, _INPUT, _WEIGHT)
    while me.left(_INPUT):
        if me.done["up", _INPUT] < shape.num_microbatches:
            me.run("down", _INPUT)
            me.run("up", _INPUT)
        else:
            me.run("down", _INPUT, _WEIGHT)
    while me.left(_WEIGHT):
        me.run("up", _WEIGHT)
        me.run("down", _WEIGHT)
    return me.order


def _placement(shape: Shape) -> tuple[int, ...]:
    return tuple(min(stage, shape.num_stages - 1 - stage) for stage in range(shape.num_stages))


def _check(shape: Shape) -> None:
    if shape.stages_per_rank != 2:
        raise BiremeError(
            f"zbv lays two stages on each rank, one on the way down and one on the way up, not "
            f"{shape.stages_per_rank}. Use interleaved for other numbers."
        )


ZERO_BUBBLE_V = Schedule(
    name="zbv",
    summary="zero-bubble V: two stages per rank, first and last on rank 0, no bubble at f = i = w",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, _zbv_order),
    splits_backward=True,
    placement=_placement,
    check=_check,
    stages_per_rank=2,
)


# rank 0: F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3|
# rank 1: .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3|
# rank 2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3|
# rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3|
# F forward   I backward for the inputs   W backward for the weights   . idle   | update
#
# 4 stages, 4 micro-batches, 1 batch.


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


ZERO_BUBBLE_H1 = Schedule(
    name="zb-h1",
    summary="zero-bubble H1: split backward fills two thirds of 1F1B's bubble",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, _zb_h1_order),
    splits_backward=True,
)
