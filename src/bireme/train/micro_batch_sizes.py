"""The sizes of micro-batches that are measured for a run, which are those that its plan may have."""

from bireme.train.run_file import RunFile

__all__ = ["micro_batches"]

LARGEST_MEASURED = 16
"""Samples of the largest micro-batch that is measured unless one is asked for."""


def micro_batches(run: RunFile) -> list[int]:
    """The sizes of micro-batches that a plan of this run may have."""
    batch, asked = run.training.batch_size, run.plan
    if asked.micro_batch is not None:
        return [asked.micro_batch]
    if asked.microbatches is not None:
        widths = [asked.width] if asked.width is not None else range(1, batch // asked.microbatches + 1)
        sizes = {batch // (width * asked.microbatches) for width in widths if _divides(width, run)}
        return sorted(sizes)[-4:] or [1]
    largest = asked.largest_batch
    powers = [1 << power for power in range(min(LARGEST_MEASURED, largest or batch).bit_length())]
    return powers if largest is not None else [size for size in powers if batch % size == 0]


def _divides(width: int, run: RunFile) -> bool:
    assert run.plan.microbatches is not None
    return run.training.batch_size % (width * run.plan.microbatches) == 0
