"""A chart of curves as SVG that needs no script; a script may add a cross-hair and a zoom to it.

A chart is as wide as the page allows, and its text keeps its size: heights are pixels, places along x are
shares of the width. Only the curves themselves are stretched, inside an SVG of their own. Marks at the axis
come in several densities, of which the style sheet shows the one that there is room for. A reader who zooms
widens the SVG `moving` inside the SVG `window`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bireme.report.markup import number, tag, titled, words
from bireme.report.shapes import Quantity, Scale, value_text

ACROSS = 1000
"""The width of every plot in the units of its curves."""
_TOP, _BOTTOM = 12, 34
"""Room above the plot, and below it for the axis."""
_Y_MARKS = 5
_DENSITIES = {"few": 4, "some": 6, "many": 11}
"""Marks along x by the classes of the style sheet."""
_ROOM = 0.06
"""Left free above and below the curves, of their range."""


class Along(StrEnum):
    """What a chart's curves are drawn along."""

    STEPS = "steps"
    TIME = "time"


class Look(StrEnum):
    """How a curve is drawn; the values are classes of the style sheet."""

    LINE = "line"
    PALE = "pale-line"
    DOTS = "dots"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at steps, and the seconds of running at these steps. `colour` is a place in the palette."""

    label: str
    steps: Sequence[float]
    times_s: Sequence[float]
    values: Sequence[float]
    colour: int
    look: Look = Look.LINE

    def along(self, along: Along) -> Sequence[float]:
        """Where its values are."""
        return self.steps if along is Along.STEPS else self.times_s


@dataclass(frozen=True, slots=True)
class ChartEvent:
    """Something that happened at a step; `role` is a class of the style sheet."""

    step: float
    time_s: float
    text: str
    role: str


@dataclass(frozen=True, slots=True)
class ChartSpan:
    """Steps from one to another in which something lasted."""

    begin: ChartEvent
    end: ChartEvent
    text: str
    role: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows."""

    title: str
    curves: tuple[Curve, ...]
    ticks: tuple[ChartEvent, ...] = ()
    spans: tuple[ChartSpan, ...] = ()
    height: int = 320
    from_zero: bool = False


def drawn(chart: Chart, along: Along = Along.STEPS, *, is_log: bool = False) -> str:
    """The chart along steps or time, its values as they are or their logarithms."""
    return _Plot(chart, along, is_log=is_log).drawn()


def framed(
    title: str, x: Scale, bottom: float, still: str, moving: str, *, role: str, along: str, **data: str
) -> str:
    """A plot with its axis at `bottom`: `moving` goes along when a reader zooms, `still` stays.

    Inside both, places along x are percent. `role` are classes, `data` attributes for the script.
    """
    height = bottom + _BOTTOM
    return tag(
        "svg",
        still,
        *(
            tag("g", *_x_axis(x, bottom, count), class_=f"x-axis {name}")
            for name, count in _DENSITIES.items()
        ),
        tag(
            "svg",
            tag("svg", moving, class_="moving", width="100%", height=bottom + 1),
            class_="window",
            width="100%",
            height=bottom + 1,
        ),
        width="100%",
        height=height,
        class_=f"plot {role}",
        role="img",
        aria_label=title,
        data_along=along,
        data_range=json.dumps([x.least, x.most]),
        data_bottom=number(bottom),
        **data,
    )


def share(place: float) -> str:
    """A place between 0 and `ACROSS` as a share of the width of the plot."""
    return f"{number(100 * place / ACROSS)}%"


def chart_data(chart: Chart) -> str:
    """The values of a chart's curves for the script, in a tag of their own."""
    curves = [
        {
            "label": curve.label,
            "colour": curve.colour,
            "steps": [round(step) for step in curve.steps],
            "time": [round(time_s, 3) for time_s in curve.times_s],
            "values": [float(f"{value:.7g}") for value in curve.values],
        }
        for curve in chart.curves
    ]
    text = json.dumps(curves, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return tag("script", text.replace("<", "\\u003c"), type="application/json", class_="data")


def _y_axis(y: Scale) -> Iterator[str]:
    for mark in y.marks(_Y_MARKS):
        height = y.at(mark)
        yield tag("line", x1=0, x2="100%", y1=height, y2=height, class_="grid")
        text = words(value_text(mark, y.quantity))
        yield tag("text", text, x=-8, y=height + 4, class_="mark", text_anchor="end")


def _x_axis(x: Scale, bottom: float, count: int) -> Iterator[str]:
    yield tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="axis")
    for mark in x.marks(count):
        place = share(x.at(mark))
        yield tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 5, class_="axis")
        text = words(value_text(mark, x.quantity))
        yield tag("text", text, x=place, y=bottom + 20, class_="mark", text_anchor="middle")


