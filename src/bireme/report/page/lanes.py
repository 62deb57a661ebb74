"""The timelines of a run's first recorded batches: the predicted one above the measured one, on one axis.

The lanes are those of the picture that `bireme simulate` draws. A group that a script can stretch holds what
moves with time; text and flags in it are placed by a transform, so that they can be kept in shape.
"""

from collections.abc import Iterator

from bireme.report import palette
from bireme.report.axes import Quantity, Scale, value_text
from bireme.report.lanes import Lanes, contents_of, drawn_batches, end_of, lanes_of
from bireme.report.legend import legend
from bireme.report.page.figures import idle_share
from bireme.report.page.markup import tag, titled, words
from bireme.report.page.themed import themed
from bireme.report.shapes import Shape, Text
from bireme.report.units import seconds_text
from bireme.timeline.timeline import Timeline

__all__ = ["timeline_figure"]

WIDTH = 1120
LEFT, RIGHT = 150, WIDTH - 14
HEAD = 22
X_MARKS = 9


def timeline_figure(predicted: Timeline | None, measured: Timeline | None) -> str:
    """Both timelines, or the one there is; nothing where there is none."""
    named = (("predicted", predicted), ("measured", measured))
    found = [(name, one) for name, one in named if one is not None]
    if not found:
        return ""
    num_batches = min(drawn_batches(one) for _, one in found)
    end_s = max(end_of(one, num_batches) for _, one in found)
    scale = Scale(0.0, end_s or 1.0, LEFT, RIGHT, Quantity.SECONDS)
    num_lanes = sum(len(one.ranks) for _, one in found)
    still: list[str] = []
    moving: list[str] = []
    drawn: list[Lanes] = []
    y = 4.0
    for name, timeline in found:
        lanes = lanes_of(timeline, num_batches, scale, 0, num_lanes)
        still.append(themed([*_heading(name, lanes, y), *lanes.beds(y + HEAD)]))
        moving += [*_beyond(lanes, y + HEAD), themed(lanes.work(y + HEAD))]
        drawn.append(lanes)
        y += HEAD + lanes.height
    key = legend(contents_of(drawn), LEFT, y + 34, WIDTH - LEFT)
    bottom = max(shape.y for shape in key if isinstance(shape, Text)) + 14
    frame = tag("rect", x=LEFT - 1, y=0, width=RIGHT - LEFT + 2, height=y)
    title = "The timeline of some batches"
    picture = tag(
        "svg",
        titled(title),
        tag("defs", tag("clipPath", frame, id="clip-lanes"), _stripes()),
        tag("g", *_axis(scale, y), class_="x-axis"),
        *still,
        tag("g", tag("g", *moving, class_="zoomed"), clip_path="url(#clip-lanes)"),
        themed(key),
        viewBox=f"0 0 {WIDTH} {bottom:.0f}",
        class_="plot lanes",
        role="img",
        aria_label=title,
        data_along="seconds",
        data_range=f"[0, {scale.most:.9g}, {LEFT}, {RIGHT}]",
        data_bottom=y,
    )
    return tag("figure", tag("div", picture, class_="plots"), class_="chart wide")


def _heading(name: str, lanes: Lanes, top: float) -> Iterator[Shape]:
    timeline = lanes.timeline
    batch_s = float(f"{timeline.steady_batch_s:.3g}")
    more = timeline.program.num_batches - lanes.num_batches
    cut = f" · {more} more recorded" if more else ""
    figures = f"{seconds_text(batch_s)} a batch, devices idle {idle_share(timeline):.0%} of it{cut}"
    yield Text(0, top + 10, name, 13, palette.INK, bold=True)
    yield Text(LEFT, top + 10, figures, 12, palette.PALE_INK)


def _beyond(lanes: Lanes, top: float) -> Iterator[str]:
    """Nothing where the other timeline goes on after this one's end: that is no idleness."""
    left = lanes.scale.at(lanes.timeline.makespan_s)
    for row in lanes.rows(top):
        height = lanes.height_of(row.rank.rank)
        yield tag("rect", x=left, y=row.y, width=RIGHT - left, height=height, class_="beyond")


def _axis(scale: Scale, bottom: float) -> Iterator[str]:
    for mark in scale.marks(X_MARKS):
        x = scale.at(mark)
        yield tag("line", x1=x, x2=x, y1=HEAD, y2=bottom, class_="grid")
        text = words(value_text(mark, scale.quantity))
        yield tag("text", text, x=x, y=bottom + 15, class_="mark", text_anchor="middle")


def _stripes() -> str:
    line = tag("line", x1=0, y1=0, x2=0, y2=6, stroke="var(--idle-stripes)", stroke_width=2)
    return tag(
        "pattern",
        line,
        id="idle",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
