"""The part of the study with codecs on boundaries: its cells, and their results as a table and a picture."""

from collections.abc import Iterator, Sequence

from benchmarks.delay_study.coded import mean_bits
from benchmarks.delay_study.pictures import Point, against_bits
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import Sweep
from benchmarks.delay_study.table import FIGURES, Row, table_lines
from benchmarks.delay_study.task import SIZES
from bireme.report.shapes import Picture

__all__ = ["MOST_EXCESS", "bits_of", "codec_lines", "codec_picture", "codec_sweeps", "is_judged"]

MOST_EXCESS = {6.5: 0.005, 3.0: 0.01, 2.0: 0.02}
"""By the bits a value that a run may take: the loss above that of the synchronous run without codecs."""

CODED = (
    ("int6", 0.0, "int8"),
    ("topk:0.125:8", 0.35, "int5"),
    ("topk:0.125:8", 0.09, "int5"),
    ("topk:0.125:8", 0.0, "int8"),
)
"""Codecs, the last share of a run with another one, and which: 6.5, 3 and 2 bits a value over the run, and
`topk` to the end.
"""

OTHERS_AT_THESE_BITS = (
    ("int8/int4", 0.0, "int8"),
    ("topk:0.125:8", 0.05, "int8"),
    ("topk:0.25:8", 0.06, "int8"),
    ("topk:0.5:4", 0.06, "int8"),
    ("topk:0.25:4", 0.2, "int8"),
)
"""With the larger model and AdamW alone, under 2bw-fresh with its start."""

OTHER_BITS = (("int5", 0.0, "int8"), ("int4", 0.0, "int8"), ("int8", 0.0, "int8"))
"""With the small model alone."""

RULES = ("fresh+warm-up", "synchronous")

SHAPE = ("codec", "last part", "bits (mean of both ways)", "rule", "optimizer", "model")
UP_TO_EXCESS = FIGURES.index("excess") + 1
"""The loss through the codec comes after the excess."""

TITLE = "Loss over that of the synchronous run; larger model, AdamW, 2bw-fresh after a delay warm-up"
SERIES = ("without the codec", "through the codec")
SEEN_EXCESS = 0.001
"""The losses without and through a codec that lie nearer to each other are one point."""


def codec_sweeps() -> Iterator[Sweep]:
    """The runs that are judged first; three seeds of each at its best rate."""
    for coded in (*CODED, *OTHERS_AT_THESE_BITS):
        yield Sweep(_cell("fresh+warm-up", *coded, size="larger"), 1, 3)
    for optimizer, rung in (("adamw", 2), ("muon", 4)):
        for coded in (*CODED, *OTHER_BITS):
            for rule in RULES:
                yield Sweep(_cell(rule, *coded, optimizer=optimizer), rung, 3)
    for coded in CODED:
        yield Sweep(_cell("synchronous", *coded, size="larger"), 1, 3)
    yield Sweep(Cell("synchronous", "muon", size="larger"), 4, 3)
    for coded in CODED:
        for rule in RULES:
            yield Sweep(_cell(rule, *coded, optimizer="muon", size="larger"), 4, 3)


def _cell(
    rule: str, word: str, ending: float, ending_word: str, *, optimizer: str = "adamw", size: str = "small"
) -> Cell:
    return Cell(rule, optimizer, size=size, codec=word, ending=ending, ending_codec=ending_word)


def codec_lines(found: Sequence[Row]) -> Iterator[str]:
    """Bits a value, and the loss without the codec and through it."""
    before, after = FIGURES[:UP_TO_EXCESS], FIGURES[UP_TO_EXCESS:]
    yield from table_lines(
        (*SHAPE, *before, "through the codec", *after),
        (_cells(row) for row in found if row.cell.codec != "none" and row.cell.replicas == 1),
    )


def _cells(row: Row) -> tuple[object, ...]:
    cell, figures = row.cell, row.figures
    through = "" if row.through is None else f"{100 * row.through:+.1f} %"
    shape = cell.codec, _told_ending(cell), f"{bits_of(cell):.2f}", cell.rule, cell.optimizer, cell.size
    return *shape, *figures[:UP_TO_EXCESS], through, *figures[UP_TO_EXCESS:]


def bits_of(cell: Cell) -> float:
    """Bits a value over the run, in the mean of both ways."""
    width = SIZES[cell.size].config.width
    return mean_bits(cell.codec, width, ending=cell.ending, ending_word=cell.ending_codec)


def is_judged(cell: Cell) -> bool:
    """Whether it is of the runs that the limits are for: the larger model with AdamW under 2bw-fresh with its
    start.
    """
    return (cell.size, cell.rule, cell.optimizer) == ("larger", "fresh+warm-up", "adamw")


def codec_picture(found: Sequence[Row]) -> Picture | None:
    """Loss against bits of the runs that the limits are for, if there are any."""
    points = [*_points(found)]
    return against_bits(TITLE, SERIES, points) if points else None


def _points(found: Sequence[Row]) -> Iterator[Point]:
    """Without the codec at the end, and through the codec that a run ended with."""
    for row in found:
        cell, excess = row.cell, row.excess
        if not is_judged(cell) or excess is None:
            continue
        if cell.codec == "none" and cell.num_microbatches == 8:
            yield Point("none, 32 bits", 0, 10.0, excess.median, excess.least, excess.greatest)
        elif cell.codec != "none":
            name = f"{cell.codec}, last {_told_ending(cell)}" if cell.ending else cell.codec
            yield Point(name, 0, bits_of(cell), excess.median, excess.least, excess.greatest)
            if row.through is not None and abs(row.through - excess.median) > SEEN_EXCESS:
                yield Point(name, 1, bits_of(cell), row.through, row.through, row.through)


def _told_ending(cell: Cell) -> str:
    return f"{100 * cell.ending:.0f} % {cell.ending_codec}" if cell.ending else ""
