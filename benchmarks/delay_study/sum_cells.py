"""The part of the study where sums of gradients go through a codec: its cells, and their table."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from benchmarks.delay_study.pair_cells import is_pair
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import FIRST_RUNG, Sweep
from benchmarks.delay_study.table import FIGURES, Row, table_lines
from benchmarks.delay_study.task import SIZES
from bireme.codec.sum_description import parse_sum_codec, sum_cost
from bireme.model.gpt import GPT

__all__ = ["sum_lines", "sum_sweeps", "times_fewer"]

CODECS = ("int8", "int4", "int2", "lowrank:4", "threshold:0.01:50", "int3", "lowrank:8", "threshold:0.1:50")
NUM_REPEATED = 5
"""So many of the codecs get three seeds."""


def sum_sweeps() -> Iterator[Sweep]:
    """Every codec at the best rate of none; then a search for those that lose most, and Muon."""
    for replicas in (2, 4):
        for codec in CODECS[:NUM_REPEATED]:
            yield Sweep(_cell(codec, replicas), FIRST_RUNG["adamw"], is_searched=False)
    for replicas in (2, 4):
        for codec in CODECS[:NUM_REPEATED]:
            yield Sweep(_cell(codec, replicas), FIRST_RUNG["adamw"], 3, is_searched=False)
    for optimizer in FIRST_RUNG:
        for codec in CODECS:
            for replicas in (2, 4):
                yield Sweep(_cell(codec, replicas, optimizer), FIRST_RUNG[optimizer], 3)


def sum_lines(found: Sequence[Row]) -> Iterator[str]:
    """What a codec saves in bytes, and costs in loss and in steps."""
    coded = [row for row in found if row.cell.sums != "none" and not is_pair(row.cell)]
    yield from table_lines(
        ("codec of sums", "times fewer bytes", "replicas", "optimizer", *FIGURES),
        ((*_shape(row.cell), *row.figures) for row in coded),
    )


def _shape(cell: Cell) -> tuple[object, ...]:
    return cell.sums, f"{times_fewer(cell.sums, cell.size):.1f}", cell.replicas, cell.optimizer


@cache
def times_fewer(word: str, size: str) -> float:
    """How many times fewer bytes a replica's message has than its gradients in float32."""
    with torch.device("meta"):
        shapes = [tuple(one.shape) for one in GPT(SIZES[size].config).parameters()]
    return 1.0 / sum_cost(parse_sum_codec(word), shapes).message_share


def _cell(codec: str, replicas: int, optimizer: str = "adamw") -> Cell:
    return Cell("synchronous", optimizer, replicas=replicas, sums=codec)
