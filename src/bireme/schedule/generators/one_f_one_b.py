"""1F1B (PipeDream-Flush): after a warm-up each stage alternates one forward and one backward.

Stage s of d runs d−1−s forwards ahead, so it keeps at most d−s micro-batches however many there are. The
pipeline drains before each update: the bubble is (d−1)/(m+d−1) of the time.

That is just enough where messages take no time: a micro-batch is back when its stage has room for it. Where
they do take time, a *lookahead* of L lets the first stage run L more forwards ahead, and the others in
proportion to their distance from the end, so that messages travel while earlier micro-batches compute. It
costs up to L stashed micro-batches.

If stages are on several ranks, "d−1−s" is the ranks from stage s on, but for one: PipeDream's number of
warm-up forwards, with which all ranks are busy if stages are as wide as they are slow.
"""

import itertools
from collections.abc import Callable
from functools import partial

from bireme.balance import split
from bireme.errors import BiremeError
from bireme.schedule.generators.shape import Schedule, Shape, backward, draining, forward
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Rule


def _in_turns(forwards: list[Instruction], backwards: list[Instruction], ahead: int) -> list[Instruction]:
    """The first forwards, `ahead` of them, and then a forward and a backward in turns."""
    order = forwards[:ahead]
    for k, step in enumerate(backwards, ahead):
        order += forwards[k : k + 1]
        order.append(step)
    return order


def alternate(
    ahead: Callable[[Shape, int], int], shape: Shape, stage: int, num_batches: int = 1
) -> list[Instruction]:
    """One stage's order over the micro-batches of some batches, of which it runs `ahead` forwards ahead."""
    places = [(k, batch) for batch in range(num_batches) for k in range(shape.num_microbatches)]
    forwards = [forward(stage, *place) for place in places]
    return _in_turns(forwards, [backward(stage, *place) for place in places], ahead(shape, stage))


def forwards_ahead(shape: Shape, stage: int) -> int:
    """How many forwards a stage runs before its first backward, as long as there are so many."""
    behind = shape.num_stages - 1 - stage
    further = -(-shape.lookahead * behind // max(shape.num_stages - 1, 1))
    return shape.num_ranks_from(stage) - 1 + further


def _a_batch_ahead(shape: Shape, _stage: int) -> int:
    return shape.num_microbatches


def _none_ahead(_shape: Shape, _stage: int) -> int:
    return 0


def within_a_batch(shape: Shape) -> int:
    """The lookahead at which the first stage runs a whole batch ahead."""
    return max(shape.num_microbatches - shape.num_ranks_from(0) + 1, 0) if shape.num_stages > 1 else 0


# GPipe: all forwards of a batch, then all its backwards.
#
# Simple, and hungry: every stage keeps the activations of all m micro-batches.

# rank 0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0=== B1=== B2=== B3===|
# rank 1: .  F0 F1 F2 F3 .  .  .  .  .  .  B0=== B1=== B2=== B3===|.  .
# rank 2: .  .  F0 F1 F2 F3 .  .  .  B0=== B1=== B2=== B3===|.  .  .  .
# rank 3: .  .  .  F0 F1 F2 F3 B0=== B1=== B2=== B3===|.  .  .  .  .  .
# F forward   B backward   . idle   | update
#
# 4 stages, 4 micro-batches, 1 batch.


GPIPE = Schedule(
    name="gpipe",
    summary="all forwards, then all backwards; stashes every micro-batch",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, partial(alternate, _a_batch_ahead)),
    widens=True,
)


# No pipelining: one micro-batch is in the machine at a time, one stage works while the others wait.
#
# The yardstick of every other schedule, and the way to run a model that is merely too large.

# rank 0: F0 . . . . . . . . . B0=F1 . . . . . . . . . B1=F2 . . . . . . . . . B2=F3 . . . . . . . . . B3=|
# rank 1:  .F0 . . . . . . B0= . . .F1 . . . . . . B1= . . .F2 . . . . . . B2= . . .F3 . . . . . . B3=|. .
# rank 2:  . .F0 . . . B0= . . . . . .F1 . . . B1= . . . . . .F2 . . . B2= . . . . . .F3 . . . B3=|. . . .
# rank 3:  . . .F0 B0= . . . . . . . . .F1 B1= . . . . . . . . .F2 B2= . . . . . . . . .F3 B3=|. . . . . .
# F forward   B backward   . idle   | update
#
# 4 stages, 4 micro-batches, 1 batch.


SEQUENTIAL = Schedule(
    name="sequential",
    summary="no pipelining: one micro-batch at a time",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, partial(alternate, _none_ahead)),
)


