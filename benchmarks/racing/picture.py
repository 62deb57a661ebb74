"""The loss over seconds in each setting, a panel for each, of the contenders that have run there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.racing.contenders import CHOSEN
from benchmarks.racing.rank import Reached
from benchmarks.racing.results import Results, curve_of
from bireme.report.axes import round_step
from bireme.report.palette import AXIS, HUES, INK, PALE_INK
from bireme.report.shapes import Anchor, Line, Picture, Shape, Text

WIDTH, PANEL = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 270, 40, 50
SIZE = 12
MOST_MARKS = 6
ABOVE = 0.5
"""Of the loss above the target, so much is in the picture."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """From seconds and losses to pixels."""

    top: float
    seconds: float
    least: float
    most: float

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.seconds

    def y(self, loss: float) -> float:
        height = PANEL - TOP - BOTTOM
        return self.top + TOP + height * (self.most - loss) / (self.most - self.least)


def drawn(results: Results, settings: Sequence[str], target: float) -> Picture:
    """The curves of the first seed of every contender."""
    shapes: list[Shape] = []
    height = 0
    for setting in settings:
        curves = {
            one["contender"]: curve_of(one)
            for one in reversed(results.find("race", setting=setting))
            if one["curve"]
        }
        if curves:
            shapes += _panel(setting, height, dict(sorted(curves.items())), target)
            height += PANEL
    return Picture(WIDTH, max(height, 1), "loss over seconds of training", tuple(shapes))


def _panel(setting: str, top: float, curves: dict[str, list[Reached]], target: float) -> Iterator[Shape]:
    seconds = max(curve[-1].seconds for curve in curves.values())
    least = min(one.loss for curve in curves.values() for one in curve) - 0.02
    panel = _Panel(top, seconds, min(least, target - 0.02), target + ABOVE)
    yield Text(LEFT, top + TOP / 2, f"{setting}: loss over seconds", SIZE + 2, INK, bold=True)
    step = round_step((panel.most - panel.least) / MOST_MARKS)
    mark = (int(panel.least / step) + 1) * step
    while mark <= panel.most:
        yield Line(LEFT, panel.y(mark), WIDTH - RIGHT, panel.y(mark), AXIS)
        yield Text(LEFT - 8, panel.y(mark), f"{mark:.2f}", SIZE, PALE_INK, Anchor.END)
        mark += step
    step, mark = round_step(seconds / MOST_MARKS), 0.0
    while mark <= seconds:
        yield Text(panel.x(mark), top + PANEL - BOTTOM + 16, f"{mark:g} s", SIZE, PALE_INK, Anchor.MIDDLE)
        mark += step
    yield Line(LEFT, panel.y(target), WIDTH - RIGHT, panel.y(target), INK)
    ends = []
    for number, (name, curve) in enumerate(curves.items()):
        hue, width = HUES[number % len(HUES)], 3.0 if name == CHOSEN else 1.5
        for before, after in pairwise(curve):
            if max(before.loss, after.loss) <= panel.most:
                ends_at = panel.x(after.seconds), panel.y(after.loss)
                yield Line(panel.x(before.seconds), panel.y(before.loss), *ends_at, hue, width)
        ends.append((min(panel.y(curve[-1].loss), top + PANEL - BOTTOM), name, hue))
    y = top + PANEL
    for wanted, name, hue in sorted(ends, reverse=True):
        y = min(wanted, y - SIZE - 2)
        yield Text(WIDTH - RIGHT + 8, y, name, SIZE, hue, bold=name == CHOSEN)
