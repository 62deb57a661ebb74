"""Shapes of the house's pictures as SVG on a page that may be light or dark.

The colours that stand for something stay as they are in every picture; ink, paper and the like are taken
from the page.
"""

from collections.abc import Iterable

from bireme.report import palette
from bireme.report.page.markup import tag, titled, words
from bireme.report.shapes import CLOTH, Flag, Line, Rect, Shape, Text
from bireme.report.svg import BASELINE

__all__ = ["themed"]

FROM_PAGE = {
    palette.INK: "var(--ink)",
    palette.PALE_INK: "var(--pale)",
    palette.AXIS: "var(--line)",
    palette.IDLE: "var(--idle)",
    palette.IDLE_STRIPES: "var(--idle-stripes)",
    palette.LINK_BED: "var(--bed)",
    palette.SYNC: "var(--pale)",
}
STEPS = {palette.UPDATE: "var(--ink)"}
"""Of rectangles alone: text of this colour is on a fill that is the same in the dark."""


def themed(shapes: Iterable[Shape]) -> str:
    """The shapes as elements of an SVG of the page."""
    return "".join(map(_element, shapes))


def _element(shape: Shape) -> str:
    match shape:
        case Rect():
            title = (titled(shape.title),) if shape.title else ()
            role = shape.role or None
            place = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height}
            fill = STEPS.get(shape.fill) or _fill(shape.fill)
            plain = tag("rect", *title, **place, fill=fill, class_=role)
            return plain if shape.stripes is None else plain + tag("rect", **place, fill="url(#idle)")
        case Flag():
            side, (width, height) = -1 if shape.is_left else 1, CLOTH
            return tag(
                "path",
                titled(shape.title),
                d=f"M{-side} {shape.height}V0H{side * width}V{height}H{side}V{shape.height}z",
                transform=f"translate({shape.x:.2f} {shape.y:.2f})",
                class_="flag trial" if shape.colour == palette.TRIAL else "flag",
            )
        case Line():
            ends = {"x1": shape.x1, "y1": shape.y1, "x2": shape.x2, "y2": shape.y2}
            return tag("line", **ends, stroke=_fill(shape.colour), stroke_width=shape.width)
        case Text():
            return tag(
                "text",
                words(shape.text),
                transform=f"translate({shape.x:.2f} {shape.y + BASELINE * shape.size:.2f})",
                font_size=shape.size,
                text_anchor=shape.anchor,
                fill=_fill(shape.colour),
                font_weight="bold" if shape.bold else None,
            )


def _fill(colour: palette.Colour) -> str:
    """A colour as a value of an attribute."""
    return FROM_PAGE.get(colour) or palette.hex_of(colour)