# Interleaved 1F1B: each of p ranks has v stages that lie p apart, so the pipeline fills v times faster.
#
# Rank r runs stages r, r+p, r+2p, …. Micro-batches go through in groups of about p: a rank forwards a group
# through its first stage, then through its second, and so on, then takes the next group; backwards go the
# other way round. The bubble shrinks to (p−1)/(v·m) of the work, for v times the messages and more stashes.
#
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
# 2021.

# rank 0: F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0=== .  b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|
# rank 1: .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0=== .  b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|.  .
# rank 2: .  .  F0 F1 F2 F3 f0 f1 f2 .  b0=== f3 b1=== .  b2=== .  b3=== B0=== B1=== B2=== B3===|.  .  .  .
# rank 3: .  .  .  F0 F1 F2 F3 f0 b0=== f1 b1=== f2 b2=== f3 b3=== B0=== B1=== B2=== B3===|.  .  .  .  .  .
# F forward   B backward   small letters: second stage of the rank   . idle   | update
#
# 8 stages on 4 ranks, 4 micro-batches, 1 batch.


def _groups(shape: Shape) -> list[range]:
    """The micro-batches in runs of p or a little more, as equal as they can be."""
    count = max(1, shape.num_microbatches // shape.num_ranks)
    bounds = itertools.accumulate(split(shape.num_microbatches, count), initial=0)
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _interleaved_order(shape: Shape, rank: int) -> list[Instruction]:
    p, v = shape.num_ranks, shape.stages_per_rank
    groups = _groups(shape)
    forwards = [forward(rank + p * c, k) for group in groups for c in range(v) for k in group]
    backwards = [backward(rank + p * c, k) for group in groups for c in reversed(range(v)) for k in group]
    ahead = min((v - 1) * len(groups[0]) + 2 * (p - 1 - rank), len(forwards))
    return _in_turns(forwards, backwards, ahead)


def _placement(shape: Shape) -> tuple[int, ...]:
    return tuple(stage % shape.num_ranks for stage in range(shape.num_stages))


INTERLEAVED = Schedule(
    name="interleaved",
    summary="1F1B with several stages per rank: a smaller bubble for more messages",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, _interleaved_order),
    placement=_placement,
    stages_per_rank=2,
)


# rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0=== .  B1=== .  B2=== .  B3===|
# rank 1: .  F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===|.  .
# rank 2: .  .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3===|.  .  .  .
# rank 3: .  .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3===|.  .  .  .  .  .
# F forward   B backward   . idle   | update
#
# 4 stages, 4 micro-batches, 1 batch.


ONE_F_ONE_B = Schedule(
    name="1f1b",
    summary="PipeDream-Flush: one forward, one backward; drains before each update",
    rule=Rule.SYNCHRONOUS,
    orders=partial(draining, partial(alternate, forwards_ahead)),
    most_lookahead=within_a_batch,
    widens=True,
)


# Sliced 1F1B (AutoPipe): the first micro-batches go forward in halves, so the last stage starts sooner.
#
# Of the first k micro-batches, stage s of d runs the forward of micro-batch j in two halves where j ≤ d−1−s;
# after that the input has arrived whole anyway. It sends the halves one by one, except where the next stage
# would not be ready for the first (j = d−1−s): there it sends the whole. Backwards stay whole, so memory and
# gradients are those of 1F1B, and the start-up takes half the time.
#
# Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and Micro-batch
# Slicing", CLUSTER 2022; which messages to aggregate is our derivation.

# rank 0: 0a0b1a1b F2= F3= . . . . . . . . . B0===== . . B1===== . . B2===== . . B3=====|
# rank 1:  .0a0b1a1b . F2= . . . . . B0===== F3= B1===== . . B2===== . . B3=====|. . . .
# rank 2:  . .0a0b1a1b . . . B0===== F2= B1===== F3= B2===== . . B3=====|. . . . . . . .
# rank 3:  . . .0a0b B0===== F1= B1===== F2= B2===== F3= B3=====|. . . . . . . . . . . .
# F forward   B backward   0a 0b halves of a forward   . idle   | update
#
# 4 stages, 4 micro-batches, two of them sliced, 1 batch.


def _sliced_order(shape: Shape, stage: int) -> list[Instruction]:
    num_sliced = min(shape.num_sliced, shape.num_stages - stage)
    order: list[Instruction] = []
    for step in alternate(forwards_ahead, shape, stage):
        k = step.microbatch
        if step.kind is Kind.FORWARD and k is not None and k < num_sliced:
            order.extend(forward(stage, k, half=half) for half in (0, 1))
        else:
            order.append(step)
    return order


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
    orders=partial(draining, _sliced_order),
    check=_check,
    slices=True,
)
