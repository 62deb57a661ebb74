"""Interleaved 1F1B: each of p ranks has v stages that lie p apart, so the pipeline fills v times faster.

Rank r runs stages r, r+p, r+2p, …. Micro-batches go through in groups of about p: a rank forwards a group
through its first stage, then through its second, and so on, then takes the next group; backwards go the
other way round. The bubble shrinks to (p−1)/(v·m) of the work, for v times the messages and more stashes.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

import itertools

from bireme.schedule.generators.shape import Schedule, Shape, backward, forward
from bireme.schedule.instruction import Instruction
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["INTERLEAVED"]

INTERLEAVED_PICTURE = """
rank 0: F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0=== .  b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|
rank 1: .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0=== .  b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|.  .
rank 2: .  .  F0 F1 F2 F3 f0 f1 f2 .  b0=== f3 b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|.  .  .  .
rank 3: .  .  .  F0 F1 F2 F3 f0 b0=== f1 b1=== f2 b2=== f3 b3=== B0=== B1=== B2=== B3===|.  .  .  .  .  .
F forward   B backward   small letters: second stage of the rank   . idle   | update
"""
"""8 stages on 4 ranks, 4 micro-batches, 1 batch."""


def _groups(shape: Shape) -> list[range]:
    """The micro-batches in runs of p or a little more, as equal as they can be."""
    count = max(1, shape.num_microbatches // shape.num_ranks)
    size, longer = divmod(shape.num_microbatches, count)
    bounds = [0]
    for i in range(count):
        bounds.append(bounds[-1] + size + (i < longer))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _interleaved_order(shape: Shape, rank: int) -> list[Instruction]:
    p, v = shape.num_ranks, shape.stages_per_rank
    groups = _groups(shape)
    forwards = [forward(rank + p * c, k) for group in groups for c in range(v) for k in group]
    backwards = [backward(rank + p * c, k) for group in groups for c in reversed(range(v)) for k in group]
    ahead = min((v - 1) * len(groups[0]) + 2 * (p - 1 - rank), len(forwards))
    order = forwards[:ahead]
    for k, step in enumerate(backwards):
        order.extend(forwards[ahead + k : ahead + k + 1])
        order.append(step)
    return order


def _interleaved_orders(shape: Shape) -> Orders:
    return every_batch(
        [_interleaved_order(shape, rank) for rank in range(shape.num_ranks)], shape.num_batches
    )


def _placement(shape: Shape) -> tuple[int, ...]:
    return tuple(stage % shape.num_ranks for stage in range(shape.num_stages))


INTERLEAVED = Schedule(
    name="interleaved",
    summary="1F1B with several stages per rank: a smaller bubble for more messages",
    rule=Rule.SYNCHRONOUS,
    picture=INTERLEAVED_PICTURE,
    orders=_interleaved_orders,
    placement=_placement,
    stages_per_rank=2,
)
