"""HTML and SVG as text: tags with escaped attributes and escaped text, and whole pictures.

What `tag`, `words` and `titled` return may be put inside further tags as it is; everything else goes through
`words` first.
"""

from collections.abc import Callable, Iterator
from html import escape

from bireme.errors import printable
from bireme.report.palette import Colour, hex_of
from bireme.report.shapes import Flag, Line, Picture, Rect, Text

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
    return escape(printable(text, "\n\t"), quote=False)


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
    yield titled(picture.title)
    striped = {shape.stripes for shape in picture.shapes if isinstance(shape, Rect) and shape.stripes}
    for colour in sorted(striped):
        yield tag("defs", stripes(_pattern(colour), hex_of(colour)))
    yield tag("rect", width=picture.width, height=picture.height, fill="#ffffff")
    for shape in picture.shapes:
        for part in shape.rects() if isinstance(shape, Flag) else (shape,):
            yield element(part)
    yield "</svg>"


def stripes(name: str, colour: str) -> str:
    """A pattern of diagonal lines, to be filled with."""
    line = tag("line", x1=0, y1=0, x2=0, y2=6, stroke=colour, stroke_width=2)
    units = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return tag("pattern", line, id=name, width=6, height=6, **units)


def element(
    shape: Rect | Line | Text,
    *,
    across: Callable[[float], str] = number,
    ink: Callable[[Colour], str] = hex_of,
    paint: Callable[[Colour], str] = hex_of,
    pattern: str | None = None,
    **more: str,
) -> str:
    """A shape as an element of an SVG.

    `across` writes places along x, `ink` the colours of lines and text, `paint` those of rectangles. Stripes
    are filled with the `pattern` of that name, or else with that of their colour. `more` are attributes.
    """
    match shape:
        case Rect():
            title = (titled(shape.title),) if shape.title else ()
            place = {
                "x": across(shape.x),
                "y": number(shape.y),
                "width": across(shape.width),
                "height": number(shape.height),
            }
            plain = tag("rect", *title, class_=shape.role or None, **place, fill=paint(shape.fill))
            if shape.stripes is None:
                return plain
            return plain + tag("rect", **place, fill=f"url(#{pattern or _pattern(shape.stripes)})")
        case Line():
            ends = {"x1": shape.x1, "y1": shape.y1, "x2": shape.x2, "y2": shape.y2}
            return tag("line", **ends, stroke=ink(shape.colour), stroke_width=shape.width)
        case Text():
            return tag(
                "text",
                words(shape.text),
                x=across(shape.x),
                y=shape.y + BASELINE * shape.size,
                font_size=shape.size,
                font_weight="bold" if shape.bold else None,
                text_anchor=shape.anchor,
                fill=ink(shape.colour),
                **more,
            )


def _pattern(colour: Colour) -> str:
    return f"stripes-{hex_of(colour)[1:]}"
