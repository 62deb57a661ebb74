"""Curves of the loss along the way, as a picture.

Early losses would press all curves together at the bottom: what is above the top of the axis is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.delay_study.study import CURVE_EVERY, Run
from bireme.report.axes import round_step
from bireme.report.palette import AXIS, HUES, INK, PALE_INK
from bireme.report.shapes import Anchor, Line, Picture, Shape, Text

__all__ = ["curves"]

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 60, 250, 50, 50
SIZE = 13
MOST_MARKS = 6
SEEN = 0.35
"""Of the way from the lowest loss to the highest, so much is in the picture."""


@dataclass(frozen=True, slots=True)
class _View:
    """From steps and losses to pixels."""

    steps: int
    least: float
    most: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.most - loss) / (self.most - self.least)


def curves(title: str, runs: Sequence[tuple[str, Run]]) -> Picture:
    """The curves of some runs, each with a name at its end."""
    losses = [loss for _, run in runs for loss in run.curve]
    least, most = min(losses), max(losses)
    steps = max(run.setting.cell.steps for _, run in runs)
    view = _View(steps, least - 0.02 * (most - least), least + SEEN * (most - least))
    shapes = [*_axes(view, title)]
    for number, (_, run) in enumerate(runs):
        shapes += _curve(view, run, number)
    shapes += _names(view, runs)
    return Picture(WIDTH, HEIGHT, title, tuple(shapes))


def _axes(view: _View, title: str) -> Iterator[Shape]:
    yield Text(LEFT, TOP / 2, title, SIZE + 2, INK, bold=True)
    step = round_step((view.most - view.least) / MOST_MARKS)
    mark = (int(view.least / step) + 1) * step
    while mark <= view.most:
        yield Line(LEFT, view.y(mark), WIDTH - RIGHT, view.y(mark), AXIS)
        yield Text(LEFT - 8, view.y(mark), f"{mark:.2f}", SIZE, PALE_INK, Anchor.END)
        mark += step
    for number in range(0, view.steps + 1, 50):
        yield Text(view.x(number), HEIGHT - BOTTOM + 18, str(number), SIZE, PALE_INK, Anchor.MIDDLE)
    yield Text(view.x(view.steps / 2), HEIGHT - BOTTOM + 38, "steps", SIZE, PALE_INK, Anchor.MIDDLE)


def _curve(view: _View, run: Run, number: int) -> Iterator[Shape]:
    points = [(CURVE_EVERY * (place + 1), loss) for place, loss in enumerate(run.curve)]
    for (step, loss), (later, lower) in pairwise(points):
        if max(loss, lower) <= view.most:
            yield Line(
                view.x(step), view.y(loss), view.x(later), view.y(lower), HUES[number % len(HUES)], 2.0
            )


def _names(view: _View, runs: Sequence[tuple[str, Run]]) -> Iterator[Shape]:
    """From the lowest up, each as far above the one below as a line of text needs."""
    ends = sorted((run.curve[-1], number) for number, (_, run) in enumerate(runs))
    y = float(HEIGHT)
    for loss, number in ends:
        y = min(view.y(loss), y - SIZE - 4)
        yield Text(WIDTH - RIGHT + 8, y, runs[number][0], SIZE, HUES[number % len(HUES)])
