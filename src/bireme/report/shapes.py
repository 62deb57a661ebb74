"""What a picture is made of: rectangles, lines and text, in pixels from the top left corner.

A layout makes them once; each writer turns them into a file format. So a layout must know how wide text
comes out without asking a writer: `text_width` is a little more than any usual font needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bireme.report.palette import INK, PALE_INK, Colour


class Anchor(StrEnum):
    """Which end of a text its position is."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `stripes` is the colour of diagonal lines across it.

    `role` says what it stands for and `title` what a reader sees who points at it, where the format can.
    """

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    stripes: Colour | None = None
    role: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: Colour
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text whose middle height is at `y`.

    `within` is the width of the rectangle that it is in, 0 if it is in none: a page that draws the rectangle
    narrower leaves the text out.
    """

    x: float
    y: float
    text: str
    size: float
    colour: Colour
    anchor: Anchor = Anchor.START
    bold: bool = False
    within: float = 0.0


CLOTH = (6.0, 5.0)
"""The width and the height of a flag's cloth."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A pole from `y` down, its middle at `x`, with a small cloth on top to one side.

    It stands for a moment, so it keeps its shape where a page stretches what is drawn.
    """

    x: float
    y: float
    height: float
    colour: Colour
    is_left: bool
    title: str = ""

    def rects(self) -> Iterator[Rect]:
        """The same in rectangles."""
        width, height = CLOTH
        yield Rect(self.x - 1, self.y, 2, self.height, self.colour, role="mark")
        yield Rect(
            self.x - width if self.is_left else self.x, self.y, width, height, self.colour, role="flag"
        )


Shape = Rect | Line | Text | Flag


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on a white page, later ones above earlier ones."""

    width: int
    height: int
    title: str
    shapes: tuple[Shape, ...]


_NARROW = frozenset("fijlrtI.,:;|'!()[]- ·")
_WIDE = frozenset("mwMW%@&")


def text_width(text: str, size: float) -> float:
    """The pixels a text takes at most."""
    return sum(map(_ems, text)) * size


def _ems(c: str) -> float:
    if c in _NARROW:
        return 0.38
    if c.isdigit():
        return 0.6
    if c in _WIDE:
        return 0.95
    return 0.76 if c.isupper() or not c.isascii() else 0.66


def printable(text: str) -> str:
    """Text from a file, which may hold anything: what no font can show becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)


def heading(title: str, figures: str, left: float, width: float) -> Iterator[Text]:
    """The title of a picture, and a line of figures below it."""
    yield Text(left, 28, fitted(title, 20, width), 20, INK, bold=True)
    yield Text(left, 54, fitted(figures, 13, width), 13, PALE_INK)


def fitted(text: str, size: float, width: float) -> str:
    """The text, cut off with dots where it is too wide."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "...", size) > width:
        text = text[:-1]
    return text.rstrip() + "..."
