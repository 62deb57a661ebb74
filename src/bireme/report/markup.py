"""HTML and SVG as text: tags with escaped attributes and escaped text, and whole pictures.

What `tag`, `words` and `titled` return may be put inside further tags as it is; everything else goes through
`words` first.
"""

from collections.abc import Iterator
from html import escape
from xml.sax.saxutils import quoteattr

from bireme.report.palette import Colour, hex_of
from bireme.report.shapes import Flag, Line, Picture, Rect, Shape, Text

_EMPTY = frozenset({"input", "meta", "br"})
"""Tags of HTML that have no end."""


def tag(name: str, /, *contents: str, **attributes: str | float | bool | None) -> str:
    """A tag around ready contents.

    `class_` and `for_` stand for words that Python keeps for itself, `_` within a name for a hyphen. An
    attribute that is None or False is left out, one that is True has no value.
    """
    shown = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return f"<{name}{shown}>" if name in _EMPTY else f"<{name}{shown}>{''.join(contents)}</{name}>"


def words(text: object) -> str:
    """Text between tags; what no font can show becomes a question mark."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)), quote=False)


def titled(text: str) -> str:
    """What a reader sees who points at a shape."""
    return tag("title", words(text))


def number(value: float) -> str:
    """A number of pixels, as short as it goes."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _attribute(key: str, value: str | float | bool) -> str:
    if value is True:
        return f" {key}"
    text = number(value) if isinstance(value, int | float) else escape(value)
    return f' {key}="{text}"'


# Pictures as SVG: text that any browser opens, sharp at any size.

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
    yield f"<title>{escape(picture.title, quote=False)}</title>"
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
                f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" '
                f'stroke="{hex_of(colour)}" stroke-width="{number(width)}"/>'
            )
        case Text(x, y, text, size, colour, anchor, bold):
            weight = ' font-weight="bold"' if bold else ""
            yield (
                f'<text x="{number(x)}" y="{number(y + BASELINE * size)}" font-size="{number(size)}"{weight} '
                f'text-anchor="{anchor}" fill="{hex_of(colour)}">{escape(text, quote=False)}</text>'
            )


def _rect(shape: Rect) -> Iterator[str]:
    corner = f'x="{number(shape.x)}" y="{number(shape.y)}"'
    place = f'{corner} width="{number(shape.width)}" height="{number(shape.height)}"'
    role = f" class={quoteattr(shape.role)}" if shape.role else ""
    start = f'<rect{role} {place} fill="{hex_of(shape.fill)}"'
    yield f"{start}><title>{escape(shape.title, quote=False)}</title></rect>" if shape.title else f"{start}/>"
    if shape.stripes is not None:
        yield f'<rect {place} fill="url(#{_pattern(shape.stripes)})"/>'


def _pattern(colour: Colour) -> str:
    return f"stripes-{hex_of(colour)[1:]}"
