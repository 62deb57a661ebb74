"""A chart of curves as SVG that needs no script; a script may add a cross-hair and a zoom to it.

Everything that moves when a reader zooms is in the group `zoomed`, whose transform stretches x alone. So
dots are strokes of no length with round ends, which stay round.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bireme.report.axes import Quantity, Scale, value_text
from bireme.report.page.markup import number, tag, titled, words

__all__ = ["Along", "Chart", "Curve", "Look", "Tick", "chart_data", "drawn"]

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34
"""Room around the plot for its axes."""
EDGE = 5
"""By how much a dot may reach over the ends of the plot."""
Y_MARKS = 5
X_MARK_WIDTH = 100
ROOM = 0.06
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
class Tick:
    """Something that happened at a step; `role` is a class of the style sheet."""

    step: float
    time_s: float
    text: str
    role: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows."""

    title: str
    curves: tuple[Curve, ...]
    ticks: tuple[Tick, ...] = ()
    width: int = 1120
    height: int = 320
    from_zero: bool = False


def drawn(chart: Chart, along: Along = Along.STEPS, *, is_log: bool = False) -> str:
    """The chart along steps or time, its values as they are or their logarithms."""
    x, y = _scales(chart, along, is_log=is_log)
    clip = "-".join(("clip", *chart.title.lower().replace("/", " ").split(), along, *["log"][:is_log]))
    plot = tag(
        "g",
        tag("g", *_ticks(chart, along, x), *_curves(chart, along, x, y), class_="zoomed"),
        clip_path=f"url(#{clip})",
    )
    frame = tag("rect", x=x.start - EDGE, y=0, width=x.end - x.start + 2 * EDGE, height=y.start + 1)
    return tag(
        "svg",
        titled(chart.title),
        tag("defs", tag("clipPath", frame, id=clip)),
        *_y_axis(x, y),
        tag("g", *_x_axis(x, y), class_="x-axis"),
        plot,
        viewBox=f"0 0 {chart.width} {chart.height}",
        class_=f"plot {along}" + (" log" if is_log else ""),
        role="img",
        aria_label=chart.title,
        data_along=along,
        data_range=json.dumps([x.least, x.most, x.start, x.end]),
        data_height=json.dumps([y.least, y.most, y.start, y.end, is_log]),
    )


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


def _scales(chart: Chart, along: Along, *, is_log: bool) -> "tuple[Scale, Scale]":
    values = [value for curve in chart.curves for value in curve.values]
    places = [place for curve in chart.curves for place in curve.along(along)]
    quantity = Quantity.STEPS if along is Along.STEPS else Quantity.CLOCK
    right, bottom = chart.width - RIGHT, chart.height - BOTTOM
    x = Scale(min(places, default=0), max(places, default=1), LEFT, right, quantity)
    low, high = min(values, default=0), max(values, default=1)
    if is_log:
        room = (high / low) ** ROOM if high > low else 1.1
        return x, Scale(low / room, high * room, bottom, TOP, is_log=True)
    if chart.from_zero and low >= 0:
        return x, Scale(0.0, high * (1 + ROOM) or 1.0, bottom, TOP)
    room = (high - low) * ROOM or abs(high) * ROOM or 1.0
    return x, Scale(low - room, high + room, bottom, TOP)


def _y_axis(x: Scale, y: Scale) -> Iterator[str]:
    for mark in y.marks(Y_MARKS):
        height = y.at(mark)
        yield tag("line", x1=x.start, x2=x.end, y1=height, y2=height, class_="grid")
        text = words(value_text(mark, y.quantity))
        yield tag("text", text, x=x.start - 8, y=height + 4, class_="mark", text_anchor="end")


def _x_axis(x: Scale, y: Scale) -> Iterator[str]:
    yield tag("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis")
    for mark in x.marks(max(int((x.end - x.start) / X_MARK_WIDTH), 2)):
        place = x.at(mark)
        yield tag("line", x1=place, x2=place, y1=y.start, y2=y.start + 5, class_="axis")
        text = words(value_text(mark, x.quantity))
        yield tag("text", text, x=place, y=y.start + 20, class_="mark", text_anchor="middle")


def _ticks(chart: Chart, along: Along, x: Scale) -> Iterator[str]:
    """Short lines at the bottom, or through the whole plot where the style sheet makes them so."""
    bottom = chart.height - BOTTOM
    for tick in chart.ticks:
        place = x.at(tick.step if along is Along.STEPS else tick.time_s)
        top = TOP if tick.role == "resumed" else bottom - 9
        path = f"M{number(place)} {number(bottom)}V{number(top)}"
        yield tag("path", titled(tick.text), d=path, class_=f"tick {tick.role}")


def _curves(chart: Chart, along: Along, x: Scale, y: Scale) -> Iterator[str]:
    order = (Look.PALE, Look.LINE, Look.DOTS)
    for curve in sorted(chart.curves, key=lambda one: order.index(one.look)):
        points = [
            (number(x.at(place)), number(y.at(value)))
            for place, value in zip(curve.along(along), curve.values, strict=True)
            if math.isfinite(value)
        ]
        if not points:
            continue
        colour = f"c{curve.colour}"
        if curve.look is not Look.DOTS:
            is_alone = len(points) == 1
            line = "M" + "L".join(f"{left} {height}" for left, height in points) + ("h0" if is_alone else "")
            look = Look.DOTS if is_alone else curve.look
            yield tag("path", titled(curve.label), d=line, class_=f"curve {look} {colour}")
            continue
        line = "M" + "L".join(f"{left} {height}" for left, height in points)
        yield tag("path", d=line, class_=f"curve joins {colour}")
        for (left, height), step, value in zip(points, curve.steps, curve.values, strict=True):
            text = f"{curve.label}: {value:.6g} at step {step:,.0f}"
            yield tag("path", titled(text), d=f"M{left} {height}h0", class_=f"curve dots {colour}")
