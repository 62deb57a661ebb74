"""2BW (PipeDream-2BW): 1F1B that never drains, on two weight versions.

Batch t runs on W(t−1) in both passes and on every stage, so W(t) can be made while batch t is under way.
W(t+1) takes the place of W(t−1), which is dead once the stage has finished batch t: two versions are
enough as long as a batch has at least as many micro-batches as the pipeline has stages.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
"""

from bireme.errors import BiremeError
from bireme.schedule.generators.one_f_one_b import alternate
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.rule import Rule
from bireme.schedule.weave import Orders

__all__ = ["TWO_BUFFER", "never_drain", "refuse_short_batches"]

PICTURE = """
"""


def never_drain(shape: Shape) -> Orders:
    """1F1B over all micro-batches of the window as if they were one batch."""
    num_microbatches = shape.num_batches * shape.num_microbatches
    return [alternate(shape, stage, num_microbatches) for stage in range(shape.num_stages)]


def refuse_short_batches(shape: Shape) -> None:
    """Two versions hold only where a batch is at least as long as the pipeline is deep."""
    if shape.num_microbatches < shape.num_stages:
        raise BiremeError(
            f"Two weight versions need at least as many micro-batches in a batch as stages, but "
            f"{shape.num_microbatches} micro-batches meet {shape.num_stages} stages. Use "
            f"{shape.num_stages} or more micro-batches, fewer stages, or a schedule that drains (1f1b)."
        )


TWO_BUFFER = Schedule(
    name="2bw",
    summary="PipeDream-2BW: no drain, two weight versions, each update one batch late",
    rule=Rule.DELAYED,
    orders=never_drain,
    check=refuse_short_batches,
)
