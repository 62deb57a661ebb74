"""The timelines of a run's first recorded batches: the predicted one above the measured ones, on one axis.

The lanes are those of the picture that `bireme simulate` draws, as wide as the page allows: places along the
time are percent, so text and flags keep their shape. Replicas that were recorded have lanes of their own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from bireme.bounds import counted, seconds_text
from bireme.report import palette
from bireme.report.lanes import SWATCH, Entry, Lanes, drawn_batches, end_of, entries, lanes_of
from bireme.report.markup import element, number, stripes, tag, titled, words
from bireme.report.page.curves import ACROSS, framed, share
from bireme.report.page.figures import idle_share
from bireme.report.shapes import CLOTH, Flag, Quantity, Scale, Shape, Text, text_width
from bireme.timeline.timeline import Timeline

_HEADING, _HEAD = 26, 18
"""The heights of a timeline's heading and of a rank's name."""
_MOST_REPLICAS = 8
_WIDTHS = (240, 320, 420, 560, 760, 1000)
"""Widths of a plot from which text is shown, as classes of the style sheet."""

_FROM_PAGE = {
    palette.INK: "var(--ink)",
    palette.PALE_INK: "var(--pale)",
    palette.AXIS: "var(--line)",
    palette.IDLE: "var(--idle)",
    palette.IDLE_STRIPES: "var(--idle-stripes)",
    palette.LINK_BED: "var(--bed)",
    palette.SYNC: "var(--pale)",
}
"""The page's own colours for ink, paper and the like, as it may be light or dark; those that stand for
something stay as they are in every picture."""
STEPS = {palette.UPDATE: "var(--ink)"}
"""Of rectangles alone: text of this colour is on a fill that is the same in the dark."""


def timeline_figure(predicted: Timeline | None, measured: Timeline | None) -> str:
    """The timelines that there are; nothing where there is none."""
    found = [("predicted", predicted)] if predicted is not None else []
    if measured is not None:
        replicas = [replace(measured, ranks=ranks, others=()) for ranks in measured.others]
        name = "measured, replica 0" if replicas else "measured"
        found += [(name, measured)]
        found += [(f"replica {place}", one) for place, one in enumerate(replicas[: _MOST_REPLICAS - 1], 1)]
    shown = [(name, one) for name, one in found if one is not None]
    if not shown:
        return ""
    num_batches = min(drawn_batches(one) for _, one in shown)
    end_s = max(end_of(one, num_batches) for _, one in shown)
    scale = Scale(0.0, end_s or 1.0, 0, ACROSS, Quantity.SECONDS)
    num_lanes = sum(len(one.ranks) for _, one in shown)
    still: list[str] = []
    moving: list[str] = []
    drawn: list[Lanes] = []
    y = 0.0
    for name, timeline in shown:
        lanes = lanes_of(timeline, num_batches, scale, 0, num_lanes, head=_HEAD)
        still.append(tag("text", words(name), x=0, y=y + 17, class_="name"))
        still.append(themed(lanes.beds(y + _HEADING), ACROSS))
        moving += [*_beyond(lanes, y + _HEADING), themed(lanes.work(y + _HEADING), ACROSS)]
        drawn.append(lanes)
        y += _HEADING + lanes.height
    title = "The timeline of some batches"
    grid = "".join(
        tag("line", x1=share(scale.at(mark)), x2=share(scale.at(mark)), y1=0, y2=y, class_="grid")
        for mark in scale.marks(6)
    )
    has_sides = any(lanes.has_strips or any(lanes.lines) for lanes in drawn)
    picture = framed(title, scale, y, grid + "".join(still), "".join(moving), role="lanes", along="seconds")
    return tag(
        "figure",
        _told(drawn, [name for name, _ in shown]),
        tag("div", picture, class_=f"plots {'sides' if has_sides else 'no-sides'}"),
        tag("div", *map(_key, chain(*entries(drawn))), class_="legend"),
        class_="chart",
    )


def _told(drawn: Sequence[Lanes], names: Sequence[str]) -> str:
    """A sentence about each timeline."""
    lines = []
    for name, lanes in zip(names, drawn, strict=True):
        timeline = lanes.timeline
        batch_s = float(f"{timeline.steady_batch_s:.3g}")
        more = timeline.program.num_batches - lanes.num_batches
        cut = f", {counted(more, 'more batch')} recorded" if more else ""
        text = f": {seconds_text(batch_s)} a batch, devices idle {idle_share(timeline):.0%} of it{cut}"
        lines.append(tag("span", tag("strong", words(name)), words(text), class_="key-text"))
    return tag("div", *lines, class_="legend")


def _key(entry: Entry) -> str:
    """An entry of the legend."""
    width = max(entry.width, 0)
    sample = tag("svg", themed(entry.sample), width=width, height=SWATCH, aria_hidden="true", class_="sample")
    return tag("span", sample if width else "", words(entry.text), class_="key")


def _beyond(lanes: Lanes, top: float) -> Iterator[str]:
    """Nothing where the other timeline goes on after this one's end: that is no idleness."""
    left = lanes.scale.at(lanes.timeline.makespan_s)
    for row in lanes.rows(top):
        height = lanes.height_of(row.rank.rank) - _HEAD
        place = {"x": share(left), "y": number(row.y), "width": share(ACROSS - left)}
        yield tag("rect", **place, height=height, class_="beyond")


def idle_pattern() -> str:
    """The pattern of idle time, which all pictures of a page use."""
    pattern = stripes("idle", "var(--idle-stripes)")
    return tag("svg", tag("defs", pattern), width=0, height=0, aria_hidden="true", class_="defs")


def themed(shapes: Iterable[Shape], width: float | None = None) -> str:
    """The shapes as elements of an SVG of the page.

    With a width, places along x are shares of it; what is left of 0 stays in pixels.
    """
    return "".join(_element(shape, width) for shape in shapes)


def _element(shape: Shape, width: float | None) -> str:
    across = partial(_across, width=width)
    if isinstance(shape, Flag):
        side, (reach, height) = -1 if shape.is_left else 1, CLOTH
        path = f"M{-side} {shape.height}V0H{side * reach}V{height}H{side}V{shape.height}z"
        role = "flag trial" if shape.colour == palette.TRIAL else "flag"
        flag = tag("path", titled(shape.title), d=path, class_=role)
        return tag("svg", flag, x=across(shape.x), y=shape.y, class_="rigid")
    room = _room(shape, width) if isinstance(shape, Text) else {}
    return element(shape, across=across, ink=_fill, paint=_paint, pattern="idle", **room)


def _across(place: float, width: float | None) -> str:
    return number(place) if width is None or place < 0 else f"{number(100 * place / width)}%"


def _room(shape: Text, width: float | None) -> dict[str, str]:
    """From which width of the plot on a text fits into its rectangle: for the style sheet and the script."""
    if width is None or not shape.within:
        return {}
    # Numbers of one digit need as much as those of two, so that they come and go together.
    needed = max(text_width(text, shape.size) for text in (shape.text, "00")) / shape.within * width
    least = next((one for one in _WIDTHS if one >= needed), _WIDTHS[-1])
    return {"class_": f"from-{least}", "data_needed": number(needed)}


def _fill(colour: palette.Colour) -> str:
    """A colour as a value of an attribute."""
    return _FROM_PAGE.get(colour) or palette.hex_of(colour)


def _paint(colour: palette.Colour) -> str:
    """The same of a rectangle."""
    return STEPS.get(colour) or _fill(colour)
