"""The part of the study where two or three things that cost steps come together: codecs of sums with delayed
updates, with codecs on boundaries, or with both.
"""

from collections.abc import Iterator, Sequence

from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import Sweep
from benchmarks.delay_study.table import FIGURES, Row, table_lines
from bireme.codec.description import BoundaryCodecs
from bireme.codec.sum_description import parse_sum_codec
from bireme.plan.penalties import (
    DEFAULT_DELAY_WARMUP,
    codec_steps,
    steps_for_one,
    sum_steps,
    unseen_share,
)
from bireme.schedule.program import Rule

__all__ = ["counted_steps", "is_pair", "pair_lines", "pair_sweeps"]

FIRST_RUNG = {"adamw": 2, "muon": 4}
RUNGS = {"2bw": 0}
"""Of rules that want a lower rate than a synchronous run."""
PAIRS = (
    ("fresh+warm-up", "none", "int4"),
    ("synchronous", "int5", "int4"),
    ("fresh+warm-up", "int5", "int4"),
    ("2bw+warm-up", "none", "int4"),
    ("synchronous", "int8", "int4"),
    ("synchronous", "int8", "int8"),
    ("fresh+warm-up", "none", "int8"),
    ("2bw+warm-up", "none", "int8"),
    ("2bw", "none", "int4"),
    ("2bw", "none", "int8"),
    ("fresh+warm-up", "none", "none"),
)
"""Rules, codecs of boundaries and of sums; what plans choose most often comes first."""
WITH_MUON = 3
"""The first pairs, so many of them, are run with Muon too."""
_RULES = {
    "synchronous": (Rule.SYNCHRONOUS, 0.0),
    "2bw": (Rule.DELAYED, 0.0),
    "2bw+warm-up": (Rule.DELAYED, DEFAULT_DELAY_WARMUP),
    "fresh+warm-up": (Rule.FRESH, DEFAULT_DELAY_WARMUP),
}


def pair_sweeps() -> Iterator[Sweep]:
    """Three seeds at the best rate of a run without codecs; then a search."""
    for is_searched in (False, True):
        for optimizer, pairs in (("adamw", PAIRS), ("muon", PAIRS[:WITH_MUON])):
            for rule, codec, sums in pairs:
                cell = Cell(rule, optimizer, codec=codec, sums=sums, replicas=2)
                yield Sweep(cell, RUNGS.get(rule, FIRST_RUNG[optimizer]), 3, is_searched=is_searched)


def is_pair(cell: Cell) -> bool:
    """Whether it is a cell of this part."""
    is_plain = cell.codec == "none" and cell.rule == "synchronous"
    return cell.replicas > 1 and cell.agreement == "allreduce" and not is_plain


def pair_lines(found: Sequence[Row]) -> Iterator[str]:
    """What is measured of both together, and the product that plans count."""
    yield from table_lines(
        ("rule", "boundaries", "sums", "optimizer", *FIGURES, "plans count"),
        (
            (*_shape(row.cell), *row.figures, f"{counted_steps(row.cell):.2f}")
            for row in found
            if is_pair(row.cell)
        ),
    )


def _shape(cell: Cell) -> tuple[str, ...]:
    return cell.rule, cell.codec, cell.sums, cell.optimizer


def counted_steps(cell: Cell) -> float:
    """The steps for one that plans count: the product of what each costs alone."""
    rule, delay_warmup = _RULES[cell.rule]
    unseen = unseen_share(cell.num_stages, cell.num_microbatches)
    steps = steps_for_one(rule, cell.optimizer, delay_warmup=delay_warmup, unseen=unseen)
    boundaries = [BoundaryCodecs(cell.codec, cell.codec)]
    return (
        steps
        * codec_steps(boundaries, cell.optimizer, has_ending=False)
        * sum_steps(parse_sum_codec(cell.sums), cell.optimizer).steps
    )
