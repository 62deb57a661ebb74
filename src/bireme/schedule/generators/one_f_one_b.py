"""1F1B (PipeDream-Flush): after a warm-up each stage alternates one forward and one backward.

Stage s of d runs d−1−s forwards ahead, so it keeps at most d−s micro-batches however many there are. The
pipeline drains before each update: the bubble is (d−1)/(m+d−1) of the time.

That is just enough where messages take no time: a micro-batch is back when its stage has room for it. Where
they do take time, a *lookahead* of L lets the first stage run L more forwards ahead, and the others in
proportion to their distance from the end, so that messages travel while earlier micro-batches compute. It
costs up to L stashed micro-batches.
"""

from bireme.schedule.generators.shape import Schedule, Shape, backward, forward
from bireme.schedule.instruction import Instruction
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders, every_batch

__all__ = ["ONE_F_ONE_B", "alternate", "forwards_ahead", "within_a_batch"]

ONE_F_ONE_B_PICTURE = """
rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0=== .  B1=== .  B2=== .  B3===|
rank 1: .  F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===|.  .
rank 2: .  .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3===|.  .  .  .
rank 3: .  .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3===|.  .  .  .  .  .
F forward   B backward   . idle   | update
"""
"""4 stages, 4 micro-batches, 1 batch."""


def forwards_ahead(shape: Shape, stage: int) -> int:
    """How many forwards a stage runs before its first backward."""
    behind = shape.num_stages - 1 - stage
    return behind + ceil_div(shape.lookahead * behind, max(shape.num_stages - 1, 1))


def within_a_batch(shape: Shape) -> int:
    """The lookahead at which the first stage runs a whole batch ahead."""
    return max(shape.num_microbatches - shape.num_stages + 1, 0) if shape.num_stages > 1 else 0


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def alternate(shape: Shape, stage: int, num_microbatches: int) -> list[Instruction]:
    """One stage's 1F1B order over a run of micro-batches that may span batches."""
    m = shape.num_microbatches
    ahead = min(forwards_ahead(shape, stage), num_microbatches)
    order = [forward(stage, k % m, k // m) for k in range(ahead)]
    for k in range(num_microbatches):
        if k + ahead < num_microbatches:
            order.append(forward(stage, (k + ahead) % m, (k + ahead) // m))
        order.append(backward(stage, k % m, k // m))
    return order


def _one_f_one_b_orders(shape: Shape) -> Orders:
    one_batch = [alternate(shape, stage, shape.num_microbatches) for stage in range(shape.num_stages)]
    return every_batch(one_batch, shape.num_batches)


ONE_F_ONE_B = Schedule(
    name="1f1b",
    summary="PipeDream-Flush: one forward, one backward; drains before each update",
    rule=Rule.SYNCHRONOUS,
    picture=ONE_F_ONE_B_PICTURE,
    orders=_one_f_one_b_orders,
    most_lookahead=within_a_batch,
)
