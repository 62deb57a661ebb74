"""Curves of the loss of several runs in one panel of a picture.

Early losses would press all curves together at the bottom: the part above the top of the axis is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

from bireme.report.palette import AXIS, HUES, INK, PALE_INK, darker
from bireme.report.shapes import Anchor, Line, Picture, Shape, Text, round_step

WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 260, 45, 50
SIZE = 12
MOST_MARKS = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's losses at places of the axis (steps, seconds), in their order."""

    name: str
    points: Sequence[tuple[float, float]]
    bold: bool = False


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """Some curves under a title, between two losses. `target` is a loss that gets a line of its own."""

    title: str
    unit: str
    curves: Sequence[Curve]
    least: float
    most: float
    target: float | None = None
    top: float = 0.0

    @property
    def end(self) -> float:
        """The last place of all curves."""
        return max(curve.points[-1][0] for curve in self.curves)

    def x(self, place: float) -> float:
        """The pixel of a place of the axis."""
        return LEFT + (WIDTH - LEFT - RIGHT) * place / self.end

    def y(self, loss: float) -> float:
        """The pixel of a loss."""
        height = HEIGHT - TOP - BOTTOM
        return self.top + TOP + height * (self.most - loss) / (self.most - self.least)

    def shapes(self) -> Iterator[Shape]:
        """The axes, the curves, and their names beside their ends."""
        yield Text(LEFT, self.top + TOP / 2, self.title, SIZE + 2, INK, bold=True)
        for mark in _marks(self.least, self.most):
            yield Line(LEFT, self.y(mark), WIDTH - RIGHT, self.y(mark), AXIS)
            yield Text(LEFT - 8, self.y(mark), f"{mark:.2f}", SIZE, PALE_INK, Anchor.END)
        below = self.top + HEIGHT - BOTTOM
        for mark in (0.0, *_marks(0.0, self.end)):
            yield Text(self.x(mark), below + 16, f"{mark:g} {self.unit}", SIZE, PALE_INK, Anchor.MIDDLE)
        if self.target is not None:
            yield Line(LEFT, self.y(self.target), WIDTH - RIGHT, self.y(self.target), INK)
        ends = []
        for curve, hue in zip(self.curves, cycle((*HUES, *map(darker, HUES))), strict=False):
            for (place, loss), (later, lower) in pairwise(curve.points):
                if max(loss, lower) <= self.most:
                    ends_at = self.x(later), self.y(lower)
                    yield Line(self.x(place), self.y(loss), *ends_at, hue, 3.0 if curve.bold else 1.8)
            ends.append((min(self.y(curve.points[-1][1]), below), curve.name, hue, curve.bold))
        y = self.top + HEIGHT
        for wanted, name, hue, bold in sorted(ends, reverse=True):  # each above the one below it
            y = min(wanted, y - SIZE - 3)
            yield Text(WIDTH - RIGHT + 8, y, name, SIZE, hue, bold=bold)


def curve_picture(title: str, panels: Sequence[CurvePanel]) -> Picture:
    """Panels below each other."""
    placed = [replace(panel, top=float(HEIGHT * number)) for number, panel in enumerate(panels)]
    shapes = [shape for panel in placed for shape in panel.shapes()]
    return Picture(WIDTH, max(HEIGHT * len(panels), 1), title, tuple(shapes))


def _marks(least: float, most: float) -> Iterator[float]:
    """Round values above `least`, up to `most`."""
    step = round_step((most - least) / MOST_MARKS)
    mark = (int(least / step) + 1) * step
    while mark <= most:
        yield mark
        mark += step
