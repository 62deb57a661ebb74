"""The part of the study where two or three things that cost steps come together: codecs of sums with delayed
updates, with codecs on boundaries, or with both.
"""

from collections.abc import Iterator, Sequence

from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import FIRST_RUNG, Sweep
from benchmarks.delay_study.table import FIGURES, Row, table_lines
from bireme.codec.description import BoundaryCodecs
from bireme.codec.sum_description import parse_sum_codec
from bireme.plan.penalties import (
    BOTH_CODED,
    DEFAULT_DELAY_WARMUP,
    codec_steps,
    steps_for_one,
    sum_steps,
    unseen_share,
)
from bireme.schedule.program import Rule

__all__ = ["counted_steps", "is_pair", "pair_lines", "pair_sweeps"]

DEEP, ALONE = (4, 8, 2), (1, 1, 4)
"""Stages, micro-batches and replicas: a pipeline, and devices that each have the whole model."""
RUNGS = {"2bw": 0}
"""Of rules that want a lower rate than a synchronous run."""
PAIRS = (
    ("fresh+warm-up", "none", "int4", ALONE),
    ("synchronous", "int5", "int4", DEEP),
    ("fresh+warm-up", "int5", "int4", DEEP),
    ("fresh+warm-up", "none", "int4", DEEP),
    ("fresh+warm-up", "none", "none", ALONE),
    ("2bw+warm-up", "none", "int4", DEEP),
    ("synchronous", "int8", "int4", DEEP),
    ("synchronous", "int8", "int8", DEEP),
    ("fresh+warm-up", "none", "int8", DEEP),
    ("2bw+warm-up", "none", "int8", DEEP),
    ("2bw", "none", "int4", DEEP),
    ("2bw", "none", "int8", DEEP),
)
"""Rules, codecs of boundaries and of sums, and shapes; what plans choose most often comes first."""
NUM_FIRST = 4
"""The first pairs, so many of them, get three seeds first, and are run with Muon too."""
_RULES = {
    "synchronous": (Rule.SYNCHRONOUS, 0.0),
    "2bw": (Rule.DELAYED, 0.0),
    "2bw+warm-up": (Rule.DELAYED, DEFAULT_DELAY_WARMUP),
    "fresh+warm-up": (Rule.FRESH, DEFAULT_DELAY_WARMUP),
}


def pair_sweeps() -> Iterator[Sweep]:
    """Seeds at the best rate of a run without codecs; then a search."""
    first = ("adamw", PAIRS[:NUM_FIRST])
    for (optimizer, pairs), num_seeds, is_searched in (
        (first, 3, False),
        (("adamw", PAIRS), 1, False),
        (("adamw", PAIRS), 3, False),
        (("muon", PAIRS[:NUM_FIRST]), 3, False),
        (("adamw", PAIRS), 3, True),
    ):
        for rule, codec, sums, (d, m, replicas) in pairs:
            cell = Cell(rule, optimizer, d, m, codec=codec, sums=sums, replicas=replicas)
            yield Sweep(cell, RUNGS.get(rule, FIRST_RUNG[optimizer]), num_seeds, is_searched=is_searched)


def is_pair(cell: Cell) -> bool:
    """Whether it is a cell of this part."""
    is_plain = cell.codec == "none" and cell.rule == "synchronous"
    return cell.replicas > 1 and cell.agreement == "allreduce" and not is_plain


def pair_lines(found: Sequence[Row]) -> Iterator[str]:
    """What is measured of both together, and the product that plans count."""
    yield from table_lines(
        ("rule", "boundaries", "sums", "replicas", "d", "optimizer", *FIGURES, "plans count"),
        (
            (*_shape(row.cell), *row.figures, f"{counted_steps(row.cell):.2f}")
            for row in found
            if is_pair(row.cell)
        ),
    )


def _shape(cell: Cell) -> tuple[object, ...]:
    return cell.rule, cell.codec, cell.sums, cell.replicas, cell.num_stages, cell.optimizer


def counted_steps(cell: Cell) -> float:
    """The steps for one that plans count."""
    rule, delay_warmup = _RULES[cell.rule]
    unseen = unseen_share(cell.num_stages, cell.num_microbatches)
    if cell.num_stages == 1:  # a trial step knows the gradients of its own replica alone
        unseen = 1 - 1 / cell.replicas
    steps = steps_for_one(rule, cell.optimizer, delay_warmup=delay_warmup, unseen=unseen)
    boundaries = [BoundaryCodecs(cell.codec, cell.codec)]
    steps *= BOTH_CODED if "none" not in (cell.codec, cell.sums) else 1.0
    return (
        steps
        * codec_steps(boundaries, cell.optimizer, has_ending=False)
        * sum_steps(parse_sum_codec(cell.sums), cell.optimizer).steps
    )
