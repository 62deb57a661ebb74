"""Pictures as SVG: text that any browser opens, sharp at any size."""

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from bireme.report.palette import Colour, hex_of
from bireme.report.shapes import Flag, Line, Picture, Rect, Shape, Text

_FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
BASELINE = 0.35
"""How far below its middle a line of text is placed, in parts of its size."""


def svg(picture: Picture) -> str:
    """The whole file."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    size = f'width="{picture.width}" height="{picture.height}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {picture.width} {picture.height}" '
        f'font-family="{_FONTS}">'
    )
    yield f"<title>{escape(picture.title)}</title>"
    stripes = {shape.stripes for shape in picture.shapes if isinstance(shape, Rect) and shape.stripes}
    for colour in sorted(stripes):
        yield (
            f'<defs><pattern id="{_pattern(colour)}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="{hex_of(colour)}" '
            'stroke-width="2"/></pattern></defs>'
        )
    yield f'<rect width="{picture.width}" height="{picture.height}" fill="#ffffff"/>'
    for shape in picture.shapes:
        yield from _element(shape)
    yield "</svg>"


def _element(shape: Shape) -> Iterator[str]:
    match shape:
        case Rect():
            yield from _rect(shape)
        case Flag():
            for rect in shape.rects():
                yield from _rect(rect)
        case Line(x1, y1, x2, y2, colour, width):
            yield (
                f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{hex_of(colour)}" '
                f'stroke-width="{_n(width)}"/>'
            )
        case Text(x, y, text, size, colour, anchor, bold):
            weight = ' font-weight="bold"' if bold else ""
            yield (
                f'<text x="{_n(x)}" y="{_n(y + BASELINE * size)}" font-size="{_n(size)}"{weight} '
                f'text-anchor="{anchor}" fill="{hex_of(colour)}">{escape(text)}</text>'
            )


def _rect(shape: Rect) -> Iterator[str]:
    place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
    role = f" class={quoteattr(shape.role)}" if shape.role else ""
    start = f'<rect{role} {place} fill="{hex_of(shape.fill)}"'
    yield f"{start}><title>{escape(shape.title)}</title></rect>" if shape.title else f"{start}/>"
    if shape.stripes is not None:
        yield f'<rect {place} fill="url(#{_pattern(shape.stripes)})"/>'


def _pattern(colour: Colour) -> str:
    return f"stripes-{hex_of(colour)[1:]}"


def _n(value: float) -> str:
    """A number of pixels, as short as it goes."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
