"""2BW (PipeDream-2BW): 1F1B that never drains, on two weight versions.

Batch t runs on W(t−1) in both passes and on every stage, so W(t) can be made while batch t is under way.
W(t+1) takes the place of W(t−1), which is dead once the stage has finished batch t: two versions are
enough as long as a batch has at least as many micro-batches as the pipeline has stages. A lookahead (see
1F1B) hides slow links without a third version, as long as no stage runs more than m forwards ahead.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
"""

from bireme.errors import BiremeError
from bireme.schedule.generators.one_f_one_b import alternate, forwards_ahead, within_a_batch
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.program import Rule
from bireme.schedule.weave import Orders

# rank 0: F0  F1  F2  F3  .   .   .   .   .   .   B0===== F4  B1===== F5  B2===== F6  B3===== F7  B4=
# rank 1: .   F0  F1  F2  .   .   .   .   B0===== F3  B1===== F4  B2===== F5  B3===== F6  B4===== F7
# rank 2: .   .   F0  F1  .   .   B0===== F2  B1===== F3  B2===== F4  B3===== F5  B4===== F6  B5=====
# rank 3: .   .   .   F0  B0===== F1  B1===== F2  B2===== F3  B3===== F4  B4===== F5  B5===== F6  B6=
#
# rank 0:====|F8  B5===== F9  B6===== F10 B7===== F11 B8===== .   B9===== .   B10==== .   B11====|
# rank 1: B5=====|F8  B6===== F9  B7===== F10 B8===== F11 B9===== .   B10==== .   B11====|.   .
# rank 2: F7  B6=====|F8  B7===== F9  B8===== F10 B9===== F11 B10==== .   B11====|.   .   .   .
# rank 3:==== F7  B7=====|F8  B8===== F9  B9===== F10 B10==== F11 B11====|.   .   .   .   .   .
# F forward   B backward   . idle   | update
#
# 4 stages, 4 micro-batches, 3 batches.


def never_drain(shape: Shape) -> Orders:
    """1F1B over all micro-batches of the window as if they were one batch."""
    return [alternate(forwards_ahead, shape, stage, shape.num_batches) for stage in range(shape.num_stages)]


def _refuse_short_batches(shape: Shape) -> None:
    """Two versions hold only if a batch is at least as long as the pipeline is deep."""
    least, of = shape.num_ranks_from(0), "ranks" if shape.shares else "stages"
    if shape.num_microbatches < least:
        raise BiremeError(
            f"Two weight versions need at least as many micro-batches in a batch as {of}, but there are "
            f"{shape.num_microbatches} for {least} {of}. Use {least} or more micro-batches, fewer {of}, or a "
            "schedule that drains (1f1b)."
        )


TWO_BUFFER = Schedule(
    name="2bw",
    summary="PipeDream-2BW: no drain, two weight versions, each update one batch late",
    rule=Rule.DELAYED,
    orders=never_drain,
    check=_refuse_short_batches,
    most_lookahead=within_a_batch,
    widens=True,
)


# Fresh 2BW: the order of 2BW, each batch on weights brought nearly up to date by a trial step.
#
# When stage s of d starts batch t it has already finished the backward of m−(d−1−s) of the m micro-batches of
# batch t−1. TRIAL steps W(t−1) by the gradient they have accumulated, without touching optimizer or
# accumulator, and batch t runs on the result. The real update is made from W(t−1) with the whole gradient. So
# instead of one whole batch, only the (d−1−s)/m of a batch that is still under way is missing. A lookahead
# (see 1F1B) hides slow links but leaves as many more micro-batches unseen.

# rank 0: F0  F1  F2  F3  .   .   .   .   .   .   B0====='F4  B1===== F5  B2===== F6  B3===== F7  B4=
# rank 1: .   F0  F1  F2  .   .   .   .   B0===== F3  B1====='F4  B2===== F5  B3===== F6  B4===== F7
# rank 2: .   .   F0  F1  .   .   B0===== F2  B1===== F3  B2====='F4  B3===== F5  B4===== F6  B5=====
# rank 3: .   .   .   F0  B0===== F1  B1===== F2  B2===== F3  B3====='F4  B4===== F5  B5===== F6  B6=
#
# rank 0:====!F8  B5===== F9  B6===== F10 B7===== F11 B8===== .   B9===== .   B10==== .   B11====|
# rank 1: B5=====!F8  B6===== F9  B7===== F10 B8===== F11 B9===== .   B10==== .   B11====|.   .
# rank 2: F7  B6=====!F8  B7===== F9  B8===== F10 B9===== F11 B10==== .   B11====|.   .   .   .
# rank 3:==== F7  B7=====!F8  B8===== F9  B9===== F10 B10==== F11 B11====|.   .   .   .   .   .
# F forward   B backward   . idle   | update   ' trial step   ! update and trial step
#
# 4 stages, 4 micro-batches, 3 batches.


def _with_one_seen(shape: Shape) -> int:
    """A trial step must see at least one micro-batch, on the first stage too."""
    return max(within_a_batch(shape) - 1, 0)


TWO_BUFFER_FRESH = Schedule(
    name="2bw-fresh",
    summary="2BW, but each batch runs on a trial step from the gradients so far",
    rule=Rule.FRESH,
    orders=never_drain,
    check=_refuse_short_batches,
    most_lookahead=_with_one_seen,
)


# PipeDream with weight stashing: an update after every micro-batch, stage s keeps d−s versions.
#
# Kept for comparison: it never drains either, but the first stage holds as many weight versions as there are
# stages, the delay differs from stage to stage, and gradients are not accumulated (m only groups micro-
# batches into batches for the eye).
#
# Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.

# rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0===|F4 B1===|F5 B2===|F6 B3===|F7 B4=== .  B5=== .  B6=== .  B7===|
# rank 1: .  F0 F1 F2 .  .  .  .  B0===|F3 B1===|F4 B2===|F5 B3===|F6 B4===|F7 B5=== .  B6=== .  B7===|.  .
# rank 2: .  .  F0 F1 .  .  B0===|F2 B1===|F3 B2===|F4 B3===|F5 B4===|F6 B5===|F7 B6=== .  B7===|.  .  .  .
# rank 3: .  .  .  F0 B0===|F1 B1===|F2 B2===|F3 B3===|F4 B4===|F5 B5===|F6 B6===|F7 B7===|.  .  .  .  .  .
# F forward   B backward   . idle   | update
#
# 4 stages, 4 micro-batches, 2 batches.

PIPEDREAM = Schedule(
    name="pipedream",
    summary="weight stashing: updates after every micro-batch, up to one version per stage",
    rule=Rule.STASHED,
    orders=never_drain,
)
