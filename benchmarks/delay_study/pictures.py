"""Pictures of the study: losses along runs, and the loss that a codec costs against its bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.common.curves import Curve, CurvePanel, curve_picture
from benchmarks.delay_study.study import CURVE_EVERY, Run
from bireme.report.palette import AXIS, HUES, INK, PALE_INK
from bireme.report.shapes import Anchor, Line, Picture, Rect, Shape, Text, round_step

__all__ = ["Point", "against_bits", "curves"]

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 60, 40, 80, 50
SIZE = 13
MARK = 8.0
LETTER = 6.4
"""How wide a letter of a name is, at most in the mean."""
MOST_MARKS = 8
MOST_BITS = 10.0


@dataclass(frozen=True, slots=True)
class Point:
    """A codec over a run: bits a value, and how much more loss than none, as a part of it; over the seeds
    the median, the least and the greatest. `series` is what it belongs to.
    """

    name: str
    series: int
    bits: float
    excess: float
    least: float
    greatest: float


@dataclass(frozen=True, slots=True)
class _View:
    """From bits and excesses to pixels."""

    least: float
    most: float

    def x(self, bits: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * bits / MOST_BITS

    def y(self, excess: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.most - excess) / (self.most - self.least)


def against_bits(title: str, series: Sequence[str], points: Sequence[Point]) -> Picture:
    """Each point with its name, a line from the least of its seeds to the greatest, and a legend on top. A
    pale line joins the points of the first series that no other beats in both bits and loss. What has more
    bits than the axis is at its end.
    """
    least, most = min(one.least for one in points), max(one.greatest for one in points)
    room = 0.08 * max(most - least, 0.01)
    view = _View(min(least, 0.0) - room, most + room)
    shapes = [*_axes(view, title)]
    for one, other in pairwise(
        _best([point for point in points if point.series == 0 and point.bits < MOST_BITS])
    ):
        shapes.append(
            Line(view.x(one.bits), view.y(one.excess), view.x(other.bits), view.y(other.excess), PALE_INK)
        )
    for number, name in enumerate(series):
        if all(point.series != number for point in points):
            continue
        begin = LEFT + 230.0 * number
        shapes.append(Rect(begin, TOP - 32, MARK, MARK, HUES[number]))
        shapes.append(Text(begin + 14, TOP - 28, name, SIZE, INK))
    for one in points:
        x, y, hue = view.x(one.bits), view.y(one.excess), HUES[one.series]
        shapes.append(Line(x, view.y(one.greatest), x, view.y(one.least), hue, 2.0))
        shapes.append(Rect(x - MARK / 2, y - MARK / 2, MARK, MARK, hue, title=one.name))
    return Picture(WIDTH, HEIGHT, title, (*shapes, *_names(view, points)))


def _names(view: _View, points: Sequence[Point]) -> Iterator[Shape]:
    """Each beside its point, right or left of it, and as much lower as no other is in its way."""
    taken: list[tuple[float, float, float]] = []
    for one in sorted(points, key=lambda point: -point.excess):
        x, long = view.x(one.bits), LETTER * len(one.name)
        y = view.y(one.excess) - MARK
        places = (
            (begin, y + lower) for lower in range(0, HEIGHT, 4) for begin in (x + MARK, x - MARK - long)
        )
        begin, y = next(
            (begin, y)
            for begin, y in places
            if LEFT <= begin <= WIDTH - long
            and all(
                begin + long < other or other_end < begin or abs(y - other_y) >= SIZE
                for other, other_end, other_y in taken
            )
        )
        taken.append((begin, begin + long, y))
        is_right = begin > x
        anchor = Anchor.START if is_right else Anchor.END
        yield Text(begin if is_right else begin + long, y, one.name, SIZE - 2, INK, anchor)


def _best(points: Sequence[Point]) -> list[Point]:
    """From few bits to many, to a tenth of a bit, those that no point with as few has less loss than."""
    found: list[Point] = []
    for one in sorted(points, key=lambda point: (round(point.bits, 1), point.excess)):
        if not found or one.excess < found[-1].excess:
            found.append(one)
    return found


def _axes(view: _View, title: str) -> Iterator[Shape]:
    yield Text(LEFT, TOP / 3, title, SIZE + 2, INK, bold=True)
    step = round_step((view.most - view.least) / MOST_MARKS)
    mark = (int(view.least / step) - 1) * step
    while mark <= view.most:
        if mark >= view.least:
            yield Line(LEFT, view.y(mark), WIDTH - RIGHT, view.y(mark), AXIS)
            yield Text(LEFT - 8, view.y(mark), f"{100 * mark:+.1f} %", SIZE, PALE_INK, Anchor.END)
        mark += step
    for bits in range(int(MOST_BITS) + 1):
        yield Text(view.x(bits), HEIGHT - BOTTOM + 18, str(bits), SIZE, PALE_INK, Anchor.MIDDLE)
    words = "bits a value, mean of both ways over the run"
    yield Text(view.x(MOST_BITS / 2), HEIGHT - BOTTOM + 38, words, SIZE, PALE_INK, Anchor.MIDDLE)


SEEN = 0.35
"""Of the way from the lowest loss to the highest, so much is in the picture."""


def curves(title: str, runs: Sequence[tuple[str, Run]]) -> Picture:
    """The losses along some runs, each with a name at its end."""
    losses = [loss for _, run in runs for loss in run.curve]
    least, height = min(losses), max(losses) - min(losses)
    found = [
        Curve(name, [(CURVE_EVERY * place, loss) for place, loss in enumerate(run.curve, 1)])
        for name, run in runs
    ]
    panel = CurvePanel(title, "steps", found, least - 0.02 * height, least + SEEN * height)
    return curve_picture(title, [panel])
