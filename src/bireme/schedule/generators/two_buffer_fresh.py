"""Fresh 2BW: the order of 2BW, each batch on weights brought nearly up to date by a trial step.

When stage s of d starts batch t it has already finished the backward of m−(d−1−s) of the m micro-batches of
batch t−1. TRIAL steps W(t−1) by the gradient they have accumulated, without touching optimiser or
accumulator, and batch t runs on the result. The real update is made from W(t−1) with the whole gradient. So
instead of one whole batch, only the (d−1−s)/m of a batch that is still under way is missing.
"""

from bireme.schedule.generators.shape import Schedule
from bireme.schedule.generators.two_buffer import never_drain, refuse_short_batches
from bireme.schedule.rule import Rule

__all__ = ["TWO_BUFFER_FRESH"]

PICTURE = """
"""

TWO_BUFFER_FRESH = Schedule(
    name="2bw-fresh",
    summary="2BW with each batch on a trial step from the gradients already there",
    rule=Rule.FRESH,
    orders=never_drain,
    check=refuse_short_batches,
)
