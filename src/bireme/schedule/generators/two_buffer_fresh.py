"""Fresh 2BW: the order of 2BW, each batch on weights brought nearly up to date by a trial step.

When stage s of d starts batch t it has already finished the backward of m−(d−1−s) of the m micro-batches of
batch t−1. TRIAL steps W(t−1) by the gradient they have accumulated, without touching optimiser or
accumulator, and batch t runs on the result. The real update is made from W(t−1) with the whole gradient. So
instead of one whole batch, only the (d−1−s)/m of a batch that is still under way is missing. A lookahead
(see 1F1B) hides slow links but leaves as many more micro-batches unseen.
"""

from bireme.schedule.generators.one_f_one_b import within_a_batch
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.generators.two_buffer import never_drain, refuse_short_batches
from bireme.schedule.rule import Rule

__all__ = ["TWO_BUFFER_FRESH"]

FRESH_PICTURE = """
rank 0: F0  F1  F2  F3  .   .   .   .   .   .   B0====='F4  B1===== F5  B2===== F6  B3===== F7  B4=
rank 1: .   F0  F1  F2  .   .   .   .   B0===== F3  B1====='F4  B2===== F5  B3===== F6  B4===== F7
rank 2: .   .   F0  F1  .   .   B0===== F2  B1===== F3  B2====='F4  B3===== F5  B4===== F6  B5=====
rank 3: .   .   .   F0  B0===== F1  B1===== F2  B2===== F3  B3====='F4  B4===== F5  B5===== F6  B6=

rank 0:====!F8  B5===== F9  B6===== F10 B7===== F11 B8===== .   B9===== .   B10==== .   B11====|
rank 1: B5=====!F8  B6===== F9  B7===== F10 B8===== F11 B9===== .   B10==== .   B11====|.   .
rank 2: F7  B6=====!F8  B7===== F9  B8===== F10 B9===== F11 B10==== .   B11====|.   .   .   .
rank 3:==== F7  B7=====!F8  B8===== F9  B9===== F10 B10==== F11 B11====|.   .   .   .   .   .
F forward   B backward   . idle   | update   ' trial step   ! update and trial step
"""
"""4 stages, 4 micro-batches, 3 batches."""


def _with_one_seen(shape: Shape) -> int:
    """A trial step must see at least one micro-batch, on the first stage too."""
    return max(within_a_batch(shape) - 1, 0)


TWO_BUFFER_FRESH = Schedule(
    name="2bw-fresh",
    summary="2BW, but each batch runs on a trial step from the gradients so far",
    rule=Rule.FRESH,
    picture=FRESH_PICTURE,
    orders=never_drain,
    check=refuse_short_batches,
    most_lookahead=_with_one_seen,
)