class _Plot:
    """A chart along steps or time, with its scales."""

    def __init__(self, chart: Chart, along: Along, *, is_log: bool) -> None:
        self.chart, self.along = chart, along
        values = [value for curve in chart.curves for value in curve.values]
        places = [place for curve in chart.curves for place in curve.along(along)]
        quantity = Quantity.STEPS if along is Along.STEPS else Quantity.CLOCK
        self.x = Scale(min(places, default=0), max(places, default=1), 0, ACROSS, quantity)
        low, high = min(values, default=0), max(values, default=1)
        if is_log:
            room = (high / low) ** _ROOM if high > low else 1.1
            low, high = low / room, high * room
        elif chart.from_zero and low >= 0:
            low, high = 0.0, high * (1 + _ROOM) or 1.0
        else:
            room = (high - low) * _ROOM or abs(high) * _ROOM or 1.0
            low, high = low - room, high + room
        self.y = Scale(low, high, chart.height - _BOTTOM, _TOP, is_log=is_log)

    def drawn(self) -> str:
        """The whole plot."""
        curves = tag(
            "svg",
            *self._curves(),
            viewBox=f"0 0 {ACROSS} {self.chart.height}",
            preserveAspectRatio="none",
            width="100%",
            height=self.chart.height,
        )
        y = self.y
        return framed(
            self.chart.title,
            self.x,
            y.start,
            "".join(_y_axis(y)),
            "".join((*self._spans(), curves, *self._dots(), *self._ticks())),
            role=f"{self.along}{' log' if y.is_log else ''}",
            along=self.along,
            data_height=json.dumps([y.least, y.most, y.start, y.end, y.is_log]),
        )

    def _at(self, tick: ChartEvent) -> float:
        return self.x.at(tick.step if self.along is Along.STEPS else tick.time_s)

    def _ticks(self) -> Iterator[str]:
        """Short lines at the bottom, or through the whole plot for what changes the run."""
        for tick in self.chart.ticks:
            place, bottom = share(self._at(tick)), self.y.start
            ends = {"y1": bottom, "y2": bottom - 9 if tick.role in ("checkpoint", "skipped") else _TOP}
            yield tag("line", titled(tick.text), x1=place, x2=place, **ends, class_=f"tick {tick.role}")

    def _spans(self) -> Iterator[str]:
        for span in self.chart.spans:
            left, right = self._at(span.begin), self._at(span.end)
            place = {"x": share(left), "width": share(right - left)}
            height, role = self.y.start - self.y.end, f"span {span.role}"
            yield tag("rect", titled(span.text), **place, y=self.y.end, height=height, class_=role)

    def _points(self, curve: Curve) -> list[tuple[float, float]]:
        return [
            (self.x.at(place), self.y.at(value))
            for place, value in zip(curve.along(self.along), curve.values, strict=True)
            if math.isfinite(value)
        ]

    def _curves(self) -> Iterator[str]:
        order = (Look.PALE, Look.LINE, Look.DOTS)
        for curve in sorted(self.chart.curves, key=lambda one: order.index(one.look)):
            points = self._points(curve)
            if len(points) > 1:
                line = "M" + "L".join(f"{number(left)} {number(height)}" for left, height in points)
                look = "joins" if curve.look is Look.DOTS else curve.look
                yield tag("path", titled(curve.label), d=line, class_=f"curve {look} c{curve.colour}")

    def _dots(self) -> Iterator[str]:
        """The points of curves of dots, and of curves that have one point."""
        for curve in self.chart.curves:
            points, role = self._points(curve), f"dots c{curve.colour}"
            if curve.look is not Look.DOTS and len(points) != 1:
                continue
            for (left, height), step, value in zip(points, curve.steps, curve.values, strict=False):
                text = titled(f"{curve.label}: {value:.6g} at step {step:,.0f}")
                yield tag("circle", text, cx=share(left), cy=height, r=3.5, class_=role)
